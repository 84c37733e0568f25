"""Target: how a training framework executes a plan, apart from the hardware, and what it can't run.

Two frameworks run the same plan on the same devices at different speeds, as one fuses its pointwise
kernels or hides its gradient reduction and the other doesn't. All of that is stated in these terms,
so that nothing about a framework hides in a formula; frameworks by name: `costmodel/targets.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from meshwright.costmodel.sharing import Sharing
from meshwright.profiles.inputs import ArgumentError
from meshwright.profiles.inputs.limits import is_number

BUCKET_BYTES = 25 * 2**20
ALONE_BYTES = BUCKET_BYTES // 8  # to copy such a tensor to a bucket costs more than a collective
SCATTERED_AT_ONCE = 2  # buckets of `train_step`; what one more would hold waits for the oldest
SENT_AT_ONCE = 2  # gradients on their way to host memory
POSTED_AHEAD = 2  # receives of `train_step` ahead of the one that is waited for
ZEROS = (0, 1, 2, 3)
UNITS = ("bucket", "parameter", "block")
DISPATCH = ("per_expert", "per_node")
IN_PARTS = ("all_gather", "reduce_scatter")  # of the tensor axis, as one product's parts come
FUSION = ("none", "pointwise", "full")
_CHOICES = {"fusion": FUSION, "unit": UNITS, "gathered_unit": UNITS, "dispatch": DISPATCH}


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A framework's kernels, gradients and parameters, and what it can't run. Nothing is hidden on
    CPUs, whose cores compute and move the bytes both."""

    name: str

    # --- kernels ---
    # "none": each operator is a kernel (eager); "pointwise": chains of pointwise operators and
    # softmax are one (hand-written kernels as Megatron's); "full": norms and reductions, too (a
    # compiler)
    fusion: str = "none"
    # host's work per operator, relative to plain eager PyTorch; 0 with CUDA graphs
    host_scale: float = 1.0
    # the same, for operators of an expert layer's data path (counting, sorting, splitting)
    expert_host: float = 1.0
    # fused attention is the kernel written for each device (cuDNN's)
    tuned_attention: bool = False
    # speed of fused attention, relative to the device's
    attention_scale: float = 1.0
    # speed of kernels that only move bytes, relative to the device's, which is that of kernels
    # written by hand, or of each operator's own
    stream_speed: float = 1.0
    # speed of 16-bit products of two activations whose sizes along memory are no multiples of 8
    unaligned_products: float = 1.0
    # the product that makes a weight's gradient adds it to those of earlier micro-batches
    fused_accumulation: bool = False
    # operands in 8 bits are cast with the scales of earlier steps, in one pass, both ways round
    delayed_scaling: bool = False
    # dropout masks are functions of global indices, kept as numbers, and attention with dropout is
    # written out; else kernels keep bytes, and fused attention draws its own
    counter_dropout: bool = False
    # a backward can put weight gradients off, for schedules that split it; else its first part
    # takes all the time
    defers_weights: bool = True

    # --- memory of activations ---
    # a cross-entropy writes its logits' gradient over what it kept of them
    loss_in_place: bool = False
    # of an activation gathered from tensor-parallel ranks a backward keeps this rank's part, and
    # gathers it beside another product: always
    gathers_again: bool = False
    # the same, where a recompute policy says so
    regathers: bool = False
    # running statistics are results, not written by a forward, so that any block may run again
    pure: bool = False
    # full recompute runs a block's whole forward again, also what no backward needs
    repeats_whole: bool = True

    # --- communication behind compute, on GPUs ---
    # reduction of gradients behind the backward
    overlap_gradients: bool = False
    # ZeRO's gathers, a block ahead
    overlap_parameters: bool = False
    # ZeRO stages whose reduction among replicas of a shard is behind the backward
    overlap_replicas: tuple[int, ...] = ZEROS
    # communication of a forward and a backward that a schedule runs together, where experts are
    # shared out
    overlap_passes: bool = False
    # collectives of the tensor axis that run part by part behind the products they belong to
    # (`costmodel/operators/pricing.py`)
    overlap_tensor: tuple[str, ...] = ()
    # fraction of the exchange of tokens between experts behind other micro-batches, 0 to 1
    overlap_experts: float = 0.0
    # a stage computes on while it sends
    overlap_sends: bool = True
    # tensor-parallel ranks send a part each, gathered by the receivers
    scatter_sends: bool = False

    # --- gradients and the optimizer ---
    # bytes of a gradient's element, as accumulated and reduced
    gradient_bytes: int = 4
    # bytes of gradients that are reduced together
    bucket_bytes: int = BUCKET_BYTES
    # no less than so many for each data-parallel rank
    bucket_bytes_per_rank: int = 0
    # buckets beside the gradients; 0: gradients lie in them
    bucket_copies: int = 2
    # bytes from which a parameter is reduced by itself; 0: none is
    alone_bytes: int = 0
    # gradients exist from when a backward makes them until the optimizer has read them, as
    # `train_step`'s do (`costmodel/memory/gradients.py`); else always
    gradients_come: bool = False
    # ZeRO scatters gradients when all are there
    whole_gradients: bool = False
    # fp32 copies of 16-bit weights are kept
    master: bool = True
    # passes of the optimizer's traffic through memory: 1 for the optimizer alone; unscaling, norm
    # and clipping add to it
    optimizer_passes: float = 1.0
    # the optimizer's step is one kernel whatever the user says, as in frameworks that bring theirs
    fused_optimizer: bool = True

    # --- ZeRO ---
    # what one collective moves in stages 1 and 2: of `UNITS`
    unit: str = "bucket"
    # the same, in stage 3
    gathered_unit: str = "bucket"
    # fraction of the links that stage 3's collectives reach
    zero_bandwidth: float = 1.0
    # fraction hidden of what stage 3 could hide behind compute, 0 to 1
    hidden_zero3: float = 1.0
    # 16-bit weights, and all of ZeRO-3's, are copied from where they were gathered to where they
    # are read
    copies_weights: bool = False

    # --- experts ---
    # how often a token crosses to a node: once "per_expert" there (an all-to-all), or "per_node"
    # (DeepEP and its like, which spread it inside)
    dispatch: str = "per_expert"
    # seconds of each token sent to another node, where they are sent one by one
    message_s: float = 0.0
    # copies of tokens on the busiest of the ranks that share experts out, over the mean, from 1
    expert_imbalance: float = 1.0

    # --- what it can't run, which is not searched for it ---
    # names that an override may forbid
    excludes: tuple[str, ...] = ()
    # ZeRO stages that it combines with tensor parallelism
    zeros_with_tensor: tuple[int, ...] = ZEROS
    # ZeRO stages that it combines with pipelines
    zeros_with_pipeline: tuple[int, ...] = ZEROS

    def __post_init__(self) -> None:
        for name, legal in _CHOICES.items():
            self._check(name, getattr(self, name) in legal, legal)
        in_parts = set(self.overlap_tensor) <= set(IN_PARTS)
        self._check("overlap_tensor", in_parts, f"of {', '.join(IN_PARTS)}")
        for name in ("overlap_experts", "hidden_zero3"):
            self._check(name, 0 <= getattr(self, name) <= 1, "0 to 1")
        known = is_number(self.expert_imbalance) and 1 <= self.expert_imbalance < math.inf
        says = "from 1 (balanced), the busiest rank's tokens over the mean"
        self._check("expert_imbalance", known, says)
        for field in fields(self):
            value = getattr(self, field.name)
            self._check(field.name, not isinstance(value, int | float) or value >= 0, "0 or more")

    def _check(self, name: str, holds: bool, legal: str | Iterable[str]) -> None:
        if not holds:
            place = f"target {self.name!r}: {name}"
            raise ArgumentError.refused(place, getattr(self, name), legal=legal)

    def hides_replicas(self, sharing: Sharing) -> bool:
        """Whether the reduction among replicas of shards joins a backward."""
        return sharing.zero in self.overlap_replicas

    def combines(self, zero: int, *, tp: int, pp: int) -> bool:
        """Whether it runs a ZeRO stage beside so many tensor-parallel ranks and device groups."""
        with_tensor = tp == 1 or zero in self.zeros_with_tensor
        return with_tensor and (pp == 1 or zero in self.zeros_with_pipeline)
