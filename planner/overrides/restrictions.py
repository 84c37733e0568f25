"""Restrictions: the overrides resolved to the model's blocks, in the graph's order.

A stage of blocks i..j-1 has one tp, dp, cp, ep, ZeRO, dp_shard and hpz, so it can take a value only
if none of its blocks is restricted to another. With `other_b` = 1 where block b does not take the
value and the prefix counts C_j = Σ_{b<j} other_b, these are the stages with i < j and C_j = C_i.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

import numpy as np

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.mesh import ContextKind, Stepping
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER
from meshwright.planner.decisions import (
    BY_BLOCK,
    CONTRADICTIONS,
    DECISIONS,
    MESH,
    STEPPINGS,
    not_in_fp16,
)
from meshwright.planner.overrides.of_target import for_target
from meshwright.planner.overrides.overrides import (
    OverrideError,
    Overrides,
    contradiction,
    left_schedules,
    left_with_consent,
    schedules_with,
    spelled,
)
from meshwright.planner.plan import (
    compress_names,
    expand_names,
    glob,
    has_experts,
    why_not_late,
    why_not_served,
    why_stepped_late,
)

SIZED = tuple(name for name, decision in DECISIONS.items() if decision.sizes)
OF_STAGES = tuple(name for name in BY_BLOCK if DECISIONS[name].acts == "stage")


@dataclass(frozen=True, slots=True, kw_only=True)
class Restrictions:
    """The choices that the overrides leave to a search. One entry per block, None where it is free,
    of `tp`, `dp`, `cp`, `ep`, `zero`, `dp_shard` (ranks among which ZeRO divides), `hpz` (those
    that keep a secondary shard), `quantized`, `compressed`, `segments` and `recompute`.

    Free blocks take one of `zeros`, `policies`, `quantizations` and `compressions`, and divide
    ZeRO among a part of the data axis only with `partial_shards`, with secondary shards only with
    `secondary_shards`. `pp` counts device groups, `virtual_stages` the stages on each. `cp_kind` is
    None where it is free, as are `host_states`, the part of the optimizer states in host memory
    (with it `host_weights`, that of the weights, and `host_files`, that of the states in files, are
    decided), and `host_activations`, the part of the blocks that send what they save there.
    `slices` and `branches` are as asked, 1 for none. `steppings` are the ways in which optimizers
    may step, the first one always; `staleness` the steps by which gradients come late, None where
    it is free. Without `unequal_meshes` all stages have one mesh. `cuts` are the block positions at
    which stages end, where the user gave them.
    """

    blocks: tuple[str, ...]
    tp: tuple[int | None, ...]
    dp: tuple[int | None, ...]
    cp: tuple[int | None, ...]
    ep: tuple[int | None, ...]
    zero: tuple[int | None, ...]
    dp_shard: tuple[int | None, ...]
    hpz: tuple[int | None, ...]
    quantized: tuple[str | None, ...]
    compressed: tuple[str | None, ...]
    segments: tuple[int | None, ...]
    recompute: tuple[str | None, ...]
    zeros: frozenset[int]
    policies: tuple[str, ...]
    partial_shards: bool
    secondary_shards: bool
    quantizations: tuple[str, ...]
    compressions: tuple[str, ...]
    schedules: tuple[str, ...]
    placements: tuple[str, ...]
    cp_kind: ContextKind | None
    pp: int | None
    virtual_stages: int | None
    microbatch_size: int | None
    num_microbatches: int | None
    slices: int | Sequence[int] | None
    branches: int | Sequence[int] | None
    unequal_meshes: bool
    cuts: tuple[int, ...] | None
    shardings: Mapping[str, str]
    host_states: float | None = None
    host_activations: float | None = None
    steppings: tuple[Stepping, ...] = ("at_end",)
    staleness: int | None = None
    host_weights: float = 0.0
    host_files: float = 0.0

    def stage_mask(self, name: str, value: Any) -> np.ndarray:
        """[i, j]: whether a stage of blocks i..j-1 may have this value; bool (K+1, K+1), False
        where i >= j."""
        choices = {
            "zero": self.zeros, "recompute": self.policies, "quantized": self.quantizations,
            "compressed": self.compressions,
        }  # fmt: skip
        given = getattr(self, name)
        agreed = self._without([v not in (None, value) for v in given])
        if value in choices.get(name, (value,)):
            return agreed
        if name == "compressed":  # free blocks have it beside one of their stage that asks for it
            asked: np.ndarray = agreed & ~self._without([v == value for v in given])
            return asked
        return self._without([v != value for v in given])

    @staticmethod
    def _without(some: Sequence[bool]) -> np.ndarray:
        """[i, j]: whether there are blocks i..j-1, and none of them is one of `some`."""
        before = np.concatenate([[0], np.cumsum(some, dtype=np.int64)])
        return np.triu(before[:, None] == before[None, :], 1)

    def uniform(self, name: str) -> Any:
        """The one value that every block is restricted to; None where some differ or are free."""
        values = set(getattr(self, name))
        return values.pop() if len(values) == 1 else None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Choice:
    """A value of one block, and the override that gave it."""

    value: Any
    said: str


_Choices = dict[str, list[_Choice | None]]


def restrict(
    overrides: Overrides,
    graph: Graph,
    *,
    target: Target = EAGER,
    allow: Collection[str] = (),
    precision: str = "bf16",
) -> Restrictions:
    """The overrides by block of `graph`; what the `target` can't run is left out. Raises
    `OverrideError` for a glob without a block, for values of one block or stage that contradict
    each other, and for what is left out."""
    wanted = _in_one_pass(for_target(overrides, target), precision)
    wanted = _without_flush(wanted, precision, graph)
    steppings = _steppings(wanted, allow, precision, graph)
    quantizations = left_with_consent(wanted, "quantized", allow, precision)
    compressions = left_with_consent(wanted, "compressed", allow, precision)
    names = [block.name for block in graph.blocks]
    choices: _Choices = {name: _by_block(wanted, name, names) for name in BY_BLOCK}
    equal = "unequal_meshes" in wanted.forbid
    for name in MESH if equal else ():  # one value for one block is one for all
        choices[name] = [next(filter(None, choices[name]), None)] * len(names)
    _check_model(wanted, choices, graph, precision)
    _check_contradictions(wanted, choices, names)
    _check_shards(choices, names)
    cuts = stage_cuts(wanted, graph)
    pp, virtual_stages = _counts(wanted, cuts)
    per_device = None if virtual_stages is None else max(1, virtual_stages // wanted.copies)
    _check_stages(choices, names, cuts, pp, per_device)
    values: dict[str, Any] = {
        name: tuple(c and c.value for c in of_blocks) for name, of_blocks in choices.items()
    }
    values |= {name: 1 if name in wanted.forbid else getattr(wanted, name) for name in SIZED}
    return Restrictions(
        blocks=tuple(names),
        **values,
        zeros=frozenset(z for z in wanted.left("zero") if not (wanted.late and z > 1)),
        policies=wanted.left("recompute"),
        partial_shards="dp_shard" not in wanted.forbid,
        secondary_shards="hpz" not in wanted.forbid,
        quantizations=quantizations,
        compressions=compressions,
        schedules=_schedules(wanted, virtual_stages, steppings),
        placements=(wanted.placement,) if wanted.placement else wanted.left("placement"),
        cp_kind=wanted.cp_kind,
        pp=pp,
        virtual_stages=virtual_stages,
        microbatch_size=wanted.microbatch_size,
        num_microbatches=wanted.num_microbatches,
        unequal_meshes=not equal,
        cuts=None if cuts is None else tuple(cuts),
        shardings=wanted.shardings,
        host_states=wanted.offloaded("optimizer"),
        host_activations=wanted.offloaded("activations"),
        steppings=steppings,
        staleness=0 if "staleness" in wanted.forbid else wanted.staleness,
        host_weights=wanted.offloaded("weights") or 0.0,
        host_files=wanted.offloaded("nvme") or 0.0,
    )


def _schedules(
    wanted: Overrides, virtual_stages: int | None, steppings: Sequence[Stepping]
) -> tuple[str, ...]:
    """Schedules that are left, of those that place so many stages and let optimizers step so."""
    return tuple(
        s
        for s in left_schedules(wanted)
        if wanted.schedule or s in schedules_with(virtual_stages)
        if not (wanted.optimizer_in_backward and SCHEDULES[s].splits_backward)
        if SCHEDULES[s].flushes or "stale" in steppings
    )


def _check_servers(wanted: Overrides, graph: Graph, precision: str) -> None:
    """Raise `OverrideError` for servers that can't be."""
    servers = wanted.servers
    why = not_in_fp16("servers") if precision == "fp16" else why_not_served(graph)
    if servers and why:
        raise OverrideError(
            f"{' with fp16' * (precision == 'fp16')}: {why}",
            place=f"override servers={servers}",
            legal="0",
            way_out="drop the override" + ", or train in bf16" * (precision == "fp16"),
        )


