"""`transformers.TrainingArguments` as what `fit` and `auto_parallelize` take.

Each field is taken, or without effect here, or refused by name where it is not at its default: no
argument is dropped in silence.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch

from meshwright.executor.ranks import launch
from meshwright.profiles.inputs import MeshwrightError, checked_path, shown
from meshwright.profiles.inputs.limits import MAX_COUNT, is_number

log = logging.getLogger(__name__)


class TrainerError(MeshwrightError):
    """An argument, a callback or a subclass of the Trainer that it does not go by."""

    CODE = "MW307"
    PLACE = "Trainer, or its TrainingArguments"
    LEGAL = "what docs/reference/fit.md says the Trainer takes, others at their defaults"
    WAY_OUT = "leave it out, or call auto_parallelize and fit"


TAKEN = frozenset(
    (
        *("output_dir", "resume_from_checkpoint", "seed", "data_seed", "use_cpu"),
        *("per_device_train_batch_size", "gradient_accumulation_steps"),
        *("num_train_epochs", "max_steps", "train_sampling_strategy"),
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
        *("optim", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
        *("bf16", "fp16", "tf32", "torch_compile", "torch_compile_backend"),
        *("logging_strategy", "logging_steps", "logging_first_step", "report_to", "disable_tqdm"),
        "logging_nan_inf_filter",
        *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start"),
        *("save_strategy", "save_steps", "save_total_limit"),
        *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        *("restore_callback_states_from_checkpoint", "length_column_name"),
        *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory"),
        *("dataloader_persistent_workers", "dataloader_prefetch_factor"),
        *("remove_unused_columns", "label_names"),
    )
)

# without effect, which a warning says
SAID = {
    "average_tokens_across_devices": "losses are means over the global batch",
    "activation_checkpointing": "the plan decides what is recomputed",
    "gradient_checkpointing": "the plan decides what is recomputed",
    "per_device_eval_batch_size": "evaluations are in batches of global_batch_size",
    "torch_empty_cache_steps": "nothing empties the allocator's cache",
}

# how other code logs, shows and launches: without effect on a run here
WITHOUT_EFFECT = frozenset(
    (
        *SAID,
        *("gradient_checkpointing_kwargs", "activation_checkpointing_kwargs", "use_cache"),
        *("log_on_each_node", "log_level", "log_level_replica"),
        *("run_name", "project", "logging_dir"),
        *("prediction_loss_only", "eval_do_concat_batches", "do_train", "do_eval", "do_predict"),
        *("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
        *("ddp_static_graph", "ddp_backend", "ddp_timeout", "local_rank"),
        *("debug", "skip_memory_metrics"),
    )
)

_ZERO = "the plan decides on ZeRO; force it by overrides=Overrides(zero=3)"
INSTEAD = {
    **dict.fromkeys(("deepspeed", "fsdp", "fsdp_config"), _ZERO),
    "parallelism_config": "the plan decides; force it by overrides=Overrides(tp=..., pp=...)",
    "auto_find_batch_size": "`meshwright fit` says what batch fits",
    "push_to_hub": "push the folder that save_model writes",
    "label_smoothing_factor": "a model, or a loss_fn, that smooths",
    "neftune_noise_alpha": "a model that adds the noise",
    "group_by_length": 'train_sampling_strategy="group_by_length"',
    "dataloader_in_order": "batches are given in their order, so that a run can be resumed",
}
OPTIMIZERS = {"adamw_torch": "adamw", "adamw_torch_fused": "adamw_fused", "sgd": "sgd"}  # planned
STRATEGIES = ("no", "steps", "epoch")
GROUPED = "group_by_length"
SAMPLING = ("random", "sequential", GROUPED)
PLATEAU = "reduce_lr_on_plateau"


def _whole(least: int) -> tuple[str, Callable[[Any], bool]]:
    return f"integers from {least}", lambda x: type(x) is int and least <= x < MAX_COUNT


# values that can be, where they are not None
VALUES: Mapping[tuple[str, ...], tuple[str, Callable[[Any], bool]]] = {
    ("per_device_train_batch_size", "gradient_accumulation_steps", "save_total_limit"): _whole(1),
    ("seed", "data_seed", "dataloader_num_workers", "dataloader_prefetch_factor"): _whole(0),
    ("max_steps",): _whole(-1),
    (
        "num_train_epochs", "learning_rate", "weight_decay", "adam_epsilon", "max_grad_norm",
        "warmup_steps", "logging_steps", "eval_steps", "save_steps",
    ): ("numbers from 0", lambda x: is_number(x) and x >= 0),
    ("adam_beta1", "adam_beta2"): (
        "numbers from 0, less than 1", lambda x: is_number(x) and 0 <= x < 1
    ),
    ("report_to", "label_names"): (
        "a list of names", lambda x: isinstance(x, list) and all(isinstance(n, str) for n in x)
    ),
    ("lr_scheduler_kwargs",): ("a dict", lambda x: isinstance(x, dict)),
    ("output_dir",): ("a path", lambda x: bool(checked_path(x, "TrainingArguments: output_dir"))),
}  # fmt: skip

# arguments of transformers' Trainer, with those to give here
OF_THEIRS = {
    "optimizers": "optimizer=, a function of the parallel model, and schedule=, one of the "
    "optimizer",
    "optimizer_cls_and_kwargs": "optimizer=, a function of the parallel model",
    "compute_loss_func": "loss_fn=, a function of outputs and targets, and a model without labels",
    "model_init": "a model",
    "tokenizer": "processing_class=",
}


def check_arguments(args: Any) -> None:
    """Raise ValueError for what are no TrainingArguments, for those that are set and that this
    Trainer doesn't do, and for values that can't be; warn about those without effect."""
    if isinstance(args, type) or not hasattr(args, "per_device_train_batch_size"):
        raise TrainerError(
            f" is {shown(args)}",
            place="Trainer: args",
            legal="transformers.TrainingArguments",
            way_out='TrainingArguments(output_dir="run")',
        )
    _check_values(args)
    _check_choices(args)
    warnings: dict[str, list[str]] = {}
    for f in dataclasses.fields(args):
        name, default, value = f.name, _default(f), getattr(args, f.name)
        if name in TAKEN or _is_unset(value, default):
            continue
        if name in SAID:
            warnings.setdefault(SAID[name], []).append(name)
        if name in WITHOUT_EFFECT or dataclasses.is_dataclass(value) or name.startswith("_"):
            continue
        raise TrainerError(
            f"={value!r:.80} is not done by this Trainer",
            place=f"TrainingArguments: {name}",
            legal=f"{default!r:.40}, its default",
            way_out=INSTEAD.get(name, "leave it out"),
        )
    for why, names in warnings.items() if launch.rank() == 0 else ():
        log.warning("TrainingArguments: without effect: %s: %s", ", ".join(names), why)


def _check_values(args: Any) -> None:
    """Raise ValueError for values that can't be."""
    for names, (legal, right) in VALUES.items():
        for name in names:
            value = getattr(args, name, None)
            if value is not None and not right(value):
                place, way_out = f"TrainingArguments: {name}", "leave it out for the default"
                raise TrainerError.refused(place, value, legal=legal, way_out=way_out)


