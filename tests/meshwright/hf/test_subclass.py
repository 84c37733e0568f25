"""Subclasses of the Trainer: overridden methods are asked, or refused by name; callbacks and
metrics are transformers' own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, TrainerCallback
from transformers import Trainer as Theirs

from meshwright import MeshwrightError
from meshwright.hf import Trainer
from meshwright.hf.theirs import HONOURED, INSTEAD
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import host
from tests.meshwright.hf.test_trainer import ROWS, arguments, classifier, dataset, model, ours

KINDS = {"theirs": Theirs, "ours": Trainer}


def trained(base: type, folder: Path, methods: dict[str, Any], **given: Any) -> tuple[Any, Any]:
    """A trainer of that kind with those methods, after its run; and its model."""
    module = given.pop("module", None) or model()
    kind = type("Mine", (base,), methods)
    more = {"cluster": host(1)} if base is Trainer else {}
    options = given.pop("args", {})
    trainer = kind(module, arguments(folder, **options), train_dataset=dataset(), **more, **given)
    trainer.train()
    return trainer, module


def same_weights(folder: Path, methods: dict[str, Any], **given: Any) -> None:
    """What theirs trains, ours trains."""
    weights = [
        trained(base, folder / name, methods, **given)[1].state_dict()
        for name, base in KINDS.items()
    ]
    for name, x in weights[0].items():
        torch.testing.assert_close(weights[1][name], x, atol=1e-4, rtol=1e-3, msg=name)


def nothing(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
    return 0.0 * model(**inputs)["loss"]


def squared(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
    labels = inputs.pop("labels")
    outputs = model(**inputs)
    loss = (outputs.logits.mean(-1) - (labels > 3).float()).pow(2).mean()
    return (loss, outputs) if return_outputs else loss


def penalised(self: Any, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
    loss, outputs = super(type(self), self).compute_loss(model, inputs, return_outputs=True)
    loss = loss + self.args.weight_decay * outputs.logits.pow(2).mean()
    return (loss, outputs) if return_outputs else loss


def momentum(self: Any, model: Any = None) -> Any:
    self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9)
    return self.optimizer


def constant(self: Any, num_training_steps: int, optimizer: Any = None) -> Any:
    self.lr_scheduler = torch.optim.lr_scheduler.ConstantLR(
        optimizer or self.optimizer, factor=0.5, total_iters=2
    )
    return self.lr_scheduler


def no_decay(self: Any, model: Any) -> list[str]:
    return []


def halves(self: Any) -> Any:
    """The first half of the rows, twice a step."""
    rows = [{k: v for k, v in row.items() if k != "note"} for row in dataset()[: ROWS // 2]]
    return DataLoader(rows, batch_size=ROWS // 2)


OVERRIDDEN: dict[str, dict[str, Any]] = {
    "zero": {"compute_loss": nothing},
    "squared": {"compute_loss": squared},
    "penalised": {"compute_loss": penalised},
    "optimizer": {"create_optimizer": momentum},
    "schedule": {"create_scheduler": constant},
    "decay": {"get_decay_parameter_names": no_decay},
    "all": {"create_optimizer": momentum, "create_scheduler": constant, "compute_loss": squared},
}
ALONE = second_tier("methods that are overridden together stay")


@pytest.mark.parametrize(
    "methods",
    [
        pytest.param(methods, id=name, marks=() if name == "all" else ALONE)
        for name, methods in OVERRIDDEN.items()
    ],
)
def test_what_is_overridden_is_what_is_trained(methods: dict[str, Any], tmp_path: Path) -> None:
    same_weights(tmp_path, methods)


@second_tier("a loader whose batches do not make a step is refused in the change tier")
def test_a_loader_of_batches_for_each_device_is_joined_to_steps(tmp_path: Path) -> None:
    _, whole = trained(Trainer, tmp_path, {"get_train_dataloader": halves})
    rows = [*dataset()[: ROWS // 2]] * 2
    _, expected = trained(Trainer, tmp_path, {"get_train_dataloader": lambda _: DataLoader(
        [{k: v for k, v in row.items() if k != "note"} for row in rows], batch_size=ROWS
    )})  # fmt: skip
    for name, x in expected.state_dict().items():
        torch.testing.assert_close(whole.state_dict()[name], x)


def test_a_loader_that_misses_the_rows_of_a_step_is_refused(tmp_path: Path) -> None:
    rows = [{k: v for k, v in row.items() if k != "note"} for row in dataset()]
    loader = DataLoader([*rows, rows[0]], batch_size=3)
    with pytest.raises(MeshwrightError, match=r"get_train_dataloader.*9 rows, where a step has 8"):
        trained(Trainer, tmp_path, {"get_train_dataloader": lambda _: loader})


@pytest.mark.parametrize("name", sorted(INSTEAD))
def test_what_is_never_called_is_refused_with_its_way_out(name: str, tmp_path: Path) -> None:
    if name != "_prepare_context":
        assert hasattr(Theirs, name)
    with pytest.raises(MeshwrightError, match=rf"Mine\.{name}.*never called.*compute_loss") as told:
        trained(Trainer, tmp_path, {name: lambda *_, **__: None})
    assert INSTEAD[name] in str(told.value)


@second_tier("what is never called is refused by name where it matters")
def test_the_rest_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    methods = {"floating_point_ops": lambda *_: 0, "of_my_own": lambda *_: 1}
    with caplog.at_level(logging.WARNING):
        trained(Trainer, tmp_path, methods)
    assert "Mine: never called here: floating_point_ops" in caplog.text
    assert "of_my_own" not in caplog.text


def test_names_are_transformers() -> None:
    assert all(hasattr(Theirs, name) for name in HONOURED | INSTEAD.keys())
    assert not HONOURED & INSTEAD.keys()


# --- metrics and callbacks ------------------------------------------------------------------------


class Noted(TrainerCallback):  # type: ignore[misc]
    """Events, with the step; asks at some steps."""

    def __init__(self, **asks: int) -> None:
        self.events: list[tuple[str, int]] = []
        self.asks = asks

    def on_step_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("step", state.global_step))

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> Any:
        self.events.append(("stepped", state.global_step))
        for name, step in self.asks.items():
            if step == state.global_step:
                setattr(control, f"should_{name}", True)
        return control

    def on_evaluate(self, args: Any, state: Any, control: Any, metrics: Any, **_: Any) -> None:
        assert metrics["eval_loss"] > 0
        self.events.append(("evaluated", state.global_step))

    def on_log(self, args: Any, state: Any, control: Any, logs: Any, **_: Any) -> None:
        if "loss" in logs:
            self.events.append(("log", state.global_step))

    def on_train_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        self.events.append(("end", state.global_step))


MORE = second_tier("a stop that is asked for stays")


@pytest.mark.parametrize(
    "asks",
    [
        pytest.param({}, marks=MORE),
        {"training_stop": 2},
        pytest.param({"evaluate": 3}, marks=MORE),
        pytest.param({"evaluate": 1, "training_stop": 3}, marks=MORE),
    ],
)
def test_callbacks_are_told_and_asked(asks: dict[str, int], tmp_path: Path) -> None:
    found = []
    for base in KINDS.values():
        noted = Noted(**asks)
        trained(base, tmp_path, {}, callbacks=[noted], eval_dataset=dataset())
        events = [event for event in noted.events if event[0] != "log"]
        found.append(events)
    assert found[0] == found[1]
    assert ("log", 1) in noted.events


@second_tier("a callback that ends the run stays, and the patience of fit")
@pytest.mark.parametrize("rate", [1e-2, 0.0])
def test_a_patience_of_transformers_ends_the_run(rate: float, tmp_path: Path) -> None:
    """Without learning no evaluation is better than the first, of which it tells."""
    args = {"eval_strategy": "steps", "eval_steps": 1, "learning_rate": rate,
            "metric_for_best_model": "eval_loss"}  # fmt: skip
    steps = []
    for base in KINDS.values():
        early = EarlyStoppingCallback(early_stopping_patience=2)
        given = {"callbacks": [early], "eval_dataset": dataset()}
        trainer, _ = trained(base, tmp_path, {}, args=args, **given)
        steps.append((trainer.state.global_step, trainer.state.log_history[-1]["step"]))
    assert steps[0] == steps[1] == ((3, 3) if rate == 0.0 else (4, 4))


@pytest.mark.parametrize("event", ["on_pre_optimizer_step", "on_optimizer_step", "on_substep_end"])
def test_a_callback_inside_of_a_step_is_refused(event: str, tmp_path: Path) -> None:
    inside = type("Inside", (TrainerCallback,), {event: lambda *_, **__: None})
    with pytest.raises(MeshwrightError, match=rf"Inside acts in {event}|Inside.*{event}"):
        ours(arguments(tmp_path), callbacks=[inside])


def test_what_is_no_callback_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=r"callbacks has .*legal: a list of transformers"):
        ours(arguments(tmp_path), callbacks=[print])
    with pytest.raises(MeshwrightError, match=r"loggers.*legal: a list of functions"):
        ours(arguments(tmp_path), loggers=print)


def accuracy(found: Any) -> dict[str, float]:
    assert isinstance(found.predictions, np.ndarray)
    return {"accuracy": float((found.predictions.argmax(-1) == found.label_ids).mean())}


def labelled() -> list[dict[str, torch.Tensor]]:
    return [{"input_ids": row["note"] % 31, "labels": row["note"][0] % 3} for row in dataset()]


@second_tier("predictions have the same metrics (test_trained)")
@pytest.mark.parametrize("rows", [8, 6])
def test_metrics_are_those_of_transformers(rows: int, tmp_path: Path) -> None:
    found = []
    for base in KINDS.values():
        more = {"cluster": host(1)} if base is Trainer else {}
        trainer = base(
            classifier(),
            arguments(tmp_path),
            train_dataset=labelled(),
            eval_dataset=labelled()[:rows],
            compute_metrics=accuracy,
            **more,
        )
        found.append(trainer.evaluate())
    for name in ("eval_loss", "eval_accuracy"):
        assert found[1][name] == pytest.approx(found[0][name], rel=1e-5)
