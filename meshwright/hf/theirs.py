"""Parts of transformers' Trainer that people change: methods, callbacks, batches, metrics.

transformers' own loop calls some eighty methods; here a step is one call under a plan. What trains
something else is honoured or refused; of the rest a warning says that it is never called.
"""

from __future__ import annotations

import inspect
import logging
import math
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from meshwright.executor.ranks import launch
from meshwright.hf.training_arguments import TrainerError
from meshwright.profiles.inputs import MeshwrightError, NotInstalledError, shown
from meshwright.training import KeptCheckpoints, RunEvent

log = logging.getLogger(__name__)

HONOURED = frozenset(
    (
        *("compute_loss", "create_optimizer", "create_scheduler", "get_decay_parameter_names"),
        *("get_train_dataloader", "get_eval_dataloader", "get_test_dataloader", "evaluate"),
        *("predict", "log", "save_model", "train", "add_callback", "pop_callback"),
        *("remove_callback", "is_local_process_zero", "is_world_process_zero"),
    )
)
_STEP = "override compute_loss, which is traced, and force how it runs by overrides=Overrides(...)"
_LOADER = "override get_train_dataloader, or give data_collator="
_EVALUATION = "override evaluate, or give compute_metrics="
_OPTIMIZER = "override create_optimizer and create_scheduler"
INSTEAD = {
    **dict.fromkeys(
        (
            *("training_step", "_inner_training_loop", "_run_epoch", "_prepare_for_training"),
            *("compute_loss_context_manager", "autocast_smart_context_manager"),
            *("_wrap_model", "_clip_grad_norm", "_get_grad_norm", "call_model_init"),
        ),
        _STEP,
    ),
    **dict.fromkeys(("create_optimizer_and_scheduler", "get_optimizer_cls_and_kwargs"), _OPTIMIZER),
    **dict.fromkeys(
        (
            *("get_batch_samples", "_get_num_items_in_batch", "_prepare_input", "_prepare_inputs"),
            *("_get_train_sampler", "_get_dataloader", "_remove_unused_columns"),
            *("_get_collator_with_removed_columns", "get_total_train_batch_size"),
        ),
        _LOADER,
    ),
    **dict.fromkeys(
        ("evaluation_loop", "prediction_step", "_evaluate", "_get_eval_sampler"), _EVALUATION
    ),
    **dict.fromkeys(
        (
            "_save_checkpoint",
            "_load_from_checkpoint",
            "_load_best_model",
            "_maybe_log_save_evaluate",
        ),
        "save in a callback's on_step_end, by result.save_checkpoint",
    ),
}


def checked_overrides(kind: type, base: type) -> set[str]:
    """Names of the functions that classes between `kind` and `base` define. Raises ValueError for
    one of transformers' Trainer which changes what is trained and is never called here; warns of
    the others that are not called."""
    from transformers import Trainer as Theirs

    inside = kind.__mro__[: kind.__mro__.index(base)]
    names = {
        name
        for c in inside
        for name, x in vars(c).items()
        if callable(x) or isinstance(x, staticmethod | classmethod | property)
    } - {"__init__"}
    for name in sorted(names & INSTEAD.keys()):
        raise TrainerError(
            " is overridden, and is never called: a step here is one call, as planned",
            place=f"{kind.__name__}.{name}",
            legal=", ".join(sorted(HONOURED)),
            way_out=INSTEAD[name],
        )
    others = sorted(name for name in names - HONOURED if hasattr(Theirs, name))
    if others and launch.rank() == 0:
        log.warning("%s: never called here: %s", kind.__name__, ", ".join(others))
    return names


def computing_loss(model: nn.Module, compute_loss: Callable[..., Any]) -> nn.Module:
    """The model itself, whose forward gives `compute_loss(model, inputs)` from now on: the loss,
    and where it returns them the outputs. A call of the model inside of it is the model's own."""
    kind = type(model)
    taken = inspect.signature(compute_loss).parameters
    options = {"return_outputs": True} if "return_outputs" in taken else {}
    inside = threading.local()

    def forward(self: nn.Module, *args: Any, **inputs: Any) -> Any:
        if args or getattr(inside, "model", None) is self:
            return kind.forward(self, *args, **inputs)
        inside.model = self
        try:
            loss = compute_loss(self, inputs, **options)
        finally:
            inside.model = None
        if isinstance(loss, tuple) and len(loss) == 2:
            loss, outputs = loss
            return {"loss": loss, "outputs": outputs}
        return {"loss": loss}

    named = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    model.__class__ = type(kind.__name__, (kind,), named)
    return model


