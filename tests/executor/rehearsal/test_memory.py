"""Memory of a rehearsal: by kind, by block, and beside the price."""

from __future__ import annotations

import pytest
import torch

from meshwright import Cluster, auto_parallelize
from meshwright.executor.rehearsal import Rehearsal
from meshwright.executor.rehearsal.memory import BUFFERS, SAVED, TRANSIENT, Memory
from meshwright.planner.overrides import Overrides
from tests.models.models import CASES


def test_what_a_block_leaves_is_saved_and_the_rest_passes() -> None:
    memory = Memory()
    weight = torch.empty(100)
    memory.name([weight], "weights")
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


@pytest.mark.parametrize(
    ("name", "decisions"),
    [
        ("llama", {"dp": 4, "zero": 2, "num_microbatches": 1}),
        ("llama", {"dp": 2, "tp": 2, "zero": 1, "num_microbatches": 2}),
        ("llama", {"dp": 2, "pp": 2, "zero": 0, "schedule": "1f1b", "num_microbatches": 4}),
        ("llama", {"tp": 2, "pp": 2, "schedule": "1f1b", "num_microbatches": 4}),
        ("bert", {"dp": 4, "zero": 0, "num_microbatches": 1}),
        ("llama", {"dp": 4, "zero": 3, "num_microbatches": 1}),
        ("llama", {"dp": 4, "zero": 3, "hpz": 2, "num_microbatches": 1}),
    ],
    ids=str,
)
def test_the_price_is_near_the_rehearsed_peak(name: str, decisions: dict[str, int]) -> None:
    found = _rehearsed(name, decisions)
    for priced, peak in zip(found.priced_bytes, found.peak_bytes, strict=True):
        assert priced == pytest.approx(peak, rel=0.02)
    for log in found.logs.values():
        assert sum(log.peak_by_kind.values()) == log.peak_bytes
        assert sum(log.saved_by_block.values()) == log.peak_by_kind[SAVED]


def _rehearsed(name: str, decisions: dict[str, int]) -> Rehearsal:
    case, cluster = CASES[name], Cluster.local(4, "cpu", measure=False)
    given = {"dp": 1, "tp": 1, "pp": 1, "recompute": "none", **decisions}
    result = auto_parallelize(
        case.model(),
        cluster,
        example_inputs=case.batch(4, 0),
        global_batch_size=16,
        precision="fp32",
        overrides=Overrides(**given),  # type: ignore[arg-type]
        profile=False,
    )
    return result.rehearse()
