"""Parts of transformers' Trainer that people change: methods, callbacks, batches, metrics.

transformers' own loop calls some eighty methods; here a step is one call under a plan. What trains
something else is honoured or refused; of the rest a warning says that it is never called.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.data.loader_arguments import DataError
from meshwright.executor.ranks import launch
from meshwright.hf.training_arguments import TrainerError
from meshwright.planner.batch import batch_rows
from meshwright.profiles.inputs import MeshwrightError, shown
from meshwright.training import RunEvent

log = logging.getLogger(__name__)

HONOURED = frozenset(
    (
        *("compute_loss", "create_optimizer", "create_scheduler", "get_decay_parameter_names"),
        *("get_train_dataloader", "get_eval_dataloader", "evaluate", "log", "save_model", "train"),
        *("add_callback", "is_local_process_zero", "is_world_process_zero"),
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
        (
            *("evaluation_loop", "prediction_step", "predict", "_evaluate", "_get_eval_sampler"),
            "get_test_dataloader",
        ),
        _EVALUATION,
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

# transformers' callbacks, told of the events of a run by `fit`.


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
            is_local_process_zero=launch.local_rank() == 0,
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
        """Logger that tells `on_log`, on the rank that logs."""
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
            raise TrainerError(
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


# --- batches and predictions ----------------------------------------------------------------------

# Batches of a loader as global batches, and predictions of many batches as arrays.


PADDING = -100  # of labels and predictions of other lengths, as in transformers


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatches:
    """Batches of a `loader`, the same on every rank, joined to as many `rows` as a step has; the
    last of a pass may have fewer."""

    loader: Any
    rows: int

    def __iter__(self) -> Iterator[Any]:
        """Raises ValueError where batches don't add up to the rows, or can't be joined."""
        parts, count = list[Any](), 0
        for batch in self.loader:
            parts.append(dict(batch) if isinstance(batch, Mapping) else batch)
            count += batch_rows(parts[-1])
            if count > self.rows:
                raise DataError(
                    f": batches of the loader have {count} rows, where a step has {self.rows}",
                    place="Trainer.get_train_dataloader",
                    legal="batches of which some in a row have as many rows as a step",
                    way_out=f"give batches of {self.rows} rows, or of a divisor of it",
                )
            if count == self.rows:
                yield _joined(parts)
                parts, count = [], 0
        if parts:
            yield _joined(parts)


def _joined(parts: Sequence[Any]) -> Any:
    if len(parts) == 1:
        return parts[0]
    try:
        return pytree.tree_map(
            lambda *xs: torch.cat(xs) if isinstance(xs[0], torch.Tensor) else xs[0], *parts
        )
    except (RuntimeError, ValueError) as error:
        raise DataError(
            f": batches of the loader can't be joined to a step's: {error}",
            place="Trainer.get_train_dataloader",
            legal="batches of one structure and of tensors that differ in their rows alone",
            way_out="pad to one length, or give batches of a step's rows",
        ) from error


def predictions(outputs: Any, model: nn.Module) -> Any:
    """The outputs of a forward without its loss and caches: a tensor, or a tuple of them."""
    if isinstance(outputs, Mapping) and isinstance(outputs.get("outputs"), Mapping | tuple):
        outputs = outputs["outputs"]  # of an overridden compute_loss
    ignored = {"loss", *getattr(getattr(model, "config", None), "keys_to_ignore_at_inference", ())}
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
