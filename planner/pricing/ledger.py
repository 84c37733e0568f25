"""The ledger of a priced plan: the work of a rank of each stage in a step, line by line.

The lines of a stage add up to its costs: those of the forwards to `forward_s` of each micro-batch,
and so on. Work beside a pass (`costmodel/stages/stage.py`) adds fewer seconds than it takes; each
part of it bears its share of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial

from meshwright.costmodel.blocks import Repeats, priced_steps
from meshwright.costmodel.operators import (
    COMPUTING,
    FORWARD_S,
    PASS_COLUMNS,
    Axis,
    Cost,
    Entry,
    Pricer,
    Problem,
    total,
)
from meshwright.costmodel.sharding import Move, Placement, Run
from meshwright.costmodel.stages import (
    Beside,
    Passes,
    StageCosts,
    host_bandwidth,
    of_one,
    stage_costs,
    stage_passes,
)
from meshwright.planner.plan import Plan
from meshwright.planner.pricing.away import sent_of
from meshwright.planner.pricing.copies import with_exchanges
from meshwright.planner.pricing.evaluate import Evaluation, Evaluator, simulated
from meshwright.planner.pricing.priced_stage import PricedStage
from meshwright.planner.pricing.segment_costs import stage_recompute
from meshwright.planner.pricing.slice_work import attention_part, works_on_stages
from meshwright.planner.pricing.stage_costs import Entered
from meshwright.profiles.profile import Profile
from meshwright.profiles.steps import COMPONENTS, HOST, NO_CORRECTIONS, STEP

KINDS_OF_BYTES = ("in passes", "gradients and weights", "between stages")
LINKS = ("in a node", "between nodes")
HOST_LINK = "to the host"
OPTIMIZER = "optimizer"
PASSES = ("forward", "backward")
# work of a stage beside its blocks' entries: kind, and on the host's link which way
_OF_STAGE: Mapping[str, tuple[str, str]] = {
    "issue_s": ("issue", ""),
    "copied_s": ("copy", ""),
    "added_s": ("accumulation", ""),
    "step_s": ("optimizer", ""),
    "fetched_s": ("copy", "to_device"),
    "weights_s": ("copy", "to_device"),
    "returned_s": ("copy", "to_host"),
    "kept_s": ("copy", "to_host"),
    "away_to_host_s": ("copy", "to_host"),
    "away_to_device_s": ("copy", "to_device"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """An entry of a stage, its number of `times` in a step, which takes `exposed_s` longer for all
    of them, the pass or the step (`where`) and the block that it belongs to (None: to all), and
    whether it is there for recompute (`again`)."""

    entry: Entry
    where: str
    times: float
    exposed_s: float
    block: str | None = None
    again: bool = False

    @property
    def seconds(self) -> float:
        """Seconds of all of them by themselves."""
        return self.times * (self.entry.seconds + self.entry.hidden_s)


def stage_lines(priced: PricedStage) -> list[Line]:
    """The ledger of a stage."""
    passes = stage_passes(priced.sums, priced.setting, priced.repeated, priced.sent)
    entries = [*_entries(priced)]
    return [*_within(priced, passes, entries), *_beside(priced, passes, entries)]


def _entries(priced: PricedStage) -> Iterator[tuple[str, Entry]]:
    """Entries of blocks, by name, and of their parameters: those that several read alike once."""
    stored: set[tuple[str, Placement]] = set()
    for entered in priced.blocks:
        name = entered.block.name
        for step in priced_steps(entered.steps):
            yield from ((name, entry) for entry in priced.pricer.step_entries(step))
        for value, state in entered.parameters:
            if (value, state) not in stored:
                entries, _ = priced.pricer.parameters.priced(value, state)
                yield from ((name, entry) for entry in entries)
        stored.update(entered.parameters)


def _within(
    priced: PricedStage, passes: Passes, entries: Sequence[tuple[str, Entry]]
) -> Iterator[Line]:
    """The passes of all micro-batches, and what is run again in their backwards."""
    m = priced.setting.batch.microbatches
    twice = {priced.blocks[k].block.name for span in priced.spans for k in span}
    exposed = dict[str, float]()  # the part of the exchange between experts that nothing hides
    exchanges = priced.sums.forward_exchange_s, priced.sums.backward_exchange_s
    for column, hidden, seconds in zip(PASS_COLUMNS, passes.hidden_s, exchanges, strict=True):
        exposed[column] = 1.0 - float(hidden) / float(seconds) if seconds else 1.0
    for name, entry in entries:
        if entry.column in PASS_COLUMNS:
            share = exposed[entry.column] if entry.axis == "experts" else 1.0
            yield _line(m, name, entry, share, again=False)
        if entry.column == FORWARD_S and name in twice:
            yield _line(m, name, entry, 1.0, again=True)
    for entered, policy in zip(priced.blocks, priced.stage.policies, strict=True):
        if (repeats := entered.passes.repeats.get(policy)) is None:
            continue
        again = [entry for step in repeats.steps for entry in priced.pricer.step_entries(step)]
        forward = [entry for entry in again if entry.column == FORWARD_S]
        gathers = sum(entry.seconds for entry in forward if entry.axis == "tensor")
        # gathers bear the part that products hide of them
        share = 1.0 - repeats.hidden_s / gathers if gathers else 1.0
        for entry in forward:
            part = share if entry.axis == "tensor" else 1.0
            yield _line(m, entered.block.name, entry, part, again=True)


def _line(m: int, block: str, entry: Entry, share: float, *, again: bool) -> Line:
    return Line(
        entry=entry,
        where="backward" if again else entry.column.removesuffix("_s"),
        times=m,
        exposed_s=m * share * entry.seconds,
        block=block,
        again=again,
    )


def _beside(
    priced: PricedStage, passes: Passes, entries: Sequence[tuple[str, Entry]]
) -> Iterator[Line]:
    """Work beside the passes, and the optimizer's step."""
    columns = defaultdict[str, list[tuple[str, Entry]]](list)
    for name, entry in entries:
        columns[entry.column].append((name, entry))
    stepped = "shard_s" if priced.setting.sharing.divides else "optimizer_s"
    optimizer = Beside(
        where="step",
        parts={stepped: passes.optimizer_s, "step_s": passes.host.step_s},
        added_s=passes.optimizer_s + passes.host.step_s,
    )
    for beside in (*passes.beside, optimizer):
        where = OPTIMIZER if beside is optimizer else beside.where
        times = 1.0 if beside.where == "step" else priced.setting.batch.microbatches
        parts = {column: float(part) for column, part in beside.parts.items() if part}
        share = float(beside.added_s) / sum(parts.values()) if parts else 0.0
        for column, part in parts.items():
            if column in _OF_STAGE:
                entry = _of_stage(priced, column, part)
                yield Line(entry=entry, where=where, times=times, exposed_s=times * share * part)
                continue
            done = times * part / sum(entry.seconds for _, entry in columns[column])
            for name, entry in columns[column]:
                exposed_s = done * share * entry.seconds
                yield Line(entry=entry, where=where, times=done, exposed_s=exposed_s, block=name)


