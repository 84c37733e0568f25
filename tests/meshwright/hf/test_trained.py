"""Runs of the Trainer beside transformers' own: the best model, predictions, samples grouped by
length, streams, and callbacks on ranks."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import IterableDataset
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers import Trainer as Theirs
from transformers.trainer_pt_utils import get_length_grouped_indices

from meshwright import MeshwrightError, Overrides
from meshwright.data.loader import Buckets, Order, few_lengths, hash_of
from meshwright.executor.ranks import launch
from meshwright.hf import Trainer
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.tiny import host
from tests.meshwright.hf.test_subclass import accuracy, labelled
from tests.meshwright.hf.test_trainer import LENGTH, ROWS, arguments, classifier, dataset, model
from tests.user_code.user_runs import free_links

BEST = {
    "eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1,
    "load_best_model_at_end": True, "save_total_limit": 2, "learning_rate": 0.5, "max_steps": 6,
    "lr_scheduler_type": "constant", "optim": "sgd", "max_grad_norm": 0.0, "weight_decay": 0.0,
}  # fmt: skip


def best_of(base: type, folder: Path, **more: Any) -> Any:
    """A run that gets worse again: the metric is of labels that it does not learn."""
    args = {**BEST, "metric_for_best_model": "odd", "greater_is_better": True}
    trainer = base(
        classifier(), arguments(folder, **args), train_dataset=labelled(),
        eval_dataset=labelled(), compute_metrics=odd(), **more,
    )  # fmt: skip
    trainer.train()
    return trainer


def odd() -> Any:
    """A metric that is best at the third evaluation, on every rank."""
    values = iter([0.1, 0.2, 0.9, 0.3, 0.4, 0.5, 0.6])
    return lambda _: {"odd": next(values)}


@second_tier("the loop of fit loads its best evaluation; the Trainer hands the choice on")
def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    theirs = best_of(Theirs, tmp_path / "theirs")
    mine = best_of(Trainer, tmp_path / "mine", cluster=host(1))
    for name in ("best_metric", "best_global_step"):
        assert getattr(mine.state, name) == getattr(theirs.state, name)
    assert mine.state.best_global_step == 3
    assert mine.state.best_model_checkpoint.endswith("step-00000003")
    kept = sorted(path.name for path in (tmp_path / "mine").glob("step-*"))
    assert kept == ["step-00000003", "step-00000006"]
    for name, x in theirs.model.state_dict().items():
        torch.testing.assert_close(mine.model.state_dict()[name], x, atol=1e-5, rtol=1e-3)


class Asking(TrainerCallback):  # type: ignore[misc]
    """Asks on rank 1 alone; counts what it is told on every rank."""

    def __init__(self) -> None:
        self.told: list[tuple[str, int]] = []

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        asks = {1: "should_log", 2: "should_evaluate", 3: "should_save", 4: "should_training_stop"}
        if launch.rank() == 1 and state.global_step in asks:
            setattr(control, asks[state.global_step], True)

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        self.told += [("log", state.global_step)] if "loss" in logs else []

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.told.append(("evaluate", state.global_step))

    def on_save(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.told.append(("save", state.global_step))


def asked_on_one(folder: Path, layout: dict[str, int]) -> None:
    """What a callback sets on rank 1 is done on both, which keep one log; then the best of two."""
    asking = Asking()
    never = {"logging_strategy": "no", "save_strategy": "steps", "save_steps": 50, "max_steps": 9}
    trainer = two(folder / "asked", never, layout, callbacks=[asking])
    done = trainer.train()
    told = [("log", 1), ("evaluate", 2), ("save", 3)]
    assert asking.told[:3] == told and done.global_step == trainer.state.global_step == 4
    assert (folder / "asked" / "step-00000003").is_dir()
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(logged) == 1

    early = [EarlyStoppingCallback(early_stopping_patience=2)]
    given = {**BEST, "metric_for_best_model": "odd", "greater_is_better": True}
    trainer = two(folder / "best", given, layout, callbacks=early, compute_metrics=odd())
    weights = {}
    trainer.add_callback(Copied(trainer, weights))
    trainer.train()
    assert (trainer.state.global_step, trainer.state.best_global_step) == (5, 3)
    for name, x in trainer.result.full_state_dict().items():
        torch.testing.assert_close(x, weights[3][name], rtol=0, atol=0)
    resumed = two(folder / "best", {**given, "max_steps": 7}, layout, compute_metrics=odd())
    resumed.train(resume_from_checkpoint=str(folder / "best" / "step-00000003"))
    history = [row["step"] for row in resumed.state.log_history if "eval_odd" in row]
    assert history == [1, 2, 3, 4, 5, 6, 7]


class Copied(TrainerCallback):  # type: ignore[misc]
    def __init__(self, trainer: Any, weights: dict[int, Any]) -> None:
        self.trainer, self.weights = trainer, weights

    def on_evaluate(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.weights[state.global_step] = self.trainer.result.full_state_dict()


def two(folder: Path, given: dict[str, Any], layout: dict[str, int], **more: Any) -> Trainer:
    """A trainer on two ranks."""
    args = arguments(folder, **{"per_device_train_batch_size": ROWS // 2, **given})
    data = {"train_dataset": labelled(), "eval_dataset": labelled()}
    plan = {"cluster": free_links(2), "overrides": Overrides(**layout)}
    return Trainer(classifier(), args, **{**data, **plan, **more})


@second_tier("a watch of one device is asked in the change tier")
@pytest.mark.parametrize("layout", [{"dp": 2, "tp": 1, "pp": 1}], ids=["dp2"])
def test_what_rank_1_asks_for_is_done_on_all(layout: dict[str, int], tmp_path: Path) -> None:
    on_ranks(2, asked_on_one, tmp_path, layout)


@second_tier("control flags and best checkpoints are those of the loop, whatever the plan")
@pytest.mark.parametrize("layout", [{"dp": 1, "tp": 2, "pp": 1}, {"dp": 1, "tp": 1, "pp": 2}])
def test_it_is_done_under_other_plans(layout: dict[str, int], tmp_path: Path) -> None:
    on_ranks(2, asked_on_one, tmp_path, layout)


@pytest.mark.parametrize("rows", tiered((8, 6), (6).__eq__, "less than a batch stays"))
def test_predictions_are_those_of_transformers(rows: int, tmp_path: Path) -> None:
    found = []
    for base, more in ((Theirs, {}), (Trainer, {"cluster": host(1)})):
        trainer = base(
            classifier(), arguments(tmp_path), train_dataset=labelled(),
            compute_metrics=accuracy, **more,
        )  # fmt: skip
        found.append(trainer.predict(labelled()[:rows]))
    theirs, mine = found
    np.testing.assert_allclose(mine.predictions, theirs.predictions, atol=1e-5)
    assert (mine.label_ids == theirs.label_ids).all()
    names = ("test_loss", "test_accuracy")
    assert [mine.metrics[n] for n in names] == pytest.approx([theirs.metrics[n] for n in names])
    assert theirs.metrics.keys() - {"test_model_preparation_time"} <= mine.metrics.keys()


def unlabelled(rows: int) -> np.ndarray[Any, Any]:
    trainer = two(Path("unused"), {"save_strategy": "no"}, {"dp": 2, "tp": 1, "pp": 1})
    samples = [{"input_ids": row["input_ids"]} for row in labelled()[:rows]]
    found = trainer.predict(samples)
    assert found.label_ids is None and "test_loss" not in found.metrics
    return found.predictions  # type: ignore[no-any-return]


@second_tier("grouped samples are predicted on ranks, too")
def test_samples_without_labels_are_predicted_on_ranks() -> None:
    with torch.no_grad():
        ids = torch.stack([row["input_ids"] for row in labelled()[:6]])
        expected = classifier().eval()(input_ids=ids).logits.numpy()
    np.testing.assert_allclose(on_ranks(2, unlabelled, 6), expected, atol=1e-5)


# --- order and streams ----------------------------------------------------------------------------


@pytest.mark.parametrize(("size", "rows"), [(37, 4), (8, 8), (500, 2)])
def test_lengths_are_grouped_as_by_transformers(size: int, rows: int) -> None:
    draw = torch.Generator().manual_seed(size)
    lengths = torch.randint(1, 70, (size,), generator=draw).tolist()
    filled = Buckets(lengths=lengths, to=few_lengths(lengths), grouped=True)
    order = Order(size=size, rows=rows, shuffle=True, seed=3, drop_last=False, buckets=filled)
    for epoch in (0, 1):
        batches = order.batches(epoch)
        drawn = torch.Generator().manual_seed(hash_of(3, epoch))
        expected = get_length_grouped_indices(lengths, rows, generator=drawn)
        assert [k for batch in batches for k in batch.samples.tolist()] == expected
        longest = [max(lengths[k] for k in batch.samples.tolist()) for batch in batches]
        spare = [(batch.length or 0) - n for batch, n in zip(batches, longest, strict=True)]
        assert min(spare) >= 0 and max(spare) < 8


def uneven() -> list[dict[str, torch.Tensor]]:
    return [
        {name: row[name][: 3 + k % 5] for name in ("input_ids", "labels")}
        for k, row in enumerate(dataset())
    ]


def grouped_losses(folder: Path) -> list[float]:
    args = arguments(
        folder, per_device_train_batch_size=2, train_sampling_strategy="group_by_length",
        max_steps=3, learning_rate=0.0,
    )  # fmt: skip
    plan = {"cluster": free_links(2), "overrides": Overrides(dp=2, tp=1, pp=1)}
    trainer = Trainer(model(), args, train_dataset=uneven(), eval_dataset=uneven(), **plan)
    trainer.train()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(plain_loss(uneven()), abs=1e-4)
    found = trainer.predict(uneven()[:3])
    assert found.predictions.shape[:2] == found.label_ids.shape == (3, 5)
    loss = plain_loss(uneven()[:3])
    assert found.metrics["test_loss"] == pytest.approx(loss, abs=1e-4)
    return [row["loss"] for row in trainer.state.log_history if "loss" in row]


def plain_loss(samples: list[Any]) -> float:
    """The mean over all tokens that are predicted, sample by sample."""
    alone, total, count = model().eval(), 0.0, 0
    for sample in samples:
        with torch.no_grad():
            loss = float(alone(**{name: x[None] for name, x in sample.items()}).loss)
        targets = int((sample["labels"][1:] != -100).sum())
        total, count = total + loss * targets, count + targets
    return total / count


def test_grouped_samples_are_trained_on_two_ranks(tmp_path: Path) -> None:
    """Each rank's rows are padded to the length of the longest of all."""
    lengths = [len(row["input_ids"]) for row in uneven()]
    order: list[int] = []
    for epoch in (0, 1):
        drawn = torch.Generator().manual_seed(hash_of(42, epoch))
        order += get_length_grouped_indices(lengths, 4, generator=drawn)
    expected = [plain_loss([uneven()[k] for k in order[4 * n : 4 * n + 4]]) for n in range(3)]
    assert on_ranks(2, grouped_losses, tmp_path) == pytest.approx(expected, abs=1e-4)


