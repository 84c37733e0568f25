"""Norms of a model's gradients from shares of ranks that hold parts and copies of them; the loss
scale against torch's own, and what a step that is not finite does on one device."""

import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from meshwright.costmodel.sharding.strategies import Placement, R
from meshwright.executor.parameters.loss_scale import CEILING, LossScale, StepGuard
from meshwright.executor.parameters.norms import ROW, clip_, copies, norm_share, total_norm
from meshwright.executor.parameters.parameters import StageParameter
from meshwright.executor.ranks.meshes import Place, StageMesh, single_process
from meshwright.executor.resharding.reshard import Axis, local_part

SHAPE = (36, 12)  # divisible by every degree tried, a fused projection's thirds too
PLACEMENTS = (R, Placement("S", 0), Placement("S", 1), Placement("S", 0, 3))
NORM_TYPES = (0.5, 1.0, 2.0, 3.0, math.inf)
CPU = torch.device("cpu")
ALONE = single_process(CPU, [StageMesh(ranks=(0,), dp=1, tp=1, shards=1)])


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


def parameter(**given: Any) -> StageParameter:
    fields: dict[str, Any] = {
        "value": "w", "fqn": "w", "shape": SHAPE, "placement": R, "sum_data": True,
        "sum_tensor": False, "trainable": True, "leaf": nn.Parameter(torch.empty(0)),
        "stored": torch.empty(0), **given,
    }  # fmt: skip
    return StageParameter(**fields)


def places(stages: Sequence[Stage]) -> Iterator[tuple[int, Place]]:
    meshes = tuple(stage.mesh for stage in stages)
    for k, s in enumerate(stages):
        for rank in s.mesh.ranks:
            d, t = s.mesh.coordinate(rank)
            replicate, shard = divmod(d, s.shard)
            yield k, Place(
                stages=(k,), meshes=meshes, rank=rank, mesh=None, device=CPU,
                data=Axis("data", s.mesh.dp, d), shard=Axis("shard", s.shard, shard),
                replicate=Axis("replicate", s.replicate, replicate),
                tensor=Axis("tensor", s.tensor, t), rows=Axis("rows", s.mesh.dp, d),
                edge_groups={}, tied_groups={},
            )  # fmt: skip


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
            taken = placement.dim if placement.sharded else None
            free = [Placement("S", d) for d in (0, 1) if d != taken]
            zero = draw(st.sampled_from([R, *free])) if stage.shard > 1 else R
            stage.held.append((name, placement, zero, owners if name == "tied" else ()))
    return stages


def gradients_on(
    stage: Stage, place: Place, whole: dict[str, torch.Tensor]
) -> list[tuple[StageParameter, torch.Tensor]]:
    found = []
    for name, placement, zero, owners in stage.held:
        local = whole[name]
        if placement.sharded:
            local = local_part(local, placement, place.tensor.size, place.tensor.rank)
        if zero.sharded:
            local = local_part(local, zero, place.shard.size, place.shard.rank)
        of = parameter(placement=placement, shard_placement=zero, shared_stages=owners)
        found.append((of, local))
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
    found = total_norm(joined, ALONE, norm_type)
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
    wanted = float(x[0].double()) * math.sqrt(n - 3 + 3 * 1024**2)
    in_one = float(torch.linalg.vector_norm(x))
    found = float(total_norm(norm_share([(parameter(shape=(n,)), x)], ALONE), ALONE))
    assert abs(found / wanted - 1) < 1e-6
    assert n % ROW == 3 and abs(in_one / wanted - 1) > 1e-4


def one_device(*gradients: torch.Tensor | None) -> tuple[list[StageParameter], list[nn.Parameter]]:
    """The same gradients at our parameters and at torch's."""
    ours, theirs = [], []
    for gradient in gradients:
        p, twin = (nn.Parameter(torch.zeros(SHAPE)) for _ in range(2))
        if gradient is not None:
            p.grad, twin.grad = gradient.clone(), gradient.clone()
        ours.append(parameter(api=p))
        theirs.append(twin)
    return ours, theirs


@settings(deadline=None)
@given(
    st.sampled_from((0.0, 1e-3, 1.0, 40.0, 1e9, math.inf)),
    st.sampled_from(NORM_TYPES[1:]),
    st.integers(0, 99),
)
def test_clipping_is_torchs_on_one_device(max_norm: float, norm_type: float, seed: int) -> None:
    one, other = torch.randn(2, *SHAPE, generator=torch.Generator().manual_seed(seed))
    ours, theirs = one_device(one, None, other)
    norm = clip_(ours, ALONE, max_norm, norm_type)
    torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(theirs, max_norm, norm_type))
    for p, twin in zip(ours, theirs, strict=True):
        torch.testing.assert_close(p.api.grad, twin.grad)


def test_without_gradients_the_norm_is_zero() -> None:
    for norm_type in NORM_TYPES:
        assert float(clip_(one_device(None, None)[0], ALONE, 1.0, norm_type)) == 0.0
    empty = [(parameter(shape=(0, 4)), torch.empty(0, 4))]
    assert float(total_norm(norm_share(empty, ALONE, math.inf), ALONE, math.inf)) == 0.0


def test_what_is_no_norm_and_a_bound_below_zero_are_refused() -> None:
    (ours,), _ = one_device(torch.ones(SHAPE))
    for norm_type in (0.0, -1.0, -math.inf, math.nan):
        with pytest.raises(ValueError, match=r"norm_type=.* > 0; .* 2\.0 is the usual one"):
            clip_([ours], ALONE, 1.0, norm_type)
    for max_norm in (-1.0, math.nan):
        with pytest.raises(ValueError, match=r"max_norm=.* norm >= 0; .* float\('inf'\) "):
            clip_([ours], ALONE, max_norm)
    assert torch.equal(ours.api.grad, torch.ones(SHAPE))


