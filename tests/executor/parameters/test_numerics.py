"""On four ranks norms, clipping, skipped steps and optimizers are those of one device.

One launch (`numerics_worker.py`) makes all results; each test reads its own.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.executor.parameters.numerics_worker import (
    LAYOUTS,
    NORM_LAYOUTS,
    NORM_TYPES,
    OPTIMIZER_LAYOUTS,
    OPTIMIZERS,
)
from tests.helpers.launching import Results, results_of

TOLERANCE = 1e-5
TIMEOUT_S = 300


@pytest.fixture(scope="module")
def numerics(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("numerics")
    worker = Path(__file__).with_name("numerics_worker.py")
    return results_of(worker, folder, ranks=4, timeout_s=TIMEOUT_S)


def test_every_rank_ends_in_order(numerics: Results) -> None:
    assert numerics.run.ok, numerics.run.tail()
    assert not any(rank.killed or rank.children_left for rank in numerics.run.ranks)


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("layout", OPTIMIZER_LAYOUTS)
def test_an_optimizer_gives_the_weights_of_one_device(
    numerics: Results, layout: str, name: str
) -> None:
    """Three steps with clipping, two parameter groups and a learning-rate schedule."""
    found = numerics[f"optimizers {layout}"][name]
    assert found["clipped"]
    assert found["loss"] < TOLERANCE
    assert found["norm"] < TOLERANCE
    assert found["state"][0] < TOLERANCE, found["state"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_an_optimizer_over_whole_tensors_goes_on_from_its_states(
    numerics: Results, layout: str
) -> None:
    found = numerics[f"resumed {layout}"]
    assert found["difference"][0] < TOLERANCE, found["difference"]
    assert found["moved"]


@pytest.mark.parametrize("layout", NORM_LAYOUTS)
def test_a_norm_counts_every_element_once(numerics: Results, layout: str) -> None:
    found = numerics[f"norms {layout}"]
    assert set(found["norms"]) == {str(norm_type) for norm_type in NORM_TYPES}
    for norm_type, norm in found["norms"].items():
        assert len(norm["ours"]) == 4
        assert len(set(norm["ours"])) == 1, norm_type  # the same bits on all ranks
        ours = float.fromhex(norm["ours"][0])
        assert ours == pytest.approx(norm["wanted"], rel=TOLERANCE), norm_type
    assert found["clipped"][0] < TOLERANCE, found["clipped"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_rank_with_nan_or_inf_makes_all_skip_the_step(numerics: Results, layout: str) -> None:
    found = numerics[f"guard {layout}"]
    assert found["admitted"] == [[True, False, False, False, False]] * 4
    assert found["scales"] == [[1024.0, 1024.0, 512.0, 256.0, 128.0]] * 4
    assert found["skipped"] == [4] * 4
    assert found["untouched"] and found["dropped"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_loss_scale_changes_no_bit_of_a_finite_step(numerics: Results, layout: str) -> None:
    assert numerics[f"guard {layout}"]["unscaled"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_inside_reduced_a_rank_reads_the_norm_of_the_whole_tensor(
    numerics: Results, layout: str
) -> None:
    found = numerics[f"reduced {layout}"]
    assert found["divided"] > 0
    assert found["norm"] < TOLERANCE
    assert found["stored"] < TOLERANCE
