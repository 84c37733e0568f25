"""`meshwright selftest`: what it compares, and what it says of a plan that is wrong."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from meshwright import selftest
from meshwright.profiles.cluster import Cluster
from meshwright.selftest import PLANS, SMALL, STEPS, Cell, Selftest, Timed
from tests.helpers.tiers import second_tier
from tests.meshwright.commands import Captured, failed, printed

CELL = Cell(ranks=2, precision="fp32", plan="dp2", error=2e-6)
TIMED = Timed(plan="dp2", predicted_s=0.3, measured_s=0.4, predicted_bytes=2e6, measured_bytes=1e6)
FOUND = Selftest(machine={"torch": "2"}, cells=[CELL], timed=[TIMED], rehearsed=False, seconds=9.0)


def answers(monkeypatch: pytest.MonkeyPatch, found: Selftest) -> None:
    monkeypatch.setattr(selftest, "selftest", lambda *_, **__: found)


def test_a_table_says_how_far_prices_are(
    monkeypatch: pytest.MonkeyPatch, capsys: Captured, tmp_path: Path
) -> None:
    answers(monkeypatch, FOUND)
    out = printed(capsys, "selftest", "-o", str(tmp_path / "found.json"))
    assert "-25%" in out and "+100%" in out and "measured" in out
    assert "1 of 1 plans equal one device; steps are 25% off in the mean" in out
    assert json.loads((tmp_path / "found.json").read_text()) == FOUND.to_dict()
    assert FOUND.to_dict()["ok"]


def test_a_plan_that_differs_is_an_error(monkeypatch: pytest.MonkeyPatch, capsys: Captured) -> None:
    wrong = replace(FOUND, cells=[CELL, replace(CELL, error=2e-3)])
    answers(monkeypatch, wrong)
    out = printed(capsys, "selftest", "--ranks", "2", code=1)
    assert "DIFFERS" in out and "1 of 2 plans equal one device" in out
    assert replace(CELL, precision="bf16", error=2e-3).ok


def test_numbers_that_the_machine_has_not(capsys: Captured) -> None:
    assert "--ranks: '0'; legal: an integer from 1" in failed(capsys, ["selftest", "--ranks", "0"])
    said = failed(capsys, ["selftest", "--ranks", "1", "--budget", "-1"])
    assert "selftest: budget=-1.0; legal: seconds above 0" in said


def test_its_model_learns_and_is_the_same_everywhere() -> None:
    losses = selftest.alone(SMALL, torch.device("cpu"))
    assert len(losses) == STEPS and losses == sorted(losses, reverse=True)
    assert losses == selftest.alone(SMALL, torch.device("cpu"))


@second_tier("what it writes stays; this one launches ranks and profiles")
def test_two_ranks_are_tested(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of it, in small: every plan equals one device, peaks are as priced."""
    sizes = replace(SMALL, width=128)
    monkeypatch.setattr(selftest, "ON_CPU", sizes)
    rates = Cluster.local
    monkeypatch.setattr(Cluster, "local", lambda n, kind=None: rates(n, "cpu", measure=False))
    found = selftest.selftest(2, budget_s=2.0)
    assert found.ok and found.rehearsed
    assert [cell.ranks for cell in found.cells] == [1] * 8 + [2] * 4
    assert len({cell.plan for cell in found.cells}) == len(found.cells)
    assert 6 <= len(found.timed) <= PLANS
    for timed in found.timed:
        assert timed.measured_s > 0
        assert timed.predicted_bytes == pytest.approx(timed.measured_bytes, rel=0.05)
