"""The optimizer that steps, against the one that was planned with."""

import logging
import re
from functools import partial

import pytest
import torch
from torch import optim

from meshwright.costmodel.operators import Problem
from meshwright.executor.parameters import name_of
from meshwright.optim import LAMB, LARS, Muon
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.search import Search
from meshwright.profiles.cluster import Cluster
from meshwright.running import steps
from meshwright.running.steps import other_than_counted
from tests.helpers import tiny
from tests.helpers.planning import linears, problem_of

MADE = {
    "adamw": optim.AdamW, "adamw_fused": partial(optim.AdamW, fused=True), "adam": optim.Adam,
    "sgd": partial(optim.SGD, lr=0.1), "momentum": partial(optim.SGD, lr=0.1, momentum=0.9),
    "adagrad": optim.Adagrad, "lamb": LAMB, "lars": LARS, "muon": Muon,
    "adafactor": optim.Adafactor,
}  # fmt: skip


def weights() -> list[torch.Tensor]:
    return [torch.zeros(2, requires_grad=True)]


@pytest.mark.parametrize("name", MADE)
def test_optimizers_have_the_names_of_plans(name: str) -> None:
    assert name_of(MADE[name](weights())) == name
    assert name_of(optim.Rprop(weights())) is None
    assert name_of(type("AdamW8bit", (optim.SGD,), {})(weights(), lr=0.1)) == "adamw8bit"


def on_a_gpu() -> tuple[Plan, Problem]:
    problem = problem_of(linears(4096, 8, 8), Cluster.from_catalog("h100-sxm", devices_per_node=1))
    return Search(problem, 8, Overrides()).run().best.plan, problem


def test_another_peak_is_said_with_that_of_the_plan() -> None:
    plan, problem = on_a_gpu()
    assert other_than_counted(optim.AdamW(weights()), plan, problem) is None
    said = other_than_counted(optim.SGD(weights(), lr=0.1), plan, problem) or ""
    found = re.search(r"='adamw', a peak of ([\d.]+) GiB; this one is 'sgd', ([\d.]+) GiB", said)
    assert found and float(found[1]) > float(found[2]) > 0
    assert "Rprop" in (other_than_counted(optim.Rprop(weights()), plan, problem) or "")


def test_the_first_step_says_it_once(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(steps, "DIFFERS", 0.0)
    result = tiny.planned(tiny.net())
    optimizer = optim.SGD(result.parameters(), lr=0.1)
    with caplog.at_level(logging.WARNING, logger="meshwright"):
        for _ in range(2):
            result.train_step(tiny.batch(tiny.ROWS), optimizer=optimizer)
    assert caplog.text.count("this one is 'sgd'") == 1
