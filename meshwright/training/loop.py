"""The loop of a training run, over what any user can call of a parallel model.

resume the newest checkpoint
for each batch:
    train_step, clip, optimizer, schedule
    log every so many steps
    evaluate every so many steps, and stop where that no longer improves
    save every so many steps, and where a signal asks for it
load the best checkpoint, where that is asked for

A watch is told of each of these, and may ask for them at other steps: transformers' callbacks are
one (`meshwright/hf/theirs.py`).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import torch

from meshwright.executor.ranks import (
    StopRequests,
    all_gather_object,
    launch,
    run_on_first,
    together,
)
from meshwright.executor.runtime import group_of
from meshwright.model import ParallelModel
from meshwright.monitor import MetricsLogger
from meshwright.profiles.inputs import shown
from meshwright.shell.progress import StepProgress
from meshwright.training.kept import FitError, GivenOrder, KeptCheckpoints, given, say_differences

log = logging.getLogger(__name__)

# why a run ends
STEPS, DATA, SIGNAL, PATIENCE, WATCH = "steps", "data", "signal", "patience", "watch"
ASKS = frozenset(("stop", "save", "evaluate", "log"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """An event of a run: "begin", "step" and "stepped" before and after each step, "epoch" where a
    pass over the data is over or cut off, "logged" and "evaluated" with their `metrics`, "saved",
    "end"; after how many steps, with what is trained. `loss` is that of the last step, `best` the
    best evaluation's number before this event, after `best_step` steps."""

    name: str
    step: int
    result: ParallelModel
    optimizer: torch.optim.Optimizer
    schedule: Any
    metrics: Mapping[str, float]
    loss: torch.Tensor | None = None
    best: float | None = None
    best_step: int | None = None


Watch = Callable[[RunEvent], Collection[str] | None]


