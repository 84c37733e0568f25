"""Target: how a training framework executes a plan, apart from the hardware.

Two frameworks run the same plan on the same devices at different speeds, because one fuses its
pointwise kernels and the other doesn't, one hides its gradient reduction behind the backward and
the other doesn't. All of that is stated here and nowhere else, so that nothing about a framework
hides in a formula.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from types import MappingProxyType

BUCKET_BYTES = 25 * 2**20
UNITS = ("bucket", "parameter", "block")
DISPATCH = ("per_expert", "per_node")
FUSION = ("none", "pointwise", "full")


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a framework does with kernels, gradients and parameters.

    `fusion`: "none" launches every operator as a kernel of its own (eager); "pointwise" fuses
    chains of pointwise operators and softmax (hand-written kernels as Megatron's); "full" fuses
    norms and reductions with them, too (a compiler). `host_scale` is the host's work per operator
    relative to plain eager PyTorch (0 with CUDA graphs). `overlap_gradients`,
    `overlap_parameters`: whether the reduction of gradients runs beside the backward, and ZeRO's
    gathers of parameters beside the compute. `overlap_tensor` is the fraction of tensor-parallel
    communication hidden behind the products it belongs to, `overlap_experts` that of the exchange
    of tokens between experts hidden behind other micro-batches; `overlap_sends` whether a stage
    computes on while it sends, `scatter_sends` whether tensor-parallel ranks send a part each,
    gathered by the receivers. `attention_scale` is the speed of its fused attention kernels
    relative to the device's, `zero_bandwidth` the part of the links' bandwidth that ZeRO's
    gathers and scatters reach. `gradient_bytes` per element as accumulated and reduced; `master`
    whether fp32 copies of 16-bit weights are kept;
    `optimizer_passes` how often the optimizer's traffic passes through memory (1 for a single fused
    kernel; separate unscaling, norm and clipping passes add to it). `bucket_bytes` of gradients
    are reduced together, and no less than `bucket_bytes_per_rank` for each data-parallel rank, from
    buffers of which `bucket_copies` exist beside the gradients (0: the gradients lie in them);
    `unit` is what one collective of ZeRO moves: a bucket, each parameter by itself, or all
    parameters of a block. `dispatch` says how often a token crosses to a node: once
    "per_expert" there (an all-to-all), or "per_node" (DeepEP and its like, which spread it inside).
    `counter_dropout`: masks are a function of global indices, as this project's executor draws
    them, kept as numbers, and attention with dropout is written out; else kernels keep bytes, and
    fused attention draws its own. `loss_in_place`: a cross-entropy writes its logits' gradient over
    what it kept of them. `gathers_again`: of an activation gathered from tensor-parallel ranks, a
    backward keeps this rank's part, and gathers it beside another product. `pure`: running
    statistics are results, not written by a forward, so that any block may be run again.
    `expert_host` is the host's work for each operator of an expert layer's data path (counting,
    sorting, splitting) relative to a plain operator; `message_s` the seconds of each token sent to
    another node, where they are sent one by one. `expert_imbalance`: copies of tokens on the
    busiest of the ranks that share experts out, over the mean: 1 where routing is balanced, up to
    their number where it is not. `defers_weights`: whether a backward can put weight gradients off,
    for schedules that split it; where it can't, its first part takes all the time. `repeats_whole`:
    full recompute runs a block's whole forward again, also what no backward needs.
    """

    name: str
    fusion: str = "none"
    host_scale: float = 1.0
    overlap_gradients: bool = False
    overlap_parameters: bool = False
    overlap_tensor: float = 0.0
    overlap_experts: float = 0.0
    overlap_sends: bool = True
    scatter_sends: bool = False
    attention_scale: float = 1.0
    zero_bandwidth: float = 1.0
    dispatch: str = "per_expert"
    expert_host: float = 1.0
    message_s: float = 0.0
    expert_imbalance: float = 1.0
    gradient_bytes: int = 4
    master: bool = True
    optimizer_passes: float = 1.0
    bucket_bytes: int = BUCKET_BYTES
    bucket_bytes_per_rank: int = 0
    bucket_copies: int = 2
    unit: str = "bucket"
    counter_dropout: bool = False
    loss_in_place: bool = False
    gathers_again: bool = False
    pure: bool = False
    defers_weights: bool = True
    repeats_whole: bool = True

    def __post_init__(self) -> None:
        if self.fusion not in FUSION:
            raise ValueError(
                f"target {self.name!r}: fusion={self.fusion!r}; legal: {', '.join(FUSION)}"
            )
        if self.unit not in UNITS:
            raise ValueError(f"target {self.name!r}: unit={self.unit!r}; legal: {', '.join(UNITS)}")
        if self.dispatch not in DISPATCH:
            raise ValueError(
                f"target {self.name!r}: dispatch={self.dispatch!r}; legal: {', '.join(DISPATCH)}"
            )
        for name in ("overlap_tensor", "overlap_experts"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(
                    f"target {self.name!r}: {name}={getattr(self, name)!r}; legal: 0 to 1"
                )
        if not 1 <= self.expert_imbalance < math.inf:
            raise ValueError(
                f"target {self.name!r}: expert_imbalance={self.expert_imbalance!r}; legal: from 1 "
                "(balanced), the busiest rank's tokens over the mean"
            )
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, int | float) and value < 0:
                raise ValueError(f"target {self.name!r}: {field.name}={value!r}; legal: 0 or more")


EAGER = Target(name="eager", counter_dropout=True, repeats_whole=False)
# the host's part of a compiled region, and of fused kernels, are assumed; so is the overlap
COMPILED = Target(
    name="compiled",
    fusion="full",
    host_scale=0.3,
    counter_dropout=True,
    defers_weights=False,
    repeats_whole=False,
)
# Megatron-Core with its usual options: buckets of 40 million gradients, a million more for each
# data-parallel rank, lying in one buffer; half of the tensor-parallel communication overlapped; its
# cross-entropy (core/tensor_parallel/cross_entropy.py) turns the softmax that it keeps into the
# gradient; sequence parallelism keeps parts (Korthikanti et al. 2022, section 4.2.2)
MEGATRON = Target(
    name="megatron",
    fusion="full",
    host_scale=0.5,
    overlap_gradients=True,
    overlap_parameters=True,
    overlap_tensor=0.5,
    bucket_bytes=160_000_000,
    bucket_bytes_per_rank=4_000_000,
    bucket_copies=0,
    loss_in_place=True,
    gathers_again=True,
)
TARGETS: Mapping[str, Target] = MappingProxyType(
    {target.name: target for target in (EAGER, COMPILED, MEGATRON)}
)


def target_named(name: str) -> Target:
    """A target by its name. Raises ValueError for an unknown one, with the legal names."""
    try:
        return TARGETS[name]
    except (KeyError, TypeError):
        raise ValueError(f"target={name!r}; legal: {', '.join(TARGETS)}") from None
