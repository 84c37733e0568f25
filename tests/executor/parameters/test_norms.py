"""Norms of a model's gradients from the shares of ranks that hold parts and copies of them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from meshwright.costmodel.sharding.strategies import Placement, R
from meshwright.executor.parameters.norms import ROW, clip_, copies, norm_share, total_norm
from meshwright.executor.parameters.parameters import StageParameter
from meshwright.executor.ranks.meshes import Place, StageMesh, single_process
from meshwright.executor.resharding.reshard import Axis, local_part

SHAPE = (36, 12)  # divisible by every degree tried, a fused projection's thirds too
PLACEMENTS = (R, Placement("S", 0), Placement("S", 1), Placement("S", 0, 3))
NORM_TYPES = (0.5, 1.0, 2.0, 3.0, math.inf)
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    """A mesh of replicate × shard × tensor ranks from `first` on, and its parameters: name, how the
    tensor axis and ZeRO divide it, and the stages that share it."""

    first: int
    replicate: int
    shard: int
    tensor: int
    held: list[tuple[str, Placement, Placement, tuple[int, ...]]] = field(default_factory=list)

    @property
    def mesh(self) -> StageMesh:
        dp, tp = self.replicate * self.shard, self.tensor
        ranks = tuple(range(self.first, self.first + dp * tp))
        return StageMesh(ranks=ranks, dp=dp, tp=tp, shards=self.shard)


def parameter(
    *,
    placement: Placement = R,
    zero: Placement = R,
    shared_stages: tuple[int, ...] = (),
    shape: Sequence[int] = SHAPE,
) -> StageParameter:
    return StageParameter(
        value="w",
        fqn="w",
        shape=tuple(shape),
        placement=placement,
        shard_placement=zero,
        sum_data=True,
        sum_tensor=False,
        trainable=True,
        leaf=nn.Parameter(torch.empty(0)),
        stored=torch.empty(0),
        shared_stages=shared_stages,
    )


def places(stages: Sequence[Stage]) -> Iterator[tuple[int, Place]]:
    """(stage, place) of every rank."""
    meshes = tuple(stage.mesh for stage in stages)
    for k, s in enumerate(stages):
        for rank in s.mesh.ranks:
            d, t = s.mesh.coordinate(rank)
            replicate, shard = divmod(d, s.shard)
            yield (
                k,
                Place(
                    stages=(k,),
                    meshes=meshes,
                    data=Axis("data", s.mesh.dp, d),
                    shard=Axis("shard", s.shard, shard),
                    replicate=Axis("replicate", s.replicate, replicate),
                    tensor=Axis("tensor", s.tensor, t),
                    mesh=None,
                    edge_groups={},
                    tied_groups={},
                    device=CPU,
                    rank=rank,
                    rows=Axis("rows", s.mesh.dp, d),
                ),
            )


@st.composite
def models(draw: st.DrawFn) -> list[Stage]:
    """One to three stages; each holds parameters of its own, and some hold a tied one."""
    sizes = st.sampled_from((1, 2, 3))
    stages: list[Stage] = []
    first = 0
    for _ in range(draw(st.integers(1, 3))):
        stage = Stage(first=first, replicate=draw(sizes), shard=draw(sizes), tensor=draw(sizes))
        first += len(stage.mesh.ranks)
        stages.append(stage)
    owners = tuple(k for k in range(len(stages)) if draw(st.booleans()))
    for k, stage in enumerate(stages):
        names = [f"{k}.{i}" for i in range(draw(st.integers(0, 2)))]
        for name in names + (["tied"] if k in owners else []):
            placement = draw(st.sampled_from(PLACEMENTS)) if stage.tensor > 1 else R
            free = [
                Placement("S", d) for d in (0, 1) if not placement.sharded or d != placement.dim
            ]
            zero = draw(st.sampled_from([R, *free])) if stage.shard > 1 else R
            stage.held.append((name, placement, zero, owners if name == "tied" else ()))
    return stages


def gradients_on(
    stage: Stage, place: Place, whole: dict[str, torch.Tensor]
) -> list[tuple[StageParameter, torch.Tensor]]:
    """A rank's parameters and its parts of their gradients."""
    found = []
    for name, placement, zero, owners in stage.held:
        local = whole[name]
        if placement.sharded:
            local = local_part(local, placement, place.tensor.size, place.tensor.rank)
        if zero.sharded:
            local = local_part(local, zero, place.shard.size, place.shard.rank)
        found.append((parameter(placement=placement, zero=zero, shared_stages=owners), local))
    return found