def loss_of(outputs: Any) -> Any:
    """transformers' own loss: of a mapping its `loss`, else the first output."""
    if isinstance(outputs, Mapping):
        if outputs.get("loss") is None:
            raise TrainerError(
                f" returned {sorted(outputs)}, without a loss",
                place="Trainer.compute_loss: the model",
                legal="outputs with a loss",
                way_out="give labels among the inputs, or override compute_loss",
            )
        return outputs["loss"]
    return outputs[0] if isinstance(outputs, tuple | list) else outputs


# --- callbacks ------------------------------------------------------------------------------------

# transformers' callbacks, told of the events of a run by `fit`. When to log, evaluate and save is
# for their own `DefaultFlowCallback` to say, as the arguments ask for it.


# events that lie inside of a step here, which is one call
INSIDE = ("on_pre_optimizer_step", "on_optimizer_step", "on_substep_end")
ASKS = {
    "should_training_stop": "stop",
    "should_log": "log",
    "should_save": "save",
    "should_evaluate": "evaluate",
}
# of a TrainerState, which go on in a run that is resumed; the others follow from the arguments
RESUMED = (
    *("epoch", "global_step", "num_input_tokens_seen", "total_flos", "log_history"),
    *("best_metric", "best_global_step", "best_model_checkpoint"),
)


def callback_handler(args: Any, model: Any, processing_class: Any, callbacks: Any) -> Any:
    """transformers' handler, with its own callbacks (flow, progress bar or printed lines, those of
    `report_to`) and the given ones. Raises ValueError for what is none of them."""
    from transformers.integrations import get_reporting_integration_callbacks
    from transformers.integrations.integration_utils import INTEGRATION_TO_CALLBACK
    from transformers.trainer import DEFAULT_CALLBACKS, DEFAULT_PROGRESS_CALLBACK
    from transformers.trainer_callback import CallbackHandler, PrinterCallback

    given = checked_callbacks(callbacks)
    kinds = [*DEFAULT_CALLBACKS]
    place, legal = "TrainingArguments: report_to", ["none", *INTEGRATION_TO_CALLBACK]
    for name in args.report_to or ():
        if name not in legal:
            raise TrainerError(
                f" names {name!r}",
                place=place,
                legal=", ".join(legal),
                way_out="give loggers=[...], functions of a mapping of numbers",
            )
        try:
            kinds += [kind() for kind in get_reporting_integration_callbacks([name])]
        except (RuntimeError, ImportError) as error:
            raise NotInstalledError(
                f"{name}: {error}", place=place, way_out="install it"
            ) from error
    make: Any = CallbackHandler
    handler = make([*kinds, *given], model, processing_class, None, None)
    handler.add_callback(PrinterCallback if args.disable_tqdm else DEFAULT_PROGRESS_CALLBACK)
    return handler


