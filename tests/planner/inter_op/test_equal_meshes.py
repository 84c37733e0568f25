"""The cut into equal meshes against enumeration of every cut."""

from itertools import combinations
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.planner.inter_op.equal_meshes import EvenCut, cut_evenly
from meshwright.planner.inter_op.partition import solve_inter_op
from meshwright.planner.inter_op.table import Constraints, StageTable


@st.composite
def problems(draw: st.DrawFn) -> dict[str, Any]:
    """Draw the arguments of cut_evenly; half of the tables repeat few values."""
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    blocks, levels, stages = (
        draw(st.integers(1, 7)),
        draw(st.integers(1, 3)),
        draw(st.integers(1, 5)),
    )
    shape = (levels, blocks + 1, blocks + 1)
    if draw(st.booleans()):
        time_s = rng.integers(1, 5, shape).astype(float)
    else:
        time_s = np.arange(blocks + 1) - np.arange(blocks + 1)[:, None] + rng.uniform(0, 1, shape)
    time_s[rng.random(shape) < draw(st.sampled_from([0.0, 0.2, 0.5]))] = np.inf
    time_s[:, np.tril_indices(blocks + 1)[0], np.tril_indices(blocks + 1)[1]] = np.inf
    fill_s = None
    if draw(st.booleans()):
        fill_s = rng.integers(0, 4, shape).astype(float)
    return {
        "time_s": time_s,
        "fill_s": fill_s,
        "level_of_stage": tuple(rng.integers(0, levels, stages).tolist()),
        "later": draw(st.sampled_from([0.0, 0.5, 1.0, 3.0, 15.0])),
    }


def every_cut(problem: dict[str, Any]) -> dict[tuple[int, ...], float]:
    """Return the objective of every legal cut."""
    time_s, levels = problem["time_s"], problem["level_of_stage"]
    fill_s = time_s if problem["fill_s"] is None else problem["fill_s"]
    blocks, found = time_s.shape[1] - 1, {}
    for inner in combinations(range(1, blocks), len(levels) - 1):
        cuts = (0, *inner, blocks)
        where = list(zip(levels, cuts, cuts[1:], strict=False))
        times = [float(time_s[w]) for w in where]
        if max(times) < np.inf:
            total = sum(float(fill_s[w]) for w in where)
            found[cuts] = total + problem["later"] * max(times)
    return found


@settings(max_examples=250)
@given(problems())
def test_cut_equals_enumeration(problem: dict[str, Any]) -> None:
    legal = every_cut(problem)
    cut = cut_evenly(**problem)
    if not legal:
        assert cut is None
        return
    assert cut is not None
    assert cut == cut_evenly(**problem)
    assert cut.cuts in legal
    assert cut.objective_s == pytest.approx(legal[cut.cuts], rel=1e-12)
    assert cut.objective_s == pytest.approx(min(legal.values()), rel=1e-11)
    assert cut.objective_s == cut.sum_s + problem["later"] * cut.t_max_s


@settings(max_examples=150)
@given(problems(), st.floats(0.5, 1.5))
def test_only_objectives_below_the_cutoff_count(problem: dict[str, Any], factor: float) -> None:
    optimum = min(every_cut(problem).values(), default=np.inf)
    cutoff = factor * optimum if optimum < np.inf else 10.0
    cut = cut_evenly(**problem, cutoff=cutoff)
    assert (cut is not None) == (optimum < cutoff)
    if cut is not None:
        assert cut.objective_s == pytest.approx(optimum, rel=1e-11)


@settings(max_examples=100)
@given(problems())
def test_one_level_agrees_with_the_inter_operator_program(problem: dict[str, Any]) -> None:
    """One device per stage and as many devices as stages leave that program the same choice."""
    stages, later = len(problem["level_of_stage"]), int(problem["later"])
    time_s = problem["time_s"][:1]
    fill_s = None if problem["fill_s"] is None else problem["fill_s"][:1]
    cut = cut_evenly(time_s, fill_s, [0] * stages, later)
    solution = solve_inter_op(
        StageTable(
            devices=np.array([1]),
            time_s=time_s,
            fill_s=fill_s,
            static_bytes=np.zeros_like(time_s),
            activation_bytes=np.zeros_like(time_s),
        ),
        Constraints(num_devices=stages, memory_bytes=0.0, in_flight=lambda s: s),
        num_microbatches=later + 1,
    )
    assert (cut is None) == (solution is None)
    if cut is not None and solution is not None:
        assert cut.objective_s == pytest.approx(solution.objective_s, rel=1e-11)


def equal_blocks(num_blocks: int) -> Any:
    length = np.arange(num_blocks + 1.0) - np.arange(num_blocks + 1.0)[:, None]
    return np.where(length > 0, length, np.inf)[None]


def test_equal_blocks_are_cut_evenly() -> None:
    assert cut_evenly(equal_blocks(12), None, [0] * 4, 7.0) == EvenCut(
        cuts=(0, 3, 6, 9, 12), objective_s=12 + 7 * 3, t_max_s=3.0, sum_s=12.0
    )


def test_ties_take_the_smallest_cuts() -> None:
    """Three stages of at most 4 blocks: any place of the short one costs the same."""
    cut = cut_evenly(equal_blocks(10), None, [0] * 3, 7.0)
    assert cut is not None and cut.cuts == (0, 2, 6, 10)


def test_the_level_of_a_stage_decides_its_cost() -> None:
    """The last stage is twice as slow per block, so it gets half as many."""
    time_s = np.concatenate([equal_blocks(10), 2 * equal_blocks(10)])
    cut = cut_evenly(time_s, None, [0, 0, 1], 100.0)
    assert cut is not None and cut.cuts == (0, 4, 8, 10)


def test_malformed_input_is_named() -> None:
    time_s = equal_blocks(3)
    with pytest.raises(ValueError, match=r"time_s has shape \(4, 4\)"):
        cut_evenly(time_s[0], None, [0], 1.0)
    with pytest.raises(ValueError, match="fill_s has shape"):
        cut_evenly(time_s, time_s[0], [0], 1.0)
    with pytest.raises(ValueError, match=r"level_of_stage=\[0, 1\]"):
        cut_evenly(time_s, None, [0, 1], 1.0)
    with pytest.raises(ValueError, match="level_of_stage"):
        cut_evenly(time_s, None, [], 1.0)
    with pytest.raises(ValueError, match="i >= j"):
        cut_evenly(np.zeros((1, 4, 4)), None, [0], 1.0)
