"""Plans kept beside a run's checkpoints: taken again for as many hosts, made ahead for others."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch

import meshwright.plan_search
from meshwright import Cluster, Overrides, Plan, fit
from meshwright.profiles.inputs import MeshwrightError
from meshwright.training.plans import KeptPlans
from tests.helpers.tiny import Net, batch, loss, net
from tests.meshwright.data.feeding import ROWS, Tokens

ASKED: dict[str, Any] = {
    "example_inputs": batch(4), "global_batch_size": ROWS, "loss_fn": loss, "precision": "fp32",
}  # fmt: skip


@pytest.fixture
def one() -> Cluster:
    return Cluster.local(1, "cpu", measure=False)


def no_search(monkeypatch: pytest.MonkeyPatch) -> None:
    def searched(*_: Any) -> None:
        raise AssertionError("a search, where a plan was there")

    monkeypatch.setattr(meshwright.plan_search, "_searched", searched)


def test_a_plan_is_searched_once(
    tmp_path: Path, one: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptPlans(folder=tmp_path, asked={**ASKED, "overrides": Overrides(recompute="full")})
    first = kept.planned(net(), one)
    no_search(monkeypatch)
    assert kept.planned(net(), one).plan == first.plan == Plan.load(kept.path(one))


def test_another_cluster_and_other_wishes_have_other_plans(tmp_path: Path, one: Cluster) -> None:
    kept = KeptPlans(folder=tmp_path, asked=ASKED)
    wishes = [{"overrides": Overrides(zero=1)}, {"global_batch_size": 16}, {"optimizer": "sgd"}]
    others = [KeptPlans(folder=tmp_path, asked={**ASKED, **wish}).path(one) for wish in wishes]
    clusters = [
        dataclasses.replace(one, num_nodes=2),
        dataclasses.replace(one, devices_per_node=2),
        Cluster.from_catalog("h100-sxm", devices_per_node=1),
    ]
    paths = {kept.path(one), *others, *map(kept.path, clusters)}
    assert len(paths) == 1 + len(wishes) + len(clusters)
    again = {**ASKED, "example_inputs": batch(4, 1)}
    assert kept.path(one) == KeptPlans(folder=tmp_path, asked=again).path(one)


def test_a_plan_of_another_model_is_made_again(
    tmp_path: Path, one: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    kept = KeptPlans(folder=tmp_path, asked=ASKED)
    kept.planned(net(), one)
    changed = Net()
    changed.head = torch.nn.Linear(16, 24, bias=True)
    with caplog.at_level(logging.WARNING):
        result = kept.planned(changed, one)
    assert "made again" in caplog.text and str(kept.path(one)) in caplog.text
    assert result.plan == Plan.load(kept.path(one))


def test_plans_for_other_numbers_of_hosts_are_made_ahead(
    tmp_path: Path, one: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept = KeptPlans(folder=tmp_path, asked=ASKED)
    result = kept.planned(net(), one)
    kept.plan_ahead(result, one, [1, 2, 4])
    for count in (2, 4):
        other = dataclasses.replace(one, num_nodes=count)
        assert Plan.load(kept.path(other)).num_ranks == count
    no_search(monkeypatch)
    kept.plan_ahead(result, one, [1, 2, 4])


def test_hosts_on_which_a_run_cannot_go_on_are_named_before_it_begins(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Weights, gradients and states take 65 KB: one device of 48 KiB has no room, four have."""
    base = Cluster.local(1, "cpu", measure=False)
    small = dataclasses.replace(
        base.device, memory_bytes=48 * 1024, reserved_bytes=0, communicator_bytes=0
    )
    four = dataclasses.replace(base, device=small, num_nodes=4)
    kept = KeptPlans(folder=tmp_path, asked={**ASKED, "memory_margin": 0.0})
    with caplog.at_level(logging.WARNING):
        kept.plan_ahead(kept.planned(net(), four), four, [1])
    assert "with 1 hosts this run can't go on" in caplog.text


def test_a_folder_that_cannot_be_written_is_a_warning(
    tmp_path: Path, one: Cluster, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "plans").touch()
    with caplog.at_level(logging.WARNING):
        KeptPlans(folder=tmp_path / "plans", asked=ASKED).planned(net(), one)
    assert "a plan is not kept" in caplog.text


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"folder": None}, r"fit: hosts are given, but no folder"),
        ({"planning": {**ASKED, "plan": "plan.json"}}, r"fit: hosts are given, but the plan is"),
        ({"hosts": (2, 0)}, r"fit: hosts\[1\]=0"),
        ({"hosts": ("2",)}, r"fit: hosts\[0\]='2'"),
        ({"hosts": 2}, r"fit: hosts=2"),
        ({"hosts": range(10**12)}, r"fit: hosts=range"),
    ],
)
def test_hosts_that_cannot_be_are_refused(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    asked = {"planning": ASKED, "hosts": (2,), "folder": tmp_path, **given}
    with pytest.raises(MeshwrightError, match=says):
        fit(net(), Tokens(), optimizer=lambda r: torch.optim.SGD(r.parameters()), **asked)