def _check_model(wanted: Overrides, choices: _Choices, graph: Graph, precision: str) -> None:
    """Raise `OverrideError` for what the model does not allow."""
    _check_servers(wanted, graph, precision)
    experts = next((choice for choice in choices["ep"] if choice and choice.value > 1), None)
    if experts and not has_experts(graph):
        place = f"override {experts.said}"
        raise OverrideError("the model has no experts", place=place, legal="1")
    if wanted.optimizer_in_backward and (why := why_stepped_late(graph)):
        raise OverrideError(f": {why}", place="override optimizer_in_backward=True", legal="False")
    if wanted.post_validation and graph.weight_writes:
        write = graph.weight_writes[0]
        raise OverrideError(
            f"the forward writes weights ({write.source or write.module}), which would be done "
            "twice where a step is undone",
            place="override post_validation=True",
            legal="False",
        )


def _in_one_pass(wanted: Overrides, precision: str) -> Overrides:
    """The overrides with what stepping in the backward leaves. Raises `OverrideError`."""
    if not wanted.optimizer_in_backward:
        return wanted
    said, rows, stages = "optimizer_in_backward=True", wanted.microbatch_size, wanted.stages or ()
    if rows is not None:
        other = f"microbatch_size={rows}: all rows are one micro-batch"
        raise contradiction(said, other, "no microbatch_size")
    if len(stages) > 1:
        raise contradiction(said, f"stages= with {len(stages)} stages", "one stage, or no stages=")
    if precision == "fp16":
        raise OverrideError(
            ": a scaled loss asks all gradients before a step",
            place="override optimizer_in_backward=True with precision='fp16'",
            legal="another precision, or False",
        )
    zero = 0 if wanted.zero is None else wanted.zero
    return replace(wanted, pp=1, virtual_stages=1, num_microbatches=1, zero=zero)


