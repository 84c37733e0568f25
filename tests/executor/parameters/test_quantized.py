"""Quantised blocks keep their bounds, and a small run that sends them learns as the exact one.

ZeRO++ (arXiv:2306.10209) claims a quarter of ZeRO-3's bytes, and losses as without it.
"""

from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.costmodel.quantized import BLOCK, GRADIENT_BITS, WEIGHT_BITS, wire_bytes
from meshwright.executor.parameters.zero3 import (
    QuantizedAllGather,
    QuantizedReduceScatter,
    packed,
    unpacked,
)
from meshwright.executor.ranks import launch
from meshwright.planner.plan import Plan, PlanError
from tests.executor.parameters.learned import GPT, gpt_of
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.tiny import planned
from tests.models.models import Traced, parallelize

RANKS, ROWS, MICROBATCHES = 4, 16, 2
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
    padded = torch.nn.functional.pad(x, (0, -x.shape[1] % BLOCK)).view(len(x), -1, BLOCK)
    scales = padded.abs().amax(2, keepdim=True) / (2 ** (bits - 1) - 1)
    return scales.expand_as(padded).reshape(len(x), -1)[:, : x.shape[1]] / 2


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


def collectives() -> None:
    """Each rank gets what the codec makes of the others' numbers: of weights in 8 bits, but over
    the exact group, and of sums in 4, in one hop or two."""
    n, world, rank = BLOCK + 44, dist.group.WORLD, launch.rank()
    given = [numbers(r, (RANKS, n), 1.0) for r in range(RANKS)]
    out = torch.empty(RANKS * n)
    QuantizedAllGather(None)(out, given[rank][0].clone(), world)
    assert torch.equal(out, torch.cat([back(x[:1], WEIGHT_BITS)[0] for x in given]))
    QuantizedAllGather(world.group_name)(out, given[rank][0].clone(), world)
    assert torch.equal(out, torch.cat([x[0] for x in given]))
    summed = torch.empty(n)
    QuantizedReduceScatter(())(summed, given[rank].flatten(), world, None)
    assert torch.equal(summed, sum(back(x[rank][None], GRADIENT_BITS)[0] for x in given))
    node, near = divmod(rank, 2)
    pairs = [[dist.new_group(ranks) for ranks in at] for at in ([[0, 1], [2, 3]], [[0, 2], [1, 3]])]
    hops = pairs[0][node], pairs[1][near]
    QuantizedReduceScatter(hops)(summed, given[rank].flatten(), world, None)
    own = [x.view(2, 2, n)[:, near].reshape(1, -1) for x in given]
    sent = [back(x, GRADIENT_BITS).view(2, n) for x in own]
    first = [sent[0] + sent[1], sent[2] + sent[3]]
    wanted = sum(back(of[node][None], GRADIENT_BITS)[0] for of in first)
    assert torch.equal(summed, wanted)


def test_collectives_are_the_codec_of_each_rank_s_numbers() -> None:
    on_ranks(RANKS, collectives)


WAYS: dict[str, dict[str, Any]] = {
    "exact": {"quantized": "none"},
    "exact in bf16": {"quantized": "none", "precision": "bf16"},
    "weights": {"quantized": "weights"},
    "gradients": {"quantized": "gradients"},
    "both in hops": {"quantized": "both", "hpz": 2},
    "both in bf16": {"quantized": "both", "hpz": 2, "precision": "bf16"},
}


def plan_of(way: str) -> tuple[Plan, Traced]:
    given = WAYS[way]
    of = gpt_of(ROWS // MICROBATCHES, given.get("precision", "fp32"))
    knobs = Knobs(meshes=((RANKS, 1),), rows=ROWS, num_microbatches=MICROBATCHES, zero=3, **given)
    return build_plan(of.graph, knobs), of


def learn(way: str, seed: int, steps: int) -> tuple[list[float], list[float]]:
    runtime = parallelize(GPT.model(seed), *plan_of(way))
    optimizer = GPT.optimize(runtime)
    losses, first = [], list[float]()
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(float(runtime.train_step(GPT.batch(ROWS, step))))
        if not step:
            gradients = runtime.full_gradients()
            first = [x for name in sorted(gradients) for x in gradients[name].flatten().tolist()]
        optimizer.step()
    return losses, first


@cache
def learned(way: str, seed: int = 1, steps: int = 1) -> tuple[list[float], torch.Tensor]:
    plan_of(way)
    losses, first = on_ranks(RANKS, learn, way, seed, steps)
    return losses, torch.tensor(first)


BOUNDS = (
    ("weights", 1e-4, 0.05), ("both in hops", 0.01, 0.3), ("gradients", 0.01, 0.2),
    ("both in bf16", 0.01, 0.3),
)  # fmt: skip
WHAT = "all that can be quantised, at once, is kept"


@pytest.mark.parametrize("bounds", tiered(BOUNDS, BOUNDS[1].__eq__, WHAT, lambda of: of[0]))
def test_gradients_are_near_the_exact_ones(bounds: tuple[str, float, float]) -> None:
    """And not the same: that they were rounded is seen."""
    way, least, most = bounds
    exact = learned("exact in bf16" if "bf16" in way else "exact")[1]
    assert least < float((learned(way)[1] - exact).norm() / exact.norm()) < most


@second_tier("the gradients of such a run's first step are kept")
def test_a_short_run_learns_as_the_exact_one() -> None:
    exact, sent = (learned(way, 1, 10)[0] for way in ("exact", "both in hops"))
    assert exact[-1] < exact[0] - 0.4
    assert sent[-1] == pytest.approx(exact[-1], rel=0.02)


def test_a_plan_that_changes_numbers_needs_consent() -> None:
    said = r"(?s)quantized='both'.*legal: none.*allow=\[\"quantized\"\]"
    given = {"example_inputs": GPT.batch(4, 0), "loss_fn": None, "global_batch_size": ROWS}
    with pytest.raises(PlanError, match=said):
        planned(GPT.model(), RANKS, plan=plan_of("both in hops")[0], profile=False, **given)
