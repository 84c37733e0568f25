"""Target: how a training framework executes a plan, apart from the hardware, and what it can't run.

Two frameworks run the same plan on the same devices at different speeds, because one fuses its
pointwise kernels and the other doesn't, one hides its gradient reduction behind the backward and
the other doesn't. All of that is stated in these terms and nowhere else, so that nothing about a
framework hides in a formula. The frameworks by name are in `costmodel/targets.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields

from meshwright.costmodel.sharing import Sharing
from meshwright.profiles.inputs import MeshwrightError
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
    """What a framework does with kernels, gradients and parameters, and what it can't run.

    Kernels: `fusion` "none" launches every operator by itself (eager); "pointwise" fuses chains of
    pointwise operators and softmax (hand-written kernels as Megatron's); "full" norms and
    reductions, too (a compiler). `host_scale` is the host's work per operator relative to plain
    eager PyTorch (0 with CUDA graphs), `expert_host` for each operator of an expert layer's data
    path (counting, sorting, splitting). `tuned_attention`: fused attention is the kernel written
    for each device (cuDNN's); `attention_scale` is its speed relative to the device's.
    `fused_accumulation`: the product that makes a weight's gradient adds it to those of earlier
    micro-batches. `delayed_scaling`: operands in 8 bits are cast with the scales of earlier steps,
    in one pass, both ways round. `counter_dropout`: masks are a function of global indices, as this
    project's executor draws them, kept as numbers, and attention with dropout is written out; else
    kernels keep bytes, and fused attention draws its own. `defers_weights`: whether a backward can
    put weight gradients off, for schedules that split it; else its first part takes all the time.

    Memory: `loss_in_place`: a cross-entropy writes its logits' gradient over what it kept of them.
    `gathers_again`: of an activation gathered from tensor-parallel ranks a backward keeps this
    rank's part, and gathers it beside another product, always; `regathers`: where a recompute
    policy says so. `pure`: running statistics are results, not
    written by a forward, so that any block may be run again. `repeats_whole`: full recompute runs a
    block's whole forward again, also what no backward needs.

    What is hidden, on GPUs (on CPUs nothing: the cores that compute move the bytes):
    `overlap_gradients` the reduction of gradients behind the backward, `overlap_parameters` ZeRO's
    gathers, a block ahead, `overlap_replicas` the reduction among replicas of a shard, for these
    ZeRO stages; `overlap_passes` the communication of a forward and a backward that a schedule runs
    together, where experts are shared out; `overlap_tensor` these kinds of collectives of the
    tensor axis behind the products they belong to, part by part
    (`costmodel/operators/resharding.py`). `overlap_experts` is the
    fraction of the exchange of tokens between experts behind other micro-batches. `overlap_sends`:
    a stage computes on while it sends; `scatter_sends`: tensor-parallel ranks send a part each,
    gathered by the receivers.

    Gradients: `gradient_bytes` per element as accumulated and reduced, `bucket_bytes` of them
    together, and no less than `bucket_bytes_per_rank` for each data-parallel rank, from buffers of
    which `bucket_copies` exist beside the gradients (0: these lie in them); parameters of
    `alone_bytes` and more travel by themselves (0: none do). `gradients_come`: they exist from when
    a backward makes them until the optimizer has read them, as `train_step`'s do
    (`costmodel/memory/gradients.py`), not always. `whole_gradients`: ZeRO scatters them when all
    are there. `master`: fp32 copies of 16-bit weights are kept; `optimizer_passes` is how often the
    optimizer's traffic passes through memory (1 for the
    optimizer alone; unscaling, norm and clipping add to it), `fused_optimizer`: its step is one
    kernel whatever the user says, as in frameworks that bring theirs.

    ZeRO: of what stage 3 could hide behind compute, the part `hidden_zero3` is hidden. What one
    collective moves, a bucket, each parameter by itself, or all parameters of a
    block, is `unit` for stages 1 and 2, `gathered_unit` for 3, whose collectives reach the part
    `zero_bandwidth` of the links. `copies_weights`: 16-bit weights, and all of ZeRO-3's, are
    copied from where they were gathered to where they are read.

    Experts: `dispatch` says how often a token crosses to a node, once "per_expert" there (an
    all-to-all), or "per_node" (DeepEP and its like, which spread it inside); `message_s` are the
    seconds of each token sent to another node, where they are sent one by one. `expert_imbalance`:
    copies of tokens on the busiest of the ranks that share experts out, over the mean, from 1.

    What it can't run is not searched for it: `excludes` are names that an override may forbid;
    `zeros_with_tensor` and `zeros_with_pipeline` the ZeRO stages that it combines with those axes.
    """

    name: str
    fusion: str = "none"
    host_scale: float = 1.0
    overlap_gradients: bool = False
    overlap_parameters: bool = False
    overlap_replicas: tuple[int, ...] = ZEROS
    overlap_passes: bool = False
    overlap_tensor: tuple[str, ...] = ()
    overlap_experts: float = 0.0
    overlap_sends: bool = True
    scatter_sends: bool = False
    attention_scale: float = 1.0
    tuned_attention: bool = False
    fused_accumulation: bool = False
    delayed_scaling: bool = False
    zero_bandwidth: float = 1.0
    hidden_zero3: float = 1.0
    copies_weights: bool = False
    dispatch: str = "per_expert"
    expert_host: float = 1.0
    message_s: float = 0.0
    expert_imbalance: float = 1.0
    gradient_bytes: int = 4
    master: bool = True
    optimizer_passes: float = 1.0
    fused_optimizer: bool = True
    bucket_bytes: int = BUCKET_BYTES
    bucket_bytes_per_rank: int = 0
    bucket_copies: int = 2
    alone_bytes: int = 0
    gradients_come: bool = False
    whole_gradients: bool = False
    unit: str = "bucket"
    gathered_unit: str = "bucket"
    counter_dropout: bool = False
    loss_in_place: bool = False
    gathers_again: bool = False
    regathers: bool = False
    pure: bool = False
    defers_weights: bool = True
    repeats_whole: bool = True
    excludes: tuple[str, ...] = ()
    zeros_with_tensor: tuple[int, ...] = ZEROS
    zeros_with_pipeline: tuple[int, ...] = ZEROS

    def __post_init__(self) -> None:
        for name, legal in _CHOICES.items():
            self._check(name, getattr(self, name) in legal, legal)
        in_parts = set(self.overlap_tensor) <= set(IN_PARTS)
        self._check("overlap_tensor", in_parts, f"of {', '.join(IN_PARTS)}")
        for name in ("overlap_experts", "hidden_zero3"):
            self._check(name, 0 <= getattr(self, name) <= 1, "0 to 1")
        imbalance = self.expert_imbalance
        known = is_number(imbalance) and 1 <= imbalance < math.inf
        says = "from 1 (balanced), the busiest rank's tokens over the mean"
        self._check("expert_imbalance", known, says)
        for field in fields(self):
            value = getattr(self, field.name)
            self._check(field.name, not isinstance(value, int | float) or value >= 0, "0 or more")

    def _check(self, name: str, holds: bool, legal: str | Iterable[str]) -> None:
        if not holds:
            value = getattr(self, name)
            raise MeshwrightError(f"={value!r}", place=f"target {self.name!r}: {name}", legal=legal)

    def hides_replicas(self, sharing: Sharing) -> bool:
        """Whether the reduction among replicas of shards joins a backward."""
        return sharing.zero in self.overlap_replicas

    def combines(self, zero: int, *, tp: int, pp: int) -> bool:
        """Whether it runs a ZeRO stage beside so many tensor-parallel ranks and device groups."""
        return (tp == 1 or zero in self.zeros_with_tensor) and (
            pp == 1 or zero in self.zeros_with_pipeline
        )
