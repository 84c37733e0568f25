"""`Trainer`: the part of `transformers.Trainer` that `fit` does, under a plan.

    trainer = meshwright.hf.Trainer(model, args, train_dataset=..., eval_dataset=...)
    trainer.train()

`per_device_train_batch_size · gradient_accumulation_steps · devices` rows make a step, as where
every device has rows of its own; how devices share a step is the plan's. What this class doesn't do
is refused by name: arguments (`training_arguments.py`), methods of a subclass and callbacks
(`theirs.py`).
"""

from __future__ import annotations

import inspect
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Subset

from meshwright.api import auto_parallelize
from meshwright.data import data_loader
from meshwright.data.loader_arguments import DataError, collated
from meshwright.executor.ranks import launch
from meshwright.hf import training_arguments
from meshwright.hf.theirs import (
    Callbacks,
    GlobalBatches,
    checked_callbacks,
    checked_overrides,
    computing_loss,
    loss_of,
    numpy_of,
    predictions,
)
from meshwright.hf.training_arguments import TrainerError
from meshwright.model import ParallelModel
from meshwright.monitor import MetricsLogger, TensorBoardLogger
from meshwright.planner.overrides import Overrides, making_logits
from meshwright.profiles.cluster import Cluster
from meshwright.training import Fitted, fit

