"""Company for a measurement starts, runs, and is gone afterwards."""

import multiprocessing

import pytest

from meshwright.profiles.measure.neighbours import neighbours
from meshwright.profiles.op_signature import OperandIndex, OpSignature

ADD = OpSignature.of_call(
    "aten.add.Tensor",
    [("float32", (64, 64), True), ("float32", (64, 64), False)],
    [OperandIndex(0), OperandIndex(1)],
    {},
)


def test_neighbours_run_beside_the_block_and_not_after_it() -> None:
    with pytest.raises(ZeroDivisionError), neighbours(1, [ADD]):
        assert len(multiprocessing.active_children()) == 1
        raise ZeroDivisionError
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize(("count", "signatures"), [(0, [ADD]), (2, [])])
def test_no_company_without_need(count: int, signatures: list[OpSignature]) -> None:
    with neighbours(count, signatures):
        assert multiprocessing.active_children() == []