@second_tier("the real package; report_to is transformers' own")
def test_mlflow_gets_the_lines_of_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    mlflow.set_tracking_uri((tmp_path / "runs").as_uri())
    args = arguments(tmp_path, report_to=["mlflow"], run_name="mine", max_steps=2)
    trainer = Trainer(model(), args, train_dataset=dataset(), cluster=host(1))
    trainer.train()
    (run,) = mlflow.search_runs(search_all_experiments=True, output_format="list")
    mlflow.end_run()
    history = mlflow.MlflowClient().get_metric_history(run.info.run_id, "loss")
    lines = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert [row.value for row in history] == pytest.approx(lines) and len(lines) == 2


class Stream(IterableDataset[dict[str, torch.Tensor]]):
    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        while True:
            yield from ({k: v for k, v in row.items() if k != "note"} for row in dataset())


@second_tier("streams are trained by data_loader in the change tier")
def test_a_stream_is_trained_as_by_transformers(tmp_path: Path) -> None:
    found = []
    for base, more in ((Theirs, {}), (Trainer, {"cluster": host(1)})):
        args = arguments(tmp_path, per_device_train_batch_size=3, max_steps=5)
        trainer = base(model(), args, train_dataset=Stream(), **more)
        trainer.train()
        rows = [row for row in trainer.state.log_history if "loss" in row]
        found.append([(row["step"], row["epoch"], row["loss"]) for row in rows])
    for theirs, mine in zip(*found, strict=True):
        assert mine == pytest.approx(theirs, rel=1e-3)
    assert len(found[1]) == 5 and len(next(islice(Stream(), 1))["input_ids"]) == LENGTH
    with pytest.raises(MeshwrightError, match="must be set to a positive value if the dataset"):
        Trainer(model(), arguments(tmp_path, max_steps=-1), train_dataset=Stream())
    grouped = arguments(tmp_path, train_sampling_strategy="group_by_length")
    with pytest.raises(MeshwrightError, match="group_by_length', with a train_dataset without"):
        Trainer(model(), grouped, train_dataset=Stream())