def normal(stages: Sequence[Stage], seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    names = sorted({name for stage in stages for name, *_ in stage.held})
    return {name: torch.randn(SHAPE, generator=generator) for name in names}


@settings(deadline=None)
@given(models(), st.sampled_from(NORM_TYPES), st.integers(0, 99))
def test_shares_of_all_ranks_make_the_norm_of_the_whole_model(
    stages: list[Stage], norm_type: float, seed: int
) -> None:
    whole = normal(stages, seed)
    shares = [
        norm_share(gradients_on(stages[k], place, whole), place, norm_type)
        for k, place in places(stages)
    ]
    elements = [x.double().reshape(-1) for x in whole.values()] or [torch.zeros(1)]
    wanted = torch.linalg.vector_norm(torch.cat(elements), norm_type)
    largest = math.isinf(norm_type)
    joined = torch.stack(shares).max() if largest else torch.stack(shares).sum()
    found = total_norm(joined, single_process(CPU, [stages[0].mesh]), norm_type)
    assert float(found) == pytest.approx(float(wanted), rel=1e-5)


@settings(deadline=None)
@given(models(), st.sampled_from((math.nan, math.inf, -math.inf)), st.data())
def test_one_value_that_is_not_finite_on_one_rank_shows_in_its_share(
    stages: list[Stage], value: float, data: st.DataObject
) -> None:
    """A replica's too: none stands for the others."""
    whole = normal(stages, 0)
    holding = [(k, place) for k, place in places(stages) if stages[k].held]
    if not holding:
        return
    k, place = data.draw(st.sampled_from(holding))
    gradients = [(p, g.clone()) for p, g in gradients_on(stages[k], place, whole)]
    _, spoilt = data.draw(st.sampled_from(gradients))
    spoilt.view(-1)[data.draw(st.integers(0, spoilt.numel() - 1))] = value
    for norm_type in (2.0, math.inf):
        assert not norm_share(gradients, place, norm_type).isfinite()


def test_virtual_stages_of_the_same_devices_hold_one_copy() -> None:
    """Stages 0 and 3 of a V-shaped pipeline run on the same ranks."""
    stages = [Stage(first=first, replicate=2, shard=1, tensor=1) for first in (0, 2, 2, 0)]
    _, place = next(places(stages))
    assert copies(parameter(shared_stages=(0, 3)), place) == 2
    assert copies(parameter(shared_stages=(0, 2)), place) == 4


def test_a_large_tensor_keeps_its_digits() -> None:
    """Equal elements, and three large ones beyond the whole rows; one fp32 sum is off by 1e-2."""
    n, c = (1 << 24) + 3, 1.1
    x = torch.full((n,), c)
    x[-3:] *= 1024
    place = single_process(CPU, [StageMesh(ranks=(0,), dp=1, tp=1, shards=1)])
    wanted = float(x[0].double()) * math.sqrt(n - 3 + 3 * 1024**2)
    in_one = float(torch.linalg.vector_norm(x))
    found = float(total_norm(norm_share([(parameter(shape=(n,)), x)], place), place))
    assert abs(found / wanted - 1) < 1e-6
    assert n % ROW == 3 and abs(in_one / wanted - 1) > 1e-4


# --- clipping on one device -----------------------------------------------------------------------


def one_device(
    gradients: Sequence[torch.Tensor | None],
) -> tuple[list[StageParameter], list[nn.Parameter], Place]:
    """The same gradients at our parameters and at torch's."""
    ours, theirs = [], []
    for gradient in gradients:
        p = parameter()
        p.api, twin = nn.Parameter(torch.zeros(SHAPE)), nn.Parameter(torch.zeros(SHAPE))
        if gradient is not None:
            p.api.grad, twin.grad = gradient.clone(), gradient.clone()
        ours.append(p)
        theirs.append(twin)
    return ours, theirs, single_process(CPU, [StageMesh(ranks=(0,), dp=1, tp=1, shards=1)])


@settings(deadline=None)
@given(
    st.sampled_from((0.0, 1e-3, 1.0, 40.0, 1e9, math.inf)),
    st.sampled_from(NORM_TYPES[1:]),
    st.integers(0, 99),
)
def test_clipping_is_torchs_on_one_device(max_norm: float, norm_type: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gradients = [torch.randn(SHAPE, generator=generator), None, torch.randn(SHAPE)]
    ours, theirs, place = one_device(gradients)
    norm = clip_(ours, place, max_norm, norm_type)
    wanted = nn.utils.clip_grad_norm_(theirs, max_norm, norm_type)
    torch.testing.assert_close(norm, wanted)
    for p, twin in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.api.grad, twin.grad)


def test_without_gradients_the_norm_is_zero() -> None:
    ours, _, place = one_device([None, None])
    for norm_type in NORM_TYPES:
        assert float(clip_(ours, place, 1.0, norm_type)) == 0.0
    empty = [(parameter(shape=(0, 4)), torch.empty(0, 4))]
    assert float(total_norm(norm_share(empty, place, math.inf), place, math.inf)) == 0.0


@pytest.mark.parametrize("norm_type", [0.0, -1.0, -math.inf, math.nan])
def test_what_is_no_norm_is_refused(norm_type: float) -> None:
    ours, _, place = one_device([torch.ones(SHAPE)])
    with pytest.raises(ValueError, match=r"norm_type=.* > 0; .* 2\.0 is the usual one"):
        clip_(ours, place, 1.0, norm_type)


@pytest.mark.parametrize("max_norm", [-1.0, math.nan])
def test_a_bound_below_zero_is_refused(max_norm: float) -> None:
    ours, _, place = one_device([torch.ones(SHAPE)])
    with pytest.raises(ValueError, match=r"max_norm=.* norm >= 0; .* float\('inf'\) "):
        clip_(ours, place, max_norm)
    assert torch.equal(ours[0].api.grad, torch.ones(SHAPE))
