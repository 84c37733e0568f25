"""The ledger of a priced plan: the work of a rank of each stage in a step, line by line.

The lines of a stage add up to its costs: those of the forwards to `forward_s` of each micro-batch,
and so on. Work beside a pass (`costmodel/stages/stage.py`) adds fewer seconds than it takes; each
part of it bears its share of them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.costmodel.blocks import priced_steps
from meshwright.costmodel.operators import FORWARD_S, PASS_COLUMNS, Axis, Entry, Problem
from meshwright.costmodel.sharding import Placement
from meshwright.costmodel.stages import Beside, Passes, host_bandwidth, stage_passes
from meshwright.planner.pricing.evaluate import Evaluation, simulated
from meshwright.planner.pricing.priced_stage import PricedStage

KINDS_OF_BYTES = ("in passes", "gradients and weights", "between stages")
LINKS = ("in a node", "between nodes")
HOST_LINK = "to the host"
OPTIMIZER = "optimizer"
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
    for column, hidden, total in zip(PASS_COLUMNS, passes.hidden_s, exchanges, strict=True):
        exposed[column] = 1.0 - float(hidden) / float(total) if total else 1.0
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

    def _messages(self, problem: Problem) -> Iterator[tuple[int, Line]]:
        evaluation, m = self.evaluation, self.evaluation.plan.passes
        sent = {edge: entry for edge, entry in evaluation.transfers.items() if entry.seconds}
        if not sent:
            return
        nothing = dict.fromkeys(evaluation.transfers, 0.0)
        _, without_s, _ = simulated(evaluation.plan, problem, evaluation.stages, nothing)
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
