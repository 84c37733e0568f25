"""Recompute policies block by block: in the plan, in its price, and no slower than one policy."""

from __future__ import annotations

import contextlib

import pytest

from meshwright.planner.plan.infeasible import InfeasibleError
from tests.helpers.enumeration import limited
from tests.helpers.planning import cluster, linears
from tests.planner.search.test_search import CLUSTERS, search, searching


@pytest.mark.parametrize(
    "recompute",
    [{"layers.0": "full"}, {"layers.1": "selective", "layers.2": "none"}, {"**": "full"}],
    ids=str,
)
@pytest.mark.parametrize("name", CLUSTERS)
def test_recompute_by_block_is_in_the_plan_and_priced(name: str, recompute: dict[str, str]) -> None:
    running = searching(CLUSTERS[name], recompute=recompute)
    for draft in running.run().drafts:
        made = running.written(draft)
        policies = {
            block: policy for stage in made.plan.stages
            for block, policy in zip(stage.blocks, stage.policies, strict=True)
        }  # fmt: skip
        for block, policy in policies.items():
            assert policy == recompute.get(block, recompute.get("**", "none"))
        assert made.step_time_s == pytest.approx(draft.step_time_s, rel=1e-9)
        ours, written = (c.evaluation.prediction for c in (draft, made))
        peaks = map(max, ours.peak_memory_bytes, written.course_bytes)
        assert [*peaks] == pytest.approx(written.peak_memory_bytes, abs=1)


def test_recompute_by_block_is_no_slower_than_one_policy() -> None:
    """Where memory binds; on one device there is nothing else to choose."""
    of, on = linears(64, 4, 8, 512), cluster(1)
    peaks = [
        max(found.best.evaluation.prediction.peak_memory_bytes)
        for found in (
            search(on, of, batch=8, num_microbatches=1, recompute=policy)
            for policy in ("full", "none")
        )
    ]
    gains = 0
    for share in (0.9, 0.7, 0.5, 0.3, 0.1, 0.0):
        small = limited(on, peaks[0] + share * (peaks[1] - peaks[0]))
        best = search(small, of, batch=8, num_microbatches=1, forbid=["offload"]).best
        assert any(policy != "none" for s in best.plan.stages for policy in s.policies)
        uniform = []
        for policy in ("selective", "full"):
            with contextlib.suppress(InfeasibleError):
                uniform.append(
                    search(
                        small, of, batch=8, num_microbatches=1, recompute=policy, forbid=["offload"]
                    ).best
                )
        assert all(best.step_time_s <= u.step_time_s * (1 + 1e-9) for u in uniform)
        gains += all(best.step_time_s < u.step_time_s * (1 - 1e-3) for u in uniform)
    assert gains >= 3
