"""Methods that a subclass of `Trainer` overrides: called here, or refused by name.

transformers' own loop calls some eighty methods; here a step is one call under a plan. What trains
something else is honoured or refused; of the rest a warning says that it is never called.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from meshwright.executor.ranks import launch
from meshwright.profiles.inputs import MeshwrightError

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


def check_overridden(kind: type, base: type) -> None:
    """Raise ValueError for a method of `kind` that overrides one of transformers' Trainer which
    changes what is trained and is never called here; warn of the others that are not called."""
    from transformers import Trainer as Theirs

    names = overridden(kind, base)
    for name in sorted(names & INSTEAD.keys()):
        raise MeshwrightError(
            " is overridden, and is never called: a step here is one call, as planned",
            place=f"{kind.__name__}.{name}",
            legal=", ".join(sorted(HONOURED)),
            way_out=INSTEAD[name],
        )
    others = sorted(name for name in names - HONOURED if hasattr(Theirs, name))
    if others and launch.rank() == 0:
        log.warning("%s: never called here: %s", kind.__name__, ", ".join(others))


def overridden(kind: type, base: type) -> set[str]:
    """Names of the functions that classes between `kind` and `base` define."""
    inside = kind.__mro__[: kind.__mro__.index(base)]
    return {
        name
        for c in inside
        for name, x in vars(c).items()
        if callable(x) or isinstance(x, staticmethod | classmethod | property)
    } - {"__init__"}


def computing_loss(model: nn.Module, compute_loss: Callable[..., Any]) -> nn.Module:
    """The model itself, whose forward gives `compute_loss(model, inputs)` from now on: the loss,
    and where it returns them the outputs. A call of the model inside of it is the model's own."""
    kind = type(model)
    options = {"return_outputs": True} if _takes(compute_loss, "return_outputs") else {}
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


def _takes(function: Callable[..., Any], name: str) -> bool:
    return name in inspect.signature(function).parameters


def loss_of(outputs: Any) -> Any:
    """transformers' own loss: of a mapping its `loss`, else the first output."""
    if isinstance(outputs, Mapping):
        if outputs.get("loss") is None:
            raise MeshwrightError(
                f" returned {sorted(outputs)}, without a loss",
                place="Trainer.compute_loss: the model",
                legal="outputs with a loss",
                way_out="give labels among the inputs, or override compute_loss",
            )
        return outputs["loss"]
    return outputs[0] if isinstance(outputs, tuple | list) else outputs
