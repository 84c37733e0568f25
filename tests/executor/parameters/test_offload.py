"""Optimizer states in host memory train as on one device, and lie where the plan says."""

import math
from unittest import mock

import pytest
import torch

from meshwright.executor.parameters import BlockWeights, clip_, reducer
from meshwright.executor.runtime.runtime import Runtime
from tests.executor.trained_cells import cells
from tests.helpers.memory_pools import DEVICE, HOST, MemoryPools
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier
from tests.models.models import CASES
from tests.parity.parity_cells import Cell
from tests.parity.parity_reference import assert_equal, built, on_its_ranks

CELLS = cells(
    """
    gpt2_tied dp2 m4 zero1 bf16 host50
    mlp dp2 m2 zero2 fp16 host30
    gpt2_tied pp2 m4 zb_h1 front host100
    gpt2_deep pp2 interleaved_1f1b m4 v2 regather host100 weights70
    """,
    """
    llama dp2 m2 zero3 bf16 host100
    llama dp2 m2 zero2 bf16 mixed host100 weights60
    gpt2_untied dp2 m2 host100
    llama dp2 m2 zero2 full host60
    gpt2_deep dp2 m4 zero3 host50
    llama_lora dp2 m2 zero3 host50
    gpt2_deep tp2 m2 host40
    gpt2_deep pp2 interleaved_1f1b m4 v2 host70
    llama dp2 m1 zero1 bf16 host60
    gpt2_untied pp2 m4 bf16 mixed host100
    gpt2_deep dp2 m2 host100 weights100
    gpt2_tied pp2 m4 bf16 host80 weights80
    llama tp2 m2 zb_h1 full host100 weights100
    """,
    "ZeRO 1 and 2 in 16 bits, and pipelines with states and weights there, are kept",
)
WORLD = 2
ADAM = 4 + 4 + 8  # bytes of an element in host memory: weight, gradient, moments
ALONE = Cell.parse("gpt2_deep pp2 m2 host100")  # no rank adds to another's gradients
AWAY = Cell.parse("gpt2_deep pp2 m2 host100 weights100")
RESIDENT = {zero: Cell.parse(f"gpt2_deep dp2 m2 zero{zero} host100") for zero in (0, 1, 2, 3)}
SAVED = Cell.parse("gpt2_tied dp2 m2 zero2 host60")
BESIDE = Cell.parse("gpt2_tied dp2 m2 zero2")  # the same without


@pytest.mark.parametrize("cell", CELLS)
def test_training_equals_one_device(cell: Cell) -> None:
    assert_equal(on_its_ranks(cell), cell.precision)


def trained_in(pools: MemoryPools, cell: Cell) -> tuple[Runtime, torch.optim.Optimizer]:
    """Two steps, counted from the building of the runtime on."""
    case = CASES[cell.case]
    with pools.crossing():
        runtime = built(cell)
        own = [p for p in runtime.stage_parameters if p.hosted]
        pools.place([p.stored for p in own if p.gathered], HOST)
        optimizer = torch.optim.AdamW(runtime.parameters(), lr=1e-3)
        for step in range(2):
            optimizer.zero_grad()
            runtime.train_step(case.batch(cell.rows, step))
            optimizer.step()
        for p in runtime.stage_parameters:
            states = [x for x in optimizer.state[p.api].values() if x.dim()]
            local = [getattr(x, "_local_tensor", x) for x in (*states, p.api.grad, p.stored)]
            wanted = {HOST} if p.hosted else {DEVICE}
            assert {pools.pool_of(x) for x in local} == wanted, p.fqn
            assert p.gathered or pools.pool_of(p.leaf) == DEVICE
    return runtime, optimizer


def resident(cell: Cell) -> int:
    """All states lie in host memory after two steps, and nothing else. Returns their number on this
    rank."""
    pools = MemoryPools()
    runtime, _optimizer = trained_in(pools, cell)
    numel = sum(p.stored.numel() for p in runtime.stage_parameters if p.hosted)
    assert pools.live[HOST] == ADAM * numel
    return numel


