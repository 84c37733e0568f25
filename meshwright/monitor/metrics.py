"""Metrics of a run: of the last step what was measured, beside what was predicted, as flat numbers.

    train_step_s    forward, backward and reduction of a batch; on GPUs of observed steps alone
    step_time_s     from the start of a `train_step` to that of the next: with the optimizer's step
                    and the input
    forward_s ...   of observed steps, what this rank computed, reduced and waited for

A step is observed where it is among those after which the deviation is told, and then every
`OBSERVE_EVERY`th: the instructions' times are taken, which on GPUs waits for the device.
"""

from __future__ import annotations

import atexit
import logging
import resource
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.costmodel.schedules import Action
from meshwright.executor.devices import has_streams, module_of
from meshwright.executor.runtime import Stopwatch
from meshwright.executor.stages import Phase
from meshwright.monitor.deviation import TERMS, Deviation, deviation
from meshwright.monitor.loggers import Metrics, MetricsLogger
from meshwright.planner.report import Report
from meshwright.profiles.inputs import MeshwrightError, shown

logger = logging.getLogger(__name__)

WARM_UP = 5  # steps that connect, compile and allocate
TELL_AFTER = 20  # steps until the deviation is told
OBSERVE_EVERY = 50

_FORWARD = (Action.FORWARD,)
_BACKWARD = (Action.BACKWARD, Action.BACKWARD_INPUT, Action.BACKWARD_WEIGHT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Predicted:
    """What a rank's step is predicted to take: `train_step_s` and the terms of it; of the whole
    `rows_per_s`, tokens a row (None without a sequence), MFU, seconds, bytes of its device."""

    train_step_s: float
    terms: Mapping[str, float]
    step_time_s: float
    interval: tuple[float, float]
    rows: int
    tokens_per_row: float | None
    mfu: float
    peak_memory_bytes: float

    @staticmethod
    def of(report: Report, rank: int) -> Predicted:
        """Of a rank of the report's plan."""
        plan, s = report.plan, report.summary
        group = next(k for k, ranks in enumerate(plan.devices) if rank in ranks)
        pairs = zip(report.stages, plan.stages, strict=True)
        rows = [row for row, stage in pairs if stage.ranks == plan.devices[group]]

        def total(name: str) -> float:
            return float(sum(row[name] for row in rows))

        step_s, m = s["step_time_s"], plan.num_microbatches
        train_step_s = max(step_s - total("optimizer_s"), 0.0)
        forward_s, backward_s = m * total("forward_s"), m * total("backward_s")
        reduction_s = total("gradient_reduction_s")
        low, high = s["step_interval_s"]
        return Predicted(
            train_step_s=train_step_s,
            terms={
                "forward_s": forward_s,
                "backward_s": backward_s,
                "reduction_s": reduction_s,
                "waiting_s": max(0.0, train_step_s - forward_s - backward_s - reduction_s),
            },
            step_time_s=step_s,
            interval=(low / step_s, high / step_s),
            rows=plan.global_batch_size,
            tokens_per_row=s["tokens_per_s"] and s["tokens_per_s"] / s["rows_per_s"],
            mfu=s["mfu"],
            peak_memory_bytes=s["peak_memory_bytes"][group],
        )


@dataclass(slots=True)
class Monitor:
    """Measures the steps of one rank on a `device`, and hands them to loggers on rank 0. `step` is
    the number of steps done, `states` gives numbers beside after each."""

    predicted: Predicted
    device: torch.device
    rank: int
    states: Callable[[], Mapping[str, float]] = dict
    clock: Callable[[], float] = time.perf_counter
    step: int = 0
    told: Deviation | None = None
    _loggers: list[tuple[MetricsLogger, int]] = field(default_factory=list)
    _last: dict[str, Any] = field(default_factory=dict)
    _observed: list[dict[str, float]] = field(default_factory=list)
    _began_s: float | None = None

    def train_step(
        self, run: Callable[[Stopwatch | None], torch.Tensor], rows: Callable[[], int]
    ) -> torch.Tensor:
        """Run a step, which takes an observer or None, and measure it; `rows` of its batch are
        counted when it has run."""
        began_s = self.clock()
        self._over(began_s)
        watch = Stopwatch(self.device) if self._observes(self.step + 1) else None
        loss = run(watch)
        self.step += 1
        self._began_s = began_s
        self._last = {"step": self.step, "loss": loss.detach(), "rows": rows(), **self.states()}
        if not has_streams(self.device):
            self._last["train_step_s"] = self.clock() - began_s
        if watch is not None:
            measured = _terms(watch, self._last.get("train_step_s"))
            self._last |= measured
            if self._last["rows"] == self.predicted.rows:
                self._observed.append(measured)
        if self.step == TELL_AFTER and self.rank == 0:
            self._tell()
        return loss

    def log_to(self, logger: MetricsLogger, every: int = 1) -> None:
        """Hand every so manyth step's metrics to a logger, when the next step or the process ends
        it. Raises ValueError for an `every` that counts no steps."""
        if isinstance(every, bool) or not isinstance(every, int) or every < 1:
            raise MeshwrightError(
                f"={shown(every)}", place="log_to: every", legal="an integer from 1"
            )
        if not self._loggers:
            atexit.register(self.close)
        self._loggers.append((logger, every))

    def note(self, **numbers: Any) -> None:
        """Add numbers to the last step's."""
        self._last.update(numbers)

    def close(self) -> None:
        """The last step is over."""
        self._over(None)

    def metrics(self) -> dict[str, float]:
        """The last step's numbers; empty before the first. Waits for its loss."""
        if not self._last:
            return {}
        last, own = self._last, self.predicted
        found = {name: float(x) for name, x in last.items() if name not in ("rows", "over")}
        step_s = found.get("step_time_s") or found.get("train_step_s")
        if step_s:
            found["rows_per_s"] = last["rows"] / step_s
            if own.tokens_per_row:
                found["tokens_per_s"] = found["rows_per_s"] * own.tokens_per_row
            found["mfu"] = own.mfu * own.step_time_s / step_s * last["rows"] / own.rows
        found["peak_memory_bytes"] = _peak_bytes(self.device)
        predicted = {
            "train_step_s": own.train_step_s,
            "step_time_s": own.step_time_s,
            "mfu": own.mfu,
            "peak_memory_bytes": own.peak_memory_bytes,
            "rows_per_s": own.rows / own.step_time_s,
            **own.terms,
        }
        if own.tokens_per_row:
            predicted["tokens_per_s"] = predicted["rows_per_s"] * own.tokens_per_row
        return found | {f"predicted_{name}": value for name, value in predicted.items()}

    def medians(self) -> tuple[int, dict[str, float]]:
        """How many steps of whole batches were observed, and the medians of their numbers."""
        names = self._observed[0] if self._observed else ()
        found = {name: statistics.median(each[name] for each in self._observed) for name in names}
        return len(self._observed), found

    def _observes(self, step: int) -> bool:
        return WARM_UP < step <= TELL_AFTER or step % OBSERVE_EVERY == 0

    def _over(self, now_s: float | None) -> None:
        """The last step is over: its whole time is known, and it goes to the loggers."""
        if not self._last or self._last.get("over"):
            return
        if now_s is not None and self._began_s is not None:
            self._last["step_time_s"] = now_s - self._began_s
        due = [log for log, every in self._loggers if self.step % every == 0]
        if due and self.rank == 0:
            metrics: Metrics = self.metrics()
            for log in due:
                log(metrics)
        self._last["over"] = True

    def _tell(self) -> None:
        if not self._observed:
            return
        own = self.predicted
        self.told = deviation(
            self._observed,
            {"train_step_s": own.train_step_s, **own.terms},
            steps=self.step,
            interval_s=(own.interval[0] * own.train_step_s, own.interval[1] * own.train_step_s),
        )
        logger.log(logging.INFO if self.told.inside else logging.WARNING, "%s", self.told)


def _terms(watch: Stopwatch, whole_s: float | None) -> dict[str, float]:
    """The terms of an observed step; the rest of its time is waiting."""
    found = dict.fromkeys(TERMS, 0.0)
    records = watch.read()
    for what, start_s, end_s in records:
        action = getattr(what, "action", what)
        name = "waiting_s"
        if action in _FORWARD:
            name = "forward_s"
        elif action in _BACKWARD:
            name = "backward_s"
        elif action is Action.REDUCE_GRADIENTS or action == Phase.REDUCE:
            name = "reduction_s"
        found[name] += end_s - start_s
    if whole_s is None:
        whole_s = max(end for _, _, end in records) - min(start for _, start, _ in records)
    busy_s = sum(found[name] for name in TERMS if name != "waiting_s")
    return found | {"waiting_s": max(0.0, whole_s - busy_s), "train_step_s": whole_s}


def _peak_bytes(device: torch.device) -> float:
    """The most that tensors took on a GPU; on the host the process' peak, all it has loaded
    included."""
    if has_streams(device):
        return float(module_of(device).max_memory_allocated(device))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
