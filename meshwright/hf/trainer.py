"""`Trainer`: the part of `transformers.Trainer` that `fit` does, under a plan.

    trainer = meshwright.hf.Trainer(model, args, train_dataset=..., eval_dataset=...)
    trainer.train()

`per_device_train_batch_size · gradient_accumulation_steps · devices` rows make a step, as where
every device has rows of its own; how devices share a step is the plan's. What this class doesn't do
is refused by name: arguments (`training_arguments.py`), methods of a subclass and callbacks
(`theirs.py`). `state`, `control` and `callback_handler` are transformers' own.
"""

from __future__ import annotations

import inspect
import math
import os
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, IterableDataset, Subset

from meshwright.api import auto_parallelize
from meshwright.data import StreamLoader, data_loader, first_samples, is_stream
from meshwright.data.loader import few_lengths, padded
from meshwright.data.loader_arguments import DataError, collated
from meshwright.executor.ranks import launch
from meshwright.hf import training_arguments
from meshwright.hf.theirs import (
    Callbacks,
    callback_handler,
    checked_callbacks,
    checked_overrides,
    computing_loss,
    loss_of,
    new_state,
    numpy_of,
    predictions,
)
from meshwright.hf.training_arguments import TrainerError
from meshwright.model import ParallelModel
from meshwright.monitor import MetricsLogger
from meshwright.planner.overrides import Overrides, making_logits
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.inputs import checked_path
from meshwright.training import KeptCheckpoints, check_alone, fit

