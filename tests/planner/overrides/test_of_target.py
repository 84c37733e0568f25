"""What a target can't run is not searched for it, and refused where it is asked for."""

import dataclasses
from typing import Any

import pytest

from meshwright.costmodel.mesh import Mesh
from meshwright.costmodel.sharing import Sharing
from meshwright.costmodel.targets import EAGER, target_named
from meshwright.planner.drafts.space import Space
from meshwright.planner.overrides.of_target import check_plan_for, for_target
from meshwright.planner.overrides.overrides import OverrideError, Overrides
from meshwright.planner.overrides.restrictions import restrict
from meshwright.planner.plan.plan import Plan, PlanError, StagePlan
from tests.helpers.planning import case, cluster, problem_of
from tests.helpers.refusals import refusals, refused
from tests.planner.overrides.test_restrictions import REFUSED


def space(target: str, **knobs: Any) -> Space:
    problem = dataclasses.replace(problem_of(case("mlp"), cluster(8)), target=target_named(target))
    restrictions = restrict(Overrides(**knobs), problem.graph, target=problem.target)
    return Space(problem=problem, global_batch_size=8, restrictions=restrictions)


def plan(*, tp: int = 1, pp: int = 1, schedule: str = "1f1b", **stage: Any) -> Plan:
    """Two data ranks a stage."""
    ranks = [tuple(range(2 * tp * k, 2 * tp * (k + 1))) for k in range(pp)]
    stages = tuple(
        StagePlan(blocks=(f"b{k}",), ranks=r, dp=2, tp=tp, **stage) for k, r in enumerate(ranks)
    )
    return Plan(
        model="any", global_batch_size=8, num_microbatches=2, schedule=schedule, precision="bf16",
        stages=stages,
    )  # fmt: skip


def zeros(of: Space, **mesh: int) -> set[int]:
    return {one.zero for one in of.zeros(Mesh(**mesh))}


def test_zero_beside_the_tensor_axis_is_offered_where_it_runs() -> None:
    assert zeros(space("megatron"), dp=8, tp=1) == {0, 1, 2, 3}
    assert zeros(space("megatron"), dp=4, tp=2) == {0, 1}
    assert zeros(space("torchtitan"), dp=4, tp=2) == {2, 3}
    assert zeros(space("eager"), dp=4, tp=2) == {0, 1, 2, 3}


def test_zero_in_a_pipeline_is_offered_where_it_runs() -> None:
    of = space("megatron")
    assert {pipeline.schedule for pipeline in of.schedules(2, 4, Sharing(zero=1))} <= {
        "1f1b",
        "interleaved_1f1b",
    }
    assert of.schedules(2, 4, Sharing(zero=1)) and not of.schedules(2, 4, Sharing(zero=3))
    assert of.schedules(1, 4, Sharing(zero=3))  # without one


def test_axes_that_a_target_lacks_have_one_degree() -> None:
    meshes = space("fsdp").meshes(8, 1)
    assert [(mesh.dp, mesh.tp, mesh.cp, mesh.ep) for mesh in meshes] == [(8, 1, 1, 1)]
    assert space("fsdp").stage_counts() == [1]
    assert not space("megatron").may_differ


@pytest.mark.parametrize(("case", "says"), refusals(REFUSED, "for_target"))
def test_an_override_that_asks_for_it_is_refused(case: tuple[str, Any], says: str) -> None:
    target, overrides = case
    with refused(OverrideError, says):
        for_target(Overrides(**overrides), target_named(target))


def test_what_a_target_leaves_no_schedule_for_is_refused() -> None:
    ours = Overrides(tp=2, zero=3, schedule="dualpipe_v")
    assert for_target(ours, EAGER) == ours
    says = r"leaves no schedule; .*target 'deepspeed' can't run .*; legal: another target"
    with pytest.raises(OverrideError, match=says):
        for_target(Overrides(virtual_stages=2), target_named("deepspeed"))


@pytest.mark.parametrize(("case", "says"), refusals(REFUSED, "check_plan_for"))
def test_a_given_plan_that_can_not_run_is_refused(case: tuple[str, Any], says: str) -> None:
    target, knobs = case
    check_plan_for(plan(**knobs), EAGER)
    check_plan_for(plan(schedule="gpipe", zero=3), target_named("megatron"))  # of one device group
    with refused(PlanError, says):
        check_plan_for(plan(**knobs), target_named(target))
