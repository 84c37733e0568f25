"""Recompute policies: which operators of a block run again in its backward.

By what they keep, from all to nothing but a block's inputs:

    none        all that the backward reads
    selective   not the cores of attention that is written out (`repeated.py`)
    pointwise   nor what norms, activations, casts and the like make again cheaply
    widening    nor what products make that is larger than what they read
    products    nor what any other product makes, if it pays
    full        the inputs of the block

and beside them "alternate", what torchtitan keeps: fused attention and every second product.

With `REGATHER` behind it (by itself: "regather") a policy also keeps this rank's part alone of what
it gathers from tensor-parallel ranks, and gathers it again in the backward (Korthikanti et al.,
2022, section 4.2.2: with sequence parallelism a block keeps 34 sbh / t bytes, without this
(4 + 30 / t) sbh). `full` does so anyway.
"""

from __future__ import annotations

REGATHER = "regather"
PARTIAL = ("selective", "pointwise", "widening", "alternate", "products")
REGATHERING = (REGATHER, *(f"{policy}+{REGATHER}" for policy in PARTIAL if policy != "alternate"))
RECOMPUTE = (
    "none", "regather", "selective", "selective+regather", "pointwise", "pointwise+regather",
    "widening", "widening+regather", "alternate", "products", "products+regather", "full",
)  # fmt: skip


def parts_of(policy: str) -> tuple[str, bool]:
    """The policy by which operators run again, and whether gathers run again beside them."""
    if policy == REGATHER:
        return "none", True
    base, plus, _ = policy.partition("+")
    return base, bool(plus)


def regathering(policy: str) -> str:
    """A policy with gathers that run again."""
    return REGATHER if policy == "none" else f"{policy}+{REGATHER}"


def in_segments(policy: str, size: int) -> str:
    """Name of a policy within segments of so many blocks."""
    return f"{policy}/{size}"


def segment_policy(name: str) -> tuple[str, int]:
    """The policy and the blocks in a segment, 1 where there are none; inverse of `in_segments`."""
    policy, _, size = name.partition("/")
    return policy, int(size or 1)