NEVER = 2**30  # steps between evaluations that callbacks alone ask for
SAMPLES = 2  # that a model is traced on


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
        train = _samples(train_dataset, "train_dataset", args)
        _check_evaluation(args, eval_dataset)
        torch.manual_seed(args.seed)  # what dropout draws from
        self.args = args
        self.processing_class = processing_class
        self._given_optimizer = planning.pop("optimizer", None)
        self.optimizer: torch.optim.Optimizer | None = None
        self.schedule = planning.pop("schedule", None)
        self.loggers = _loggers(planning.pop("loggers", ()))
        self.lr_scheduler: Any = None
        self.model = model
        self.callback_handler = callback_handler(
            args, model, processing_class, planning.pop("callbacks", None)
        )
        self.compute_metrics = _function(planning, "compute_metrics")
        self.preprocess_logits_for_metrics = _function(planning, "preprocess_logits_for_metrics")
        self._label_names = _label_names(model, args)
        self._decayed = frozenset(self.get_decay_parameter_names(model))
        self._adapted = any(hasattr(module, "peft_config") for module in model.modules())
        columns = _columns(model, args) if args.remove_unused_columns else None
        self._collate = _Collate(data_collator or _collator(processing_class), columns)
        self._padding = _padding(processing_class)
        self.train_dataset = train
        self.train_dataset = self._masked(train)
        self.eval_dataset = None if eval_dataset is None else self._evaluated(eval_dataset)
        check_alone("Trainer", planning)
        cluster = cluster or (_cpus() if args.use_cpu else Cluster.detect())
        options = self._planning(cluster)
        if "compute_loss" in self._overridden:
            computing_loss(model, self.compute_loss)
        if self.compute_metrics is not None:  # of logits
            planning["overrides"] = making_logits(planning.get("overrides") or Overrides())
        self.result = auto_parallelize(model, cluster, **{**options, **planning})
        self._begin()

    def _planning(self, cluster: Cluster) -> dict[str, Any]:
        """Arguments of `auto_parallelize`, as the arguments of training say."""
        args = self.args
        options = {
            "global_batch_size": training_arguments.global_batch_size(args, cluster.num_devices),
            "example_inputs": self._collate(self._first_samples()),
            "precision": training_arguments.precision_of(args),
            "compile": args.torch_compile_backend or args.torch_compile,
            "tf32": bool(args.tf32),
        }
        if self._given_optimizer is None and "create_optimizer" not in self._overridden:
            name = str(training_arguments.chosen(args, "optim"))
            options["optimizer"] = training_arguments.OPTIMIZERS[name]
        return options

    def _begin(self) -> None:
        """The state before any run, of which the callbacks are told."""
        from transformers import TrainerControl

        self.control = TrainerControl()
        self.state = new_state(self)
        self.control = self.callback_handler.on_init_end(self.args, self.state, self.control)

    def _first_samples(self) -> list[Any]:
        """Samples that the model is traced on."""
        return self._of_one_length(first_samples(self.train_dataset, SAMPLES), None)

    def _of_one_length(self, samples: list[Any], to: Sequence[int] | None) -> list[Any]:
        """Samples of a batch, where they are grouped by length padded to that of the longest, or to
        the next one of `to`."""
        if not self._by_length:
            return samples
        length = max(map(self._by_length["lengths"], samples))
        length = length if to is None else to[bisect_left(to, length)]
        return [padded(sample, length, self._padding) for sample in samples]

    def _masked(self, samples: Any) -> Any:
        """Samples with a mask of what they are padded with, where that is done here and the model
        takes one."""
        taken = inspect.signature(self.model.forward).parameters
        return _Masked(samples) if self._by_length and "attention_mask" in taken else samples

    def train(self, resume_from_checkpoint: bool | str | None = None) -> Any:
        """Train to the end of the arguments' steps or epochs; `transformers.TrainOutput`. With
        `resume_from_checkpoint` from the newest checkpoint in `output_dir` on, or from the one that
        it names; else there must be none."""
        from transformers.trainer_utils import TrainOutput

        args, epoch = self.args, self._epoch_steps
        folder = None if args.save_strategy.value == "no" else Path(args.output_dir)
        total = args.max_steps if args.max_steps > 0 else math.ceil(args.num_train_epochs * epoch)
        asked = (
            args.resume_from_checkpoint
            if resume_from_checkpoint is None
            else resume_from_checkpoint
        )
        resume = checked_resume(asked, Path(args.output_dir), saves=folder is not None)
        watch = Callbacks(self, total=total, epoch_steps=epoch, folder=folder)
        done = fit(
            self.result,
            self._training_data,
            optimizer=self._given_optimizer or self._made_optimizer,
            schedule=self.schedule or (lambda optimizer: self._made_scheduler(total, optimizer)),
            steps=total,
            max_grad_norm=args.max_grad_norm or None,
            evaluation=None if self.eval_dataset is None else self._evaluation,
            evaluate_every=NEVER,  # the callbacks ask for it
            metric=training_arguments.best_metric(args),
            greater_is_better=bool(args.greater_is_better),
            load_best=args.load_best_model_at_end,
            folder=folder,
            save_every="best" if args.save_strategy.value == "best" else None,
            keep=args.save_total_limit or 1_000_000,
            resume=resume,
            progress=False,  # which is a callback
            watch=watch,
            **({} if "get_train_dataloader" in self._overridden else self._loading),
        )
        return TrainOutput(done.steps, watch.metrics["train_loss"], watch.metrics)

    def evaluate(
        self, eval_dataset: Any = None, ignore_keys: Any = None, metric_key_prefix: str = "eval"
    ) -> dict[str, float]:
        """`eval_loss` and, of a cross-entropy, `eval_perplexity` of a dataset, what
        `compute_metrics` says of its predictions, and the time it took; logged. Collective."""
        dataset = self._evaluated(eval_dataset)
        metrics = self._evaluation_of(
            self.get_eval_dataloader(eval_dataset), "get_eval_dataloader", metric_key_prefix
        )
        if self.compute_metrics is not None:
            found = self._predicted(dataset, ignore_keys)
            metrics |= self._metrics_of(found, metric_key_prefix)
        self.log(metrics)
        self.control = self.callback_handler.on_evaluate(
            self.args, self.state, self.control, metrics
        )
        return metrics

    def predict(
        self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test"
    ) -> Any:
        """`transformers.PredictionOutput` of a dataset: its predictions and labels as arrays, on
        every rank, and numbers as of `evaluate`, the loss where there are labels. Collective."""
        from transformers.trainer_utils import PredictionOutput, speed_metrics

        dataset = self._masked(_samples(test_dataset, "test_dataset"))
        began_s = time.time()
        predictions, labels, batches = self._predicted(dataset, ignore_keys)
        metrics: dict[str, float] = {}
        if labels is not None:
            batch_loader = self.get_test_dataloader(test_dataset)
            metrics = self._evaluation_of(batch_loader, "get_test_dataloader", metric_key_prefix)
            if self.compute_metrics is not None:
                metrics |= self._metrics_of((predictions, labels, batches), metric_key_prefix)
        metrics |= speed_metrics(
            metric_key_prefix, began_s, num_samples=len(dataset), num_steps=batches
        )
        self.control = self.callback_handler.on_predict(
            self.args, self.state, self.control, metrics
        )
        return PredictionOutput(predictions=predictions, label_ids=labels, metrics=metrics)

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

    def get_test_dataloader(self, test_dataset: Any) -> Any:
        """Batches of a dataset that is predicted, in its order."""
        dataset = self._masked(_samples(test_dataset, "test_dataset"))
        return data_loader(dataset, self.result, **self._in_order)

    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        """Batches of a dataset, by default of `eval_dataset`, in its order."""
        return data_loader(self._evaluated(eval_dataset), self.result, **self._in_order)

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Numbers of a step, an evaluation or the run, on every rank: to `state.log_history` and
        the callbacks, and on rank 0 to the loggers, those of a step with what was measured."""
        from transformers import Trainer as Theirs

        kept: Callable[..., None] = Theirs.log
        kept(self, logs, start_time)
        measured = self.result.metrics() if "loss" in logs and self.loggers else {}
        for logger in self.loggers if launch.rank() == 0 else ():
            logger({**measured, **logs, "step": self.state.global_step})

    def add_callback(self, callback: Any) -> None:
        for made in checked_callbacks([callback]):
            self.callback_handler.add_callback(made)

    def pop_callback(self, callback: Any) -> Any:
        return self.callback_handler.pop_callback(callback)

    def remove_callback(self, callback: Any) -> None:
        self.callback_handler.remove_callback(callback)

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
        if is_stream(self.train_dataset):
            return int(self.args.max_steps)  # as transformers counts what has no length
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
        options |= self._by_length
        if args.dataloader_num_workers:
            options["persistent_workers"] = args.dataloader_persistent_workers
            options["prefetch_factor"] = args.dataloader_prefetch_factor
        return options

    @property
    def _by_length(self) -> dict[str, Any]:
        """Options of a loader that groups samples by length, where the arguments say so."""
        args = self.args
        if training_arguments.chosen(args, "train_sampling_strategy") != training_arguments.GROUPED:
            return {}
        names = getattr(self.processing_class, "model_input_names", None) or ["input_ids"]

        def length(sample: Any) -> int:
            known = sample.get(args.length_column_name)
            return len(sample[names[0]]) if known is None else int(known)

        return {"group_by_length": True, "lengths": length, "padding": self._padding}

    @property
    def _in_order(self) -> dict[str, Any]:
        return {**self._loading, "shuffle": False, "drop_last": False}

    @property
    def _training_data(self) -> Any:
        if "get_train_dataloader" not in self._overridden:
            return self.train_dataset
        return self._joined(self.get_train_dataloader(), "get_train_dataloader")

    def _joined(self, batches: Any, method: str) -> Any:
        """Batches of an overridden method, the same on every rank, joined to those of a step, of
        which each takes its rows; others as they are."""
        if method not in self._overridden:
            return batches
        return StreamLoader(
            batches,
            self.result.data_parallel,
            rows=self.result.plan.global_batch_size,
            drop_last=False,
            collate_fn=self._collate,
            loading={},
            waited=self.result.monitor.waited_for_input,
            place=f"Trainer.{method}",
        )

    def _evaluated(self, eval_dataset: Any) -> Any:
        if eval_dataset is None and self.eval_dataset is not None:
            return self.eval_dataset
        return self._masked(_samples(eval_dataset, "eval_dataset"))

    def _made_optimizer(self, _: ParallelModel) -> Any:
        made = self.create_optimizer()
        self.optimizer = self.optimizer if made is None else made  # theirs may set it alone
        return self.optimizer

    def _made_scheduler(self, total: int, optimizer: torch.optim.Optimizer) -> Any:
        made = self.create_scheduler(total, optimizer)
        self.lr_scheduler = self.lr_scheduler if made is None else made
        return self.lr_scheduler

    def _evaluation(self) -> dict[str, float]:
        """An evaluation in a run. Raises ValueError where it lacks the metric of the best model."""
        metrics, name = self.evaluate(), training_arguments.best_metric(self.args)
        if name not in metrics:
            raise TrainerError(
                f" is set to {name!r}, which is not found in the evaluation metrics",
                place="TrainingArguments: metric_for_best_model",
                legal=f"the available evaluation metrics are: {list(metrics)}",
                way_out="change metric_for_best_model, or have compute_metrics return it",
            )
        return metrics

    def _evaluation_of(self, batches: Any, method: str, prefix: str) -> dict[str, float]:
        """Loss of the batches and the time that takes, by transformers' names."""
        from transformers.trainer_utils import speed_metrics

        began_s, joined = time.time(), self._joined(batches, method)
        self.callback_handler.eval_dataloader = batches
        found = self.result.evaluate(self._told(joined), local=joined.local)
        metrics = {f"{prefix}_loss": found.loss}
        if found.perplexity is not None:
            metrics[f"{prefix}_perplexity"] = found.perplexity
        more = speed_metrics(prefix, began_s, num_samples=found.rows, num_steps=found.batches)
        return {**metrics, **more}

    def _told(self, batches: Any) -> Iterator[Any]:
        """The batches, of each of which the callbacks are told when it is done."""
        for batch in batches:
            yield batch
            self.control = self.callback_handler.on_prediction_step(
                self.args, self.state, self.control
            )

    def _predicted(self, dataset: Any, ignore_keys: Any) -> tuple[Any, Any, int]:
        """Predictions and labels (None without) of a dataset, as arrays, and the number of
        batches. Collective."""
        rows, size = self.result.plan.global_batch_size, len(dataset)
        logits, labels = list[Any](), list[Any]()
        length = self._by_length.get("lengths")
        to = few_lengths([length(dataset[k]) for k in range(size)]) if length else None
        for start in range(0, size, rows):
            samples = [dataset[k] for k in range(start, min(start + rows, size))]
            batch = self._collate(self._of_one_length(samples, to))
            named = [batch[name] for name in self._label_names if name in batch]
            labels += [named[0] if len(named) == 1 else tuple(named)] if named else []
            output = self.result.forward(batch, gather=True)
            of_batch = predictions(output, self.model, ignore_keys)
            if self.preprocess_logits_for_metrics is not None:
                of_batch = self.preprocess_logits_for_metrics(of_batch, named and labels[-1])
            logits.append(of_batch)
        return numpy_of(logits), numpy_of(labels) if labels else None, len(logits)

    def _metrics_of(self, found: tuple[Any, Any, int], prefix: str) -> dict[str, float]:
        """Numbers of `compute_metrics`."""
        from transformers import EvalPrediction
        from transformers.trainer_utils import denumpify_detensorize

        assert self.compute_metrics is not None
        metrics = self.compute_metrics(EvalPrediction(predictions=found[0], label_ids=found[1]))
        plain: Mapping[str, float] = denumpify_detensorize(metrics)
        start = f"{prefix}_"
        return {k if k.startswith(start) else start + k: v for k, v in plain.items()}


