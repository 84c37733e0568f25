"""What ranks see of a run: the same loss, rates of the global batch, one log."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from meshwright.monitor.deviation import TERMS
from tests.helpers.launching import Results, results_of
from tests.meshwright.data.feeding import LENGTH, RANKS, ROWS, plain_losses
from tests.meshwright.monitor.monitor_worker import PLANS, STEPS


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Results:
    worker = Path(__file__).with_name("monitor_worker.py")
    return results_of(worker, tmp_path_factory.mktemp("monitor"), ranks=RANKS, timeout_s=300)


@pytest.mark.parametrize("plan", PLANS)
def test_metrics_of_ranks_are_of_one_global_step(launched: Results, plan: str) -> None:
    ranks = launched[plan]["ranks"]
    of_ranks = [seen["metrics"] for seen in ranks]
    assert len({m["loss"] for m in of_ranks}) == 1 and {m["step"] for m in of_ranks} == {STEPS}
    for m in of_ranks:
        assert all(math.isfinite(x) for x in m.values())
        assert m["step_time_s"] == pytest.approx(m["train_step_s"] + m["between_s"])
        assert m["rows_per_s"] == pytest.approx(ROWS / m["step_time_s"])
        assert m["tokens_per_s"] == pytest.approx(ROWS * LENGTH / m["step_time_s"])
        assert m["peak_memory_bytes"] > 1e6
        assert {f"predicted_{n}" for n in ("between_s", "step_time_s", *TERMS)} <= m.keys()
    logged = ranks[0]["logged"]
    assert [row["loss"] for row in logged][:1] == pytest.approx(plain_losses([range(ROWS)]))
    assert len({frozenset(row.keys() - {*TERMS, "grad_norm"}) for row in logged}) == 1
    for row in logged[5:20]:
        assert sum(row[name] for name in TERMS) == pytest.approx(row["train_step_s"])


@pytest.mark.parametrize("plan", PLANS)
def test_rank_0_alone_writes_and_says(launched: Results, plan: str) -> None:
    first, *others = launched[plan]["ranks"]
    assert [row["step"] for row in first["logged"]] == [*range(1, STEPS + 1)]
    assert first["board"] == [10, 20]
    assert "grad_norm" in first["logged"][3] and "grad_norm" not in first["logged"][2]
    assert [line for line in first["said"] if line == first["told"]] == [first["told"]]
    for seen in others:
        assert seen["logged"] == seen["board"] == seen["said"] == []
        assert "after 20 steps: " in seen["told"]


def test_what_a_loader_takes_is_between_the_steps(launched: Results) -> None:
    for steps in launched["fed"]["ranks"]:
        assert [m["step"] for m in steps] == [1, 2]
        assert 0 < steps[1]["input_s"] < steps[1]["between_s"]
        assert steps[1]["rows_per_s"] == pytest.approx(ROWS / steps[1]["step_time_s"])


def test_bytes_moved_are_said_by_rank_0_and_steps_go_on_counting(launched: Results) -> None:
    first, *others = launched["moved"]["ranks"]
    for what in ("writing", "reading"):
        lines = [line for line in first["said"] if line.startswith(f"{what} a checkpoint: ")]
        said, whose = lines[-1].removeprefix(f"{what} a checkpoint: ").split(" (")
        done, total = said.split(" of ")
        assert done == total and whose == "rank 0 of 4)"
    assert {seen["step"] for seen in (first, *others)} == {4}
    for seen in others:
        assert not [line for line in seen["said"] if " a checkpoint: " in line]
