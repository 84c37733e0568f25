"""Serving as users ask for it: the call, and the command's flags."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import Cluster, MeshwrightError
from meshwright.cli import main
from meshwright.profiles.inputs import ArgumentError
from meshwright.serving import Asked, plan_serving
from tests.planner.serving.served import MODELS, SMALL

Captured = pytest.CaptureFixture[str]
COMMAND = ["hf:config.json", "--cluster", "dgx-h100"]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], **SMALL}
    config["max_position_embeddings"] = 1 << 30
    Path("config.json").write_text(json.dumps(config))


def answered(capsys: Captured, *flags: str, code: int = 0) -> str:
    assert main([*flags]) == code
    out, err = capsys.readouterr()
    return err if code else out


def test_plan_serve_prints_the_best_and_its_price(capsys: Captured) -> None:
    asked = ["plan", *COMMAND, "--serve", "--prompt", "100", "--new", "20", "--rows", "8"]
    text = answered(capsys, *asked, "--tp", "2", "--pp", "1", "--price", "2.0")
    assert (
        "Serving 100 tokens of prompt and 20 new ones: tp=2, pp=1, replicas: 4, rows of each: 8"
        in text
    )
    assert text.rstrip().endswith("for a million new tokens")
    data = json.loads(answered(capsys, *asked, "--json"))
    assert data["asked"]["prompt"] == 100
    assert {plan["rows"] for plan in data["plans"]} == {8}


def test_fit_generate_says_how_many_rows_fit(capsys: Captured) -> None:
    text = answered(capsys, "fit", *COMMAND, "--generate", "--prompt", "4096")
    assert text.startswith("fits: ") and "rows at once of 4,096 tokens of prompt" in text
    assert "tp=8, pp=1: " in text
    Path("small.toml").write_text(
        'base = "dgx-h100"\n[device]\nmemory_bytes = 3_000_000_000\nreserved_bytes = 0\n'
    )
    flags = ["fit", COMMAND[0], "--cluster", "small.toml", "--generate", "--prompt", "100000000"]
    assert "do not fit: one needs" in answered(capsys, *flags, code=1)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["plan", "--serve", "--zero", "3"], "--serve beside --zero decides nothing of serving"),
        (["plan", "--serve", "--html", "x"], "--serve beside --html decides nothing of serving"),
        (["plan", "--prompt", "8", "--batch", "8"], "--prompt is of serving; legal: beside"),
        (["plan"], "--batch: is missing"),
        (["plan", "--serve", "--optimizer", "sgd"], "--serve beside --optimizer decides nothing"),
        (["plan", "--serve", "--precision", "fp8"], "precision='fp8'; legal: fp32, bf16, fp16"),
        (["plan", "--serve", "--new", "2000000000"], "the model has 1,073,741,824 positions"),
        (["fit", "--new", "8"], "--new is of serving"),
        (["plan", "--serve", "--tp", "3"], "serving: tp=3; legal: 1, 2, 4, 8"),
        (["plan", "--serve", "--token-s", "1e-9"], "the least between tokens is"),
    ],
)
def test_what_decides_nothing_is_refused(capsys: Captured, flags: list[str], says: str) -> None:
    command, *rest = flags
    assert says in answered(capsys, command, *COMMAND, *rest, code=1)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        ({"prompt": 0, "new": 1}, "prompt=0; legal: an integer from 1"),
        ({"prompt": 1, "new": 1.5}, "new=1.5; legal: an integer"),
        ({"prompt": 1, "new": 1, "token_s": 0}, "token_s=0; legal: a number over 0"),
        ({"prompt": 1, "new": 1, "tokens_per_s": float("nan")}, "tokens_per_s=nan"),
    ],
)
def test_numbers_that_ask_for_nothing_are_refused(asked: Any, says: str) -> None:
    ids = torch.zeros(2, 8, dtype=torch.int64)
    with pytest.raises(ArgumentError, match=says):
        plan_serving(
            MODELS["llama"](), Cluster.from_catalog("h100-sxm"), Asked(**asked),
            example_inputs={"input_ids": ids, "labels": ids},
        )  # fmt: skip


def test_other_models_are_refused() -> None:
    with pytest.raises(MeshwrightError, match="causal language model"):
        plan_serving(
            nn.Linear(16, 8), Cluster.from_catalog("h100-sxm"), Asked(prompt=8, new=8),
            example_inputs=(torch.randn(4, 16), torch.randint(0, 8, (4,))),
            loss_fn=torch.nn.functional.cross_entropy,
        )  # fmt: skip
