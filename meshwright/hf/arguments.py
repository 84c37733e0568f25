"""`transformers.TrainingArguments` as what `fit` and `auto_parallelize` take.

Each field is taken, or without effect here, or refused by name where it is not at its default: no
argument is dropped in silence.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from meshwright.profiles.inputs import MeshwrightError

TAKEN = frozenset(
    [
        "output_dir",
        "per_device_train_batch_size",
        "gradient_accumulation_steps",
        "num_train_epochs",
        "max_steps",
        "learning_rate",
        "lr_scheduler_type",
        "lr_scheduler_kwargs",
        "warmup_steps",
        "optim",
        "weight_decay",
        "adam_beta1",
        "adam_beta2",
        "adam_epsilon",
        "max_grad_norm",
        "bf16",
        "fp16",
        "tf32",
        "torch_compile",
        "torch_compile_backend",
        "logging_strategy",
        "logging_steps",
        "report_to",
        "eval_strategy",
        "eval_steps",
        "save_strategy",
        "save_steps",
        "save_total_limit",
        "seed",
        "data_seed",
        "use_cpu",
        "dataloader_drop_last",
        "dataloader_num_workers",
        "dataloader_pin_memory",
        "dataloader_persistent_workers",
        "dataloader_prefetch_factor",
        "remove_unused_columns",
        "label_names",
        "resume_from_checkpoint",
    ]
)

# what says nothing of a run here: how other code logs, shows and launches, what the plan decides
WITHOUT_EFFECT = frozenset(
    [
        "average_tokens_across_devices",
        "activation_checkpointing",
        "gradient_checkpointing",
        "gradient_checkpointing_kwargs",
        "activation_checkpointing_kwargs",
        "logging_first_step",
        "log_on_each_node",
        "logging_nan_inf_filter",
        "log_level",
        "log_level_replica",
        "disable_tqdm",
        "run_name",
        "project",
        "logging_dir",
        "per_device_eval_batch_size",
        "prediction_loss_only",
        "eval_do_concat_batches",
        "ddp_find_unused_parameters",
        "ddp_bucket_cap_mb",
        "ddp_broadcast_buffers",
        "ddp_static_graph",
        "ddp_backend",
        "ddp_timeout",
        "debug",
        "skip_memory_metrics",
        "do_train",
        "do_eval",
        "do_predict",
        "local_rank",
        "use_cache",
        "torch_empty_cache_steps",
    ]
)

INSTEAD = {
    "deepspeed": "the plan decides on ZeRO; force it by overrides=Overrides(zero=3)",
    "fsdp": "the plan decides on ZeRO; force it by overrides=Overrides(zero=3)",
    "fsdp_config": "the plan decides on ZeRO; force it by overrides=Overrides(zero=3)",
    "parallelism_config": "the plan decides; force it by overrides=Overrides(tp=..., pp=...)",
    "auto_find_batch_size": "`meshwright fit` says what batch fits",
    "push_to_hub": "push the folder that save_model writes",
    "load_best_model_at_end": "load_checkpoint the step that the metrics say was best",
    "label_smoothing_factor": "a model, or a loss_fn, that smooths",
    "neftune_noise_alpha": "a model that adds the noise",
}
OPTIMIZERS = ("adamw_torch", "adamw_torch_fused", "sgd")


def check_arguments(args: Any) -> None:
    """Raise ValueError for the arguments that are set, and that this Trainer doesn't do."""
    unset = {f.name: _default(f) for f in dataclasses.fields(args)}
    for name, default in unset.items():
        value = getattr(args, name)
        if name in TAKEN or name in WITHOUT_EFFECT or value == default or not value:
            continue
        if _derived(name, value):
            continue
        raise MeshwrightError(
            f"={value!r:.80} is not done by this Trainer",
            place=f"TrainingArguments: {name}",
            legal=f"{default!r:.40}, its default",
            way_out=INSTEAD.get(name, "leave it out"),
        )
    if str(getattr(args.optim, "value", args.optim)) not in OPTIMIZERS:
        raise MeshwrightError(
            f"={args.optim!s:.80}",
            place="TrainingArguments: optim",
            legal=", ".join(OPTIMIZERS),
            way_out="or give optimizer=, a function of the parallel model",
        )
    for name in ("logging_strategy", "eval_strategy", "save_strategy"):
        given = str(getattr(args, name).value)
        if given not in ("no", "steps", "epoch"):
            raise MeshwrightError(
                f"={given!r}", place=f"TrainingArguments: {name}", legal="no, steps, epoch",
                way_out='give "steps" and how many',
            )  # fmt: skip


def _default(field: Any) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def _derived(name: str, value: Any) -> bool:
    """Whether TrainingArguments itself makes the value of its default."""
    return dataclasses.is_dataclass(value) or name.startswith("_")


def precision_of(args: Any) -> str:
    """The precision that the arguments ask for."""
    return "bf16" if args.bf16 else "fp16" if args.fp16 else "fp32"


def global_batch_size(args: Any, num_devices: int) -> int:
    """Rows of an optimizer step, as where every device trains on rows of its own."""
    per_device: int = args.per_device_train_batch_size * args.gradient_accumulation_steps
    return per_device * num_devices


def every(strategy: Any, steps: float | None, epoch_steps: int, total_steps: int) -> int | None:
    """A strategy ("no", "steps", "epoch") and its steps (a part of all where below 1) as a number
    of steps; None for "no"."""
    kind = str(strategy.value)
    if kind == "epoch":
        return max(1, epoch_steps)
    if kind == "no" or not steps:
        return None
    return max(1, round(steps * total_steps)) if steps < 1 else int(steps)


def optimizer_of(args: Any, decayed: list[Any], others: list[Any]) -> torch.optim.Optimizer:
    """The optimizer that `optim` names, with weight decay on some of the parameters alone."""
    groups = [
        {"params": decayed, "weight_decay": args.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    if str(getattr(args.optim, "value", args.optim)) == "sgd":
        return torch.optim.SGD(groups, lr=args.learning_rate)
    betas = (args.adam_beta1, args.adam_beta2)
    return torch.optim.AdamW(groups, lr=args.learning_rate, betas=betas, eps=args.adam_epsilon)
