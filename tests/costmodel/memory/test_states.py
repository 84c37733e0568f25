"""Model states against the formulas of the papers that name the stages, and buffers by hand.

Ψ parameters, n ranks, K bytes of optimizer states per parameter (12 for Adam in mixed precision:
fp32 copy and two moments). Rajbhandari et al., "ZeRO", 2020: 4Ψ + KΨ; ZeRO-1 4Ψ + KΨ/n; ZeRO-2
2Ψ + (2 + K)Ψ/n; ZeRO-3 (4 + K)Ψ/n, with gradients of two bytes.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.costmodel.memory.states import (
    OPTIMIZER_BYTES,
    fixed_bytes,
    model_state_bytes,
    optimizer_bytes,
    optimizer_step_bytes,
    optimizer_temporary_bytes,
    undo_bytes,
    working_bytes,
)
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER

HALF = Target(name="16-bit gradients", gradient_bytes=2)
RANKS = st.integers(1, 512)
SIZES = st.integers(1, 10**12)


def states(numel: float, zero: int, dp: int, precision: str = "bf16", target: Target = HALF):
    return model_state_bytes(
        numel, precision=precision, zero=zero, dp=dp, optimizer="adamw", target=target
    )


@given(SIZES, RANKS)
def test_states_are_those_of_the_zero_paper(psi: int, n: int) -> None:
    """But for the first stage, whose optimizer takes gradients in fp32, and the third, which keeps
    weights as fp32 shards alone: the 16-bit ones, 2Ψ/n, exist only while they are used."""
    k = 12
    assert states(psi, 0, n) == (4 + k) * psi
    assert states(psi, 1, n) == pytest.approx(4 * psi + (4 + k) * psi / n, rel=1e-12)
    assert states(psi, 2, n) == pytest.approx(2 * psi + (2 + k) * psi / n, rel=1e-12)
    assert states(psi, 3, n) == pytest.approx((4 + k - 2) * psi / n, rel=1e-12)


@pytest.mark.parametrize(
    ("precision", "gradient_bytes", "per_parameter"),
    [("fp32", 4, 16), ("fp32", 2, 16), ("bf16", 4, 18), ("fp16", 2, 16)],
)
def test_bytes_of_a_parameter_with_adam(
    precision: str, gradient_bytes: int, per_parameter: int
) -> None:
    target = dataclasses.replace(EAGER, gradient_bytes=gradient_bytes)
    assert states(1000, 0, 1, precision, target) == 1000 * per_parameter


def test_without_a_master_copy_mixed_precision_saves_four_bytes() -> None:
    bare = dataclasses.replace(HALF, master=False)
    assert states(1000, 0, 1) - states(1000, 0, 1, target=bare) == 4000


def test_arrays_are_priced_as_numbers() -> None:
    numels, ranks = np.array([1.0, 50.0, 1e9]), np.array([1.0, 4.0, 64.0])
    for zero in (0, 1, 2, 3):
        found = model_state_bytes(numels, precision="bf16", zero=zero, dp=ranks, optimizer="adamw")
        assert found.tolist() == [
            model_state_bytes(n, precision="bf16", zero=zero, dp=r, optimizer="adamw")
            for n, r in zip(numels.tolist(), ranks.tolist(), strict=True)
        ]


# --- buffers -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("zero", "dp", "numel", "nbytes"),
    [
        (0, 1, 10_000, 0),  # nobody to talk to
        (0, 4, 10_000, 2000),  # two buckets of 1000 bytes
        (1, 4, 10_000, 2000),
        (0, 4, 300, 1200),  # all gradients are less than two buckets
        (2, 4, 10_000, 4 * 700),  # a block's gradients before they are scattered
        (3, 4, 10_000, (4 + 2 * 2) * 700),  # and the weights of two blocks
        (3, 1, 10_000, 0),
    ],
)
def test_buffers_by_hand(zero: int, dp: int, numel: int, nbytes: int) -> None:
    target = Target(name="small buckets", bucket_bytes=1000, bucket_copies=2)
    found = working_bytes(numel, 700, weight_bytes=2, zero=zero, dp=dp, target=target)
    assert found == nbytes
    in_place = dataclasses.replace(target, bucket_copies=0)
    if zero < 2:  # gradients lie in their buckets
        assert not working_bytes(numel, 700, weight_bytes=2, zero=zero, dp=dp, target=in_place)


# --- the optimizer -------------------------------------------------------------------------------


@pytest.mark.parametrize("optimizer", OPTIMIZER_BYTES)
def test_a_step_reads_weight_and_gradient_and_updates_weight_and_moments(optimizer: str) -> None:
    moments = optimizer_bytes(optimizer)
    read, written = 2 * 4 + moments, 4 + moments
    assert optimizer_step_bytes(10, optimizer=optimizer) == 10 * (read + written)


@pytest.mark.parametrize(
    ("precision", "zero", "shards", "host", "per_parameter"),
    [
        ("fp32", 0, 4, False, 4 + 8),
        ("bf16", 0, 4, False, 2 + 4 + 8),
        ("fp32", 1, 4, False, 4 + 12 / 4),
        ("bf16", 2, 4, False, 2 + 12 / 4),
        ("bf16", 3, 4, False, 12 / 4),
        ("bf16", 1, 1, False, 2 + 4 + 8),  # of one rank
        ("bf16", 0, 4, True, 2),
        ("fp32", 2, 4, True, 4),
        ("bf16", 3, 4, True, 0),
    ],
)
def test_what_stays_between_steps(
    precision: str, zero: int, shards: int, host: bool, per_parameter: float
) -> None:
    given = {"precision": precision, "zero": zero, "optimizer": "adamw", "host": host}
    assert fixed_bytes(1000, shards, **given) == 1000 * per_parameter


def test_a_step_is_undone_from_weights_and_moments_and_adam_makes_roots_of_all() -> None:
    assert undo_bytes(1000, 4, zero=0, optimizer="adamw") == 1000 * 12
    assert undo_bytes(1000, 4, zero=1, optimizer="sgd") == 1000 / 4 * (4 + optimizer_bytes("sgd"))
    made = [
        optimizer_temporary_bytes([10, 30], optimizer=optimizer, device=device)
        for optimizer, device in (("adamw", "cuda"), ("adam", "cpu"), ("sgd", "cuda"))
    ]
    assert made == [4 * 40, 2 * 4 * 30, 0]


def test_an_unknown_optimizer_is_refused_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"optimizer='lamb'; legal: adagrad.*moments as yours"):
        optimizer_bytes("lamb")
