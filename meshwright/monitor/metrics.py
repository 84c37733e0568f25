"""Metrics of a run: of the last step what was measured, beside what was predicted, as flat numbers.

    train_step_s    forward, backward and reduction of a batch
    between_s       from the end of the `train_step` before to the start of this one: the
                    optimizer's step, the input, and whatever else ran meanwhile
    input_s         of it the wait for a `data_loader`
    step_time_s     both: from the end of the `train_step` before to the end of this one; rates and
                    MFU are by it. The first step has nothing before it
    forward_s ...   of observed steps, what this rank computed, reduced and waited for

Rates are those of the global batch. Times are of this rank, on a GPU by events on its stream:
nothing waits for the device until metrics are asked for, or the deviation is told. A step is
observed where it is among those after which that is, and then every `OBSERVE_EVERY`th: each
instruction's time is taken.
"""

from __future__ import annotations

import atexit
import logging
import math
import resource
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.costmodel.schedules import Action, Instruction
from meshwright.executor.devices import Clock, has_streams, module_of
from meshwright.executor.runtime import Stopwatch
from meshwright.executor.stages import Phase
from meshwright.monitor.batch_size import BatchSize
from meshwright.monitor.loggers import Metrics, MetricsLogger
from meshwright.planner.plan import seconds, slower
from meshwright.planner.report import Report
from meshwright.profiles.inputs import ArgumentError

logger = logging.getLogger(__name__)

WARM_UP = 5  # steps that connect, compile and allocate
TELL_AFTER = 20  # steps until the deviation is told
OBSERVE_EVERY = 50

