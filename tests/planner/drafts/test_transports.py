"""How ZeRO's weights and gradients may travel."""

from __future__ import annotations

from meshwright.planner.drafts.mesh import Mesh
from meshwright.planner.drafts.transports import quantizations, secondaries, transports
from tests.planner.drafts.test_space import space


def test_secondary_shards_lie_in_a_node_of_several() -> None:
    far = Mesh(dp=8, tp=1)
    assert secondaries(space(2, 4), far, 3, 0) == [0, 4]
    assert secondaries(space(2, 4), Mesh(dp=4, tp=2), 3, 0) == [0, 2]
    assert secondaries(space(2, 4), far, 3, 4) == [0]  # ZeRO divides within the node
    assert secondaries(space(2, 4), far, 2, 0) == [0]
    assert secondaries(space(1, 8), far, 3, 0) == [0]
    assert secondaries(space(2, 4, forbid=["hpz"]), far, 3, 0) == [0]
    assert secondaries(space(2, 4, hpz=2), far, 3, 0) == [2]
    assert secondaries(space(2, 4, hpz=2), far, 2, 0) == []  # asks for ZeRO-3
    assert secondaries(space(2, 4, hpz=8), far, 3, 0) == [0]  # as many as it divides among
    assert secondaries(space(2, 4, hpz=3), far, 3, 0) == []


def test_what_is_quantised_is_allowed_or_asked_for() -> None:
    far = Mesh(dp=8, tp=1)
    assert quantizations(space(2, 4), far, 3) == ["none"]
    allowed = space(2, 4, allow=["quantized"])
    assert quantizations(allowed, far, 3) == ["none", "weights", "gradients", "both"]
    assert quantizations(allowed, far, 2) == ["none"]
    assert quantizations(space(2, 4, allow=["quantized"], forbid=["quantized"]), far, 3) == ["none"]
    asked = space(2, 4, allow=["quantized"], quantized="both")
    assert quantizations(asked, far, 3) == ["both"]
    assert quantizations(asked, far, 1) == []  # asks for ZeRO-3
    assert quantizations(asked, Mesh(dp=1, tp=8), 0) == ["none"]


def test_one_chain_prices_gathers_near_and_far_but_not_hops() -> None:
    far = Mesh(dp=8, tp=1)
    found = transports(space(2, 4, allow=["quantized"], zero=3, dp_shard=8), far)
    assert found == {
        (0, 0, "none"): [(3, 0), (3, 4)],
        (0, 0, "weights"): [(3, 0), (3, 4)],
        (0, 0, "gradients"): [(3, 0)],
        (0, 4, "gradients"): [(3, 4)],
        (0, 0, "both"): [(3, 0)],
        (0, 4, "both"): [(3, 4)],
    }
