"""The plans of experts that ours are compared with: their models have the published sizes, their
stages the published devices; a comparison fails where it must."""

import dataclasses
import re
from functools import cache
from typing import Any

import pytest

from meshwright.planner.plan.check import check_plan
from scripts.experts import alpa as alpa_models
from scripts.experts import compare as compare_experts
from scripts.experts import plans as expert_plans
from scripts.experts.plans import ALPA_GPT, ALPA_MOE, ALPA_WIDE_RESNET, Expert, Mesh, staged
from scripts.published.predict import traced
from scripts.published.rows import read_row
from scripts.published.setup import Setup
from tests.helpers.planning import problem_of
from tests.helpers.tiers import second_tier
from tests.models.models import Traced

ROW = {
    "model": "GPT", "layers": "8", "hidden": "64", "heads": "4", "vocab": "128",
    "seq_len": "16", "gpu": "V100-16GB", "gpus_per_node": "8", "num_gpus": "8", "precision": "fp16",
    "tp": "1", "pp": "1", "dp": "8", "micro_batch": "1", "global_batch": "32",
    "zero_stage_fsdp": "1", "recompute": "full", "framework": "Alpa/XLA",
}  # fmt: skip


def billions(name: str) -> float:
    return float(name[:-1]) / {"B": 1, "M": 1000}[name[-1]]


@pytest.mark.parametrize("gpus", ALPA_MOE)
def test_mixtures_have_the_published_sizes(gpus: int) -> None:
    """Which count the embedding once, though the head has a matrix of its own."""
    name, layers, hidden, experts, *_ = ALPA_MOE[gpus]
    model, _ = alpa_models.moe(layers=layers, hidden=hidden, experts=experts)
    counted = sum(p.numel() for fqn, p in model.named_parameters() if fqn != "head.weight")
    assert counted / 1e9 == pytest.approx(billions(name), rel=0.05)


@pytest.mark.parametrize("gpus", ALPA_WIDE_RESNET)
def test_wide_resnets_have_the_published_sizes_and_stages_take_all_bottlenecks(gpus: int) -> None:
    name, groups, channels, width, *_, stages = ALPA_WIDE_RESNET[gpus]
    model, _ = alpa_models.wide_resnet(groups=groups, channels=channels, width=width)
    numel = sum(p.numel() for p in model.parameters())
    assert numel / 1e9 == pytest.approx(billions(name), rel=0.05)
    assert sum(stages) == sum(groups)


def test_stages_of_gpt_take_all_devices_and_layers_and_every_source_has_plans() -> None:
    for gpus, (_, layers, *_, meshes) in ALPA_GPT.items():
        assert sum(count for count, _, _ in meshes) == layers
        assert sum(dp * tp for _, dp, tp in meshes) == gpus
    found = expert_plans.experts()
    for source in ("SC21", "torchtitan", "DGXC", "Alpa OSDI22", "Llama 3"):
        assert any(source in e.source for e in found)


@cache
def setup() -> Setup:
    return read_row(ROW)


def made(*meshes: Mesh, **given: Any) -> Any:
    graph, table = traced(setup().dims, "fp16")
    plan = staged(setup(), graph, meshes, microbatches=4, **given)
    check_plan(plan, graph, table)
    return plan


@second_tier("the comparison's own plans are staged in the test below")
def test_stages_follow_each_other_or_take_the_devices_in_turn() -> None:
    plan = made((2, 2, 1), (2, 2, 1), (4, 2, 2))
    assert [(s.dp, s.tp) for s in plan.stages] == [(2, 1), (2, 1), (2, 2)]
    assert [s.ranks for s in plan.stages] == [(0, 1), (2, 3), (4, 5, 6, 7)]
    layers = [sum(bool(re.match("layers", b)) for b in s.blocks) for s in plan.stages]
    assert layers == [2, 2, 4]
    assert [bool(s.shardings) for s in plan.stages] == [False, False, True]
    plan = made(*((0, 2, 2),), *((2, 2, 2),) * 2, (4, 2, 2), per_device=2)
    assert plan.schedule == "interleaved_1f1b"
    assert [s.ranks[0] for s in plan.stages] == [0, 4, 0, 4]
    assert plan.stages[0].blocks == ("embed",)


@cache
def comparison() -> compare_experts.Comparison:
    """A tiny model on eight devices, with the only plan that its expert thought of."""
    row = setup()
    (found,) = compare_experts.compare([
        Expert(
            name="tiny", source="a test", cluster=row.cluster, target=row.framework.target,
            precision="fp16", global_batch_size=32, traced=lambda: traced(row.dims, "fp16"),
            plans=lambda graph: [
                staged(row, graph, ((4, 2, 2),) * 2, microbatches=m) for m in (2, 4)
            ],
        )
    ])  # fmt: skip
    return found


def test_ours_is_no_slower_than_the_faster_reading_of_theirs() -> None:
    graph, table = traced(setup().dims, "fp16")
    found, of = comparison(), Traced(graph=graph, table=table)
    problem = problem_of(of, found.expert.cluster, "fp16", target=found.expert.target)
    price = compare_experts.Evaluator(problem).price
    steps = [price(plan).prediction.step_time_s for plan in found.expert.plans(graph)]
    assert found.their_step_s == min(steps)
    found = comparison()
    assert found.ratio <= 1
    assert not found.failed
    assert "1 of 1" in compare_experts.summary([found])


def test_what_fails() -> None:
    found = comparison()
    slow = dataclasses.replace(found, their_step_s=found.their_step_s * found.ratio * 0.99)
    assert slow.failed and "FAILED" in compare_experts.show(slow)
    assert not dataclasses.replace(slow, short_gib=1.0).failed
    none = dataclasses.replace(found, ours=None)
    assert none.failed and "nothing fits" in compare_experts.show(none)
    found = comparison()
    theirs = found.their_step_s
    for again, failed in ((theirs, 0), (theirs * 0.9, 0), (theirs * 1.02, 1), ("no override", 1)):
        assert dataclasses.replace(found, again=again).failed == bool(failed)