class Callbacks:
    """The callbacks of a `trainer` in a run of `total` steps: a `watch` for `fit`. What they set of
    the control (training_stop, log, save, evaluate) is done, on all ranks where one asks.

    The trainer has transformers' `state`, `control` and `callback_handler`.
    """

    def __init__(self, trainer: Any, *, total: int, epoch_steps: int, folder: Any) -> None:
        self.trainer, self.epoch_steps, self.folder = trainer, epoch_steps, folder
        self.losses: list[torch.Tensor] = []  # since the last line of the log
        self.total_loss, self.logged_step, self.began_s = 0.0, 0, time.time()
        self.in_epoch = False
        self.first_step: int | None = None  # steps before this run
        self.metrics: dict[str, float] = {}  # of the whole run
        args, state = trainer.args, new_state(trainer)
        state.train_batch_size = args.per_device_train_batch_size
        state.compute_steps(args, total)
        state.max_steps, state.num_train_epochs = total, math.ceil(total / epoch_steps)
        trainer.state = state

    @property
    def rows(self) -> int:
        """Rows of a step."""
        rows: int = self.trainer.result.plan.global_batch_size
        return rows

    @property
    def same_on_all(self) -> bool:
        """Whether only transformers' own are told, which ask the same on every rank."""
        from transformers import trainer_callback as own

        kinds = (own.DefaultFlowCallback, own.ProgressCallback, own.PrinterCallback)
        return all(type(x) in kinds for x in self.trainer.callback_handler.callbacks)

    def _call(self, event: str, **told: Any) -> None:
        trainer = self.trainer
        call = getattr(trainer.callback_handler, event)
        trainer.control = call(trainer.args, trainer.state, trainer.control, **told)

    def __call__(self, event: RunEvent) -> Collection[str]:
        """Raises ValueError for an end of the epoch that is asked for."""
        trainer, state = self.trainer, self.trainer.state
        handler, args = trainer.callback_handler, trainer.args
        state.global_step, state.epoch = event.step, event.step / self.epoch_steps
        if args.metric_for_best_model is not None:
            state.best_metric = event.best
            state.best_global_step = None if self.folder is None else event.best_step
        handler.optimizer, handler.lr_scheduler = event.optimizer, event.schedule
        getattr(self, f"_{event.name}")(event)
        control = trainer.control
        if control.should_epoch_stop:
            raise TrainerError(
                " sets should_epoch_stop, and batches here have an order of their own",
                place="Trainer: callbacks",
                legal=", ".join(ASKS),
                way_out="set should_training_stop, or give a dataset of fewer rows",
            )
        asks = {ask for name, ask in ASKS.items() if getattr(control, name)}
        for name in ASKS.keys() - {"should_training_stop"}:
            setattr(control, name, False)  # asked for once, however many events are before it
        if event.name == "begin" and args.eval_on_start:
            asks.add("evaluate")
        return asks - ({"stop"} if state.global_step >= state.max_steps else set())

    def _begin(self, event: RunEvent) -> None:
        self.first_step = self.logged_step = event.step
        self._call("on_train_begin")

    def _step(self, event: RunEvent) -> None:
        if not self.in_epoch:
            self.in_epoch = True
            self._call("on_epoch_begin")
        self._call("on_step_begin")

    def _stepped(self, event: RunEvent) -> None:
        assert event.loss is not None
        self.losses.append(event.loss)
        self.trainer.state.total_flos += event.result.prediction.model_flops
        self._call("on_step_end")

    def _epoch(self, event: RunEvent) -> None:
        self.in_epoch = False
        self._call("on_epoch_end")

    def _logged(self, event: RunEvent) -> None:
        """The mean loss of the steps since the last line, and what transformers tells beside it."""
        steps, self.logged_step = event.step - self.logged_step, event.step
        if not steps:
            return
        loss, measured = self._drained(), event.metrics
        logs = {"loss": loss / steps}
        if "grad_norm" in measured:
            logs["grad_norm"] = measured["grad_norm"]
        self.trainer.log({**logs, "learning_rate": measured["lr"]}, self.began_s)

    def _drained(self) -> float:
        losses, self.losses, total = self.losses, [], 0.0
        for k, x in enumerate(losses):
            loss = float(x)
            if self.trainer.args.logging_nan_inf_filter and not math.isfinite(loss):
                loss = total / (1 + k)  # the mean of those before it
            total += loss
        self.total_loss += total
        return total

    def _evaluated(self, event: RunEvent) -> None:
        """`Trainer.evaluate` has told them."""

    def _saved(self, event: RunEvent) -> None:
        state = self.trainer.state
        best = state.best_global_step
        if (
            best is not None
            and (path := KeptCheckpoints(folder=self.folder, keep=1).path(best)).is_dir()
        ):
            state.best_model_checkpoint = str(path)
        self._call("on_save")

    def _end(self, event: RunEvent) -> None:
        from transformers.trainer_utils import speed_metrics

        self._drained()
        state, first = self.trainer.state, self.first_step or 0
        steps = event.step - first
        rows = steps * event.result.plan.global_batch_size
        self.metrics = speed_metrics("train", self.began_s, num_samples=rows, num_steps=steps)
        self.metrics["total_flos"] = state.total_flos
        self.metrics["train_loss"] = self.total_loss / max(steps, 0.001)
        self.trainer.log(self.metrics)
        self._call("on_train_end")

    def state_dict(self) -> dict[str, Any]:
        """State that a resumed run goes on with; `stateful_callbacks` as transformers has them."""
        state = self.trainer.state
        kept = {name: getattr(state, name) for name in RESUMED}
        callbacks = new_state(self.trainer).stateful_callbacks
        return {**kept, "rows": self.rows, "stateful_callbacks": callbacks}

    def load_state_dict(self, saved: dict[str, Any]) -> None:
        from transformers import Trainer as Theirs

        before = saved.get("rows", self.rows)
        if before != self.rows and launch.rank() == 0:
            log.warning(
                "a step had %d rows and has %d now: steps, epochs and learning rates are no longer "
                "those of the run that goes on; per_device_train_batch_size or "
                "gradient_accumulation_steps of %g times theirs keep %d rows",
                *(before, self.rows, before / self.rows, before),
            )
        for name in (*RESUMED, "stateful_callbacks"):
            setattr(self.trainer.state, name, saved[name])
        restore: Callable[..., None] = Theirs._load_callback_state
        restore(self.trainer)


