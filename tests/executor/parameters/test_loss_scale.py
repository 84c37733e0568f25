"""The loss scale against torch's own, and what a step that is not finite does on one device."""

from __future__ import annotations

import logging
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from meshwright.costmodel.sharding.strategies import R
from meshwright.executor.parameters.loss_scale import CEILING, LossScale, StepGuard
from meshwright.executor.parameters.parameters import StageParameter
from meshwright.executor.ranks.meshes import StageMesh, single_process

CPU = torch.device("cpu")


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


def test_the_defaults_are_those_of_the_design() -> None:
    scale = LossScale()
    assert (scale.value, scale.growth_interval) == (65536.0, 2000)
    for _ in range(1999):
        scale.update(True)
    assert scale.value == 65536.0
    scale.update(True)
    assert scale.value == 131072.0
    scale.update(False)
    assert scale.value == 65536.0


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


@settings(deadline=None)
@given(st.lists(st.booleans(), max_size=20), st.lists(st.booleans(), max_size=20))
def test_a_checkpoint_goes_on_where_it_was(before: list[bool], after: list[bool]) -> None:
    one, two = LossScale(growth_interval=3), LossScale(growth_interval=3)
    for finite in before:
        one.update(finite)
    two.load_state_dict(one.state_dict())
    for finite in after:
        one.update(finite)
        two.update(finite)
    assert one == two


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"value": 1000.0}, r"value=1000\.0 is no power of two"),
        ({"value": 0.0}, r"value=0\.0 is no power of two"),
        ({"value": math.inf}, r"value=inf is no power of two up to 2\*\*126"),
        ({"value": math.nan}, r"value=nan is no power of two"),
        ({"floor": -1.0}, r"floor=-1\.0 is no power of two"),
        ({"value": 1.0, "floor": 2.0}, r"value=1\.0 is below floor=2\.0; .*start at the floor"),
        ({"growth_interval": 0}, r"growth_interval=0 must be at least 1"),
    ],
)
def test_a_scale_that_would_round_or_never_move_is_refused(
    wrong: dict[str, float], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        LossScale(**wrong)  # type: ignore[arg-type]


def test_a_state_of_something_else_is_refused() -> None:
    scale = LossScale()
    with pytest.raises(ValueError, match=r"lacks \['finite_steps'\]; it has \['scale', 'value'\]"):
        scale.load_state_dict({"scale": 1.0, "value": 2.0})
    with pytest.raises(ValueError, match=r"value=3\.0 is no power of two"):
        scale.load_state_dict({"value": 3.0, "finite_steps": 0})
    assert scale == LossScale()


# --- steps ----------------------------------------------------------------------------------------


def held(*values: list[float]) -> list[StageParameter]:
    """Parameters of ones on one device, with gradients ready to be delivered."""
    found = []
    for k, numbers in enumerate(values):
        weights = torch.ones(len(numbers))
        found.append(
            StageParameter(
                value=f"w{k}",
                fqn=f"w{k}",
                shape=tuple(weights.shape),
                placement=R,
                sum_data=False,
                sum_tensor=False,
                trainable=True,
                leaf=nn.Parameter(weights),
                stored=weights,
                gradient=torch.tensor(numbers),
                api=nn.Parameter(weights),
            )
        )
    return found


def guard(scale: LossScale | None = None) -> StepGuard:
    place = single_process(CPU, [StageMesh(ranks=(0,), dp=1, tp=1, shards=1)])
    return StepGuard(place=place, scale=scale)


def gradients(parameters: list[StageParameter]) -> list[list[float] | None]:
    return [None if p.gradient is None else p.gradient.tolist() for p in parameters]


def test_a_finite_step_is_unscaled_to_the_bit() -> None:
    scaled = [[1.25 * 65536.0, 2.0**-120], [-3.0]]
    parameters = held(*scaled)
    of = guard(LossScale())
    assert of.seed == 65536.0
    assert of.admit(parameters)
    assert gradients(parameters) == [[1.25, 2.0**-136], [-3.0 / 65536.0]]
    assert of.skipped_steps == 0


def test_without_a_scale_gradients_pass_as_they_are() -> None:
    parameters = held([1.5, -2.0], [3.0])
    of = guard()
    assert of.seed == 1.0
    assert of.admit(parameters)
    assert gradients(parameters) == [[1.5, -2.0], [3.0]]


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


def test_a_parameter_without_a_gradient_is_left_out() -> None:
    parameters = held([1.0], [2.0])
    parameters[0].gradient = None
    assert guard().admit(parameters)
    assert gradients(parameters) == [None, [2.0]]
    assert guard().admit([])


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


def test_what_is_no_search_for_a_scale_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    of = guard()
    for _ in range(2):
        assert not of.admit(held([math.nan]))
    assert len(caplog.records) == 1 and of.skipped_steps == 2
