"""What a rank of a stage says to others in a step, collective by collective, as the price has it.

The price of a stage adds up seconds; here the same steps of its blocks are gone through by axis and
collective. Of a communication `seconds` are what it takes by itself, `exposed_s` what is left where
products or passes run beside it (`costmodel/operators/beside.py`, `costmodel/stages/stage.py`);
what the data axis' collectives leave is known for all of them together, and each bears its share.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from meshwright.costmodel.blocks import parts_of
from meshwright.costmodel.operators import (
    DTYPE_BYTES,
    NOTHING,
    Cost,
    Pricer,
    Setting,
    attention_kind,
    context_exchange,
    moved_tokens,
)
from meshwright.costmodel.quantized import quantizes_gradients
from meshwright.costmodel.rules import takes_batch_statistics
from meshwright.costmodel.sharding import (
    ALL_GATHER,
    RING,
    ULYSSES,
    Assignment,
    ContextKind,
    Move,
    Run,
    Step,
    transition,
)
from meshwright.costmodel.stages import NO_RECOMPUTE, Recompute, StageCosts, Sums
from meshwright.planner.plan import Plan, passes_of, segments_of
from meshwright.planner.pricing.stage_costs import StageCoster, stage_setting

Axis = Literal["tensor", "context", "experts", "data", "pipeline"]
AxisAndKind = tuple[Axis, str]  # axis and collective
# of attention over the context axis, forward and backward
_OF_CONTEXT: Mapping[ContextKind, tuple[AxisAndKind, AxisAndKind]] = MappingProxyType({
    ALL_GATHER: (("context", "all_gather"), ("context", "reduce_scatter")),
    RING: (("context", "send"),) * 2,
    ULYSSES: (("context", "all_to_all"),) * 2,
})  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Amount:
    """Calls, seconds of them all, and the seconds that nothing hides."""

    calls: float = 0.0
    seconds: float = 0.0
    exposed_s: float = 0.0

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            calls=self.calls + other.calls,
            seconds=self.seconds + other.seconds,
            exposed_s=self.exposed_s + other.exposed_s,
        )

    def times(self, factor: float) -> Amount:
        return Amount(
            calls=self.calls * factor,
            seconds=self.seconds * factor,
            exposed_s=self.exposed_s * factor,
        )


Amounts = dict[AxisAndKind, Amount]


def add(amounts: Amounts, key: AxisAndKind, amount: Amount) -> None:
    """Add to what is there under a key."""
    amounts[key] = amounts.get(key, Amount()) + amount


def passes_amounts(
    plan: Plan, k: int, coster: StageCoster, assignments: Mapping[str, Assignment]
) -> Amounts:
    """Communication within the forwards and backwards of stage k in a step, and what its blocks
    run again of it."""
    stage, found = plan.stages[k], dict[AxisAndKind, Amount]()
    pricer = coster.pricer(stage_setting(plan, k, coster))
    own = [coster.blocks[name] for name in stage.blocks]
    spans = segments_of(own, stage.segments, coster.graph.loss)
    twice = {own[k].name for span in spans for k in span}
    entered = coster.entered(stage, assignments)
    for (block, assignment, inputs), policy in zip(entered, stage.policies, strict=True):
        steps = coster.steps(block, assignment, inputs, stage.tp)
        again = coster.block_sums(pricer, block, assignment, inputs).recompute(policy)
        forward, backward = _of_steps(pricer, steps)
        if parts_of(policy)[1]:
            repeats = coster.passes(pricer, block, assignment, inputs).repeats.get(policy)
            gathers, _ = _of_steps(pricer, repeats.moves if repeats else ())
            whole = sum(amount.seconds for amount in gathers.values())
            part = min(1.0, float(again.comm_s) / whole) if whole else 0.0
            for key, amount in gathers.items():
                exposed_s = part * amount.seconds
                add(backward, key, replace(amount, exposed_s=exposed_s))
            again = NO_RECOMPUTE
        exposed = sum(amount.exposed_s for amount in forward.values())
        more = 1 + (float(again.comm_s) / exposed if exposed else 0.0) + (block.name in twice)
        for key, amount in forward.items():
            add(found, key, amount.times(passes_of(plan) * more))
        for key, amount in backward.items():
            add(found, key, amount.times(passes_of(plan)))
    return found


def _of_steps(pricer: Pricer, steps: Sequence[Step]) -> tuple[Amounts, Amounts]:
    """Of a block: its forward's and its backward's, of one micro-batch."""
    both: tuple[Amounts, Amounts] = ({}, {})
    for step in steps:
        for amounts, found in zip(both, step_amounts(pricer, step), strict=True):
            for key, amount in found:
                add(amounts, key, amount)
    return both


def step_amounts(pricer: Pricer, step: Step) -> list[list[tuple[AxisAndKind, Amount]]]:
    """Communication of one step of a block, in the forward and in the backward of one
    micro-batch."""
    match step:
        case Move(value, source, target):
            price = pricer.reshard_parameter if step.once else pricer.reshard
            cost = price(value, source, target) or NOTHING
            kinds = transition(source, target) or ("", "")
            nbytes, found = pricer.nbytes(value), list[list[tuple[AxisAndKind, Amount]]]()
            for kind, exposed in zip(kinds, _communication(cost), strict=True):
                amounts = list[tuple[AxisAndKind, Amount]]()
                if exposed:
                    seconds = pricer.comm(kind, nbytes)
                    amount = Amount(calls=1, seconds=seconds, exposed_s=exposed)
                    amounts.append((("tensor", kind), amount))
                found.append(amounts)
            return found
        case Run():
            return _inside(pricer, step)
    return [[], []]


def _communication(cost: Cost) -> tuple[float, float]:
    return cost.forward_comm_s, cost.backward_comm_s


def _inside(pricer: Pricer, step: Run) -> list[list[tuple[AxisAndKind, Amount]]]:
    """What an operator exchanges by itself, in the forward and in the backward."""
    op, strategy = step.op, step.strategy
    cost = pricer.op_cost(op, strategy)
    exchanges = cost.forward_exchange_s, cost.backward_exchange_s
    whole = context_exchange(pricer, op, strategy, 0.0, 0.0)
    kinds: tuple[AxisAndKind, AxisAndKind] = (("tensor", "all_reduce"),) * 2
    if any(whole):
        kinds = _OF_CONTEXT[attention_kind(pricer, op) or ALL_GATHER]  # or a shift by a token
    elif any(moved_tokens(pricer, op)):
        kinds = (("context", "all_gather"), ("context", "reduce_scatter"))
    elif takes_batch_statistics(op):
        kinds = (("data", "all_reduce"),) * 2
    elif pricer.step.mesh.dp > 1 and pricer.gathers_batch(op):
        kinds = (("data", "all_gather"),) * 2
    found = []
    for key, exposed, tokens, alone in zip(
        kinds, _communication(cost), exchanges, whole, strict=True
    ):
        amounts: list[tuple[AxisAndKind, Amount]] = []
        if tokens:
            amount = Amount(calls=1, seconds=tokens, exposed_s=tokens)
            amounts.append((("experts", "all_to_all"), amount))
        if (left := exposed - tokens) > 0 or alone:
            amount = Amount(calls=1, seconds=max(left, alone), exposed_s=left)
            amounts.append((key, amount))
        found.append(amounts)
    return found


def data_amounts(
    setting: Setting, sums: Sums, repeated: Recompute, costs: StageCosts[float] | None
) -> Amounts:
    """Collectives of gradients and weights of a stage in a step; `costs` say what is exposed, all
    of it where they are not given. Copies into buckets are in the seconds."""
    m, found = setting.batch.microbatches, dict[AxisAndKind, Amount]()
    for kind, times, seconds, alone in _collectives(setting, sums, float(repeated.gather_s)):
        if seconds:
            calls = times * alone
            amount = Amount(calls=calls, seconds=times * seconds, exposed_s=times * seconds)
            add(found, ("data", kind), amount)
    if costs is None or not found:
        return found
    forward = costs.forward_comm_s - float(sums.forward_comm_s)
    backward = costs.backward_comm_s - float(sums.backward_comm_s + repeated.comm_s)
    whole = sum(amount.seconds for amount in found.values())
    exposed = min(1.0, max(0.0, m * (forward + backward) + costs.reduce_s) / whole)
    return {
        key: Amount(calls=a.calls, seconds=a.seconds, exposed_s=a.seconds * exposed)
        for key, a in found.items()
    }


def _collectives(
    setting: Setting, sums: Sums, again_s: float
) -> Iterator[tuple[str, int, float, float]]:
    """Kind, times a step, seconds of one time, units that it moves then one after the other;
    `again_s` of what ZeRO-3 gathers for a forward more."""
    m, several = setting.batch.microbatches, setting.mesh.holders > 1
    numel, target = float(sums.parameters), setting.target
    gradients, weights = numel * target.gradient_bytes, numel * DTYPE_BYTES[setting.precision]

    def units(nbytes: float, kind: str) -> float:
        if kind == "bucket":
            size = target.bucket_bytes or nbytes
            return math.ceil(nbytes / max(size, target.bucket_bytes_per_rank * setting.mesh.dp, 1))
        return math.ceil(numel / max(float(sums.largest_parameters), 1.0))

    if not several:
        return
    unit = target.gathered_unit if setting.sharing.zero == 3 else target.unit
    reduced, gathered = units(gradients, unit), units(weights, unit)
    if setting.sharing.zero == 0:
        yield "all_reduce", 1, float(sums.reduce_s), units(gradients, "bucket")
    elif setting.sharing.zero == 3:
        second = sums.zero3_secondary_s if setting.sharing.hpz else sums.zero3_gather_s
        yield "all_gather", m, float(sums.zero3_gather_s), gathered
        yield "all_gather", m, float(second), gathered
        if again_s:
            yield "all_gather", m, again_s, gathered * again_s / float(sums.zero3_gather_s)
        exchanged = quantizes_gradients(setting.sharing.quantized)
        kind = "all_to_all" if exchanged else "reduce_scatter"
        yield kind, m, float(sums.zero3_scatter_s), reduced
        yield "all_reduce", 1, float(sums.zero3_replicate_s), reduced
    else:
        times = m if setting.sharing.zero == 2 else 1
        yield "reduce_scatter", times, float(sums.scatter_s), reduced
        yield "all_gather", 1, float(sums.gather_s), gathered
        yield "all_reduce", 1, float(sums.replicate_s), reduced