def _cpus() -> Cluster:
    """CPU processes, as many as torchrun started."""
    return Cluster.local(int(os.environ.get("WORLD_SIZE", 1)), "cpu", measure=False)


def checked_resume(asked: Any, folder: Path, *, saves: bool) -> bool | Path:
    """The `resume` of `fit`. Raises ValueError, in transformers' words, where that is not there,
    and where a run would be begun over another. Collective."""
    place = "Trainer.train: resume_from_checkpoint"
    steps = KeptCheckpoints(folder=folder, keep=1).steps()
    if asked is not None and not isinstance(asked, bool | str | os.PathLike):
        legal = "True, False, None, the path of a checkpoint"
        raise TrainerError.refused(place, asked, legal=legal, way_out="give True")
    if not asked:
        if not saves or not steps:
            return False
        raise TrainerError(
            f" {str(folder)!r} holds checkpoints of {len(steps)} steps, the last {steps[-1]}",
            place="Trainer.train: output_dir",
            legal="a folder without checkpoints, or resume_from_checkpoint=True",
            way_out="train(resume_from_checkpoint=True) goes on; or give another output_dir",
        )
    if asked is True:
        if not steps:
            raise TrainerError(
                f": No valid checkpoint found in output directory ({folder})",
                place=place,
                legal="True where output_dir has a checkpoint, as step-00000004",
                way_out="leave it out to begin a run",
            )
        return True if saves else KeptCheckpoints(folder=folder, keep=1).path(steps[-1])
    path = checked_path(asked, place)
    if not launch.agree_on(path.is_dir):
        raise TrainerError(
            f": Can't find a valid checkpoint at {path}",
            place=place,
            legal="True, or the path of a checkpoint, as output_dir/step-00000004",
            way_out="train(resume_from_checkpoint=True) goes on from the newest in output_dir",
        )
    return path