def new_state(trainer: Any) -> Any:
    """A TrainerState of this rank, with the states of the callbacks that have one."""
    from transformers.trainer_callback import ExportableState, TrainerState

    of = [*trainer.callback_handler.callbacks, trainer.control]
    stateful: list[Any] = [x for x in of if isinstance(x, ExportableState)]
    return TrainerState(
        is_local_process_zero=launch.local_rank() == 0,
        is_world_process_zero=launch.rank() == 0,
        stateful_callbacks=stateful,
    )


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
                raise TrainerError(
                    f" acts in {name}, inside of a step, which is one call here",
                    place=f"Trainer: callbacks: {type(callback).__name__}",
                    legal="the events around a step: on_step_begin, on_step_end, on_log, ...",
                    way_out="clip by max_grad_norm; change gradients by an optimizer of your own, "
                    "made in create_optimizer",
                )
    return made


def _refused(what: str) -> MeshwrightError:
    return TrainerError(
        what,
        place="Trainer: callbacks",
        legal="a list of transformers.TrainerCallback",
        way_out="give functions of a mapping of numbers as loggers=",
    )


# --- predictions ----------------------------------------------------------------------------------

# Predictions of many batches as arrays.


PADDING = -100  # of labels and predictions of other lengths, as in transformers


def predictions(outputs: Any, model: nn.Module, ignore_keys: Any = None) -> Any:
    """The outputs of a forward without its loss and caches (or `ignore_keys`): a tensor, or a tuple
    of them."""
    if isinstance(outputs, Mapping) and isinstance(outputs.get("outputs"), Mapping | tuple):
        outputs = outputs["outputs"]  # of an overridden compute_loss
    if ignore_keys is None:
        ignore_keys = getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", ())
    ignored = {"loss", *ignore_keys}
    if isinstance(outputs, Mapping):
        outputs = tuple(x for name, x in outputs.items() if name not in ignored)
    if isinstance(outputs, torch.Tensor):
        return outputs
    tensors = tuple(x for x in outputs or () if isinstance(x, torch.Tensor))
    return tensors[0] if len(tensors) == 1 else tensors


def numpy_of(batches: Sequence[Any]) -> Any:
    """The rows of all batches as arrays, those of other lengths padded as transformers pads."""
    if isinstance(batches[0], tuple):
        return tuple(numpy_of(xs) for xs in zip(*batches, strict=True))
    arrays = [x.detach().float().cpu().numpy() if x.is_floating_point() else x.cpu().numpy()
              for x in batches]  # fmt: skip
    longest = [max(sizes) for sizes in zip(*(x.shape[1:] for x in arrays), strict=True)]
    padded = [
        np.pad(
            x,
            [(0, 0), *((0, most - n) for most, n in zip(longest, x.shape[1:], strict=True))],
            constant_values=PADDING,
        )
        for x in arrays
    ]
    return np.concatenate(padded)
