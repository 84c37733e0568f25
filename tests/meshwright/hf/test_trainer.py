"""The Trainer beside transformers' own: the same arguments, the same losses; the rest refused."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2ForSequenceClassification,
    GPT2LMHeadModel,
    TrainingArguments,
)
from transformers import Trainer as Theirs

from meshwright import MeshwrightError
from meshwright.hf import Trainer
from meshwright.hf.theirs import Callbacks
from meshwright.hf.training_arguments import (
    TAKEN,
    WITHOUT_EFFECT,
    check_arguments,
    global_batch_size,
    precision_of,
)
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import host

pytest.importorskip("accelerate", reason="TrainingArguments need it: pip install accelerate")

ROWS, LENGTH, STEPS = 8, 8, 4
COMPARED = {"loss", "grad_norm", "learning_rate", "eval_loss", "train_loss", "epoch", "step"}


def dataset() -> list[dict[str, torch.Tensor]]:
    """As many rows as a step takes, so that no order of samples matters."""
    draw = torch.Generator().manual_seed(0)
    rows = torch.randint(32, (ROWS, LENGTH), generator=draw)
    return [
        {"input_ids": row, "labels": torch.cat([torch.tensor([-100]), row[1:]]), "note": row}
        for row in rows
    ]


def gpt2(layers: int = 2, **given: Any) -> GPT2Config:
    return GPT2Config(
        vocab_size=32, n_positions=LENGTH, n_embd=16, n_layer=layers, n_head=2, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, **given,
    )  # fmt: skip


def model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    return GPT2LMHeadModel(gpt2())


def classifier() -> Any:
    torch.manual_seed(0)
    return GPT2ForSequenceClassification(gpt2(1, num_labels=3, pad_token_id=31))


def arguments(folder: Path, **given: Any) -> TrainingArguments:
    options = {
        "output_dir": str(folder), "use_cpu": True, "per_device_train_batch_size": ROWS,
        "max_steps": STEPS, "learning_rate": 1e-2, "weight_decay": 0.1, "warmup_steps": 2,
        "lr_scheduler_type": "cosine", "logging_steps": 1, "save_strategy": "no",
        "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    return TrainingArguments(**{**options, **given})


def ours(args: TrainingArguments, module: Any = None, **given: Any) -> Trainer:
    options = {"train_dataset": dataset(), "cluster": host(1), **given}
    return Trainer(module or model(), args, **options)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    """That trains nothing."""
    betas = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-7}
    rows = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3}
    return ours(arguments(tmp_path_factory.mktemp("trainer"), **betas, **rows))


def test_the_losses_are_those_of_transformers(tmp_path: Path) -> None:
    """The log, too: its lines, their names, means over the steps between them."""
    asked = {"logging_steps": 3, "logging_first_step": True, "eval_strategy": "steps",
             "eval_steps": 2, "eval_delay": 3, "max_steps": 7}  # fmt: skip
    history, outputs = [], []
    lines: list[Any] = []
    for base, more in ((Theirs, {}), (Trainer, {"cluster": host(1), "loggers": [lines.append]})):
        args = arguments(tmp_path, **asked)
        data = {"train_dataset": dataset(), "eval_dataset": dataset()}
        trainer = base(model(), args, **data, **more)
        outputs.append(trainer.train())
        history.append(trainer.state.log_history)
    beside = ("eval_perplexity", "eval_model_preparation_time")
    names = [[[*sorted({*row} - {*beside})] for row in rows] for rows in history]
    assert names[1] == names[0] and len(names[0]) > 5
    for theirs, mine in zip(*history, strict=True):
        for name in theirs.keys() & COMPARED:
            assert mine[name] == pytest.approx(theirs[name], rel=2e-3), name
    assert outputs[1].global_step == 7
    assert outputs[1].training_loss == pytest.approx(outputs[0].training_loss, rel=1e-3)
    assert outputs[1].metrics.keys() == outputs[0].metrics.keys()
    assert "mfu" in lines[0] and "eval_loss" in lines[2] and len(lines) == len(history[1])


@second_tier("fit, which it calls, has runs in parts")
def test_it_goes_on_from_its_checkpoints(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 1, "save_total_limit": 2}
    whole = ours(arguments(tmp_path / "whole")).train()
    ours(arguments(tmp_path / "parts", max_steps=2, **saves), schedule=constant).train()
    names = sorted(path.name for path in (tmp_path / "parts").glob("step-*"))
    assert names == ["step-00000001", "step-00000002"]
    with pytest.raises(MeshwrightError, match="holds checkpoints"):
        ours(arguments(tmp_path / "parts", **saves)).train()
    resumed = ours(arguments(tmp_path / "parts", **saves), schedule=constant).train(True)
    assert resumed.global_step == whole.global_step == STEPS


@second_tier("checkpoints of fit stay, and lines of the log")
def test_a_save_beside_a_line_of_the_log_is_one(tmp_path: Path) -> None:
    """A resumed run whose steps have other rows says so."""
    every = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 2, "max_steps": 3}
    ours(arguments(tmp_path, **every)).train()
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == ["step-00000002", "step-00000003"]  # the last one at the end


def test_another_number_of_rows_is_said(trainer: Trainer, caplog: pytest.LogCaptureFixture) -> None:
    watch = Callbacks(trainer, total=STEPS, epoch_steps=2, folder=None)
    saved = watch.state_dict()
    watch.load_state_dict(saved)
    assert "a step had" not in caplog.text
    watch.load_state_dict({**saved, "rows": 2 * watch.rows})
    assert f"a step had {2 * watch.rows} rows and has {watch.rows} now" in caplog.text
    assert "of 2 times theirs" in caplog.text


def constant(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ("elsewhere/checkpoint-5", "Can't find a valid checkpoint at elsewhere/checkpoint-5"),
        (True, "No valid checkpoint found in output directory"),
        (3, "resume_from_checkpoint=3"),
    ],
)
def test_what_is_not_there_is_not_resumed(trainer: Trainer, asked: Any, says: str) -> None:
    with pytest.raises(MeshwrightError, match=f"resume_from_checkpoint.*{says}|{says}"):
        trainer.train(asked)


def test_arguments_say_rows_precision_and_steps(trainer: Trainer) -> None:
    assert trainer.result.plan.global_batch_size == 6
    assert global_batch_size(trainer.args, num_devices=4) == 24
    asked = [SimpleNamespace(bf16=b, fp16=f) for b, f in ((0, 0), (1, 0), (0, 1))]
    assert [precision_of(a) for a in asked] == ["fp32", "bf16", "fp16"]


@pytest.mark.parametrize(
    ("drop_last", "steps"),
    [
        (False, 5),
        pytest.param(
            True, 3, marks=second_tier("an epoch stays; orders drop a last batch in test_loader")
        ),
    ],
)
def test_epochs_are_steps(tmp_path: Path, drop_last: bool, steps: int) -> None:
    """8 rows in steps of 3 are 3 steps an epoch, the last of 2 rows, or 2 without it."""
    rows = {"max_steps": -1, "per_device_train_batch_size": 3, "num_train_epochs": 1.5}
    args = arguments(tmp_path, dataloader_drop_last=drop_last, **rows)
    assert ours(args).train().global_step == steps


def test_weights_alone_decay(trainer: Trainer, monkeypatch: pytest.MonkeyPatch) -> None:
    decayed, others = trainer.create_optimizer().param_groups
    names = {p: name for name, p in trainer.result.named_parameters()}
    assert {names[p].rpartition(".")[2] for p in decayed["params"]} == {"weight"}
    assert not [names[p] for p in decayed["params"] if "ln_" in names[p]]
    assert {p for group in (decayed, others) for p in group["params"]} == set(names)
    for group, decay in ((decayed, 0.1), (others, 0.0)):
        found = [group[name] for name in ("weight_decay", "lr", "betas", "eps")]
        assert found == [decay, 1e-2, (0.8, 0.9), 1e-7] and group["fused"]
    monkeypatch.setattr(trainer.args, "optim", "sgd")
    assert type(trainer.create_optimizer()) is torch.optim.SGD


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"neftune_noise_alpha": 5.0}, "neftune_noise_alpha"),
        ({"optim": "adafactor"}, "optim"),
        ({"train_sampling_strategy": "batch_rebalance"}, "train_sampling_strategy"),
        ({"report_to": "nowhere"}, "report_to names 'nowhere'.*mlflow, .*tensorboard"),
        ({"lr_scheduler_type": "reduce_lr_on_plateau", "eval_strategy": "steps", "eval_steps": 1},
         "lr_scheduler_type"),
        ({"eval_strategy": "steps", "eval_steps": 1}, "eval_strategy"),
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


NO_DATASET = type("NoDataset", (), {"__len__": lambda self: -1, "__getitem__": list})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"callbacks": 3}, "Trainer: callbacks"),
        ({"compute_metrics": 3}, "Trainer: compute_metrics"),
        ({"preprocess_logits_for_metrics": "x"}, "Trainer: preprocess_logits_for_metrics"),
        ({"optimizers": (None, None)}, "optimizer=, a function of the parallel model"),
        ({"train_dataset": iter(())}, "train_dataset is a"),
        ({"train_dataset": []}, "train_dataset is empty"),
        ({"eval_dataset": {"one": dataset()}}, "eval_dataset is a dict"),
        ({"train_dataset": list}, "Trainer: train_dataset is"),
        ({"train_dataset": NO_DATASET()}, "Trainer: train_dataset is"),
        ({"train_dataset": ...}, "Trainer: train_dataset is"),
    ],
)
def test_arguments_that_are_none_of_its_own_are_refused(
    tmp_path: Path, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(MeshwrightError, match=says):
        ours(arguments(tmp_path), **given)


def test_what_has_no_effect_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    check_arguments(arguments(tmp_path))
    assert not caplog.records
    check_arguments(arguments(tmp_path, gradient_checkpointing=True, torch_empty_cache_steps=2))
    said = [record.getMessage() for record in caplog.records]
    assert len(said) == 2 and "gradient_checkpointing: the plan decides" in said[0]
    assert "torch_empty_cache_steps: nothing empties" in said[1]


def test_samples_are_collated_as_by_transformers(tmp_path: Path) -> None:
    """Lists become rows, a `label` the `labels`, and text is left out."""
    rows = [
        {"input_ids": row["input_ids"].tolist(), "label": k % 3, "text": "x"}
        for k, row in enumerate(dataset())
    ]
    args = arguments(tmp_path, train_sampling_strategy="sequential", max_steps=1)
    trainer = ours(args, classifier(), train_dataset=rows)
    batch = trainer._collate(rows)
    assert batch["labels"].tolist() == [k % 3 for k in range(ROWS)]
    assert set(batch) == {"input_ids", "labels"}
    with torch.no_grad():
        expected = float(classifier().eval()(**batch).loss)
    assert trainer.evaluate(rows)["eval_loss"] == pytest.approx(expected, abs=1e-5)
    assert trainer.train().training_loss == pytest.approx(expected, abs=1e-5)
    assert not trainer._loading["shuffle"]


@second_tier("weights alone are saved by the same call, and columns are of models without adapters")
def test_of_an_adapted_model_the_adapters_are_saved(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    given = peft.LoraConfig(r=2, target_modules=["c_attn"], fan_in_fan_out=True)
    adapted = peft.get_peft_model(model(), given)  # whose forward takes any name
    trainer = ours(arguments(tmp_path, max_steps=2), adapted)
    assert trainer.train().global_step == 2
    trainer.save_model()
    adapters = peft.PeftModel.from_pretrained(model(), tmp_path / "model").eval()
    with torch.no_grad():
        loss = float(adapters(**trainer._collate(dataset())).loss)
    assert trainer.evaluate(dataset())["eval_loss"] == pytest.approx(loss, abs=1e-5)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("seed", 2**70), ("learning_rate", float("nan")), ("adam_beta1", 2.0),
        ("warmup_steps", "x"), ("logging_steps", {1}), ("max_steps", "all"), ("report_to", 3.0),
        ("per_device_train_batch_size", 0), ("lr_scheduler_kwargs", 1), ("output_dir", "a\0b"),
    ],
    ids=str,
)  # fmt: skip
def test_values_that_cannot_be_are_refused_by_name(name: str, value: Any, tmp_path: Path) -> None:
    args = arguments(tmp_path)
    setattr(args, name, value)
    with pytest.raises(MeshwrightError, match=f"TrainingArguments: {name}") as caught:
        ours(args)
    assert caught.value.legal


@pytest.mark.parametrize("args", [None, {}, TrainingArguments])
def test_what_is_no_arguments_is_refused(args: Any) -> None:
    with pytest.raises(MeshwrightError, match="Trainer: args is"):
        Trainer(model(), args, train_dataset=dataset())


@second_tier("values that can't be are refused by the same errors above")
def test_schedules_and_samples_that_cannot_be_are_told(tmp_path: Path) -> None:
    args = arguments(tmp_path, max_steps=1, lr_scheduler_kwargs={"x": 1})
    with pytest.raises(MeshwrightError, match="TrainingArguments: lr_scheduler_type"):
        ours(args).train()
    rows = [{"input_ids": [1] * n, "labels": [1] * n} for n in (2, 3)]
    with pytest.raises(MeshwrightError, match="Trainer: samples"):
        ours(arguments(tmp_path), train_dataset=rows)


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
