"""What the inter-op DP is given: stages as the evaluator prices them, and bounds of meshes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from meshwright.costmodel.stages.stage import stage_costs
from meshwright.planner.drafts.candidates import PipelineSetup, make_draft
from meshwright.planner.drafts.unequal_stages import Option
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.search.search import Search
from tests.helpers.enumeration import PLAIN, Enumeration, instance, limited
from tests.helpers.planning import problem_of

INSTANCES = 10


def searches() -> Iterator[tuple[Search, Enumeration]]:
    for seed in range(INSTANCES):
        of, on, batch, _ = instance(seed)
        search = Search(problem_of(of, on), batch, Overrides())
        yield search, Enumeration(of=of, cluster=on, batch=batch)


def test_no_plan_is_faster_than_the_bound_of_a_mesh_it_uses() -> None:
    """Of the enumerated plans, the hundred that promise most."""
    for search, plans in searches():
        bounds = {}
        for m in search.space.microbatch_counts():
            meshes = search.unequal.meshes(m)
            for mesh, bound in zip(meshes, search.unequal.bounds(m, meshes), strict=True):
                if mesh.cp == 1:
                    bounds[m, mesh.dp, mesh.tp] = float(bound)
        for plan in [p for p in plans.plans if p.schedule in PLAIN][:100]:
            step_s = plans.price(plan).prediction.step_time_s
            for _, _, how, _ in plan.stages:
                bound = bounds[plan.num_microbatches, how.dp, how.tp]
                assert bound <= step_s * (1 + 1e-9)


def test_every_mesh_of_a_plan_is_offered() -> None:
    for search, plans in searches():
        for m in search.space.microbatch_counts():
            offered = {(mesh.dp, mesh.tp) for mesh in search.unequal.meshes(m) if mesh.cp == 1}
            used = {
                (how.dp, how.tp)
                for p in plans.plans if p.num_microbatches == m
                for _, _, how, _ in p.stages
            }  # fmt: skip
            assert used <= offered


def test_stages_in_the_table_hold_what_their_blocks_do() -> None:
    """And take no less than them; where no stage is legal they take forever."""
    for search, _ in itertools.islice(searches(), 5):
        for m in search.space.microbatch_counts():
            ways = search.unequal.setups(m, search.unequal.meshes(m), np.inf)
            table, options = search.unequal.table(m, ways)
            for v, option in enumerate(options):
                chain = option.setup.chain
                assert table.devices[v] == option.setup.mesh.devices
                ends = range(len(search.problem.graph.blocks) + 1)
                for i, j in itertools.product(ends, repeat=2):
                    if not search.equal.legal[i, j]:
                        assert np.isinf(table.time_s[v, i, j])
                        continue
                    wanted = stage_costs(chain.sums[i, j], option.setup.setting, option.policy)
                    assert table.static_bytes[v, i, j] == pytest.approx(wanted.static_bytes)
                    assert table.activation_bytes[v, i, j] == pytest.approx(wanted.activation_bytes)


def test_a_mesh_that_can_not_win_is_left_out() -> None:
    left = 0
    for search, _ in searches():
        for m in search.space.microbatch_counts():
            meshes = search.unequal.meshes(m)
            bounds = search.unequal.bounds(m, meshes)
            below = float(np.median(bounds))
            kept = {way.mesh for way in search.unequal.setups(m, meshes, below)}
            assert kept <= {mesh for mesh, b in zip(meshes, bounds, strict=True) if b < below}
            left += len(meshes) - len(kept)
    assert left


def test_the_solution_becomes_stages_that_fit() -> None:
    """Each with no more recompute than its place needs, so none slower than the DP's own."""
    solved = 0
    for seed in range(INSTANCES):
        of, on, batch, rng = instance(seed)
        peaks = Enumeration(of=of, cluster=on, batch=batch).peaks(16)
        small = limited(on, rng.choice(peaks[4:]))
        search = Search(problem_of(of, small), batch, Overrides())
        for m in search.space.microbatch_counts():
            ways = search.unequal.setups(m, search.unequal.meshes(m), np.inf)
            table, options = search.unequal.table(m, ways)
            found = search.unequal.solve(table, m, np.inf, None)
            if found is None:
                continue
            stages = search.unequal.stage_drafts(found, options, m, "1f1b")
            assert stages is not None
            assert sum(s.setup.mesh.devices for s in stages) == on.num_devices
            assert [s.start for s in stages[1:]] == [s.stop for s in stages[:-1]]
            step = PipelineSetup(global_batch_size=batch, num_microbatches=m, schedule="1f1b")
            assert make_draft(search.programs.coster, stages, step, small.device.memory_bytes).fits
            for stage, choice in zip(stages, found.stages, strict=True):
                option: Option = options[choice.variant]
                own = stage.levels.at(stage.run, stage.chosen)
                sums = option.setup.chain.sums[stage.start, stage.stop]
                whole = stage_costs(sums, option.setup.setting, option.policy)
                assert own.backward_s <= float(whole.backward_s) * (1 + 1e-9)
            solved += 1
    assert solved > INSTANCES