def _of_stage(priced: PricedStage, column: str, seconds: float) -> Entry:
    """An entry of a stage that belongs to none of its blocks."""
    kind, way = _OF_STAGE[column]
    return Entry(
        column=column,
        kind=kind,
        seconds=seconds,
        axis="host" if way else None,
        collective=way.replace("_", " "),
        calls=1.0 if way else 0.0,
        sent_bytes=seconds * host_bandwidth(priced.setting, way) if way else 0.0,
    )


# --- sums -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """Work of a rank in a step: `flops` of products and attention, `repeated_flops` of which are
    recompute, `moved_bytes` of the device's memory, and bytes that it gives to links by kind
    (`KINDS_OF_BYTES`): collectives within forwards and backwards, of gradients and weights, and
    messages to other stages."""

    flops: float
    repeated_flops: float
    moved_bytes: float
    sent_bytes: Mapping[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Communication of a rank of a stage in a step on one axis by one collective: calls, bytes that
    it gives to links, seconds by themselves, and those that nothing hides; `link` is the slowest
    that its group has. Copies to and from the host are on an axis of their own. Messages between
    stages are counted by the stage that sends them: to the next activations, to the one before
    gradients."""

    stage: int
    axis: Axis
    collective: str
    link: str
    calls: int
    sent_bytes: float
    seconds: float
    exposed_s: float