def _without_flush(wanted: Overrides, precision: str, graph: Graph) -> Overrides:
    """The overrides with what a pipeline without a flush leaves. Raises `OverrideError`."""
    if not wanted.late:
        return wanted
    said = f"staleness={wanted.staleness}" if wanted.staleness else f"schedule={wanted.schedule!r}"
    if why := why_not_late(graph, precision):
        raise OverrideError(
            f": {why}", place=f"override {said}", legal="staleness=0", way_out="flush each step"
        )
    m, pp = wanted.num_microbatches, wanted.pp
    names = [wanted.schedule] if wanted.schedule else [n for n, s in SCHEDULES.items() if s.late]
    delays = {SCHEDULES[n].staleness(m, pp) for n in names if m and pp and SCHEDULES[n].runs(m, pp)}
    if m and pp and not delays & ({wanted.staleness} - {None} or delays):
        raise OverrideError(
            f" contradicts num_microbatches={m} with pp={pp}, whose delays are others",
            place=f"override {said}",
            legal=f"staleness {', '.join(map(str, sorted(delays)))}"
            if delays
            else f"{pp - 1} or more micro-batches, or schedule='pipedream'",
        )
    return replace(wanted, virtual_stages=1, slices=1, cp=1, ep=1)


def _steppings(
    wanted: Overrides, allow: Collection[str], precision: str, graph: Graph
) -> tuple[Stepping, ...]:
    """Ways in which optimizers may step, by the decisions about it and those that are allowed."""
    asked = [way for name, way in STEPPINGS.items() if getattr(wanted, name)]
    if wanted.late:
        return ("stale",)
    if asked:
        return (*asked,)
    left = [name for name in STEPPINGS if name in allow and getattr(wanted, name) is None]
    free: list[Stepping] = [STEPPINGS[name] for name in left]
    late = precision == "fp16" or why_stepped_late(graph)
    may_come_late = not (wanted.staleness == 0 or "staleness" in wanted.forbid)
    if "stale" in allow and may_come_late and not why_not_late(graph, precision):
        free.append("stale")
    return ("at_end", *(way for way in free if not (late and way == "in_backward")))