_FORWARD = (Action.FORWARD,)
_BACKWARD = (Action.BACKWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """Prediction of a rank's step: `train_step_s` and the terms of it; of the whole step seconds
    and their 80 % interval, rows, tokens a row (None without a sequence), MFU; bytes of its
    device."""

    train_step_s: float
    terms: Mapping[str, float]
    step_time_s: float
    interval_s: tuple[float, float]
    rows: int
    tokens_per_row: int | None
    mfu: float
    peak_memory_bytes: float

    @staticmethod
    def of(report: Report, rank: int) -> Predicted:
        """Prediction for a rank of the report's plan."""
        plan, s = report.plan, report.summary
        group = plan.group_of(rank)
        group_report = report.device_groups[group]
        low, high = s["step_interval_s"]
        after_s, within_s = group_report.optimizer_s, 0.0
        if plan.stepping == "in_backward":
            after_s, within_s = within_s, after_s
        return Predicted(
            train_step_s=max(s["step_time_s"] - after_s, 0.0),
            terms={
                "forward_s": group_report.forward_s,
                "backward_s": group_report.backward_s + within_s,
                "reduction_s": group_report.gradient_reduction_s,
                "waiting_s": group_report.waiting_s,
            },
            step_time_s=s["step_time_s"],
            interval_s=(low, high),
            rows=plan.global_batch_size,
            tokens_per_row=s["sequence_length"],
            mfu=s["mfu"],
            peak_memory_bytes=float(s["peak_memory_bytes"][group]),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class _Step:
    """A step that ran: moments by the monitor's clock, the end of the step `before` it (its own
    start for the first one) among them; further `numbers` by name."""

    step: int
    loss: torch.Tensor
    size: BatchSize
    before: Any
    began: Any
    ended: Any
    watch: Stopwatch | None
    numbers: dict[str, Any]


@dataclass(slots=True)
class Monitor:
    """Measures the steps of one rank by the clock of its device, and hands them to loggers on rank
    0. `steps_done` is how many steps were trained, under plans before this one too; `states` gives
    numbers beside after each. `count` is the number of steps measured."""

    predicted: Predicted
    clock: Clock
    rank: int
    steps_done: Callable[[], int]
    states: Callable[[], Mapping[str, float]] = dict
    count: int = 0
    told: Deviation | None = None
    _loggers: list[tuple[MetricsLogger, int]] = field(default_factory=list)
    _last: _Step | None = None
    _logged: bool = False
    _observed: list[_Step] = field(default_factory=list)
    _rows: list[dict[str, float]] = field(default_factory=list)
    _input_s: float | None = None

    def train_step(
        self, run: Callable[[Stopwatch | None], torch.Tensor], size: Callable[[], BatchSize]
    ) -> torch.Tensor:
        """Run a step, which takes an observer or None, and measure it; the `size` of its batch is
        asked for when it has run."""
        self.close()
        began = self.clock.now()
        watch = Stopwatch(self.clock.device, self.clock) if self._observes() else None
        loss = run(watch)
        ended = self.clock.now()
        numbers: dict[str, Any] = dict(self.states())
        if self._input_s is not None:
            numbers["input_s"], self._input_s = self._input_s, 0.0
        self._last = _Step(
            step=self.steps_done(),
            loss=loss.detach(),
            size=size(),
            before=began if self._last is None else self._last.ended,
            began=began,
            ended=ended,
            watch=watch,
            numbers=numbers,
        )
        self._logged = False
        self.count += 1
        if watch is not None and self.count <= TELL_AFTER and self._last.size == self._planned:
            self._observed.append(self._last)
        if self.count == TELL_AFTER:
            self._tell()
        return loss

    def log_to(self, logger: MetricsLogger, every: int = 1) -> None:
        """Hand every so manyth step's metrics to a logger, when the next step or the process ends
        it. Raises ValueError for an `every` that counts no steps."""
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise ArgumentError.refused("log_to: every", every, legal="an integer from 1")
        if not self._loggers:
            atexit.register(self.close)
        self._loggers.append((logger, every))

    def forget(self, logger: MetricsLogger) -> None:
        """Hand it no more steps."""
        self._loggers = [(log, every) for log, every in self._loggers if log is not logger]

    def note(self, **numbers: Any) -> None:
        """Add numbers to the last step's."""
        if self._last is not None:
            self._last.numbers.update(numbers)

    def waited_for_input(self, seconds: float) -> None:
        """The next step's batch was waited for."""
        self._input_s = (self._input_s or 0.0) + seconds

    def close(self, *, asked: bool = False) -> None:
        """The last step is over: it goes to the loggers, once, to all of them where it is
        `asked`."""
        if self._last is None or self._logged:
            return
        self._logged = True
        due = [log for log, every in self._loggers if asked or self._last.step % every == 0]
        if due and self.rank == 0:
            metrics: Metrics = self.metrics()
            for log in due:
                log(metrics)
            atexit.unregister(self.close)  # at the end before those of what a logger has started
            atexit.register(self.close)

    def metrics(self) -> dict[str, float]:
        """The last step's numbers; empty before the first. Waits for the step, and for no other
        rank."""
        last, planned = self._last, self.predicted
        if last is None:
            return {}
        numbers = {name: float(x) for name, x in last.numbers.items()}
        numbers |= {"step": float(last.step), "loss": float(last.loss), **self._times(last)}
        numbers |= _rates(last.size, numbers["step_time_s"])
        share = (last.size.tokens or last.size.rows) / (self._planned.tokens or planned.rows)
        numbers["mfu"] = planned.mfu * share * planned.step_time_s / numbers["step_time_s"]
        numbers |= _memory(self.clock.device)
        if last.watch is not None:
            numbers |= self._terms(last)
        predicted = {
            "train_step_s": planned.train_step_s,
            "step_time_s": planned.step_time_s,
            "between_s": planned.step_time_s - planned.train_step_s,
            "mfu": planned.mfu,
            "peak_memory_bytes": planned.peak_memory_bytes,
            **_rates(self._planned, planned.step_time_s),
            **planned.terms,
        }
        return numbers | {f"predicted_{name}": value for name, value in predicted.items()}

    @property
    def _planned(self) -> BatchSize:
        predicted = self.predicted
        return BatchSize(
            predicted.rows, predicted.tokens_per_row and predicted.tokens_per_row * predicted.rows
        )

    def _observes(self) -> bool:
        """Whether the next step is observed."""
        return WARM_UP <= self.count < TELL_AFTER or (self.steps_done() + 1) % OBSERVE_EVERY == 0

    def _times(self, step: _Step) -> dict[str, float]:
        between_s = self.clock.between(step.before, step.began)
        train_step_s = self.clock.between(step.began, step.ended)
        return {
            "train_step_s": train_step_s,
            "between_s": between_s,
            "step_time_s": between_s + train_step_s,
        }

    def _terms(self, step: _Step) -> dict[str, float]:
        """The terms of an observed step; the rest of its time is waiting."""
        assert step.watch is not None
        seconds = dict.fromkeys(TERMS, 0.0)
        for what, lasted_s in step.watch.durations():
            seconds[_term(what)] += lasted_s
        busy_s = sum(seconds.values()) - seconds["waiting_s"]
        return seconds | {"waiting_s": max(0.0, self._times(step)["train_step_s"] - busy_s)}

    def _observed_rows(self) -> list[dict[str, float]]:
        """The times and terms of the steps of whole batches that were observed. Waits for them."""
        for step in self._observed:
            row = self._times(step) | self._terms(step)
            row["input_s"] = float(step.numbers.get("input_s", 0.0))
            self._rows.append(row | {"between_s": max(0.0, row["between_s"] - row["input_s"])})
        self._observed = []
        return self._rows

    def medians(self) -> tuple[int, dict[str, float]]:
        """Number of steps of whole batches that were observed, and the medians of their numbers."""
        rows = self._observed_rows()
        names = rows[0] if rows else ()
        return len(rows), {name: statistics.median(row[name] for row in rows) for name in names}

    def _tell(self) -> None:
        """Say how far the observed steps are from what was predicted, on rank 0."""
        rows, predicted = self._observed_rows(), self.predicted
        if not rows:
            return
        between_s = predicted.step_time_s - predicted.train_step_s
        self.told = deviation(
            rows,
            {
                "step_time_s": predicted.step_time_s,
                **predicted.terms,
                "input_s": 0.0,
                "between_s": between_s,
            },
            steps=self.count,
            interval_s=predicted.interval_s,
        )
        if self.rank == 0:
            logger.log(logging.INFO if self.told.inside else logging.WARNING, "%s", self.told)


def _rates(size: BatchSize, step_time_s: float) -> dict[str, float]:
    rates = {"rows_per_s": size.rows / step_time_s}
    if size.tokens:
        rates["tokens_per_s"] = size.tokens / step_time_s
    return rates


def _term(what: Instruction | Phase) -> str:
    """The term that an instruction or phase of a step is part of."""
    action = getattr(what, "action", what)
    if action in _FORWARD:
        return "forward_s"
    if action in _BACKWARD:
        return "backward_s"
    if action is Action.REDUCE_GRADIENTS or action == Phase.REDUCE:
        return "reduction_s"
    return "waiting_s"


def _memory(device: torch.device) -> dict[str, float]:
    """The most that tensors took on this rank's GPU so far, that its allocator held, and how often
    that had to start anew; on the host the process' peak, all it has loaded included."""
    if not has_streams(device):
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
        return {"peak_memory_bytes": peak}
    module = module_of(device)
    return {
        "peak_memory_bytes": float(module.max_memory_allocated(device)),
        "reserved_memory_bytes": float(module.max_memory_reserved(device)),
        "allocation_retries": float(module.memory_stats(device).get("num_alloc_retries", 0)),
    }


# --- deviation from the prediction ----------------------------------------------------------------

# How far measured steps are from the predicted one, and which term is the likely reason.
#
# Terms are those of a rank: of its `train_step` forward, backward, gradient reduction, and the
# rest, in which it waits for other ranks or for its host; between two of them a loader's wait, and
# the rest. The likely reason is the term that is off most in the direction in which the step is;
# forward and backward count as one where both are off by about the same factor.


TERMS = ("forward_s", "backward_s", "reduction_s", "waiting_s")  # of a train_step
BETWEEN = ("input_s", "between_s")  # before it; between_s without the wait for the input
BLOCKS = ("forward_s", "backward_s")
ALIKE = 2.0  # logarithms of their factors up to this apart have one reason
NAMES: Mapping[tuple[str, ...], str] = {
    ("forward_s",): "forward",
    ("backward_s",): "backward",
    ("reduction_s",): "gradient reduction",
    ("waiting_s",): "waiting inside train_step",
    ("input_s",): "waiting for the data_loader",
    ("between_s",): "what runs between train_steps",
    BLOCKS: "forward and backward alike",
}
_KERNELS = (
    "kernels or collectives inside the blocks; `meshwright profile` measures both, and plans rest "
    "on that from then on"
)
AIMS: Mapping[tuple[str, ...], str] = {
    ("forward_s",): _KERNELS,
    ("backward_s",): _KERNELS,
    ("reduction_s",): "the data axis' collectives: the link, or what hides behind the backward; "
    "`meshwright profile` measures them",
    ("waiting_s",): "other ranks, whose own result.monitor.told says why, or the host's launches; "
    "result.timeline(path) shows which",
    ("input_s",): "more num_workers, or samples that are prepared beforehand",
    ("between_s",): "the optimizer's step, clipping, an input without data_loader, logging",
    BLOCKS: "the device as a whole: other processes on it, its clocks; if it is always so, "
    "`meshwright profile` measures it, and plans rest on that from then on",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Deviation:
    """Median seconds of a step, `step_time_s`, against the prediction, and of each term the same;
    `interval_s` is where 80 % of measured steps are."""

    steps: int
    measured_s: float
    predicted_s: float
    interval_s: tuple[float, float]
    terms: Mapping[str, tuple[float, float]]

    @property
    def inside(self) -> bool:
        low, high = self.interval_s
        return low <= self.measured_s <= high

    @property
    def likely(self) -> tuple[str, ...]:
        """The term that is off most in the step's direction, or forward and backward both; empty
        where none is."""
        sign = 1 if self.measured_s >= self.predicted_s else -1
        off: dict[tuple[str, ...], float]
        off = {(name,): sign * (ours - theirs) for name, (ours, theirs) in self.terms.items()}
        if self._blocks_alike:
            off[BLOCKS] = sum(off.pop((name,)) for name in BLOCKS)
        names = max(off, key=lambda terms: off[terms])
        return names if off[names] > 0 else ()

    @property
    def _blocks_alike(self) -> bool:
        """Whether forward and backward are off in one direction, by about the same factor."""
        pairs = [self.terms[name] for name in BLOCKS]
        if not all(ours and theirs for ours, theirs in pairs):
            return False
        one, other = (math.log(ours / theirs) for ours, theirs in pairs)
        return one * other > 0 and max(abs(one), abs(other)) <= ALIKE * min(abs(one), abs(other))

    def __str__(self) -> str:
        more = self.measured_s / self.predicted_s - 1
        low, high = map(seconds, self.interval_s)
        where = "inside" if self.inside else "outside"
        text = (
            f"after {self.steps} steps: a step takes {seconds(self.measured_s)}, predicted "
            f"{seconds(self.predicted_s)} ({slower(more)}), {where} of the 80 % interval {low} to "
            f"{high}"
        )
        if names := self.likely:
            ours, theirs = (sum(self.terms[name][k] for name in names) for k in (0, 1))
            text += (
                f"; most is off in {NAMES[names]}: {seconds(ours)}, predicted {seconds(theirs)} "
                f"({AIMS[names]})"
            )
        return text


def deviation(
    measured: Sequence[Mapping[str, float]],
    predicted: Mapping[str, float],
    *,
    steps: int,
    interval_s: tuple[float, float],
) -> Deviation:
    """Deviation of measured steps, each with `step_time_s` and the terms, from the same of the
    prediction."""

    def median(name: str) -> float:
        return statistics.median(row[name] for row in measured)

    return Deviation(
        steps=steps,
        measured_s=median("step_time_s"),
        predicted_s=predicted["step_time_s"],
        interval_s=interval_s,
        terms={name: (median(name), predicted[name]) for name in (*TERMS, *BETWEEN)},
    )
