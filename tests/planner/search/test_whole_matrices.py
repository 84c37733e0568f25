"""Plans with optimizers that step whole matrices: where they win, and what they cost."""

import pytest

from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.plan import InfeasibleError
from meshwright.planner.report import device_groups
from meshwright.planner.search.search import Search
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import linears, problem_of

WIDTH = 8192


def searched(optimizer: str, layers: int, devices: int, **given: object) -> Search:
    on = Cluster.from_catalog("h100-sxm", devices_per_node=devices)
    problem = problem_of(linears(WIDTH, layers, 8), on, optimizer=optimizer)
    return Search(problem, 8 * devices, Overrides(**given))


def test_one_moment_fits_where_two_do_not() -> None:
    """4.7 billion parameters on one device of 80 GB: 14 and 18 bytes of each."""
    with pytest.raises(InfeasibleError):
        searched("adamw_fused", 70, 1, forbid=["offload"]).run()
    fits = searched("muon", 70, 1).run().best.evaluation.prediction
    assert fits.fullest_bytes > 14 * 70 * WIDTH**2
    adafactor = searched("adafactor", 70, 1).run().best.evaluation.prediction
    assert fits.fullest_bytes - adafactor.fullest_bytes == pytest.approx(
        4 * 69 * WIDTH**2, rel=0.05
    )


def test_products_are_shared_out_and_cost_more_than_an_element() -> None:
    """Eight data ranks: each iterates on an eighth of the matrices."""

    def optimizer_s(optimizer: str, devices: int) -> float:
        found = searched(optimizer, 16, devices, dp=devices, zero=0).run()
        (group,) = device_groups(found.best.evaluation)
        return group.optimizer_s

    alone, shared = optimizer_s("muon", 1), optimizer_s("muon", 8)
    flops = 15 * 5 * 6 * WIDTH**3  # the last product's weights are stepped by AdamW
    assert alone > flops / 989e12
    assert shared < alone / 3
    assert shared > 2 * optimizer_s("adamw_fused", 8)


def test_the_fullest_owner_is_priced() -> None:
    """Nine matrices on eight ranks: one owner has two, their moments and, in a step, both of them
    with their gradients and one more that is gathered."""

    def peak_bytes(layers: int, optimizer: str = "muon") -> float:
        found = searched(optimizer, layers, 8, dp=8, zero=0, tp=1, pp=1, recompute="none").run()
        return found.best.evaluation.prediction.fullest_bytes

    one, two = peak_bytes(9), peak_bytes(10)  # the last layer's weights are AdamW's
    weight = WIDTH**2
    # a layer more: weights, master, gradient; a moment, and a matrix with its gradient, of one more
    assert two - one == pytest.approx(weight * (2 + 4 + 4) + weight * (4 + 8), rel=0.02)
    assert peak_bytes(11) - two == pytest.approx(weight * (2 + 4 + 4), rel=0.05)
