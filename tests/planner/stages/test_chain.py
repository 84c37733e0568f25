"""Stages of equal blocks are one run, whatever the place; what each run costs is tested with
`BlockPrograms`."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from meshwright.costmodel.stages.sums import MAXIMA, Sums
from meshwright.planner.drafts.mesh import Mesh
from meshwright.planner.stages.chain import Chain
from tests.helpers.planning import Traced, case, large_gpt2, linears, odd_cluster, programs_of

MODELS = {
    "linears": lambda: linears(64, 6, 4, 16), "gpt2": large_gpt2, "llama": lambda: case("llama"),
    "resnet": lambda: case("resnet"),
}  # fmt: skip


def chain_of(of: Traced, forced: tuple[str | None, ...] = ()) -> Chain:
    programs = programs_of(of, odd_cluster(5))
    found = programs.chain(
        programs.coster.setting(Mesh(dp=2, tp=2), rows=2, microbatches=2), "fast", forced
    )
    assert found is not None
    return found


def kinds(chain: Chain, start: int, stop: int) -> tuple[tuple[int, str | None], ...]:
    """What the blocks of a stage are: their solved tables, and the policies forced on them."""
    tables = [id(table) for table in chain.tables[start:stop]]
    return tuple(zip(tables, chain.forced[start:stop], strict=True))


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("mixed", [False, True])
def test_stages_share_a_run_if_and_only_if_their_blocks_are_alike(name: str, mixed: bool) -> None:
    of = MODELS[name]()
    count = len(of.graph.blocks)
    chain = chain_of(of, tuple("full" if k % 3 == 1 else None for k in range(count)) * mixed)
    of_row: dict[int, tuple[tuple[int, str | None], ...]] = {}
    for i, j in itertools.combinations(range(count + 1), 2):
        row = int(chain.runs.index[i, j])
        assert of_row.setdefault(row, kinds(chain, i, j)) == kinds(chain, i, j)
        assert chain.runs.blocks[row] == j - i
    assert len(set(of_row.values())) == len(of_row) == len(chain.runs.seconds) - 1
    assert (chain.runs.index[np.tril_indices(count + 1)] == 0).all()
    assert np.isinf(chain.runs.seconds[0])


@pytest.mark.parametrize("name", MODELS)
def test_a_stage_is_the_sum_of_its_blocks_on_its_path(name: str) -> None:
    """But for parameters that several of them read, which are held once."""
    chain = chain_of(MODELS[name]())
    for i, j in itertools.combinations(range(len(chain.blocks) + 1), 2):
        parts = Sums(np.array([part.array for part in chain.block_sums(i, j)]))
        sums = chain.sums[i, j]
        largest = parts.array[:, -MAXIMA:].max(axis=0)
        np.testing.assert_allclose(sums.array[-MAXIMA:], largest, rtol=1e-9)
        if not chain.shared:
            added = parts.array[:, :-MAXIMA].sum(axis=0)
            np.testing.assert_allclose(sums.array[:-MAXIMA], added, rtol=1e-9)
        else:
            assert sums.parameters <= parts.parameters.sum() * (1 + 1e-9)


@pytest.mark.parametrize("name", MODELS)
def test_typical_runs_add_up_typical_blocks(name: str) -> None:
    """What the whole model's typical sums are made of, stage by stage."""
    chain = chain_of(MODELS[name]())
    count = len(chain.blocks)
    ends = sorted({0, 1, count // 2, count - 1, count})
    runs = chain.typical_runs(ends)
    assert runs.index[0, -1] > 0 and np.isinf(runs.seconds[0])
    assert (runs.index[np.tril_indices(len(ends))] == 0).all()
    whole = runs.sums[runs.index[0, -1]].array
    np.testing.assert_allclose(whole, chain.typical().array, rtol=1e-9, atol=1e-12)
    for i, j in itertools.combinations(range(len(ends)), 2):
        assert runs.blocks[runs.index[i, j]] == ends[j] - ends[i]
        parts = [runs.sums[runs.index[k, k + 1]].array for k in range(i, j)]
        together = runs.sums[runs.index[i, j]].array
        assert (together[:-MAXIMA] <= sum(parts)[:-MAXIMA] * (1 + 1e-9) + 1e-12).all()
        assert (together[-MAXIMA:] == np.max(parts, axis=0)[-MAXIMA:]).all()
