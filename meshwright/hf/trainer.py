"""`Trainer`: the part of `transformers.Trainer` that `fit` does, under a plan.

    trainer = meshwright.hf.Trainer(model, args, train_dataset=..., eval_dataset=...)
    trainer.train()

`per_device_train_batch_size · gradient_accumulation_steps · devices` rows make a step, as where
every device has rows of its own; how devices share a step is the plan's. What this class doesn't do
is refused by name (`training_arguments.py`).
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset

from meshwright.api import auto_parallelize
from meshwright.data import data_loader
from meshwright.data.loader_arguments import DataError, collated
from meshwright.hf import training_arguments
from meshwright.model import ParallelModel
from meshwright.monitor import MetricsLogger, TensorBoardLogger
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.inputs import MeshwrightError
from meshwright.training import Fitted, fit


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainOutput:
    """`transformers.trainer_utils.TrainOutput`: optimizer steps made, loss of the last one, and
    metrics."""

    global_step: int
    training_loss: float | None
    metrics: dict[str, float]


class Trainer:
    """Trains a model of transformers on the cluster that torchrun started, or `cluster`.

    `optimizer` and `schedule` are as `fit` takes them, in place of what the arguments say;
    `planning` are further arguments of `auto_parallelize` (overrides=, plan=, loss_fn=, ...).
    `result` is the parallel model. Collective: every rank makes one.
    """

    def __init__(
        self,
        model: nn.Module,
        args: Any,
        *,
        train_dataset: Any,
        eval_dataset: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        processing_class: Any = None,
        cluster: Cluster | None = None,
        **planning: Any,
    ) -> None:
        """Raises ValueError for arguments that are refused, and as `auto_parallelize` does."""
        training_arguments.check_arguments(args)
        training_arguments.check_options(planning)
        train = _samples(train_dataset, "train_dataset")
        _check_evaluation(args, eval_dataset)
        torch.manual_seed(args.seed)  # what dropout draws from
        self.args = args
        self.processing_class = processing_class
        self.optimizer: Callable[[ParallelModel], torch.optim.Optimizer] | None
        self.optimizer = planning.pop("optimizer", None)
        self.schedule = planning.pop("schedule", None)
        self.loggers: list[MetricsLogger] = list(planning.pop("loggers", ()))
        self._decayed = _decayed(model)
        self._adapted = any(hasattr(module, "peft_config") for module in model.modules())
        columns = _columns(model, args) if args.remove_unused_columns else None
        self._collate = _Collate(data_collator or _collator(processing_class), columns)
        self.train_dataset = train
        self.eval_dataset = None if eval_dataset is None else _samples(eval_dataset, "eval_dataset")
        cluster = cluster or (_cpus() if args.use_cpu else Cluster.detect())
        rows = min(2, len(train))
        options = {
            "global_batch_size": training_arguments.global_batch_size(args, cluster.num_devices),
            "example_inputs": self._collate([train[k] for k in range(rows)]),
            "precision": training_arguments.precision_of(args),
            "compile": args.torch_compile_backend or args.torch_compile,
            "tf32": bool(args.tf32),
        }
        if self.optimizer is None:
            options["optimizer"] = training_arguments.OPTIMIZERS[
                str(training_arguments.chosen(args, "optim"))
            ]
        self.result = auto_parallelize(model, cluster, **{**options, **planning})

    def train(self, resume_from_checkpoint: bool | None = None) -> TrainOutput:
        """Train to the end of the arguments' steps or epochs. With `resume_from_checkpoint` from
        the newest checkpoint in `output_dir` on; else there must be none."""
        args = self.args
        _check_resume(resume_from_checkpoint, args)
        resume = bool(args.resume_from_checkpoint if resume_from_checkpoint is None
                      else resume_from_checkpoint)  # fmt: skip
        epoch = self._epoch_steps
        total = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * epoch)
        evaluate_every = training_arguments.every(
            args.eval_strategy, args.eval_steps or args.logging_steps, epoch, total
        )
        done = fit(
            self.result,
            self.train_dataset,
            optimizer=self.optimizer or self._optimizer,
            schedule=self.schedule or self._scheduler(total),
            steps=total,
            max_grad_norm=args.max_grad_norm or None,
            evaluation=self.eval_dataset if evaluate_every else None,
            evaluate_every=evaluate_every or 1,
            folder=None if args.save_strategy.value == "no" else Path(args.output_dir),
            save_every=training_arguments.every(args.save_strategy, args.save_steps, epoch, total),
            keep=args.save_total_limit or 1_000_000,
            resume=resume,
            log_to=_all_of([*self.loggers, *self._reporting()]),
            log_every=training_arguments.every(
                args.logging_strategy, args.logging_steps, epoch, total
            )
            or total,
            **self._loading,
        )
        return self._output(done)

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """`eval_loss` and, of a cross-entropy, `eval_perplexity` of a dataset. Collective."""
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        dataset = _samples(chosen, "eval_dataset")
        loading = {**self._loading, "shuffle": False, "drop_last": False}
        batches = data_loader(dataset, self.result, **loading)
        evaluation = self.result.evaluate(batches)
        perplexity = evaluation.perplexity
        extra = {} if perplexity is None else {"eval_perplexity": perplexity}
        return {"eval_loss": evaluation.loss, **extra}

    def save_model(self, output_dir: str | Path | None = None) -> None:
        """Write the weights for `from_pretrained`, of a model with peft's adapters those alone,
        into `model` in the arguments' folder if no other is given. Collective."""
        folder = output_dir or Path(self.args.output_dir) / "model"
        self.result.save_pretrained(folder, trainable_only=self._adapted)

    # --- what the arguments say ---

    @property
    def _epoch_steps(self) -> int:
        rows, batch = len(self.train_dataset), self.result.plan.global_batch_size
        return rows // batch if self.args.dataloader_drop_last else math.ceil(rows / batch)

    @property
    def _loading(self) -> dict[str, Any]:
        args = self.args
        options: dict[str, Any] = {
            "collate_fn": self._collate,
            "seed": args.seed if args.data_seed is None else args.data_seed,
            "drop_last": args.dataloader_drop_last,
            "shuffle": training_arguments.chosen(args, "train_sampling_strategy") != "sequential",
            "num_workers": args.dataloader_num_workers,
            "pin_memory": args.dataloader_pin_memory and torch.cuda.is_available(),
        }
        if args.dataloader_num_workers:
            options["persistent_workers"] = args.dataloader_persistent_workers
            options["prefetch_factor"] = args.dataloader_prefetch_factor
        return options

    def _optimizer(self, result: ParallelModel) -> torch.optim.Optimizer:
        named = [(name, p) for name, p in result.named_parameters() if p.requires_grad]
        decayed = [p for name, p in named if name in self._decayed]
        return training_arguments.optimizer_of(
            self.args, decayed, [p for n, p in named if n not in self._decayed]
        )

    def _scheduler(self, total: int) -> Callable[[torch.optim.Optimizer], Any]:
        from transformers import get_scheduler

        def schedule(optimizer: torch.optim.Optimizer) -> Any:
            args = self.args
            try:
                return get_scheduler(
                    args.lr_scheduler_type,
                    optimizer,
                    num_warmup_steps=args.get_warmup_steps(total),
                    num_training_steps=total,
                    scheduler_specific_kwargs=args.lr_scheduler_kwargs,
                )
            except (TypeError, ValueError) as error:
                raise MeshwrightError(
                    f": {error}",
                    place="TrainingArguments: lr_scheduler_type, lr_scheduler_kwargs",
                    legal="what transformers.get_scheduler takes",
                    way_out="mend them, or give schedule=, a function of the optimizer",
                ) from error

        return schedule

    def _reporting(self) -> list[MetricsLogger]:
        """Loggers of `report_to`. Raises ValueError for one that isn't there."""
        loggers: list[MetricsLogger] = []
        for name in self.args.report_to or ():
            if name == "tensorboard":
                loggers.append(TensorBoardLogger(Path(self.args.output_dir) / "runs"))
            elif name != "none":
                raise MeshwrightError(
                    f" names {name!r}",
                    place="TrainingArguments: report_to",
                    legal="none, tensorboard",
                    way_out="give loggers=[...], functions of a mapping of numbers "
                    "(meshwright.monitor has WandbLogger)",
                )
        return loggers

    def _output(self, done: Fitted) -> TrainOutput:
        metrics = {} if done.eval_loss is None else {"eval_loss": done.eval_loss}
        return TrainOutput(
            global_step=done.steps,
            training_loss=done.loss,
            metrics={**metrics, **self.result.metrics()},
        )


