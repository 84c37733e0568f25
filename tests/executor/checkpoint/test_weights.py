"""Weights under every plan are the single device's, bit for bit: initialised, or read from files.

One launch of four ranks (`weights_worker.py`) does everything; each test reads its part of the
results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.executor.checkpoint.weights_worker import CASE_NAMES, LAYOUTS, LOAD_CASES, LOADED
from tests.helpers.launching import Results, results_of

TOLERANCE, HALF_TOLERANCE = 1e-5, 1e-2  # of the loss: sums in another order; bf16
TIMEOUT_S = 500


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("weights")
    worker = Path(__file__).with_name("weights_worker.py")
    return results_of(worker, folder, ranks=4, timeout_s=TIMEOUT_S)


def check(result: dict[str, Any], tolerance: float = TOLERANCE) -> None:
    """State and buffers bit for bit, and a loss that says the graphs read them."""
    assert result["differing"] == []
    assert result["extra"] == []
    assert result["loss"] == pytest.approx(result["alone"], rel=tolerance)


def test_every_rank_ends_in_order(results: Results) -> None:
    assert results.run.ok, results.run.tail()
    assert not any(rank.killed or rank.children_left for rank in results.run.ranks)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("case", CASE_NAMES)
def test_initialised_like_one_device(results: Results, case: str, layout: str) -> None:
    result = results[f"init-{case}-{layout}"]
    check(result, HALF_TOLERANCE if LAYOUTS[layout].precision == "bf16" else TOLERANCE)
    assert result["alike"]


@pytest.mark.parametrize("layout", LOADED)
@pytest.mark.parametrize("case", LOAD_CASES)
def test_loaded_from_every_format(results: Results, case: str, layout: str) -> None:
    loaded = results[f"load-{case}"]
    assert {"torch", "safetensors", "dcp", "dcp_model"} <= set(loaded["formats"])
    for kind in loaded["formats"]:
        check(loaded[f"{layout}-{kind}"])


@pytest.mark.parametrize("layout", LOADED)
@pytest.mark.parametrize("case", LOAD_CASES)
def test_a_rank_reads_what_it_holds_and_no_more(results: Results, case: str, layout: str) -> None:
    loaded = results[f"load-{case}"]
    for kind in set(loaded["formats"]) - {"dcp", "dcp_model"}:  # which read whole chunks
        assert [read for read, _ in loaded[f"{layout}-{kind}"]["reads"]] == [
            held for _, held in loaded[f"{layout}-{kind}"]["reads"]
        ]


@pytest.mark.parametrize("layout", ["tp4", "pp2xtp2", "zero3"])
def test_loaded_from_a_checkpoint_of_another_plan(results: Results, layout: str) -> None:
    check(results["load_checkpoint"][layout])