# --- the loss scale -------------------------------------------------------------------------------


def torchs(outcomes: list[bool], start: float, interval: int) -> list[float]:
    """Scales after each step by the update that `torch.amp.GradScaler` runs."""
    scale, streak = torch.tensor(start), torch.tensor(0, dtype=torch.int32)
    found = []
    for finite in outcomes:
        torch._amp_update_scale_(scale, streak, torch.tensor(float(not finite)), 2.0, 0.5, interval)
        found.append(float(scale))
    return found


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=40), st.integers(1, 6), st.integers(0, 20))
def test_it_moves_as_torchs(outcomes: list[bool], interval: int, exponent: int) -> None:
    """Above the floor, which torch's does not have."""
    start = 2.0 ** (exponent + 40)
    scale = LossScale(value=start, growth_interval=interval)
    found = []
    for finite in outcomes:
        scale.update(finite)
        found.append(scale.value)
    assert found == torchs(outcomes, start, interval)


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=30), st.integers(-10, 10), st.booleans())
def test_it_stays_between_floor_and_ceiling(
    outcomes: list[bool], exponent: int, high: bool
) -> None:
    floor = 2.0**exponent
    scale = LossScale(value=CEILING if high else floor, floor=floor, growth_interval=1)
    for finite in outcomes:
        scale.update(finite)
        assert floor <= scale.value <= CEILING
        assert torch.tensor(1 / scale.value).item() * scale.value == 1.0  # exact in fp32


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"value": 1000.0}, r"value=1000\.0 is no power of two"),
        ({"value": 0.0}, r"value=0\.0 is no power of two"),
        ({"value": math.inf}, r"value=inf is no power of two up to 2\*\*126"),
        ({"value": 1.0, "floor": 2.0}, r"value=1\.0 is below floor=2\.0; .*start at the floor"),
        ({"growth_interval": 0}, r"growth_interval=0 must be at least 1"),
    ],
)
def test_a_scale_that_would_round_or_never_move_is_refused(
    wrong: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LossScale(**wrong)


def test_a_state_of_something_else_is_refused() -> None:
    scale = LossScale()
    with pytest.raises(ValueError, match=r"lacks \['finite_steps'\]; it has \['scale', 'value'\]"):
        scale.load_state_dict({"scale": 1.0, "value": 2.0})
    with pytest.raises(ValueError, match=r"value=3\.0 is no power of two"):
        scale.load_state_dict({"value": 3.0, "finite_steps": 0})
    assert scale == LossScale()


def held(*values: list[float] | None) -> list[StageParameter]:
    """Parameters of ones on one device, with gradients ready to be delivered."""
    given = [None if x is None else torch.tensor(x) for x in values]
    api = [nn.Parameter(torch.ones(1 if x is None else len(x))) for x in values]
    return [
        parameter(fqn=f"w{k}", gradient=g, api=api[k], stored=api[k].detach())
        for k, g in enumerate(given)
    ]


def guard(scale: LossScale | None = None) -> StepGuard:
    return StepGuard(place=ALONE, scale=scale)


def gradients(parameters: list[StageParameter]) -> list[list[float] | None]:
    return [None if p.gradient is None else p.gradient.tolist() for p in parameters]


def test_a_finite_step_is_unscaled_to_the_bit() -> None:
    """Without a scale gradients pass as they are; a parameter without one is left out."""
    parameters, of = held([1.25 * 65536.0, 2.0**-120], None, [-3.0]), guard(LossScale())
    assert of.seed == 65536.0 and of.admit(parameters)
    assert gradients(parameters) == [[1.25, 2.0**-136], None, [-3.0 / 65536.0]]
    assert of.skipped_steps == 0
    parameters, of = held([1.5, -2.0], None, [3.0]), guard()
    assert of.seed == 1.0 and of.admit(parameters) and of.admit([])
    assert gradients(parameters) == [[1.5, -2.0], None, [3.0]]


@settings(deadline=None)
@given(st.sampled_from((math.nan, math.inf, -math.inf)), st.integers(0, 2), st.booleans())
def test_a_step_that_is_not_finite_is_dropped(value: float, where: int, half: bool) -> None:
    numbers = [[1.0, 2.0], [3.0]]
    numbers[where // 2][where % 2] = value
    parameters = held(*numbers)
    of = guard(LossScale() if half else None)
    assert not of.admit(parameters)
    assert gradients(parameters) == [None, None]
    assert of.skipped_steps == 1
    assert of.seed == (32768.0 if half else 1.0)
    assert of.admit(held([1.0, 2.0], [3.0]))
    assert of.skipped_steps == 1


def test_a_skipped_step_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """Searching the scale is news; a step lost without that, or at its floor, is a warning."""
    for scale, level in (
        (LossScale(), logging.INFO),
        (LossScale(value=1.0), logging.WARNING),
        (None, logging.WARNING),
    ):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            guard(scale).admit(held([1.0], [math.nan], [math.inf], [2.0]))
        assert [record.levelno for record in caplog.records] == [level]
        assert "step skipped" in caplog.text
        assert ("first in the backward that of 'w2'" in caplog.text) == (level == logging.WARNING)
    caplog.clear()
    of = guard()
    for _ in range(2):
        assert not of.admit(held([math.nan]))
    assert len(caplog.records) == 1 and of.skipped_steps == 2  # said once
