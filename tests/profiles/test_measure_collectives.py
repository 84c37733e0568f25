"""Which groups are timed, and one launch on two real ranks."""

import os
import subprocess
from collections import Counter
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.kernels.collectives import group_for
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.measure import collectives
from meshwright.profiles.measure.collectives import COLLECTIVES, Shape, launch_local, shapes
from tests.helpers.tiers import second_tier


@given(st.integers(1, 6), st.integers(1, 6), st.integers(1, 4))
def test_groups_tile_the_world(size: int, stride: int, tiles: int) -> None:
    world = size * stride * tiles
    groups = Shape(size=size, stride=stride).groups(world)
    assert Counter(rank for group in groups for rank in group) == Counter(range(world))
    for group in groups:
        assert group == [group[0] + k * stride for k in range(size)]


@pytest.mark.parametrize(
    ("ranks", "per_node", "expected"),
    [
        (1, 1, []), (2, 2, [(2, 2)]), (4, 4, [(2, 2), (4, 4)]), (4, 2, [(2, 2), (2, 1), (4, 2)]),
        (6, 6, [(2, 2), (3, 3), (6, 6)]),
    ],
)  # fmt: skip
def test_shapes_of_groups(ranks: int, per_node: int, expected: list[tuple[int, int]]) -> None:
    assert [(s.size, s.per_node(per_node)) for s in shapes(ranks, per_node)] == expected


@pytest.mark.parametrize(("nodes", "per_node"), [(1, 4), (2, 4), (4, 2)])
def test_every_group_of_a_mesh_is_among_them(nodes: int, per_node: int) -> None:
    """Axes of a mesh, as the cost model sees them, are asked for by the names used here."""
    host = Cluster.from_catalog("dgx-h100", num_nodes=nodes, devices_per_node=per_node)
    known = {(s.size, s.per_node(per_node)) for s in shapes(host.num_devices, per_node)}
    degrees = [d for d in range(1, host.num_devices + 1) if host.num_devices % d == 0]
    for tp in degrees:
        for dp in degrees:
            if dp > 1 and host.num_devices % (tp * dp) == 0:
                group = group_for(host, size=dp, stride=tp)
                assert (group.size, group.per_node) in known


@second_tier("two ranks for a while; which groups are timed, and how, stays")
def test_two_ranks_time_everything_and_leave_nothing_behind() -> None:
    found = launch_local(2, "gloo", budget_s=0.1)
    assert {c.kind for c in found} == set(COLLECTIVES)
    for c in found:
        assert (c.backend, c.ranks, c.size, c.per_node) == ("gloo", 2, 2, 2)
        assert c.seconds > 0 and c.repetitions >= 7 and c.spread >= 0
    sizes = {kind: sorted(c.nbytes for c in found if c.kind == kind) for kind in COLLECTIVES}
    assert len({tuple(s) for s in sizes.values()}) == 1  # all curves end alike
    listed = subprocess.run(["ps", "-eo", "ppid,args"], capture_output=True, text=True, check=True)
    left = [x for x in listed.stdout.splitlines() if "meshwright.profiles.measure.collectives" in x]
    assert not [x for x in left if x.split()[0] in ("1", str(os.getpid()))]


def test_a_cpus_collective_is_what_it_adds_to_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    """Calls that take 2 ms, every twentieth 1 s, beside work of whatever length."""
    clock = [0.0]
    calls = iter(range(1, 1000))

    def call() -> None:
        clock[0] += 1.0 if next(calls) % 20 == 0 else 0.002

    def once(timed: Callable[[], None], device: torch.device) -> float:
        clock[0] = 0.0 if timed is call else 0.3
        timed()
        return clock[0]

    monkeypatch.setattr(collectives, "_once", once)
    monkeypatch.setattr(collectives, "_largest", lambda values, device: list(values))
    cpu = torch.device("cpu")
    times = collectives._timed(call, cpu, messages=2)
    assert collectives._typical(times, cpu) == pytest.approx(0.001)
    assert collectives._typical([1.0, 2.0, 9.0], torch.device("cuda")) == 2.0


@second_tier("two ranks; which groups are timed, and how, stays")
def test_a_launch_that_fails_says_why() -> None:
    with pytest.raises(RuntimeError, match=r"2 no-such ranks failed(?s:.)*no-such"):
        launch_local(2, "no-such", budget_s=0.5)
