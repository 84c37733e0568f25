"""The Trainer beside transformers' own: the same arguments, the same losses; the rest refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments
from transformers import Trainer as Theirs

from meshwright import Cluster, MeshwrightError
from meshwright.hf import Trainer
from meshwright.hf.arguments import TAKEN, WITHOUT_EFFECT

pytest.importorskip("accelerate", reason="TrainingArguments need it: pip install accelerate")

ROWS, LENGTH, STEPS = 8, 8, 4


def dataset() -> list[dict[str, torch.Tensor]]:
    """As many rows as a step takes, so that no order of samples matters."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(32, (ROWS, LENGTH), generator=draw)
    return [
        {"input_ids": row, "labels": torch.cat([torch.tensor([-100]), row[1:]]), "note": row}
        for row in rows
    ]


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=32,
        n_positions=LENGTH,
        n_embd=16,
        n_layer=2,
        n_head=2,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return GPT2LMHeadModel(config)


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    options = {
        "output_dir": str(folder),
        "use_cpu": True,
        "per_device_train_batch_size": ROWS,
        "max_steps": STEPS,
        "learning_rate": 1e-2,
        "weight_decay": 0.1,
        "warmup_steps": 2,
        "lr_scheduler_type": "cosine",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    return TrainingArguments(**{**options, **given})


def ours(args: TrainingArguments, **given: Any) -> Trainer:
    cluster = Cluster.local(1, "cpu", measure=False)
    return Trainer(model(), args, train_dataset=dataset(), cluster=cluster, **given)


def test_the_losses_are_those_of_transformers(tmp_path: Path) -> None:
    theirs = Theirs(model(), arguments(tmp_path), train_dataset=dataset())
    theirs.train()
    expected = [row["loss"] for row in theirs.state.log_history if "loss" in row]
    found: list[float] = []
    trainer = ours(arguments(tmp_path), loggers=[lambda metrics: found.append(metrics["loss"])])
    output = trainer.train()
    assert output.global_step == STEPS and len(expected) == STEPS
    assert found == pytest.approx(expected, abs=1e-3)  # theirs are rounded
    assert output.training_loss == pytest.approx(expected[-1], abs=1e-3)
    assert trainer.evaluate(dataset())["eval_loss"] < expected[-1]


def test_it_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    whole = ours(arguments(tmp_path / "whole")).train()
    ours(arguments(tmp_path / "parts", max_steps=2, **saves), schedule=constant).train()
    names = sorted(path.name for path in (tmp_path / "parts").iterdir())
    assert names == ["step-00000001", "step-00000002"]
    with pytest.raises(MeshwrightError, match="holds checkpoints"):
        ours(arguments(tmp_path / "parts", **saves)).train()
    resumed = ours(arguments(tmp_path / "parts", **saves), schedule=constant).train(True)
    assert resumed.global_step == whole.global_step == STEPS


def constant(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


def test_a_path_to_resume_from_is_refused(tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match="resume_from_checkpoint"):
        ours(arguments(tmp_path)).train("elsewhere/checkpoint-5")  # type: ignore[arg-type]


def test_accumulation_is_rows_of_a_step(tmp_path: Path) -> None:
    args = arguments(tmp_path, per_device_train_batch_size=2, gradient_accumulation_steps=3)
    assert ours(args).result.plan.global_batch_size == 6


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"label_smoothing_factor": 0.1}, "label_smoothing_factor"),
        ({"load_best_model_at_end": True, "eval_strategy": "steps", "save_strategy": "steps"},
         "load_best_model_at_end"),
        ({"optim": "adafactor"}, "optim"),
        ({"group_by_length": True}, "group_by_length"),
        ({"auto_find_batch_size": True}, "auto_find_batch_size"),
    ],
)  # fmt: skip
def test_what_it_does_not_do_is_refused_by_name(
    tmp_path: Path, given: dict[str, Any], says: str
) -> None:
    try:
        args = arguments(tmp_path, **given)
    except TypeError:
        pytest.skip("not an argument of this transformers")
    with pytest.raises(MeshwrightError, match=f"TrainingArguments: {says}"):
        ours(args)


def test_every_argument_is_taken_or_refused(tmp_path: Path) -> None:
    """A field that is neither in a table nor at its default is refused, whatever it is."""
    args = arguments(tmp_path)
    assert not TAKEN & WITHOUT_EFFECT
    changed: Callable[[Any], Any] = lambda value: 7 if value is None else f"{value}x"  # noqa: E731
    missed = []
    for name in vars(TrainingArguments(output_dir=str(tmp_path), use_cpu=True)):
        known = name.startswith("_") or name in TAKEN | WITHOUT_EFFECT
        if known or name not in TrainingArguments.__dataclass_fields__:
            continue
        before = getattr(args, name)
        setattr(args, name, changed(before))
        try:
            ours(args)
            missed.append(name)
        except (MeshwrightError, AttributeError):
            pass
        setattr(args, name, before)
    assert missed == []
