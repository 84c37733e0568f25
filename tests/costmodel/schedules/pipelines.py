"""Pipelines for the tests of schedules: what there is to draw from, and how to run one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise

from hypothesis import strategies as st

from meshwright.costmodel.schedules import Pipeline, Streams, build_schedule
from meshwright.costmodel.schedules.simulate import StageTimes, Timeline, simulate
from meshwright.costmodel.schedules.table import SCHEDULES

Edges = list[tuple[int, int]]
counts = st.integers(1, 7)
seconds = st.integers(0, 9)
whether = st.booleans()


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A schedule on `p` devices with `v` stages each."""

    name: str
    p: int
    v: int
    m: int
    paired: bool = False

    @property
    def num_stages(self) -> int:
        return self.p * self.v

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(self.name, self.num_stages, self.m, self.p)

    @property
    def pipelines(self) -> tuple[range, ...]:
        return SCHEDULES[self.name].pipelines(self.num_stages)

    @property
    def chain(self) -> Edges:
        return [edge for stages in self.pipelines for edge in pairwise(stages)]

    def microbatches(self, stage: int) -> range:
        each = self.m // len(self.pipelines)
        (copy,) = (k for k, stages in enumerate(self.pipelines) if stage in stages)
        return range(copy * each, (copy + 1) * each)

    def streams(self, edges: Edges | None = None) -> Streams:
        edges = self.chain if edges is None else edges
        return build_schedule(self.pipeline, edges, paired=self.paired)


@st.composite
def shapes(
    draw: st.DrawFn,
    names: Sequence[str] = tuple(name for name, own in SCHEDULES.items() if own.flushes),
    m: st.SearchStrategy[int] = counts,
    paired: st.SearchStrategy[bool] = whether,
) -> Shape:
    name = draw(st.sampled_from(names))
    v, copies = SCHEDULES[name].stages_per_device or draw(st.integers(1, 3)), SCHEDULES[name].copies
    p, of_each = draw(st.integers(1, 5)), draw(m)
    if copies > 1:  # both share out among them
        p, of_each = copies * -(-p // copies), copies * -(-of_each // copies)
    return Shape(name=name, p=p, v=v, m=of_each, paired=draw(paired))


@st.composite
def edges_of(draw: st.DrawFn, shape: Shape) -> Edges:
    """Any set of forward edges between the stages of a copy, the chain included or not."""
    possible = [edge for stages in shape.pipelines for edge in combinations(stages, 2)]
    return draw(st.lists(st.sampled_from(possible), unique=True)) if possible else []


@st.composite
def stage_times(draw: st.DrawFn) -> StageTimes:
    forward, backward = draw(seconds), draw(seconds)
    return StageTimes(
        forward_s=forward, backward_s=backward, weight_s=draw(st.integers(0, backward)),
        overlap_s=draw(st.integers(0, forward)), reduce_s=draw(seconds),
        optimizer_s=draw(seconds),
    )  # fmt: skip


def times(
    forward: float, backward: float, reduce: float = 0, optimizer: float = 0, *, weight: float = 0
) -> StageTimes:
    own = {"forward_s": forward, "backward_s": backward, "weight_s": weight}
    return StageTimes(**own, reduce_s=reduce, optimizer_s=optimizer)


def run(
    shape: Shape,
    of_stages: Sequence[StageTimes],
    transfers: Mapping[tuple[int, int], float] | None = None,
) -> Timeline:
    """The simulated step; without `transfers`, of a chain whose links cost nothing."""
    if transfers is None:
        transfers = dict.fromkeys(shape.chain, 0)
    return simulate(shape.streams(list(transfers)), of_stages, transfers)
