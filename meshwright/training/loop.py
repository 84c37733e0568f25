"""The loop of a training run, over what any user can call of a parallel model.

resume the newest checkpoint
for each batch:
    train_step, clip, optimizer, schedule
    evaluate every so many steps, and stop where that no longer improves
    save every so many steps, and where a signal asks for it
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from meshwright.executor.ranks import StopRequests, all_gather_object, launch, run_on_all, together
from meshwright.executor.runtime import group_of
from meshwright.model import ParallelModel
from meshwright.monitor import MetricsLogger
from meshwright.profiles.inputs import shown
from meshwright.training.kept import FitError, GivenOrder, KeptCheckpoints, given, say_differences

log = logging.getLogger(__name__)

# why a run ends
STEPS, DATA, SIGNAL, PATIENCE, WATCH = "steps", "data", "signal", "patience", "watch"
ASKS = frozenset(("stop", "save", "evaluate"))


@dataclass(frozen=True, slots=True, kw_only=True)
class RunEvent:
    """An event of a run: "begin", "step" and "stepped" before and after each step, "evaluated",
    with its `metrics`, "saved", "end"; after how many steps, with what is trained."""

    name: str
    step: int
    result: ParallelModel
    optimizer: torch.optim.Optimizer
    schedule: Any
    metrics: Mapping[str, float]


Watch = Callable[[RunEvent], Collection[str] | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Saves:
    """Place of a run's saves, and the steps between them (None: at the end, and on signals,
    alone)."""

    checkpoints: KeptCheckpoints
    every: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluations:
    """An evaluation: a collective function that gives numbers, of which `eval_loss`; after how many
    steps it is made, and after how many of them without a better loss the run ends (None: it goes
    on)."""

    run: Callable[[], Mapping[str, float]]
    every: int
    patience: int | None


@dataclass(slots=True)
class Progress:
    """Progress of a run; saved with it. `best_loss` is that of an evaluation, `worse` how many
    evaluations since were no better; `given` what the script gave (`kept.py`)."""

    step: int = 0
    eval_loss: float | None = None
    best_loss: float = math.inf
    worse: int = 0
    given: dict[str, Any] = field(default_factory=dict)

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__}

    def load_state_dict(self, state: dict[str, Any]) -> None:
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
    watch: Watch | None = None
    asked: set[str] = field(default_factory=set)
    progress: Progress = field(default_factory=Progress)
    loss: torch.Tensor | None = None
    saved_step: int | None = None
    takes_given: bool = False  # of what a checkpoint was given otherwise

    def run(self, requests: StopRequests) -> str:
        """Train; returns why it ended, a constant of this module. Collective."""
        self.progress.given = given(self.optimizer, self.schedule, self.loader)
        if self.saves is not None:
            self.saved_step = self.saves.checkpoints.resume(self._load)
            if self.saved_step is not None:
                log.info("resumed at step %d", self.saved_step)
                if "data" not in self._extra:
                    log.warning(
                        "the data begin anew: %s has no state_dict(); data_loader has one",
                        type(self.loader).__name__,
                    )
        for logger in self.loggers:
            self.result.log_to(logger, every=self.log_every)
        self._tell("begin")
        ended = self._run(requests)
        self.result.settle()
        self.result.monitor.close()
        self._save()
        self._tell("end")
        if ended == SIGNAL:
            requests.await_signal()
        return ended

    def _run(self, requests: StopRequests) -> str:
        progress, batches = self.progress, self._batches(requests)
        while self.steps is None or progress.step < self.steps:
            try:
                batch = next(batches)
            except StopIteration:
                return DATA
            self._tell("step")
            self._step(batch)
            asked = self._agreed("stepped")
            ends, saves = requests.agreed()
            if ends:
                return SIGNAL  # and saves
            if saves:
                self._save()
            due = self.evaluations and not progress.step % self.evaluations.every
            if self.evaluations and (due or "evaluate" in asked):
                asked |= self._evaluate(self.evaluations)
            if "save" in asked:
                self._save()
            if self.saves and self.saves.every and not progress.step % self.saves.every:
                self._save()
            if self.evaluations and progress.worse >= (self.evaluations.patience or math.inf):
                return PATIENCE
            if "stop" in asked:
                return WATCH
        return STEPS

    def _tell(self, event: str, metrics: Mapping[str, float] | None = None) -> None:
        """Tell the watch. Collective: an error of one rank is raised on all."""
        watch = self.watch
        if watch is None:
            return
        told = RunEvent(
            name=event,
            step=self.progress.step,
            result=self.result,
            optimizer=self.optimizer,
            schedule=self.schedule,
            metrics=metrics or {},
        )
        self.asked |= run_on_all(self._group, lambda: checked_asks(watch(told)))

    @property
    def _group(self) -> Any:
        return group_of(self.result.runtime)

    def _agreed(self, event: str, metrics: Mapping[str, float] | None = None) -> set[str]:
        """Tell the watch of an event, and take what any rank's has asked for until then."""
        if self.watch is None:
            return set()
        self._tell(event, metrics)
        asked, self.asked = set().union(*all_gather_object(self._group, self.asked)), set()
        return asked

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
            if self.steps is None:
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

    def _evaluate(self, evaluations: Evaluations) -> set[str]:
        metrics, progress = dict(evaluations.run()), self.progress
        loss = metrics["eval_loss"]
        progress.worse = 0 if loss < progress.best_loss else progress.worse + 1
        progress.eval_loss, progress.best_loss = loss, min(progress.best_loss, loss)
        if launch.rank() == 0:
            for logger in self.loggers:
                logger({"step": self.result.runtime.steps, **metrics})
        return self._agreed("evaluated", metrics)

    # --- checkpoints ---

    @property
    def _extra(self) -> dict[str, Any]:
        states = {"progress": self.progress, "schedule": self.schedule, "data": self.loader}
        return {name: x for name, x in states.items() if hasattr(x, "state_dict")}

    def _save(self) -> None:
        if self.saves is None or self.saved_step == self.progress.step:
            return
        self.result.monitor.close()  # who goes on from here does not log this step again
        checkpoints, step = self.saves.checkpoints, self.progress.step
        self.result.save_checkpoint(checkpoints.path(step), self.optimizer, extra=self._extra)
        self.saved_step = step
        checkpoints.drop_old(step)
        self._tell("saved")

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