def _samples(dataset: Any, what: str, args: Any = None) -> Any:
    """A dataset of samples, which a list is here (and of batches to `fit`). Raises ValueError for
    what is none, or empty; a stream is one where the `args` say how many steps there are."""
    if args is not None and isinstance(dataset, IterableDataset):
        strategy = training_arguments.chosen(args, "train_sampling_strategy")
        if strategy == training_arguments.GROUPED:
            raise TrainerError(
                f"={strategy!r}, with a train_dataset without a length",
                place="TrainingArguments: train_sampling_strategy",
                legal='"random" with an IterableDataset, which gives its own order',
                way_out="leave it out, or give a dataset with len() and samples by number",
            )
        if args.max_steps > 0:
            return dataset
        raise TrainerError(
            f"={args.max_steps}: it must be set to a positive value if the dataset does not have "
            "a length",
            place="TrainingArguments: max_steps",
            legal="an integer from 1 where train_dataset is an IterableDataset",
            way_out="set max_steps",
        )
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
            way_out="give list(dataset), or one dataset of several at a time; only training reads "
            "an IterableDataset",
        )
    if not size:
        raise TrainerError(
            " is empty", place=f"Trainer: {what}", legal="one sample at least", way_out="give some"
        )
    if not isinstance(dataset, list):
        return dataset
    samples: Any = dataset  # as good as a Dataset
    return Subset(samples, range(len(samples)))


def _padding(processing_class: Any) -> dict[str, float]:
    """Values that samples are padded with, by name."""
    pad = getattr(processing_class, "pad_token_id", None)
    return {} if pad is None else {"input_ids": pad}


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


class _Masked(Dataset[Any]):
    """Samples with an attention mask, which tells what they are padded with."""

    def __init__(self, samples: Any) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, number: int) -> Any:
        sample = self.samples[number]
        if "attention_mask" in sample:
            return sample
        return {**sample, "attention_mask": [1] * len(next(iter(sample.values())))}


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