def _cpus() -> Cluster:
    """CPU processes, as many as torchrun started."""
    return Cluster.local(int(os.environ.get("WORLD_SIZE", 1)), "cpu", measure=False)


def _check_resume(resume: Any, args: Any) -> None:
    asked = args.resume_from_checkpoint if resume is None else resume
    saves = args.save_strategy.value != "no"
    if asked and (not saves or not isinstance(asked, bool)):
        raise MeshwrightError(
            f"={asked!r:.80}, with save_strategy {args.save_strategy.value!r}",
            place="Trainer.train: resume_from_checkpoint",
            legal="True, which means the newest in output_dir, where it is saved to",
            way_out="move the checkpoint into output_dir, and set save_strategy",
        )


def _samples(dataset: Any, what: str) -> Any:
    """A dataset of samples, which a list is here (and of batches to `fit`). Raises ValueError for
    what is none, or empty."""
    try:
        size = len(dataset)
    except (TypeError, ValueError):  # it has none, or a negative one
        size = None
    apart = isinstance(dataset, Mapping | str | bytes | type)
    if size is None or not hasattr(dataset, "__getitem__") or apart:
        raise MeshwrightError(
            f" is a {type(dataset).__name__}",
            place=f"Trainer: {what}",
            legal="a dataset with len() and samples by number, or a list of samples",
            way_out="give list(dataset), or one dataset of several at a time; batches that are "
            "streamed go to fit",
        )
    if not size:
        raise MeshwrightError(
            " is empty", place=f"Trainer: {what}", legal="one sample at least", way_out="give some"
        )
    if not isinstance(dataset, list):
        return dataset
    samples: Any = dataset  # as good as a Dataset
    return Subset(samples, range(len(samples)))