@second_tier("where all states lie is kept, of ranks that share none")
@pytest.mark.parametrize("zero", [1, 2, 3])
def test_states_lie_in_host_memory_and_zero_divides_them(zero: int) -> None:
    whole, part = (on_ranks(WORLD, resident, RESIDENT[z]) for z in (0, zero))
    assert part == whole / WORLD


def gradients_leave(cell: Cell) -> None:
    """A step's backwards leave less on the device than the optimizer reads, in buckets that are no
    larger than the model's."""
    pools, left = MemoryPools(), list[int]()
    with (
        pools.crossing(),
        mock.patch.object(reducer, "BUCKET_BYTES", 2**14),
        mock.patch.object(reducer, "ALONE_BYTES", 2**14),
    ):
        runtime = built(cell)
        finish = runtime.finish_gradients

        def counted() -> None:
            left.append(pools.live[DEVICE])
            finish()

        with mock.patch.object(runtime, "finish_gradients", counted):
            batch = CASES[cell.case].batch(cell.rows, 0)
            before = pools.live[DEVICE]
            runtime.train_step(batch)
    read = 4 * sum(p.stored.numel() for p in runtime.stage_parameters if p.reached)
    assert left[0] - before < 0.55 * read


@pytest.mark.parametrize("cell", (ALONE, RESIDENT[2]), ids=lambda cell: cell.name)
def test_gradients_leave_the_device_as_they_are_made(cell: Cell) -> None:
    """But for those on their way."""
    on_ranks(WORLD, gradients_leave, cell)


def weights_away() -> None:
    """The device has memory for the weights of two blocks at once, after the steps for none."""
    peaks, had = [], []
    fetch = BlockWeights._fetch

    def counted(own: BlockWeights, block: str, *, waits: bool) -> None:
        fetch(own, block, waits=waits)
        members = (p.leaf for block in own.away.values() for p in block)
        had.append(sum(leaf.untyped_storage().nbytes() for leaf in members))

    for cell in (ALONE, AWAY):
        pools = MemoryPools()
        with mock.patch.object(BlockWeights, "_fetch", counted):
            runtime, _optimizer = trained_in(pools, cell)
        peaks.append(pools.peak[DEVICE])
    (own,) = (gather.away for gather in runtime.gathers.values())
    assert own is not None
    sizes = sorted(4 * sum(p.leaf.numel() for p in block) for block in own.away.values())
    assert 0 < max(had) <= sum(sizes[-2:]) < 0.8 * sum(sizes)
    assert peaks[0] - peaks[1] > 0.3 * sum(sizes)
    leaves = [p.leaf for p in runtime.stage_parameters if p.away]
    assert not sum(leaf.untyped_storage().nbytes() for leaf in leaves)
    # in fp32 the optimizer's are what is read
    numel = sum(p.stored.numel() for p in runtime.stage_parameters if p.hosted)
    assert pools.live[HOST] == ADAM * numel


def test_weights_lie_on_the_device_while_their_block_runs_alone() -> None:
    on_ranks(WORLD, weights_away)


def norms(cell: Cell) -> list[float]:
    runtime = built(cell)
    runtime.train_step(CASES[cell.case].batch(cell.rows, 0))
    return [float(clip_(runtime.stage_parameters, runtime.place, x)) for x in (0.1, math.inf)]


@second_tier("norms of ranks and of stages are kept (test_norms_and_scales.py)")
def test_norms_count_gradients_of_both_memories() -> None:
    alone, ours = (on_ranks(WORLD, norms, cell) for cell in (BESIDE, SAVED))
    assert ours == pytest.approx(alone, rel=1e-5)
    assert ours[1] == pytest.approx(0.1, rel=1e-3)