# --- globs over blocks ---------------------------------------------------------------------------


def _by_block(overrides: Overrides, name: str, names: Sequence[str]) -> list[_Choice | None]:
    """The value of every block under an override, or the one that `forbid` leaves; None is free."""
    choices: dict[str, _Choice] = {}
    for pattern, value in overrides.items(name):
        choice = _Choice(value=value, said=spelled(name, pattern, value))
        for block in names if pattern is None else _matching(pattern, names, choice.said):
            before = choices.get(block, choice)
            if before.value != value:
                raise OverrideError(
                    f" contradicts {choice.said}: both are about block {block!r}",
                    place=f"override {before.said}",
                    legal="one of the two",
                    way_out="make the globs disjoint, or drop one of the two",
                )
            choices[block] = choice
    value = overrides.everywhere(name)
    rest = None if value is None else _Choice(value=value, said=spelled(name, None, value))
    return [choices.get(block, rest) for block in names]


def _matching(pattern: str, names: Sequence[str], said: str) -> list[str]:
    """Blocks of a name, a range (`layers.0-11`) or a glob."""
    if pattern in names:
        return [pattern]
    blocks: list[str] = []
    for part in expand_names([pattern]):
        matches = [part] if part in names else [n for n in names if glob(part).match(n)]
        if not matches:
            raise _no_block(part, names, said)
        blocks += matches
    return blocks


def _no_block(name: str, names: Sequence[str], said: str) -> OverrideError:
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.3)
    return OverrideError(
        f"no block {name!r}",
        place=f"override {said}",
        legal=compress_names(names),
        way_out=f"nearest: {', '.join(near) or 'none'}",
    )


def stage_cuts(overrides: Overrides, graph: Graph) -> list[int] | None:
    """Block positions at which the overridden stages end; None where stages are free."""
    if overrides.stages is None:
        return None
    names = [block.name for block in graph.blocks]
    cuts: list[int] = []
    position = 0
    for k, stage in enumerate(overrides.stages):
        for name in expand_names(stage):
            if name not in names:
                raise _no_block(name, names, f"stages[{k}]")
            expected = names[position] if position < len(names) else "nothing more"
            if name != expected:
                raise OverrideError(
                    f"block {name!r} out of order, expected {expected!r}",
                    place=f"override stages[{k}]",
                    legal="the blocks once, in order",
                    way_out="sort them as the model does",
                )
            position += 1
        cuts.append(position)
    if position != len(names):
        raise OverrideError(
            f"in no stage: {', '.join(compress_names(names[position:]))}",
            place="override stages",
            legal="the blocks once, in order",
            way_out="name the rest, too",
        )
    return cuts