NEVER = 2**30  # steps between evaluations that callbacks alone ask for


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
    `callbacks`, `compute_metrics` and `preprocess_logits_for_metrics` as transformers' Trainer;
    `planning` are further arguments of `auto_parallelize` (overrides=, plan=, loss_fn=, ...).
    `result` is the parallel model. Collective: every rank makes one.

    A subclass may override `compute_loss`, which is traced as the loss, `create_optimizer`,
    `create_scheduler`, `get_decay_parameter_names`, the loaders of training and evaluation,
    `evaluate`, `log` and `save_model`.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        args: Any = None,
        *,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        processing_class: Any = None,
        cluster: Cluster | None = None,
        **planning: Any,
    ) -> None:
        """Raises ValueError for arguments that are refused, and as `auto_parallelize` does."""
        training_arguments.check_options(planning)
        training_arguments.check_arguments(args)
        if not isinstance(model, nn.Module):
            raise TrainerError.refused(
                "Trainer: model", model, legal="a module", way_out="Trainer(model, args, ...)"
            )
        self._overridden = checked_overrides(type(self), Trainer)
        train = _samples(train_dataset, "train_dataset")
        _check_evaluation(args, eval_dataset)
        torch.manual_seed(args.seed)  # what dropout draws from
        self.args = args
        self.processing_class = processing_class
        self._given_optimizer = planning.pop("optimizer", None)
        self.optimizer: torch.optim.Optimizer | None = None
        self._logging: list[MetricsLogger] = []
        self.schedule = planning.pop("schedule", None)
        self.loggers = _loggers(planning.pop("loggers", ()))
        self.lr_scheduler: Any = None
        self.model = model
        self.callbacks = checked_callbacks(planning.pop("callbacks", None))
        self.compute_metrics = _function(planning, "compute_metrics")
        self.preprocess_logits_for_metrics = _function(planning, "preprocess_logits_for_metrics")
        self._label_names = _label_names(model, args)
        self._decayed = frozenset(self.get_decay_parameter_names(model))
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
        if self._given_optimizer is None and "create_optimizer" not in self._overridden:
            options["optimizer"] = training_arguments.OPTIMIZERS[
                str(training_arguments.chosen(args, "optim"))
            ]
        if "compute_loss" in self._overridden:
            computing_loss(model, self.compute_loss)
        if self.compute_metrics is not None:  # of logits
            planning["overrides"] = making_logits(planning.get("overrides") or Overrides())
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
        watch = self._watch(total) if self.callbacks else None
        self._logging = [*self.loggers, *self._reporting(), *([watch.log] if watch else [])]
        done = fit(
            self.result,
            self._training_data,
            optimizer=self._given_optimizer or self._made_optimizer,
            schedule=self.schedule or (lambda optimizer: self._made_scheduler(total, optimizer)),
            steps=total,
            max_grad_norm=args.max_grad_norm or None,
            evaluation=None if self.eval_dataset is None else self.evaluate,
            evaluate_every=evaluate_every or NEVER,
            folder=None if args.save_strategy.value == "no" else Path(args.output_dir),
            save_every=training_arguments.every(args.save_strategy, args.save_steps, epoch, total),
            keep=args.save_total_limit or 1_000_000,
            resume=resume,
            log_to=self.log if self._logging or "log" in self._overridden else None,
            log_every=training_arguments.every(
                args.logging_strategy, args.logging_steps, epoch, total
            )
            or total,
            watch=watch,
            **({} if "get_train_dataloader" in self._overridden else self._loading),
        )
        return self._output(done)

    def evaluate(self, eval_dataset: Any = None) -> dict[str, float]:
        """`eval_loss` and, of a cross-entropy, `eval_perplexity` of a dataset, and what
        `compute_metrics` says of its predictions. Collective."""
        batches = self.get_eval_dataloader(eval_dataset)
        if "get_eval_dataloader" in self._overridden:
            batches = GlobalBatches(loader=batches, rows=self.result.plan.global_batch_size)
        evaluation = self.result.evaluate(batches)
        perplexity = evaluation.perplexity
        extra = {} if perplexity is None else {"eval_perplexity": perplexity}
        return {"eval_loss": evaluation.loss, **extra, **self._metrics_of(eval_dataset)}

    # --- what a subclass may override ---

    def compute_loss(
        self, model: nn.Module, inputs: Mapping[str, Any], return_outputs: bool = False, **_: Any
    ) -> Any:
        """The loss of a batch, and with `return_outputs` the model's outputs. Traced."""
        outputs = model(**inputs)
        loss = loss_of(outputs)
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """The optimizer that the arguments name, of the parallel model's parameters."""
        named = [(name, p) for name, p in self.result.named_parameters() if p.requires_grad]
        decayed = [p for name, p in named if name in self._decayed]
        self.optimizer = training_arguments.optimizer_of(
            self.args, decayed, [p for n, p in named if n not in self._decayed]
        )
        return self.optimizer

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """The learning-rate schedule that the arguments name."""
        from transformers import get_scheduler

        args = self.args
        of: Any = self.optimizer if optimizer is None else optimizer
        try:
            self.lr_scheduler = get_scheduler(
                args.lr_scheduler_type,
                of,
                num_warmup_steps=args.get_warmup_steps(num_training_steps),
                num_training_steps=num_training_steps,
                scheduler_specific_kwargs=args.lr_scheduler_kwargs,
            )
        except (TypeError, ValueError) as error:
            raise TrainerError(
                f": {error}",
                place="TrainingArguments: lr_scheduler_type, lr_scheduler_kwargs",
                legal="what transformers.get_scheduler takes",
                way_out="mend them, or give schedule=, a function of the optimizer",
            ) from error
        return self.lr_scheduler

    def get_decay_parameter_names(self, model: nn.Module) -> Sequence[str]:
        """Names of the parameters with weight decay: as transformers, all but biases and norms."""
        from transformers import Trainer as Theirs

        names: Sequence[str] = Theirs.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
        return names

    def get_train_dataloader(self) -> Any:
        """Batches of the training set. An override gives those of all devices, on every rank: as
        many in a row as make a step's rows are one batch."""
        return data_loader(self.train_dataset, self.result, **self._loading)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Batches of a dataset, by default of `eval_dataset`, in its order."""
        return data_loader(self._evaluated(eval_dataset), self.result, **self._in_order)

    def log(self, logs: Mapping[str, float], start_time: float | None = None) -> None:
        """Numbers of a step or an evaluation, on rank 0, to the loggers and callbacks."""
        for logger in self._logging:
            logger(logs)

    def add_callback(self, callback: Any) -> None:
        self.callbacks += checked_callbacks([callback])

    def is_world_process_zero(self) -> bool:
        return launch.rank() == 0

    def is_local_process_zero(self) -> bool:
        return launch.local_rank() == 0

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

    @property
    def _in_order(self) -> dict[str, Any]:
        return {**self._loading, "shuffle": False, "drop_last": False}

    @property
    def _training_data(self) -> Any:
        if "get_train_dataloader" not in self._overridden:
            return self.train_dataset
        rows = self.result.plan.global_batch_size
        return GlobalBatches(loader=self.get_train_dataloader(), rows=rows)

    def _evaluated(self, eval_dataset: Any) -> Any:
        chosen = self.eval_dataset if eval_dataset is None else eval_dataset
        return _samples(chosen, "eval_dataset")

    def _made_optimizer(self, _: ParallelModel) -> Any:
        made = self.create_optimizer()
        self.optimizer = self.optimizer if made is None else made  # theirs may set it alone
        return self.optimizer

    def _made_scheduler(self, total: int, optimizer: torch.optim.Optimizer) -> Any:
        made = self.create_scheduler(total, optimizer)
        self.lr_scheduler = self.lr_scheduler if made is None else made
        return self.lr_scheduler

    def _watch(self, total: int) -> Callbacks:
        return Callbacks(
            self.callbacks,
            self.args,
            self.model,
            self.processing_class,
            total=total,
            epoch_steps=self._epoch_steps,
        )

    def _metrics_of(self, eval_dataset: Any) -> dict[str, float]:
        """Numbers of `compute_metrics`, of the predictions for a whole dataset. Collective."""
        if self.compute_metrics is None:
            return {}
        from transformers import EvalPrediction

        chosen = self._evaluated(eval_dataset)
        rows, size = self.result.plan.global_batch_size, len(chosen)
        logits, labels = list[Any](), list[Any]()
        for start in range(0, size, rows):
            samples = [chosen[k] for k in range(start, min(start + rows, size))]
            batch = self._collate(samples)
            named = [batch[name] for name in self._label_names if name in batch]
            labels.append(named[0] if len(named) == 1 else tuple(named))
            of_batch = predictions(self.result.forward(batch, gather=True), self.model)
            if self.preprocess_logits_for_metrics is not None:
                of_batch = self.preprocess_logits_for_metrics(of_batch, labels[-1])
            logits.append(of_batch)
        found = self.compute_metrics(
            EvalPrediction(predictions=numpy_of(logits), label_ids=numpy_of(labels))
        )
        return {k if k.startswith("eval_") else f"eval_{k}": float(v) for k, v in found.items()}

    def _reporting(self) -> list[MetricsLogger]:
        """Loggers of `report_to`. Raises ValueError for one that isn't there."""
        loggers: list[MetricsLogger] = []
        for name in self.args.report_to or ():
            if name == "tensorboard":
                loggers.append(TensorBoardLogger(Path(self.args.output_dir) / "runs"))
            elif name != "none":
                raise TrainerError(
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
        raise TrainerError(
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
        raise TrainerError(
            f" is a {type(dataset).__name__}",
            place=f"Trainer: {what}",
            legal="a dataset with len() and samples by number, or a list of samples",
            way_out="give list(dataset), or one dataset of several at a time; batches that are "
            "streamed go to fit",
        )
    if not size:
        raise TrainerError(
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
        raise TrainerError(
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


def _function(options: dict[str, Any], name: str) -> Callable[..., Any] | None:
    """Take a function out of the options. Raises ValueError for what is none."""
    function = options.pop(name, None)
    if function is not None and not callable(function):
        raise TrainerError.refused(
            f"Trainer: {name}", function, legal="a function, or None", way_out="leave it out"
        )
    return function  # type: ignore[no-any-return]


def _label_names(model: nn.Module, args: Any) -> list[str]:
    from transformers.utils import find_labels

    find: Callable[..., list[str]] = find_labels
    return list(args.label_names or find(type(model)))


def _loggers(loggers: Any) -> list[MetricsLogger]:
    """Raise ValueError for what is no list of functions."""
    if isinstance(loggers, list | tuple) and all(map(callable, loggers)):
        return list(loggers)
    raise TrainerError.refused(
        "Trainer: loggers",
        loggers,
        legal="a list of functions of a mapping of numbers",
        way_out="loggers=[print]",
    )
