"""Schedules of stages that are no chain: warm-ups by the way to the end, several stages of a device
as one, against walks through the streams and by hand."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.schedules import Pipeline, build_schedule, in_flight, simulate
from meshwright.costmodel.schedules.orders import Action
from meshwright.costmodel.schedules.table import SCHEDULES, compute_orders
from tests.costmodel.schedules.pipelines import times

ALONE = [name for name, record in SCHEDULES.items() if record.branched]
Edges = tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Branched:
    """Stages on `groups`, and what each sends to later ones."""

    groups: tuple[int, ...]
    edges: Edges
    m: int

    @property
    def between(self) -> Edges:
        """Edges between device groups."""
        pairs = {(self.groups[a], self.groups[b]) for a, b in self.edges}
        return tuple(sorted((a, b) for a, b in pairs if a != b))

    def ways(self, group: int, seen: tuple[int, ...] = ()) -> Iterator[tuple[int, ...]]:
        """All ways from a group to an end; one that comes back is no pipeline."""
        assert group not in seen
        yield (*seen, group)
        for a, b in self.between:
            if a == group:
                yield from self.ways(b, (*seen, group))

    def paths(self, stage: int) -> Iterator[tuple[int, ...]]:
        """All ways from a stage to an end."""
        after = [b for a, b in self.edges if a == stage]
        yield from ((stage, *way) for b in after for way in self.paths(b)) if after else ((stage,),)

    def pipeline(self, name: str) -> Pipeline:
        depth = {g: max(map(len, self.ways(g))) for g in self.groups}
        return Pipeline(
            name, len(self.groups), self.m, len(set(self.groups)),
            depths=tuple(depth[g] for g in self.groups), groups=self.groups,
        )  # fmt: skip


@st.composite
def branched(draw: st.DrawFn) -> Branched:
    """Chains that end in one stage, which may lie on the last devices of one of them."""
    lengths = draw(st.lists(st.integers(1, 3), min_size=1, max_size=3))
    edges, ends, at = list[tuple[int, int]](), list[int](), 0
    for length in lengths:
        edges += [(k, k + 1) for k in range(at, at + length - 1)]
        at += length
        ends.append(at - 1)
    edges += [(end, at) for end in ends]
    host = draw(st.sampled_from([None, *ends]))
    skips = draw(st.lists(st.integers(0, at - 1), max_size=2))
    edges += [(k, at) for k in skips]
    groups = (*range(at), at if host is None else host)
    return Branched(groups=groups, edges=tuple(sorted({*edges})), m=draw(st.integers(1, 6)))


@st.composite
def any_graph(draw: st.DrawFn) -> Branched:
    """Stages on devices of their own, any of which send to any later ones."""
    count = draw(st.integers(2, 7))
    pairs = [(a, b) for b in range(count) for a in range(b)]
    edges = draw(st.lists(st.sampled_from(pairs), unique=True))
    return Branched(
        groups=tuple(range(count)), edges=tuple(sorted(edges)), m=draw(st.integers(1, 9))
    )


@given(branched() | any_graph(), st.sampled_from(ALONE))
def test_no_more_is_in_flight_than_is_said(of: Branched, name: str) -> None:
    pipeline = of.pipeline(name)
    streams = build_schedule(pipeline, of.edges)
    sends = dict.fromkeys(of.edges, 0.0)
    step = simulate(streams, [times(2, 3, weight=1)] * len(of.groups), sends)
    apart_s = 4 if SCHEDULES[name].splits_backward else 5  # of a stage, W beside others
    longest_s = max(
        len(way) * apart_s for stage in range(len(of.groups)) for way in of.paths(stage)
    )
    busiest_s = max(5 * of.m * of.groups.count(group) for group in of.groups)
    assert step.step_time_s >= max(longest_s, busiest_s)
    last = Action.BACKWARD_WEIGHT if SCHEDULES[name].splits_backward else Action.BACKWARD
    for order in compute_orders(pipeline):
        for stage in {compute.stage for compute in order}:
            own = [compute for compute in order if compute.stage == stage]
            ran = [compute.microbatch for compute in own if compute.action is Action.FORWARD]
            assert ran == list(range(of.m))
            held = [(c.action is Action.FORWARD) - (c.action is last) for c in own]
            most = max(sum(held[: k + 1]) for k in range(len(held)))
            assert most <= in_flight(pipeline, stage)
            if name == "1f1b":
                assert most == min(of.m, pipeline.depths[stage])


@pytest.mark.parametrize("name", ALONE)
def test_a_chain_is_the_same_pipeline(name: str) -> None:
    chain = Pipeline(name, 4, 7, 4)
    said = chain._replace(depths=(4, 3, 2, 1), groups=(0, 1, 2, 3))
    assert compute_orders(said) == compute_orders(chain)
    assert said.shape == chain.shape
    assert [in_flight(said, k) for k in range(4)] == [in_flight(chain, k) for k in range(4)]


def test_towers_run_at_once_and_the_trunk_between_them_by_hand() -> None:
    towers = Branched(groups=(0, 1, 1), edges=((0, 2), (1, 2)), m=2)
    pipeline = towers.pipeline("1f1b")
    assert pipeline.depths == (2, 1, 1) and pipeline.placed == ((0,), (1, 2))
    assert pipeline.each == 2 and pipeline.length == 2
    beside = compute_orders(pipeline)[1]
    assert [(c.action.value[0], c.stage, c.microbatch) for c in beside] == [
        ("f", 1, 0), ("f", 2, 0), ("b", 2, 0), ("b", 1, 0),
        ("f", 1, 1), ("f", 2, 1), ("b", 2, 1), ("b", 1, 1),
    ]  # fmt: skip
    one = replace(towers, m=1)
    seconds = [times(3, 6), times(2, 4), times(1, 2)]
    streams = build_schedule(one.pipeline("1f1b"), one.edges)
    step = simulate(streams, seconds, dict.fromkeys(one.edges, 0.0))
    # the slower tower, the trunk, the slower tower's way back
    assert step.step_time_s == 3 + (1 + 2) + 6


@cache
def equal(name: str) -> tuple[float, int]:
    """Seconds of two chains of two groups and a last one, and groups on a way."""
    of = Branched(groups=(0, 1, 2, 3, 4), edges=((0, 1), (1, 4), (2, 3), (3, 4)), m=8)
    pipeline = of.pipeline(name)
    streams = build_schedule(pipeline, of.edges)
    step = simulate(streams, [times(4, 8, weight=3)] * 5, dict.fromkeys(of.edges, 0.0))
    return step.pipeline_s, pipeline.length


@pytest.mark.parametrize(
    ("name", "each_s"), [("gpipe", 12), ("1f1b", 12), ("eager_1f1b", 12), ("zb_h1", 4 + 5 - 3)]
)
def test_a_pipeline_is_filled_by_the_longest_way(name: str, each_s: float) -> None:
    took_s, length = equal(name)
    assert length == 3
    assert took_s == 8 * 12 + (length - 1) * each_s