@runtime_checkable
class Stateful(Protocol):
    """A watch whose state, that of rank 0, is saved with the run."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state: dict[str, Any]) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """Place of a run's saves, and the steps between them (None: at the end, and on signals, alone;
    "best": also after an evaluation that is better than all before). `load_best`: the run ends with
    the weights of the best evaluation."""

    checkpoints: KeptCheckpoints
    every: int | str | None
    load_best: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """An evaluation: a collective function that gives numbers, of which one, the `metric`, tells
    the best; after how many steps it is made, and after how many of them without a better one the
    run ends (None: it goes on)."""

    run: Callable[[], Mapping[str, float]]
    every: int
    patience: int | None
    metric: str = "eval_loss"
    greater_is_better: bool = False

    def value(self, metrics: Mapping[str, float]) -> float:
        """The number that tells the best. Raises ValueError where it is not there."""
        if self.metric in metrics:
            return metrics[self.metric]
        raise FitError(
            f"={self.metric!r} is not among the numbers of the evaluation",
            place="fit: metric",
            legal=", ".join(metrics),
            way_out="name one of them",
        )

    def better(self, value: float, best: float | None) -> bool:
        """Whether a number is better than the best before it."""
        if best is None:
            return not math.isnan(value)
        return value > best if self.greater_is_better else value < best


@dataclass(slots=True)
class Progress:
    """Progress of a run; saved with it. `best` is the number of the best evaluation, after
    `best_step` steps, `worse` how many evaluations since were no better; `given` what the script
    gave (`kept.py`), `watched` the state of the watch."""

    step: int = 0
    eval_loss: float | None = None
    best: float | None = None
    best_step: int | None = None
    worse: int = 0
    given: dict[str, Any] = field(default_factory=dict)
    watched: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        before = state.get("best_loss", math.inf)  # of a run before 2026-11-29
        state = {"best": before if math.isfinite(before) else None, **state}
        for name in self.__slots__:
            setattr(self, name, state.get(name, getattr(self, name)))


@dataclass(slots=True, kw_only=True)
class Loop:
    """A run of so many `steps` (None: as long as there is data) over the batches of a `loader`."""

    result: ParallelModel
    optimizer: torch.optim.Optimizer
    schedule: Any
    loader: Any
    steps: int | None
    max_grad_norm: float | None
    saves: Saves | None
    evaluations: Evaluations | None
    loggers: tuple[MetricsLogger, ...] = ()
    log_every: int = 1
    shown: StepProgress | None = None
    watch: Watch | None = None
    asked: set[str] = field(default_factory=set)
    failed: Exception | None = None
    start: Path | None = None  # the checkpoint to go on from, in place of the newest
    progress: Progress = field(default_factory=Progress)
    loss: torch.Tensor | None = None
    saved_step: int | None = None
    over: bool = True  # the last pass over the data
    ended: str | None = None  # with a pass
    takes_given: bool = False  # of what a checkpoint was given otherwise

    def run(self, requests: StopRequests) -> str:
        """Train; returns why it ended, a constant of this module. Collective."""
        self.result.without_servers("fit")
        self.progress.given = given(self.optimizer, self.schedule, self.loader)
        self._resume()
        for logger in self.loggers:
            self.result.log_to(logger, every=self.log_every)
        try:
            self._do(self._agreed("begin"))
            ended = self._run(requests)
            self._drain()
            self.result.settle()
            self.result.monitor.close()
        except KeyboardInterrupt:
            self._say_cut_off("interrupted")
            raise
        finally:
            for logger in self.loggers:
                self.result.monitor.forget(logger)
        self._save()
        if self.saves is not None and self.saves.load_best:
            self._load_best(self.saves.checkpoints)
        self._agreed("end")
        if ended == SIGNAL:
            self._say_cut_off("ended by SIGTERM")
            requests.await_signal()
        return ended

    def _say_cut_off(self, how: str) -> None:
        if launch.rank() != 0:
            return
        step = self.progress.step
        if self.saves is None:
            log.warning("%s after step %d: without a folder nothing is kept", how, step)
            return
        kept = self.saves.checkpoints
        newest = (
            f"goes on from {kept.path(self.saved_step).name}" if self.saved_step else "begins anew"
        )
        log.warning("%s after step %d: a run in %s %s", how, step, kept.folder, newest)

    def _resume(self) -> None:
        """Go on from a checkpoint, if there is one."""
        if self.start is not None:
            self._load(self.start)
            self.saved_step = self.progress.step
        elif self.saves is not None:
            self.saved_step = self.saves.checkpoints.resume(self._load)
        if self.saved_step is None:
            return
        log.info("resumed at step %d", self.saved_step)
        if "data" not in self._extra:
            log.warning(
                "the data begin anew: %s has no state_dict(); data_loader has one",
                type(self.loader).__name__,
            )

    def _run(self, requests: StopRequests) -> str:
        batches = self._batches(requests)
        while self.steps is None or self.progress.step < self.steps:
            try:
                batch = next(batches)
            except StopIteration:
                return self._pass_over() or self.ended or DATA
            self._tell("step")
            self._step(batch)
            asked = self._agreed("stepped")
            ends, saves = requests.agreed()
            if ends:
                return SIGNAL  # and saves
            ended = self._do(asked | ({"save"} if saves else set()) | self._due)
            if ended is not None or getattr(self.loader, "finished", False):
                ended = self._pass_over() or ended
            if ended is not None:
                return ended
        return self._pass_over() or STEPS

    def _pass_over(self) -> str | None:
        """A pass over the data is over, or is cut off by the end of the run: said once. Why the run
        ends, if the watch asks for it then."""
        if self.over:
            return None
        self.over = True
        return self._do(self._agreed("epoch"))

    @property
    def _due(self) -> set[str]:
        """Evaluation and save that are due after this many steps."""
        step, every = self.progress.step, self.saves and self.saves.every
        due = {"evaluate"} if self.evaluations and not step % self.evaluations.every else set()
        return due | ({"save"} if isinstance(every, int) and not step % every else set())

    def _do(self, asked: set[str]) -> str | None:
        """Log, evaluate and save, as is asked for; why the run ends, if it does. Collective."""
        if "log" in asked:
            self.result.monitor.close(asked=True)
            if self.watch is not None:
                self._tell("logged", self.result.metrics())
        if self.evaluations and "evaluate" in asked:
            self._drain()  # what is saved behind it, or given back, is what was evaluated
            asked |= self._evaluate(self.evaluations)
        if "save" in asked:
            self._save()
        if self.evaluations and self.progress.worse >= (self.evaluations.patience or math.inf):
            return PATIENCE
        return WATCH if "stop" in asked else None

    def _tell(self, event: str, metrics: Mapping[str, float] | None = None) -> None:
        """Tell the watch. An error of it is raised, on all ranks, when they agree next."""
        if self.watch is None or self.failed is not None:
            return
        told = RunEvent(
            name=event,
            step=self.progress.step,
            result=self.result,
            optimizer=self.optimizer,
            schedule=self.schedule,
            metrics=metrics or {},
            loss=self.loss,
            best=self.progress.best,
            best_step=self.progress.best_step,
        )
        try:
            self.asked |= checked_asks(self.watch(told))
        except Exception as error:  # noqa: BLE001 - the others wait for this rank
            self.failed = error

    @property
    def _group(self) -> Any:
        return group_of(self.result.runtime)

    def _agreed(self, event: str, metrics: Mapping[str, float] | None = None) -> set[str]:
        """Tell the watch of an event, and take what any rank's has asked for until then; one that
        asks the same on every rank (`same_on_all`) is not compared. Collective."""
        if self.watch is None:
            return set()
        self._tell(event, metrics)
        told = [(self.asked, self.failed)]
        if not getattr(self.watch, "same_on_all", False):
            told = all_gather_object(self._group, told[0])
        self.asked, self.failed = set(), None
        for _, failed in told:
            if failed is not None:
                raise failed
        return set().union(*(asked for asked, _ in told))

    def _batches(self, requests: StopRequests) -> Iterator[Any]:
        """Batch after batch, epoch after epoch where the number of steps is what ends the run."""
        if self.steps is None and getattr(self.loader, "finished", False):
            return
        empty = 0
        while empty < 2:  # the first may be the end of a pass that was resumed
            before = self.progress.step
            if is_local(self.loader):
                yield from self.loader  # as many on every rank
            else:
                yield from together("fit: data", self.loader, requests.group)
            self.ended = self._pass_over()
            if self.steps is None or self.ended is not None:
                return
            empty = empty + 1 if self.progress.step == before else 0

    def _step(self, batch: Any) -> None:
        result = self.result
        self.loss = result.train_step(
            batch,
            local=is_local(self.loader),
            optimizer=self.optimizer,
            max_grad_norm=self.max_grad_norm,
        )
        result.monitor.note(lr=self.optimizer.param_groups[0]["lr"])
        if self.schedule is not None:
            self.schedule.step()
        self.progress.step += 1
        self.over = False
        if self.shown is not None:
            self.shown.at(self.progress.step, self.steps)

    def _drain(self) -> None:
        """Step with the gradients that are outstanding, of a pipeline that is not flushed."""
        norm = self.max_grad_norm
        while (loss := self.result.drain(self.optimizer, max_grad_norm=norm)) is not None:
            self.loss = loss

    def _evaluate(self, evaluations: Evaluations) -> set[str]:
        metrics, progress = dict(evaluations.run()), self.progress
        value = evaluations.value(metrics)
        if launch.rank() == 0:
            for logger in self.loggers:
                logger({"step": self.result.runtime.steps, **metrics})
        asked = self._agreed("evaluated", metrics)
        progress.eval_loss = metrics.get("eval_loss")
        if not evaluations.better(value, progress.best):
            progress.worse += 1
            return asked
        progress.best, progress.best_step, progress.worse = value, progress.step, 0
        return asked | ({"save"} if self.saves and self.saves.every == "best" else set())

    # --- checkpoints ---

    @property
    def _extra(self) -> dict[str, Any]:
        states = {"progress": self.progress, "schedule": self.schedule, "data": self.loader}
        return {name: x for name, x in states.items() if hasattr(x, "state_dict")}

    def _save(self) -> None:
        if self.saves is None or self.saved_step == self.progress.step:
            return
        self.result.monitor.close()  # who goes on from here does not log this step again
        self._drain()
        checkpoints, step = self.saves.checkpoints, self.progress.step
        if isinstance(self.watch, Stateful):
            self.progress.watched = run_on_first(self._group, self.watch.state_dict)
        self.result.save_checkpoint(checkpoints.path(step), self.optimizer, extra=self._extra)
        self.saved_step = step
        checkpoints.drop_old(step, self.progress.best_step if self.saves.load_best else None)
        self._tell("saved")

    def _load_best(self, checkpoints: KeptCheckpoints) -> None:
        """The weights after the best evaluation, where they were saved."""
        best = self.progress.best_step
        if best == self.progress.step:
            return
        if best not in checkpoints.steps():
            log.warning("the best step, %s, was not saved: the last one's weights stay", best)
            return
        log.info("the weights of step %d, the best with %.6g", best, self.progress.best)
        self.result.load_weights(checkpoints.path(best))

    def _load(self, path: Any) -> None:
        now, self.progress.given = self.progress.given, {}
        groups = [{**group} for group in self.optimizer.param_groups]
        extra = self._extra
        if self.takes_given:
            extra.pop("schedule", None)
            if "data" in extra:
                extra["data"] = GivenOrder(self.loader)
        try:
            self.result.load_checkpoint(path, self.optimizer, extra=extra)
        finally:
            before, self.progress.given = self.progress.given, now
        if self.progress.watched and isinstance(self.watch, Stateful):
            self.watch.load_state_dict(self.progress.watched)
        if before:  # not of a run before 2026-11-27
            say_differences(before, now, takes_given=self.takes_given)
        if not self.takes_given:
            self.progress.given = before or now
            return
        for group, own in zip(self.optimizer.param_groups, groups, strict=True):
            group.update((name, x) for name, x in own.items() if name != "params")
        for _ in range(self.progress.step if self.schedule is not None else 0):
            self.schedule.step()


def checked_asks(asks: Any) -> set[str]:
    """Raise ValueError for what a watch can't ask for."""
    listed = () if asks is None else asks
    if isinstance(listed, Collection) and not isinstance(listed, str) and ASKS.issuperset(listed):
        return set(listed)
    raise FitError(
        f" asked for {shown(asks)}",
        place="fit: watch",
        legal=f"None, or some of {', '.join(sorted(ASKS))}",
        way_out='return ["stop"]',
    )


def is_local(loader: Any) -> bool:
    """Whether a loader gives this rank's rows, as those of `data_loader` do, not global batches."""
    return bool(getattr(loader, "local", False))
