"""Mistakes in arguments of the public API: one error each, with the place and the way out."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from meshwright import MeshwrightError, Overrides, auto_parallelize, data_loader, fit, packed, rule
from tests.helpers.tiny import ROWS, batch, host, loss, net, planned

SAMPLES = [tuple(x[0] for x in batch(ROWS))] * ROWS


@pytest.fixture(scope="module")
def result() -> Any:
    return planned(net(), 1)


def sgd(result: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(result.parameters(), lr=0.1)


BOOLEANS: dict[str, Callable[[Any, Path], Any]] = {
    "auto_parallelize: tf32": lambda *_: auto_parallelize(
        net(), host(1), example_inputs=batch(4), global_batch_size=8, loss_fn=loss,
        tf32="x",  # type: ignore[arg-type]
    ),
    "auto_parallelize: check_replicas": lambda *_: auto_parallelize(
        net(), host(1), example_inputs=batch(4), global_batch_size=8, loss_fn=loss,
        check_replicas=float("nan"),  # type: ignore[arg-type]
    ),
    "train_step: local": lambda r, _: r.train_step(batch(ROWS), local="no"),
    "eval_step: local": lambda r, _: r.eval_step(batch(ROWS), local=1),
    "evaluate: local": lambda r, _: r.evaluate([batch(ROWS)], local="yes"),
    "forward: gather": lambda r, _: r.forward(batch(ROWS), gather="x"),
    "metrics: grad_norm": lambda r, _: r.metrics(grad_norm=0.5),
    "rehearse: every": lambda r, _: r.rehearse(every="all"),
    "save_pretrained: trainable_only": lambda r, p: r.save_pretrained(p, trainable_only="x"),
    "save_checkpoint: asynchronous": lambda r, p: r.save_checkpoint(p, asynchronous=2),
    "rule: verify": lambda *_: rule("aten.relu", "*x -> *x", verify="no"),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("place", BOOLEANS)
def test_what_is_no_boolean_is_refused(place: str, result: Any, tmp_path: Path) -> None:
    with pytest.raises(MeshwrightError, match=rf"{place}=.*legal: True, False"):
        BOOLEANS[place](result, tmp_path / "to")
    assert not [*tmp_path.iterdir()]


def test_booleans_of_numpy_are_booleans(result: Any) -> None:
    assert result.forward(batch(ROWS), gather=np.bool_(True)) is not None
    assert result.evaluate([batch(ROWS)], local=None).batches == 1


MISTAKES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a decision misspelled": (
        lambda _: Overrides(tpp=2),  # type: ignore[call-arg]
        r"override 'tpp' is given \(2\).*legal: branches, chunked_loss, comp.*did you mean 'tp'\?",
    ),
    "a decision that is none": (
        lambda _: Overrides(learning="fast"),  # type: ignore[call-arg]
        r"override 'learning' is given \('fast'\), and is no decision",
    ),
    "no model for a loader": (
        lambda _: data_loader(SAMPLES, ""),  # type: ignore[arg-type]
        r"data_loader: result=''; legal: the model that auto_parallelize returned",
    ),
    "a list of samples": (
        lambda r: fit(r, SAMPLES, optimizer=sgd),
        r"fit: data is a list of samples, which have no dim of rows.*Subset\(samples",
    ),
    "a number of documents": (
        lambda _: packed(4, rows=2).stream(torch.tensor(2)),
        r"documents are a Tensor; legal: what can be read again",
    ),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_one_error_names_the_place_and_the_way_out(name: str, result: Any) -> None:
    mistake, told = MISTAKES[name]
    with pytest.raises(MeshwrightError, match=told):
        mistake(result)


def test_overrides_are_made_as_before() -> None:
    """By name, copied and replaced."""
    made = Overrides(tp=2)
    assert replace(made, dp=4) == Overrides(tp=2, dp=4)
    assert copy.deepcopy(made) == made == pickle.loads(pickle.dumps(made))


# --- the line of a loss ---------------------------------------------------------------------------


def penalised(weight: float, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    kept = logits.logsumexp(-1)[targets != -100]
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + weight * kept.pow(2).mean()
