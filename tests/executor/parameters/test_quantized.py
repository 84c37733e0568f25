"""Quantised blocks keep their bounds, and a small run that sends them learns as the exact one.

ZeRO++ (arXiv:2306.10209) claims a quarter of ZeRO-3's bytes, and losses as without it.
"""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.costmodel.quantized import BLOCK, GRADIENT_BITS, WEIGHT_BITS, wire_bytes
from meshwright.executor.parameters.quantized import packed, unpacked
from tests.executor.parameters.quantized_worker import RANKS, SEEDS
from tests.helpers.launching import Results, results_of

TIMEOUT_S = 300
BITS = pytest.mark.parametrize("bits", [WEIGHT_BITS, GRADIENT_BITS])
few = settings(deadline=None, max_examples=40)
SHAPES = st.tuples(st.integers(1, 4), st.integers(1, 3 * BLOCK + 1))


def numbers(seed: int, shape: tuple[int, int], scale: float) -> torch.Tensor:
    """Of both signs, a few of them far larger than the rest, and some zero."""
    drawn = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=drawn) ** 3
    return scale * x * (torch.rand(shape, generator=drawn) > 0.1)


def back(x: torch.Tensor, bits: int) -> torch.Tensor:
    return unpacked(packed(x, bits), x.shape[1], bits)


def half_scales(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Half of each element's block's scale."""
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK)).view(len(x), -1, BLOCK)
    scales = padded.abs().amax(2, keepdim=True) / (2 ** (bits - 1) - 1)
    return scales.expand_as(padded).reshape(len(x), -1)[:, : x.shape[1]] / 2


# --- the codec -----------------------------------------------------------------------------------


@BITS
@few
@given(seed=st.integers(0, 1000), shape=SHAPES, power=st.integers(-20, 20))
def test_no_element_is_off_by_more_than_half_a_scale(
    bits: int, seed: int, shape: tuple[int, int], power: int
) -> None:
    x = numbers(seed, shape, 2.0**power)
    off = (back(x, bits) - x).abs()
    assert bool((off <= half_scales(x, bits) * (1 + 1e-5)).all())


@BITS
@few
@given(seed=st.integers(0, 1000), shape=SHAPES)
def test_what_was_rounded_stays_as_it_is(bits: int, seed: int, shape: tuple[int, int]) -> None:
    once = back(numbers(seed, shape, 1.0), bits)
    assert torch.allclose(back(once, bits), once, rtol=1e-5)
    assert torch.equal(back(-once, bits), -back(once, bits))
    assert torch.equal(back(0 * once, bits), 0 * once)


@BITS
def test_sums_are_hardly_off_though_elements_are(bits: int) -> None:
    """Roundings are even-handed: of N of them, each uniform within half a scale h, the sum is off
    by h sqrt(N / 3), and a mean by less and less."""
    x = torch.randn(64, 64 * BLOCK, generator=torch.Generator().manual_seed(7))
    off, half = back(x, bits) - x, half_scales(x, bits)
    spread = float((half.square().sum() / 3).sqrt())
    assert abs(float(off.double().sum())) < 4 * spread
    assert float(off.square().mean()) == pytest.approx(float(half.square().mean() / 3), rel=0.05)


@BITS
@few
@given(shape=SHAPES, at=st.integers(0, 10**6), value=st.sampled_from(["nan", "inf", "-inf"]))
def test_what_is_not_finite_is_seen_after(
    bits: int, shape: tuple[int, int], at: int, value: str
) -> None:
    x = numbers(1, shape, 1.0)
    row, column = at % shape[0], at % shape[1]
    x[row, column] = float(value)
    assert not bool(back(x, bits)[row].isfinite().all())


@BITS
@few
@given(shape=SHAPES)
def test_the_wire_carries_what_is_priced(bits: int, shape: tuple[int, int]) -> None:
    whole = -(-shape[1] // BLOCK) * BLOCK  # the last block is filled up
    sent = packed(numbers(2, shape, 1.0), bits)
    assert sent.numel() == shape[0] * wire_bytes(whole, bits)


def test_a_step_sends_about_a_quarter() -> None:
    """Of 16-bit units of M, as published: ZeRO-3 gathers M twice and scatters M; of ours, between
    nodes, half an M and a bit gathered once, and a quarter and a bit scattered."""
    gathered, scattered = wire_bytes(1, WEIGHT_BITS) / 2, wire_bytes(1, GRADIENT_BITS) / 2
    assert 0.75 < gathered + scattered < 0.75 * 1.03
    assert 3 / (gathered + scattered) == pytest.approx(4, rel=0.03)


# --- on ranks ------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("quantized")
    worker = Path(__file__).with_name("quantized_worker.py")
    return results_of(worker, folder, ranks=RANKS, timeout_s=TIMEOUT_S)


def test_every_rank_ends_in_order(trained: Results) -> None:
    assert trained.run.ok, trained.run.tail()


@pytest.mark.parametrize(
    ("way", "least", "most"),
    [
        ("weights", 1e-4, 0.05),
        ("gradients", 0.01, 0.2),
        ("both", 0.01, 0.2),
        ("both in hops", 0.01, 0.3),
        ("both in bf16", 0.01, 0.3),
    ],
)
def test_gradients_are_near_the_exact_ones(
    trained: Results, way: str, least: float, most: float
) -> None:
    """And not the same: that they were rounded is seen."""
    assert least < trained[way]["gradient"] < most
    assert trained[way]["plan"] == ["both" if "both" in way else way]


def test_a_run_learns_as_the_exact_one_within_the_noise_of_seeds(trained: Results) -> None:
    exact, sent = (trained[way]["losses"] for way in ("exact", "both in hops"))
    assert trained["exact"]["plan"] == ["none"]
    assert len(exact) == len(sent) == len(SEEDS)
    ends = [[statistics.fmean(losses[-5:]) for losses in runs] for runs in (exact, sent)]
    assert all(end < losses[0] / 4 for end, losses in zip(ends[0], exact, strict=True))
    noise = max(ends[0]) - min(ends[0])
    assert abs(statistics.fmean(ends[0]) - statistics.fmean(ends[1])) < noise


def test_a_plan_that_changes_numbers_needs_consent(trained: Results) -> None:
    said = trained["refused"]["said"]
    assert "quantized='both'" in said and 'allow=["quantized"]' in said and "legal: none" in said
