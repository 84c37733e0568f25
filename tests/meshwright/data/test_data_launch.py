"""A rank feeds its own rows: the losses are those of one device on the global batches."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.data.order import Order
from tests.helpers.launching import Results, results_of
from tests.meshwright.data.feeding import PLANS, RANKS, ROWS, SAMPLES, plain_losses, planned


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Results:
    worker = Path(__file__).with_name("data_worker.py")
    return results_of(worker, tmp_path_factory.mktemp("data"), ranks=RANKS, timeout_s=300)


@pytest.fixture(scope="module")
def expected() -> list[float]:
    order = Order(size=SAMPLES, rows=ROWS, shuffle=True, seed=3, drop_last=False)
    return plain_losses([batch.samples for batch in order.batches(0)])


@pytest.mark.parametrize("plan", PLANS)
def test_own_rows_train_as_the_global_batch_does(
    launched: Results, expected: list[float], plan: str
) -> None:
    found = launched[plan]
    assert len(expected) == 3 and found["losses"] == pytest.approx(expected, rel=1e-5)
    assert found["eval"][0] == pytest.approx(found["eval"][1], rel=1e-6)


def test_only_stages_that_read_data_need_any(launched: Results) -> None:
    assert launched["pp4"]["reads"] == [True, False, False, True]
    assert launched["dp4"]["reads"] == [True] * 4


@pytest.mark.parametrize(
    ("case", "says"),
    [
        ("of another share", "ranks of one result.data_parallel.rank give the same rows"),
        ("longer on a rank", "on ranks [2, 3]: rows have the same dtype and sizes on every rank"),
        ("more rows on a rank", "ranks give [4, 4, 8, 8] rows, where the shares of a global batch"),
        ("none", "it is None, and this rank reads data"),
        ("another key", "['ids'] were not among example_inputs"),
        ("sharded dataset", f"has {[SAMPLES + k for k in range(RANKS)]} samples on the ranks"),
        ("small dataset", "less than a batch of 8"),
        ("no len", "without len() or samples by number"),
    ],
)
def test_every_rank_is_told_what_is_wrong(launched: Results, case: str, says: str) -> None:
    for said in launched["errors"][case]:
        assert says in said, said


def test_one_device_has_all_rows() -> None:
    share = planned(ranks=1).data_parallel
    assert (share.rank, share.size, share.reads) == (0, 1, True)
    assert share.rows == tuple(range(ROWS))
