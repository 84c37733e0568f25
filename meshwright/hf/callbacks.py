"""transformers' callbacks, told of the events of a run by `fit`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from meshwright.executor.ranks import launch
from meshwright.profiles.inputs import MeshwrightError, shown
from meshwright.training import RunEvent

# events that lie inside of a step here, which is one call
INSIDE = ("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end")
ASKS = {"should_training_stop": "stop", "should_save": "save", "should_evaluate": "evaluate"}


class Callbacks:
    """Callbacks of a run of `total` steps: a `watch` for `fit`. What they set of the control
    (training_stop, save, evaluate) is done, on all ranks where one asks."""

    def __init__(
        self,
        callbacks: Sequence[Any],
        args: Any,
        model: Any,
        processing_class: Any,
        *,
        total: int,
        epoch_steps: int,
    ) -> None:
        from transformers.trainer_callback import (
            CallbackHandler,
            DefaultFlowCallback,
            TrainerControl,
            TrainerState,
        )

        first = launch.rank() == 0
        self.args, self.epoch_steps = args, epoch_steps
        self.state = TrainerState(
            max_steps=total,
            num_train_epochs=-(-total // epoch_steps),
            train_batch_size=args.per_device_train_batch_size,
            is_local_process_zero=first,
            is_world_process_zero=first,
        )
        self.control = TrainerControl()
        make: Callable[..., Any] = CallbackHandler
        # which warns without one of theirs; `fit` decides when to log, evaluate and save
        self.handler = make([DefaultFlowCallback], model, processing_class, None, None)
        self.handler.callbacks = list(callbacks)
        self._call("on_init_end")

    def _call(self, event: str, **told: Any) -> None:
        call: Callable[..., Any] = self.handler.call_event
        self.control = call(event, self.args, self.state, self.control, **told)

    def log(self, metrics: Mapping[str, float]) -> None:
        """As a logger: `on_log`, on the rank that logs."""
        self.state.log_history.append({**metrics, "step": self.state.global_step})
        self._call("on_log", logs=dict(metrics))

    def __call__(self, event: RunEvent) -> Collection[str]:
        """Raises ValueError for an end of the epoch that is asked for."""
        state, control = self.state, self.control
        state.global_step, state.epoch = event.step, event.step / self.epoch_steps
        self.handler.optimizer, self.handler.lr_scheduler = event.optimizer, event.schedule
        at_epoch = event.step % self.epoch_steps == 0
        if event.name == "begin":
            self._call("on_train_begin")
        elif event.name == "step":
            if at_epoch:
                self._call("on_epoch_begin")
            control.should_save = control.should_evaluate = control.should_log = False
            self._call("on_step_begin")
        elif event.name == "stepped":
            self._call("on_step_end")
            if at_epoch:
                self._call("on_epoch_end")
        elif event.name == "evaluated":
            control.should_evaluate = False
            self._call("on_evaluate", metrics=dict(event.metrics))
        elif event.name == "saved":
            control.should_save = False
            self._call("on_save")
        else:
            self._call("on_train_end")
        if self.control.should_epoch_stop:
            raise MeshwrightError(
                " sets should_epoch_stop, and batches here have an order of their own",
                place="Trainer: callbacks",
                legal=", ".join(ASKS),
                way_out="set should_training_stop, or give a dataset of fewer rows",
            )
        return [ask for name, ask in ASKS.items() if getattr(self.control, name)]


def checked_callbacks(callbacks: Any) -> list[Any]:
    """Instances of the callbacks, as transformers takes classes, too. Raises ValueError for what is
    none, and for one that acts inside of a step."""
    from transformers import TrainerCallback

    if callbacks is not None and not isinstance(callbacks, list | tuple):
        raise _refused(f" is {shown(callbacks)}")
    made = [x() if isinstance(x, type) else x for x in callbacks or ()]
    for callback in made:
        if not isinstance(callback, TrainerCallback):
            raise _refused(f" has {shown(callback)}")
        for name in INSIDE:
            if getattr(type(callback), name) is not getattr(TrainerCallback, name):
                raise MeshwrightError(
                    f" acts in {name}, inside of a step, which is one call here",
                    place=f"Trainer: callbacks: {type(callback).__name__}",
                    legal="the events around a step: on_step_begin, on_step_end, on_log, ...",
                    way_out="clip by max_grad_norm; change gradients by an optimizer of your own, "
                    "made in create_optimizer",
                )
    return made


def _refused(what: str) -> MeshwrightError:
    return MeshwrightError(
        what,
        place="Trainer: callbacks",
        legal="a list of transformers.TrainerCallback",
        way_out="give functions of a mapping of numbers as loggers=",
    )