@dataclass(frozen=True, slots=True)
class Ledger:
    """All lines of a priced plan, by stage."""

    evaluation: Evaluation
    stages: Sequence[Sequence[Line]]

    @staticmethod
    def of(evaluation: Evaluation) -> Ledger:
        """The ledger of a plan whose stages were walked."""
        stages = [*map(stage_lines, evaluation.priced)]
        for k, entry in evaluation.exchanges.items():
            stages[k].append(Line(entry=entry, where="step", times=1.0, exposed_s=entry.seconds))
        return Ledger(evaluation, stages)

    def work(self) -> list[Work]:
        """The work of a rank of each device group."""
        plan = self.evaluation.plan
        work = []
        for ranks in plan.devices:
            members = [k for k, stage in enumerate(plan.stages) if stage.ranks == ranks]
            lines = [line for k in members for line in self.stages[k]]
            messages = sum(
                plan.passes * entry.sent_bytes
                for edge, entry in self.evaluation.transfers.items()
                for end in edge
                if end in members
            )
            work.append(_work(lines, messages))
        return work

    def traffic(self, problem: Problem) -> list[Traffic]:
        """The communication of each stage; messages between stages are exposed by what the step
        would take without them."""
        by_stage = [(k, line) for k, lines in enumerate(self.stages) for line in lines]
        grouped = defaultdict[tuple[int, Axis, str, str], list[Line]](list)
        for stage, line in (*by_stage, *self._messages(problem)):
            if (axis := line.entry.axis) and line.seconds:
                link = HOST_LINK if axis == "host" else LINKS[line.entry.crosses]
                grouped[stage, axis, line.entry.collective, link].append(line)
        rows = [
            Traffic(
                stage=stage,
                axis=axis,
                collective=collective,
                link=link,
                calls=max(1, round(sum(line.times * line.entry.calls for line in lines))),
                sent_bytes=sum(line.times * line.entry.sent_bytes for line in lines),
                seconds=sum(line.seconds for line in lines),
                exposed_s=sum(line.exposed_s for line in lines),
            )
            for (stage, axis, collective, link), lines in grouped.items()
        ]
        return sorted(rows, key=lambda row: row.stage)

    def beside_passes(self) -> list[dict[str, list[float]]]:
        """Seconds of each stage's communication, [exposed, hidden]: in the forward and the backward
        of a micro-batch, and once in a step beside the first forward (weights) and the last
        backward (gradients), whose exposed seconds the step has by themselves."""
        m, rows = self.evaluation.plan.passes, []
        for lines in self.stages:
            row = {name: [0.0, 0.0] for name in (*PASSES, "first_forward", "last_backward")}
            for line in lines:
                if line.entry.axis and line.where != OPTIMIZER:
                    gathers = line.entry.collective in ("all_gather", "to device")
                    once = "first_forward" if gathers else "last_backward"
                    seconds = row[line.where if line.where in PASSES else once]
                    times = m if line.where in PASSES else 1
                    seconds[0] += line.exposed_s / times
                    seconds[1] += (line.seconds - line.exposed_s) / times
            rows.append(row)
        return rows

    def _messages(self, problem: Problem) -> Iterator[tuple[int, Line]]:
        evaluation, m = self.evaluation, self.evaluation.plan.passes
        sent = {edge: entry for edge, entry in evaluation.transfers.items() if entry.seconds}
        if not sent:
            return
        nothing = dict.fromkeys(evaluation.transfers, 0.0)
        _, without_s, _ = simulated(
            evaluation.plan, problem, evaluation.stages, nothing, evaluation.works
        )
        more_s = evaluation.prediction.step_time_s - without_s
        share = max(0.0, more_s) / sum(entry.seconds for entry in sent.values()) / 2
        for edge, entry in sent.items():
            for stage in edge:
                exposed_s = min(m * entry.seconds, share * entry.seconds)
                yield stage, Line(entry=entry, where="step", times=m, exposed_s=exposed_s)


def _work(lines: Iterable[Line], messages: float) -> Work:
    flops = again = moved = 0.0
    sent = dict.fromkeys(KINDS_OF_BYTES, 0.0) | {KINDS_OF_BYTES[2]: messages}
    for line in lines:
        entry = line.entry
        flops += line.times * entry.flops
        again += line.times * entry.flops * line.again
        moved += line.times * entry.moved_bytes
        if entry.axis not in (None, "host"):
            within = entry.column in PASS_COLUMNS
            sent[KINDS_OF_BYTES[not within]] += line.times * entry.sent_bytes
    return Work(flops=flops, repeated_flops=again, moved_bytes=moved, sent_bytes=sent)


# --- terms ----------------------------------------------------------------------------------------

# Terms of a plan's step, and the seconds by which each component of them could be corrected.
#
# A plan is priced once. Then the entries of a component are made a little larger, added up again
# and simulated: the difference is the component's part of a term, exactly where nothing is hidden,
# and elsewhere for corrections near 1.


MORE = 1e-5


@dataclass(frozen=True, slots=True, kw_only=True)
class PricedTerm:
    """Seconds of a term of a step without corrections, and each component's part of them."""

    seconds: float
    parts: Mapping[str, float]


def priced_terms(plan: Plan, problem: Problem, profile: Profile) -> dict[str, PricedTerm]:
    """The terms of a plan's step on a profile, whose corrections are left out. Raises `PlanError`
    as `check_plan` does."""
    problem = replace(problem, profile=replace(profile, corrections=NO_CORRECTIONS))
    evaluation = Evaluator(problem).price(plan)
    plain = terms_of(evaluation)
    parts: dict[str, dict[str, float]] = {term: {} for term in plain}
    for name in COMPONENTS:
        for term, seconds in _terms_with(_Larger(name), evaluation, problem).items():
            if abs(seconds - plain[term]) > 1e-12 * plain[term]:
                parts[term][name] = (seconds - plain[term]) / MORE
    return {term: PricedTerm(seconds=plain[term], parts=parts[term]) for term in plain}