def _check_choices(args: Any) -> None:
    """Raise ValueError for choices of which this Trainer has some."""
    steps = (STRATEGIES, 'give "steps" and how many')
    choices = {
        "optim": (OPTIMIZERS, "or give optimizer=, a function of the parallel model"),
        **dict.fromkeys(("logging_strategy", "eval_strategy"), steps),
        "save_strategy": ((*STRATEGIES, "best"), 'give "steps" and how many'),
        "train_sampling_strategy": (SAMPLING, "fit(..., buckets=...) makes batches of buckets"),
    }
    for name, (legal, way_out) in choices.items():
        value = chosen(args, name)
        if value is not None and value not in legal:
            place = f"TrainingArguments: {name}"
            raise TrainerError.refused(place, value, legal=legal, way_out=way_out)
    if chosen(args, "lr_scheduler_type") == PLATEAU:
        raise TrainerError(
            f"={PLATEAU!r}, which is stepped by evaluations",
            place="TrainingArguments: lr_scheduler_type",
            legal="schedules of the step alone",
            way_out='"cosine", "linear" or another, or give schedule=, a function of the optimizer',
        )


def check_options(options: Mapping[str, Any]) -> None:
    """Raise ValueError for arguments of transformers' Trainer that this one doesn't have."""
    for name, instead in OF_THEIRS.items():
        if name in options:
            raise TrainerError(
                " is an argument of transformers' Trainer, not of this one",
                place=f"Trainer: {name}",
                legal="what Trainer, auto_parallelize and (optimizer, schedule) fit take",
                way_out=f"give {instead}",
            )


def chosen(args: Any, name: str) -> str | None:
    """A choice as text; None where these TrainingArguments have none of that name."""
    value = getattr(args, name, None)
    return None if value is None else str(getattr(value, "value", value))


def _is_unset(value: Any, default: Any) -> bool:
    """Whether a value is its default, or nothing: None, an empty text or list, False in the place
    of None. Where the default is True or a number, False and 0 say something."""
    if value == default or value is None or (value is False and default is None):
        return True
    return not value and not isinstance(value, bool | int | float)


def _default(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def precision_of(args: Any) -> str:
    """The precision that the arguments ask for."""
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


def global_batch_size(args: Any, num_devices: int) -> int:
    """Rows of an optimizer step, as where every device trains on rows of its own."""
    per_device: int = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return per_device * num_devices


def best_metric(args: Any) -> str:
    """Name of the evaluation's number that tells the best model."""
    name = str(args.metric_for_best_model or "loss")
    return name if name.startswith("eval_") else f"eval_{name}"


def optimizer_of(args: Any, decayed: list[Any], others: list[Any]) -> torch.optim.Optimizer:
    """The optimizer that `optim` names, with weight decay on some of the parameters alone."""
    groups = [
        {"params": decayed, "weight_decay": args.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    name = chosen(args, "optim")
    if name == "sgd":
        return torch.optim.SGD(groups, lr=args.learning_rate)
    betas, fused = (args.adam_beta1, args.adam_beta2), name == "adamw_torch_fused" or None
    return torch.optim.AdamW(
        groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon, fused=fused
    )