def _check_evaluation(args: Any, eval_dataset: Any) -> None:
    """Raise ValueError where evaluations are asked for, of nothing."""
    asked = training_arguments.chosen(args, "eval_strategy")
    if asked != "no" and eval_dataset is None:
        raise MeshwrightError(
            f"={asked!r}, without an eval_dataset",
            place="TrainingArguments: eval_strategy",
            legal='"no", or with an eval_dataset',
            way_out="give Trainer(eval_dataset=...)",
        )


class _Collate:
    """Collates samples to a batch of the columns that the model takes."""

    def __init__(self, collate: Callable[[list[Any]], Any], columns: frozenset[str] | None) -> None:
        self.collate, self.columns = collate, columns

    def __call__(self, samples: list[Any]) -> Any:
        columns = self.columns
        if columns is not None and samples and isinstance(samples[0], Mapping):
            samples = [{k: v for k, v in row.items() if k in columns} for row in samples]
        batch = self.collate(samples)
        return dict(batch) if isinstance(batch, Mapping) else batch


def _collator(processing_class: Any) -> Callable[[list[Any]], Any]:
    """Trainer's own collator: padding where there is what pads, else stacking, `label` being the
    `labels`."""
    from transformers import DataCollatorWithPadding, default_data_collator

    if processing_class is not None:
        collator: Callable[[list[Any]], Any] = DataCollatorWithPadding(processing_class)
        return collator
    by_name: Callable[[list[Any]], Any] = default_data_collator

    def collate(samples: list[Any]) -> Any:
        if not isinstance(samples[0], Mapping):
            return collated(samples)
        try:
            return by_name(samples)
        except (TypeError, ValueError, RuntimeError, KeyError) as error:
            raise DataError(f": {error}", place="Trainer: samples") from error

    return collate


def _columns(model: nn.Module, args: Any) -> frozenset[str]:
    """Names that the model's forward takes, and labels'; of a model that peft adapted those of the
    model inside."""
    inner = getattr(model, "get_base_model", None)
    taken = inspect.signature((inner() if inner else model).forward).parameters
    return frozenset([*taken, "label", "label_ids", *(args.label_names or ())])


def _decayed(model: nn.Module) -> frozenset[str]:
    """Names of the parameters with weight decay: as Trainer, all but biases and norms."""
    from transformers import Trainer as Theirs

    return frozenset(Theirs.get_decay_parameter_names(None, model))  # type: ignore[arg-type]


def _all_of(loggers: list[MetricsLogger]) -> MetricsLogger | None:
    def log(metrics: Mapping[str, float]) -> None:
        for logger in loggers:
            logger(metrics)

    return log if loggers else None
