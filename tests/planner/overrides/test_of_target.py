"""What a target can't run is not searched for it, and refused where it is asked for."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from meshwright.costmodel.targets import EAGER, target_named
from meshwright.planner.drafts.mesh import Mesh
from meshwright.planner.drafts.space import Space
from meshwright.planner.overrides.of_target import check_plan_for, for_target
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.overrides.restrictions import restrict
from meshwright.planner.overrides.values import OverrideError
from meshwright.planner.plan.plan import Plan, PlanError, StagePlan
from tests.helpers.planning import case, cluster, problem_of


def space(target: str, **given: Any) -> Space:
    problem = dataclasses.replace(problem_of(case("mlp"), cluster(8)), target=target_named(target))
    found = restrict(Overrides(**given), problem.graph, target=problem.target)
    return Space(problem=problem, global_batch_size=8, restrictions=found)


def plan(*, tp: int = 1, zero: int = 0, pp: int = 1, schedule: str = "1f1b") -> Plan:
    """Two data ranks a stage."""
    width = 2 * tp
    return Plan(
        model="any",
        global_batch_size=8,
        num_microbatches=2,
        schedule=schedule,
        precision="bf16",
        stages=tuple(
            StagePlan(
                blocks=(f"b{k}",),
                ranks=tuple(range(k * width, (k + 1) * width)),
                dp=2,
                tp=tp,
                zero=zero,
            )
            for k in range(pp)
        ),
    )


def zeros(of: Space, **mesh: int) -> set[int]:
    return {zero for zero, _ in of.zeros(Mesh(**mesh))}


def test_zero_beside_the_tensor_axis_is_offered_where_it_runs() -> None:
    assert zeros(space("megatron"), dp=8, tp=1) == {0, 1, 2, 3}
    assert zeros(space("megatron"), dp=4, tp=2) == {0, 1}
    assert zeros(space("torchtitan"), dp=4, tp=2) == {2, 3}
    assert zeros(space("eager"), dp=4, tp=2) == {0, 1, 2, 3}


def test_zero_in_a_pipeline_is_offered_where_it_runs() -> None:
    of = space("megatron")
    assert {name for name, _ in of.schedules(2, 4, 1)} <= {"1f1b", "interleaved_1f1b"}
    assert of.schedules(2, 4, 1) and not of.schedules(2, 4, 3)
    assert of.schedules(1, 4, 3)  # without one


def test_axes_that_a_target_lacks_have_one_degree() -> None:
    meshes = space("fsdp").meshes(8, 1)
    assert [(mesh.dp, mesh.tp, mesh.cp, mesh.ep) for mesh in meshes] == [(8, 1, 1, 1)]
    assert space("fsdp").stage_counts() == [1]
    assert not space("megatron").may_differ


@pytest.mark.parametrize(
    ("target", "given", "says"),
    [
        ("fsdp", {"tp": 2}, "tp=2: target 'fsdp' can't run it; legal: 1;"),
        ("fsdp", {"zero": 1}, "zero=1: target 'fsdp' can't run it; legal: 0, 2, 3;"),
        ("megatron", {"schedule": "zb_v"}, "legal: 1f1b, interleaved_1f1b;"),
        ("megatron", {"zero": 3, "tp": 2}, "zero=3 with tp=2: target 'megatron' .* zero 0, 1;"),
        ("deepspeed", {"zero": 2, "pp": 2}, "zero=2 with pp=2: target 'deepspeed'"),
        ("deepspeed", {"virtual_stages": 2}, "leaves no schedule; .*target 'deepspeed' can't run"),
        ("megatron", {"tp": {"b0": 1, "b1": 2}}, "unequal_meshes.* target 'megatron' can't run"),
    ],
    ids=str,
)
def test_an_override_that_asks_for_it_is_refused(
    target: str, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(OverrideError, match=f"{says}.*another target .*torchtitan|{says}.*fsdp"):
        for_target(Overrides(**given), target_named(target))


def test_overrides_for_our_own_target_stay_as_they_are() -> None:
    given = Overrides(tp=2, zero=3, schedule="dualpipe_v")
    assert for_target(given, EAGER) == given


@pytest.mark.parametrize(
    ("target", "given", "says"),
    [
        ("megatron", {"tp": 2, "zero": 3}, "stage 0: zero=3 with tp=2, pp=1: .* legal: 0, 1;"),
        ("megatron", {"pp": 2, "schedule": "zb_h1"}, "plan: schedule='zb_h1': target 'megatron'"),
        ("fsdp", {"tp": 2}, "plan: stage 0: tp=2: target 'fsdp' can't run it; legal: 1"),
        ("fsdp", {"pp": 2}, "plan: pp=2: target 'fsdp'"),
        ("megatron-lm", {"zero": 1}, "plan: stage 0: zero=1: target 'megatron-lm'"),
    ],
    ids=str,
)
def test_a_given_plan_that_can_not_run_is_refused(
    target: str, given: dict[str, Any], says: str
) -> None:
    check_plan_for(plan(**given), EAGER)
    with pytest.raises(PlanError, match=says):
        check_plan_for(plan(**given), target_named(target))


def test_a_schedule_of_one_device_group_is_anybodys() -> None:
    check_plan_for(plan(schedule="gpipe", zero=3), target_named("megatron"))