# --- one block, one stage ------------------------------------------------------------------------


def _check_contradictions(wanted: Overrides, choices: _Choices, names: Sequence[str]) -> None:
    """Raise for values that rule each other out in one block."""
    for row in CONTRADICTIONS:
        known = row.given and {row.a, row.b} <= choices.keys()
        if not known or not row.holds(wanted.everywhere):
            continue
        for block, a, b in zip(names, choices[row.a], choices[row.b], strict=True):
            if a and b and row.clash(a.value, b.value):
                other = f"{b.said}: both are about block {block!r}, and {row.why}"
                raise contradiction(a.said, other, row.legal)


def _check_shards(choices: _Choices, names: Sequence[str]) -> None:
    """Raise for dp_shard and hpz that divide neither each other nor the data axis of a block."""
    columns = (choices[name] for name in ("dp_shard", "hpz", "dp", "cp"))
    for block, shard, hpz, dp, cp in zip(names, *columns, strict=True):
        if hpz and shard and shard.value % hpz.value:
            raise OverrideError(
                f" contradicts {shard.said}: {hpz.value} does not divide the ranks that ZeRO "
                f"divides block {block!r} among",
                place=f"override {hpz.said}",
                legal="a divisor of it",
            )
        if shard and dp and cp and (dp.value * cp.value) % shard.value:
            raise OverrideError(
                f" contradicts {dp.said}: {shard.value} does not divide the data axis of block "
                f"{block!r} (dp·cp = {dp.value * cp.value})",
                place=f"override {shard.said}",
                legal="a divisor of it",
            )


def _counts(overrides: Overrides, cuts: Sequence[int] | None) -> tuple[int | None, int | None]:
    """Device groups and stages on each, as far as the overrides say."""
    pp, (virtual_stages, _) = overrides.everywhere("pp"), overrides.virtual()
    if cuts is not None:
        count = len(cuts) * overrides.copies
        pp = pp or (count // virtual_stages if virtual_stages else None)
        virtual_stages = virtual_stages or (count // pp if pp else None)
    return pp, virtual_stages


def _check_stages(
    choices: _Choices,
    names: Sequence[str],
    cuts: Sequence[int] | None,
    pp: int | None,
    per_device: int | None,
) -> None:
    """Raise unless every stage has one value of each kind: within `cuts`, or with so many."""
    for k, (start, stop) in enumerate(pairwise([0, *(cuts or [])])):
        _, clash = _needed(choices, start, stop)
        if clash:
            raise OverrideError(
                f" contradicts {clash[1].said}: stages[{k}] "
                f"({', '.join(compress_names(names[start:stop]))}) has one value of each",
                place=f"override {clash[0].said}",
                way_out="cut it between them, or drop one of the two",
            )
    if cuts is not None or pp is None or per_device is None:
        return
    needed, clash = _needed(choices, 0, len(names))
    if clash and needed > pp * per_device:
        raise OverrideError(
            f" contradicts {clash[1].said} with pp={pp}, virtual_stages={per_device}: a stage has "
            f"one value of each, so that all values need at least {needed} stages",
            place=f"override {clash[0].said}",
            legal=f"pp from {-(-needed // per_device)}",
            way_out="raise pp, or drop one of the two",
        )


def _needed(choices: _Choices, start: int, stop: int) -> tuple[int, tuple[_Choice, _Choice] | None]:
    """The least number of stages for these blocks, and two values that make it more than one."""
    count, clash = 1, None
    of_stage: dict[str, _Choice] = {}
    for b in range(start, stop):
        of_block = {name: choice for name in OF_STAGES if (choice := choices[name][b])}
        for name, choice in of_block.items():
            if of_stage.get(name, choice).value != choice.value:
                count, clash, of_stage = count + 1, (of_stage[name], choice), {}
        of_stage = of_block | of_stage
    return count, clash
