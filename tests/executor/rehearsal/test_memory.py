"""Memory of a rehearsal: by kind, by block, and beside the price."""

from __future__ import annotations

import pytest
import torch

from meshwright.executor.rehearsal.memory import BUFFERS, SAVED, TRANSIENT, Memory
from meshwright.planner.pricing import StageCoster, bytes_beside_tensors, evaluate
from tests.executor.rehearsal.rehearsal_runs import checked
from tests.helpers.tiers import tiered
from tests.helpers.tiny import host


def test_what_a_block_leaves_is_saved_and_the_rest_passes() -> None:
    memory = Memory()
    weight = torch.empty(100)
    memory.name([weight], "weights")
    memory.see(torch.empty(2000))  # before the peak is followed
    memory.begin()
    memory.enter("first")
    saved, passing = torch.empty(10), torch.empty(20)
    memory.see(saved)
    memory.see(passing)
    del passing
    memory.enter("")
    gathered, other = torch.empty(40), torch.empty(50)
    memory.see(other)
    memory.communicated([gathered])
    del other
    memory.end()
    late = torch.empty(1000)
    memory.see(late)
    assert memory.peak() == (800, {"weights": 400, SAVED: 40, BUFFERS: 160, TRANSIENT: 200})
    assert memory.saved == {"first": 40}
    assert saved.numel() == 10


PRICED = (
    "llama pp2xdp2 1f1b m4", "llama dp2xtp2 1f1b m2 zero1", "llama dp4 1f1b m1 zero3 hpz2",
    "llama dp4 1f1b m1 zero2", "llama pp2xtp2 1f1b m4", "bert dp4 1f1b m1",
    "llama dp4 1f1b m1 zero3",
)  # fmt: skip
MORE = "the change tier has a pipeline, and ZeRO on both axes"


@pytest.mark.parametrize("line", tiered(PRICED, PRICED[:2].__contains__, MORE))
def test_the_price_is_near_the_rehearsed_peak(line: str) -> None:
    of = checked(line)
    found = of.rehearse()
    plan, problem, assignments = of.priced_on(host(4))
    prices = evaluate(plan, problem, assignments).prediction.course_bytes
    beside = bytes_beside_tensors(plan, StageCoster(problem))
    for priced, less, peak in zip(prices, beside, found.peak_bytes, strict=True):
        assert priced - less == pytest.approx(peak, rel=0.02)
    for log in found.logs.values():
        assert sum(log.peak_by_kind.values()) == log.peak_bytes
        assert sum(log.saved_by_block.values()) == log.peak_by_kind[SAVED]
