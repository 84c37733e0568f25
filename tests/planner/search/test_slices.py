"""Token slices in the search: where few long rows leave a pipeline empty; as asked."""

from functools import cache
from typing import Any

import pytest

from meshwright.costmodel.mesh import Mesh
from meshwright.costmodel.targets import TARGETS
from meshwright.planner.overrides.overrides import OverrideError, Overrides
from meshwright.planner.overrides.pinned import plan_overrides
from meshwright.planner.plan.check import check_plan
from meshwright.planner.plan.words import describe
from meshwright.planner.pricing import Evaluator
from meshwright.planner.search import Search
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import Traced, cluster, llama, problem_of
from tests.models.models import CASES
from tests.parity.parity_cells import graph_of

LENGTH = 16384


@cache
def model() -> Traced:
    return llama(1024, 2816, 8, 8, words=1024, length=LENGTH)


def slow() -> Cluster:
    """Two devices that reach each other slowly."""
    return cluster(1, nodes=2, flops=1e13, node_bandwidth=1e9)


def search(on: Cluster, of: Traced | None = None, batch: int = 2, **given: Any) -> Search:
    return Search(problem_of(of or model(), on), batch, Overrides(**given))


def test_slices_are_chosen_where_few_long_rows_leave_a_pipeline_empty() -> None:
    best = search(slow(), batch=1).run().best
    assert len(best.plan.devices) == 2 and len(best.plan.slices) > 1
    assert sum(best.plan.slices) == LENGTH and best.plan.slices[0] >= best.plan.slices[-1]
    without = search(slow(), batch=1, forbid=["slices"]).run().best
    assert not without.plan.slices and without.step_time_s > 1.05 * best.step_time_s
    assert f"in {len(best.plan.slices)} slices of " in describe(best.plan)
    of = model()
    again = Evaluator(problem_of(of, slow())).price(best.plan)
    assert again.prediction.step_time_s == best.step_time_s
    assert check_plan(best.plan, of.graph, of.table)
    assert plan_overrides(best.plan, of.graph).slices == best.plan.slices
    assert plan_overrides(without.plan, of.graph).slices == 1


@pytest.mark.parametrize(
    ("on", "batch"),
    [(cluster(2, flops=1e13, bandwidth=1e12), 2), (slow(), 64)],
    ids=["fast links", "many rows"],
)
def test_they_are_not_where_nothing_is_empty(on: Cluster, batch: int) -> None:
    assert not search(on, batch=batch).run().best.plan.slices


@pytest.mark.parametrize(
    ("batch", "m", "groups", "tried"),
    [
        (4, 8, 2, True),  # of four micro-batches two slices each
        (4, 16, 2, False),  # more than fill two groups
        (8, 16, 2, False),  # eight whole ones fill two groups
        (8, 16, 4, True),
        (4, 8, 1, False),  # no pipeline
    ],
)
def test_slices_are_tried_where_they_fill_a_pipeline(
    batch: int, m: int, groups: int, tried: bool
) -> None:
    space = search(slow(), batch=batch).space
    mesh = Mesh(dp=1, tp=1)
    assert space.slices(mesh, m) == m // batch and m in space.counts()
    assert space.tries(mesh, m, groups) is tried


@pytest.mark.parametrize(
    ("asked", "count"), [(3, 3), ((8192, 4096, 4096), 3), ([8192, 8192], 2), (1, 0)]
)
def test_slices_are_as_asked(asked: Any, count: int) -> None:
    best = search(slow(), pp=2, slices=asked).run().best
    assert len(best.plan.slices) == count
    if not isinstance(asked, int):
        assert best.plan.slices == tuple(asked)


def test_asked_for_they_go_with_numbers_of_micro_batches() -> None:
    best = search(slow(), batch=4, pp=2, num_microbatches=2, slices=4, schedule="1f1b").run().best
    assert (best.plan.num_microbatches, len(best.plan.slices)) == (2, 4)
    assert best.plan.pipeline.num_microbatches == 8


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"slices": 0}, r"slices=0; legal: how many, or a list of sizes, each an integer from 1"),
        ({"slices": (8192, -1)}, "legal: how many, or a list of sizes"),
        ({"slices": (8192, 4096)}, r"12288 tokens in all; legal: sizes that add up to 16384"),
        ({"slices": LENGTH + 1}, "legal: 1 to 128"),
        ({"slices": (8191, 8193), "tp": 2}, "with tp=2.*legal: multiples of 2 that add up"),
        ({"slices": 4, "zero": 3}, "contradicts zero=3: weights would be gathered anew"),
        ({"slices": 4, "cp": 2}, "contradicts cp=2"),
        ({"slices": 4, "schedule": "zb_v"}, "contradicts schedule='zb_v'"),
        ({"slices": 4, "segments": 2}, "contradicts segments=2"),
        ({"slices": 4, "forbid": ["slices"]}, "contradicts forbid='slices'"),
    ],
)
def test_what_can_t_hold_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(OverrideError, match=says):
        search(slow(), **given).run()


def test_a_model_that_reads_later_tokens_is_refused_by_name() -> None:
    assert "bert" in CASES
    says = r"override slices=2: bert.*not causal.*legal: 1; drop slices; cp splits tokens"
    with pytest.raises(OverrideError, match=says):
        search(slow(), graph_of("bert", 4), batch=8, slices=2).run()


def test_software_that_has_no_slices_gets_none() -> None:
    """Asked for, they are refused."""
    problem = problem_of(model(), slow(), target=TARGETS["megatron"])
    assert not Search(problem, 1, Overrides(pp=2)).run().best.plan.slices
    with pytest.raises(OverrideError, match="target 'megatron' is not priced with it"):
        Search(problem, 1, Overrides(pp=2, slices=2))
