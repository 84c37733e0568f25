"""What fits in the course of a step."""

import pytest

from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.search.search import Search
from tests.helpers.planning import cluster, linears, problem_of
from tests.helpers.tiers import tiered
from tests.models.models import Traced

BATCH = 8


def wide() -> Traced:
    """Mostly weights."""
    return linears(512, 4, BATCH)


def states_bytes() -> int:
    return 18 * wide().graph.num_parameters()


def following(
    memory_bytes: float,
    target: Target = EAGER,
    devices: int = 4,
    forbid: tuple[str, ...] = ("tp", "pp", "offload"),
) -> Search:
    on = cluster(devices, bandwidth=1e9, memory_bytes=memory_bytes)
    return Search(problem_of(wide(), on, target=target), BATCH, Overrides(forbid=forbid))


@pytest.mark.parametrize("share", [1.0, 0.6, 0.45, 0.37])
def test_what_is_chosen_fits(share: float) -> None:
    memory_bytes = share * states_bytes()
    prediction = following(memory_bytes).run().best.evaluation.prediction
    assert max(prediction.peak_memory_bytes) <= memory_bytes


@pytest.mark.parametrize("share", tiered([0.30, 0.285], (0.285).__eq__, "the tighter one stays"))
def test_a_larger_space_loses_no_plan_that_fits(share: float) -> None:
    """Different meshes draft no plan in place of others like it."""
    for forbid in (("pp",), ()):
        assert following(share * states_bytes(), forbid=forbid).run().best.fits