def terms_of(evaluation: Evaluation) -> dict[str, float]:
    """Seconds of a `train_step` by term: forward, backward and reduction are the sums over the
    device groups, the step (without the optimizer's) is the mean."""
    return _terms(evaluation.plan, evaluation.stages, evaluation.prediction.step_time_s)


def _terms(plan: Plan, stages: Sequence[StageCosts[float]], step_s: float) -> dict[str, float]:
    m, groups = plan.passes, len(plan.devices)

    def total_of(name: str) -> float:
        return float(sum(getattr(stage, name) for stage in stages))

    stepped_s, within = total_of("optimizer_s"), plan.stepping == "in_backward"
    return {
        "forward": m * total_of("forward_s"),
        "backward": m * total_of("backward_s") + stepped_s * within,
        "reduction": total_of("reduce_s"),
        STEP: max(step_s - stepped_s * (not within) / groups, 0.0),
    }


def _terms_with(larger: _Larger, evaluation: Evaluation, problem: Problem) -> dict[str, float]:
    """The terms where a component takes more."""
    plan = evaluation.plan
    exchanged = {k: larger.entry(entry) for k, entry in evaluation.exchanges.items()}
    stages = with_exchanges([larger.stage(priced) for priced in evaluation.priced], exchanged)
    pairs = zip(evaluation.priced, stages, strict=True)
    works = works_on_stages(plan.slices, (larger.attention(*pair) for pair in pairs))
    sends = {edge: larger.entry(entry).seconds for edge, entry in evaluation.transfers.items()}
    return _terms(plan, stages, simulated(plan, problem, stages, sends, works)[1])


@dataclass(frozen=True, slots=True)
class _Larger:
    """The entries of a price, of which those of one component take `MORE`."""

    component: str

    def entry(self, entry: Entry) -> Entry:
        """An entry, which hides as much as before."""
        more = 1 + MORE * (entry.component == self.component)
        seconds = entry.seconds * more
        if entry.axis == "context" and entry.hidden_s:  # as long as all of the scores beside it
            behind = COMPUTING[entry.column] == self.component
            seconds = max(0.0, seconds - MORE * entry.hidden_s * behind)
        return entry._replace(
            seconds=seconds,
            weight_s=entry.weight_s * more,
            host_s=entry.host_s * (1 + MORE * (self.component == HOST and entry.kind != "wait")),
        )

    def step(self, pricer: Pricer, step: Run | Move) -> Cost:
        """The cost of a step of a block."""
        entries = pricer.step_entries(step)
        if isinstance(step, Move) and any(entry.hidden_s for entry in entries):
            alone = (e._replace(seconds=e.seconds + e.hidden_s, hidden_s=0.0) for e in entries)
            return Cost.of(pricer.exposed(step.value, self.entry(entry)) for entry in alone)
        return Cost.of(map(self.entry, entries))

    def parameters(self, pricer: Pricer, stored: Iterable[tuple[str, Placement]]) -> Cost:
        """The cost of parameters."""
        priced = (pricer.parameters.priced(*parameter)[0] for parameter in stored)
        return Cost.of(self.entry(entry) for entries in priced for entry in entries)

    def stage(self, priced: PricedStage) -> StageCosts[float]:
        """The costs of a stage."""
        pricer, policies = priced.pricer, priced.stage.policies
        passes = [
            total(self.step(pricer, step) for step in priced_steps(block.steps))
            for block in priced.blocks
        ]
        blocks = [
            self._block(pricer, *block)
            for block in zip(priced.blocks, policies, passes, strict=True)
        ]
        stored = dict.fromkeys(p for block in priced.blocks for p in block.parameters)
        sums = priced.sums.costing(total([*passes, self.parameters(pricer, stored)]), {})
        priced = replace(priced, blocks=blocks)
        return of_one(stage_costs(sums, priced.setting, stage_recompute(priced), sent_of(priced)))

    def attention(self, priced: PricedStage, costs: StageCosts[float]) -> float:
        """The part of a stage's seconds that its causal attention takes."""
        blocks, cost_of = (b.block for b in priced.blocks), partial(self.step, priced.pricer)
        return attention_part(priced.pricer, blocks, costs, cost_of)

    def _block(self, pricer: Pricer, block: Entered, policy: str, passes: Cost) -> Entered:
        again = {}
        if (repeats := block.passes.repeats.get(policy)) is not None:
            again[policy] = Repeats.of(
                repeats.steps, partial(self.step, pricer), repeats.freed_bytes, repeats.hiding
            )
        cost = total([passes, self.parameters(pricer, block.parameters)])
        return replace(block, sums=block.sums.costing(cost, again))
