"""Runs with products in 8 bits learn as in bf16, and round their gradients by as much as they may.

The cells of the parity matrix compare them with a single device.
"""

import statistics
from functools import cache

import pytest
import torch

from meshwright.executor.ranks import launch
from tests.executor.parameters.learned import GPT, gpt_of, rows
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier
from tests.models.models import CASES, parallelize

RANKS, ROWS = 4, 16
SEEDS, STEPS = (1, 2, 3), 25

Run = tuple[list[float], torch.Tensor]


def learn(precision: str, seed: int, steps: int) -> Run:
    """Losses, and all gradients of the first step."""
    of = gpt_of(ROWS, precision)
    knobs = Knobs(
        meshes=((2, 2),), rows=ROWS, num_microbatches=1, zero=1, precision=precision,
        shardings=CASES["gpt2_untied"].shardings,
    )  # fmt: skip
    runtime = parallelize(GPT.model(seed), build_plan(of.graph, knobs), of)
    optimizer = GPT.optimize(runtime)
    losses, first = [], torch.empty(0)
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(float(runtime.train_step(rows(step, ROWS)).detach()))
        if step == 0:
            gradients = runtime.full_gradients()
            first = torch.cat([g.float().flatten() for g in gradients.values()])
        optimizer.step()
    return (losses, first) if launch.rank() == 0 else ([], torch.empty(0))


@cache
def learned(precision: str, seed: int, steps: int) -> Run:
    gpt_of(ROWS, precision)
    return on_ranks(RANKS, learn, precision, seed, steps)


@second_tier("products and their gradients are rounded in executor/backward/test_eight_bits.py")
def test_gradients_are_rounded() -> None:
    """By 3 bits of a mantissa, of gradients by 2 where scales are of tensors."""
    exact, by_tensor, by_row = (learned(p, 1, 1)[1] for p in ("bf16", "fp8", "fp8_rowwise"))
    far = [float((x - exact).norm() / exact.norm()) for x in (by_row, by_tensor)]
    assert 0.01 < far[0] < far[1] < 0.2


@second_tier("a trend over 25 steps of three seeds; the matrix and the rounding of a step stay")
@pytest.mark.parametrize("precision", ["fp8", "fp8_rowwise", "mxfp8"])
def test_a_run_learns_as_in_bf16_within_the_noise_of_seeds(precision: str) -> None:
    wide, narrow = ([learned(p, s, STEPS)[0] for s in SEEDS] for p in ("bf16", precision))
    ends = [[statistics.fmean(losses[-5:]) for losses in runs] for runs in (wide, narrow)]
    assert all(end < losses[0] / 3 for end, losses in zip(ends[0], wide, strict=True))
    noise = max(ends[0]) - min(ends[0])
    assert abs(statistics.fmean(ends[0]) - statistics.fmean(ends[1])) < noise
