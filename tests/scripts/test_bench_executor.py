"""The figures of the executor's benchmark: what a row says follows from what the ranks measured,
and a comparison of two different works is refused."""

import math
import mmap
import statistics
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.planner.overrides.overrides import check_overrides
from scripts import bench_executor as bench
from scripts.ranks.measure import WARM_UP, Step, resident_bytes, status_bytes

POSITIVE = st.floats(min_value=0.01, max_value=100)


def steps(walls: Sequence[float], loss: float | None = 2.0) -> list[Step]:
    """Steps of one side on one rank, after warm-up steps that must not count."""
    warm = [Step(wall_s=1e6, cpu_s=1e6, loss=loss)] * WARM_UP
    return [*warm, *(Step(wall_s=wall, cpu_s=2 * wall, loss=loss) for wall in walls)]


@given(st.lists(st.tuples(POSITIVE, POSITIVE), min_size=1, max_size=30))
def test_ratio_is_taken_pair_by_pair(pairs: list[tuple[float, float]]) -> None:
    ours, theirs = zip(*pairs, strict=True)
    ratio = bench.ratio_of(ours, theirs)
    ratios = sorted(a / b for a, b in pairs)
    assert ratio.median == pytest.approx(statistics.median(ratios))
    assert ratios[0] <= ratio.low <= ratio.median <= ratio.high <= ratios[-1]
    assert sum(r < ratio.low for r in ratios) <= math.ceil(len(ratios) / 4)
    assert sum(r > ratio.high for r in ratios) <= math.ceil(len(ratios) / 4)


def test_verdict_and_table() -> None:
    for low, median, target, said in (
        (0.7, 0.8, 0.85, "met"), (0.9, 1.0, 1.0, "met"), (0.99, 1.01, 1.0, "within noise"),
        (1.01, 1.02, 1.0, "MISSED"),
    ):  # fmt: skip
        assert bench.verdict(bench.Ratio(low=low, median=median, high=2.0), target) == said
    ranks = [{"ours": steps([0.9, 0.9]), "theirs": steps([1.0, 1.0])}]
    row = bench.row_of("tp2", 0.95, ranks)
    sized = bench.replace(row, peak_bytes={"ours": 3 * 2**20, "theirs": 4 * 2**20})
    for shown, memory in ((row, []), (sized, ["3", "4", "0.750"])):
        line = bench.table([shown]).splitlines()[-1].split()
        assert (line[0], line[2:4]) == ("tp2", ["900", "ms"]) and "met" in line
        assert line[len(line) - len(memory) :] == memory


def test_a_step_takes_what_the_slowest_rank_takes_and_all_ranks_compute() -> None:
    ranks = [
        {"ours": steps([1.0, 2.0, 3.0]), "theirs": steps([4.0, 4.0, 4.0])},
        {"ours": steps([2.0, 1.0, 1.0]), "theirs": steps([2.0, 2.0, 8.0])},
    ]
    row = bench.row_of("pp2", 0.85, ranks)
    assert row.wall_s == {"ours": 2.0, "theirs": 4.0}
    assert row.wall.median == 0.5  # of 2/4, 2/4, 3/8
    assert row.cpu.median == pytest.approx(0.5)  # of 6/12, 6/12, 8/24
    assert row.target == 0.85
    assert row.memory_ratio is None


def test_losses_are_means_of_the_same_work() -> None:
    ranks = [{"ours": steps([1.0], loss=2.0), "theirs": steps([1.0], loss=2.01)}]
    with pytest.raises(ValueError, match=r"one: the losses .* differ by 5\.0e-03"):
        bench.row_of("one", 1.0, ranks)
    # by hand each data-parallel rank knows the mean of its own rows, and of a pipeline only
    # the last stage; our step returns the whole mean on every rank
    ranks = [
        {"ours": steps([1.0], loss=3.0), "theirs": steps([1.0], loss=loss)}
        for loss in (None, 2.0, None, 4.0)
    ]
    assert bench.row_of("dp2-tp2-pp2", 1.0, ranks).loss_difference == 0.0


@pytest.mark.parametrize("name", bench.CASES)
def test_our_plans_can_hold_on_the_ranks_of_the_case(name: str) -> None:
    case = bench.CASES[name]
    setting = bench.setting_of(case, bench.NEAR)
    sizes = {"num_devices": case.ranks, "global_batch_size": setting.rows}
    overrides = case.overrides(setting.layers)
    check_overrides(overrides, **sizes, num_blocks=setting.layers + 2)


def test_resident_bytes_are_read() -> None:
    status = "Name:\tpython\nVmHWM:\t    2048 kB\nVmRSS:\t    1024 kB\n"
    assert status_bytes(status, "VmHWM") == 2 * 2**20
    assert status_bytes(status, "VmRSS") == 2**20
    with pytest.raises(ValueError, match="VmPeak"):
        status_bytes(status, "VmPeak")
    before = resident_bytes("VmRSS")
    with mmap.mmap(-1, 2**26) as block:  # pages that no allocator held before
        block.write(bytes([1]) * 2**26)
        assert resident_bytes("VmRSS") - before > 0.9 * 2**26
    assert resident_bytes("VmRSS") <= resident_bytes("VmHWM")
