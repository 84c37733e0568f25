"""Targets by name: what `train_step` does, and the frameworks fitted to published measurements.

Numbers that were fitted or assumed have a name and their source first; where a source was fitted,
it was on every other of its models in order of size (`scripts/validate_costmodel`). What each can't
run is from its own documentation and sources, as cited beside it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from meshwright.costmodel.target import ALONE_BYTES, IN_PARTS, Target
from meshwright.profiles.inputs import ArgumentError

# the host's work relative to plain eager PyTorch: fitted to vTrain's single-node rows (every block
# checkpointed, with the bookkeeping of random states); fitted to llm-foundry; assumed
MEGATRON_HOST = 6.9
FSDP_HOST = 2.0
COMPILED_HOST = 0.3
# the optimizer's traffic over what the states need once, at the bandwidth that the model's streams
# reach: from pairs of vTrain's single-node rows that differ in the number of micro-batches alone,
# whose steps have 20 ps a parameter in common (a fused Adam, faster than those streams)
MEGATRON_OPTIMIZER = 0.75
# kernels that XLA fuses, beside Megatron-LM's, to which the V100 is fitted: of half of Alpa's steps
XLA_STREAMS = 1.6
# products of queries, keys and values of CUDA 11's cuBLAS whose heads' size is no multiple of 8:
# fitted to BLOOM's tuning logs of 200B, heads of 225
UNALIGNED_PRODUCTS = 0.08
# the part of the links that DeepSpeed's ZeRO-3 of 2021 reaches: fitted to the 175B rows of Megatron
# SC21's table 2 (the 530B rows score it)
ZERO_3_BANDWIDTH = 0.2
# Megatron-Core's modules (Transformer Engine), and its operators of experts, as in `Target`: fitted
# to steps with one row per micro-batch of DeepSeek-V3 and Qwen3-30B-A3B
# (aws-samples/awsome-distributed-ai) and of Moonlight (Megatron-Bridge); Megatron-LM's own tests of
# a tiny GPT, which log norms in each step, take 20 to 28
MODULE_HOST = 16.0
EXPERT_HOST = 4.0

_ZERO_BUBBLE = ("zb_h1", "zb_h2", "zb_v", "dualpipe_v")
_TWO_COPIES = ("chimera", "dualpipe")
# secondary shards, quantised collectives and compressed sums are ours: no published step that was
# fitted has them
_ZERO_PP = ("hpz", "quantized", "compressed")
# stages of unequal meshes, and a pipeline that runs ahead, are only ours and Alpa's
_USUAL = ("eager_1f1b", *_TWO_COPIES, "unequal_meshes", *_ZERO_PP)

# recompute by operator is ours; torchtitan's selective one is "alternate"
_BY_OPERATOR = ("selective", "pointwise", "widening", "products")

# What `train_step` does: buckets of fp32 gradients are reduced while the backward makes the rest
# (executor/parameters/reducer.py), updated weights are gathered a block ahead of the first forward
# (block_weights.py); ZeRO-3 is FSDP2 by block with its prefetch (zero3.py), which reduces among
# replicas on a stream of its own; sends and receives are posted ahead (stages/pipeline.py).
# Collectives of the tensor axis, and of a pair of passes, wait.
EAGER = Target(
    name="eager",
    overlap_gradients=True,
    overlap_parameters=True,
    overlap_replicas=(3,),
    copies_weights=True,
    alone_bytes=ALONE_BYTES,
    gradients_come=True,
    gathered_unit="block",
    counter_dropout=True,
    repeats_whole=False,
    regathers=True,
    fused_optimizer=False,
)
# what fusion leaves of the host's work is assumed; a compiler keeps what it gathered
COMPILED = replace(
    EAGER,
    name="compiled",
    fusion="full",
    host_scale=COMPILED_HOST,
    defers_weights=False,
    regathers=False,
)
# Megatron-LM of 2021: gradients in 16 bits, one buffer, reduced after the last backward. Its
# schedules: megatron/schedules.py (1F1B, interleaved); no ZeRO.
MEGATRON_LM = Target(
    name="megatron-lm",
    fusion="pointwise",
    host_scale=MEGATRON_HOST,
    unaligned_products=UNALIGNED_PRODUCTS,
    gradient_bytes=2,
    optimizer_passes=MEGATRON_OPTIMIZER,
    bucket_bytes=2**30,
    bucket_copies=0,
    overlap_sends=False,
    scatter_sends=True,
    loss_in_place=True,
    excludes=("zero", "cp", "ep", "gpipe", *_ZERO_BUBBLE, *_USUAL),
)
# Megatron-Core with its usual options: buckets of 40 million gradients, a million more for each
# data-parallel rank, lying in one buffer; tensor-parallel communication beside its products, which
# add up weights' gradients themselves (`gradient_accumulation_fusion`).
# Its cross-entropy (core/tensor_parallel/cross_entropy.py) turns the softmax that it keeps into the
# gradient; sequence parallelism keeps parts (Korthikanti et al. 2022, section 4.2.2).
# Beside tensor or pipeline parallelism ZeRO is its distributed optimizer, stage 1; 2 and 3 are
# torch's FSDP2 in it (`use_torch_fsdp2`: not with a pipeline; parallel_state, schedules.py: 1F1B
# and interleaved). Megatron-FSDP, later, joins 3 and the tensor axis; no fit has measured it.
MEGATRON = Target(
    name="megatron",
    fusion="full",
    host_scale=MODULE_HOST,
    overlap_gradients=True,
    overlap_parameters=True,
    overlap_tensor=IN_PARTS,
    tuned_attention=True,
    fused_accumulation=True,
    delayed_scaling=True,
    bucket_bytes=160_000_000,
    bucket_bytes_per_rank=4_000_000,
    bucket_copies=0,
    loss_in_place=True,
    gathers_again=True,
    excludes=("gpipe", *_ZERO_BUBBLE, *_USUAL),
    zeros_with_tensor=(0, 1),
    zeros_with_pipeline=(0, 1),
)
# the layers of mixtures issued operator by operator; DeepEP's kernels inside a node and over
# InfiniBand send a token once to each node that has experts for it
MEGATRON_MOE = replace(MEGATRON, name="megatron-moe", expert_host=EXPERT_HOST)
MEGATRON_DEEPEP = replace(MEGATRON_MOE, name="megatron-deepep", dispatch="per_node")
# torch's FSDP by block, alone (llm-foundry): FULL_SHARD, SHARD_GRAD_OP, NO_SHARD or hybrid
FSDP = Target(
    name="fsdp",
    unit="block",
    gathered_unit="block",
    overlap_gradients=True,
    overlap_parameters=True,
    gradient_bytes=2,
    bucket_copies=0,
    host_scale=FSDP_HOST,
    excludes=("tp", "pp", "cp", "ep", "zero-1", "unequal_meshes", *_ZERO_PP),
)
FSDP_COMPILED = replace(FSDP, name="fsdp-compiled", fusion="full", host_scale=COMPILED_HOST)
# torchtitan: FSDP2 with fp32 reduction beside tensor, context and pipeline parallelism; DDP not
# with the tensor axis (models/llama3/parallelize.py); torch's schedules, ZB-V and DualPipeV too,
# whose pairs run one after the other (_PipelineScheduleRuntime) unless experts are shared out
# (pipeline_parallel_expert_parallel_overlap)
TORCHTITAN = replace(
    FSDP,
    name="torchtitan",
    gradient_bytes=4,
    overlap_passes=True,
    excludes=("zero-1", "zb_h1", "zb_h2", *_USUAL, *_BY_OPERATOR),
    zeros_with_tensor=(2, 3),
    zeros_with_pipeline=(0, 2, 3),
)
# DeepSpeed with Megatron's kernels, ZeRO-3 as of 2021: a parameter at a time, not overlapped.
# deepspeed/runtime/pipe/engine.py asserts ZeRO stage < 2; its TrainSchedule is 1F1B
DEEPSPEED_2021 = replace(
    MEGATRON_LM,
    name="deepspeed-2021",
    gathered_unit="parameter",
    zero_bandwidth=ZERO_3_BANDWIDTH,
    excludes=("cp", "gpipe", "interleaved_1f1b", "dp_shard", *_ZERO_BUBBLE, *_USUAL),
    zeros_with_pipeline=(0, 1),
)
# DeepSpeed of today (0.9 on) under the modules of Hugging Face: ZeRO's collectives beside the
# passes (`overlap_comm`), a bucket at a time in stages 1 and 2, by module in stage 3, among all
# ranks (MiCS was removed in 0.19); hpZ and quantised collectives (ZeRO++), Ulysses. AutoTP goes
# with stages 0 to 2 (runtime/tensor_parallel), a pipeline with 0 and 1 (runtime/pipe/engine.py)
DEEPSPEED = Target(
    name="deepspeed",
    unit="bucket",
    gathered_unit="block",
    gradient_bytes=2,
    bucket_copies=0,
    host_scale=MODULE_HOST,
    overlap_gradients=True,
    overlap_parameters=True,
    excludes=(
        "dp_shard", "gpipe", "eager_1f1b", "interleaved_1f1b", "unequal_meshes", *_ZERO_BUBBLE,
        *_TWO_COPIES, *_BY_OPERATOR, "alternate",
    ),
    zeros_with_tensor=(0, 1, 2),
    zeros_with_pipeline=(0, 1),
)  # fmt: skip
# Alpa on XLA: stages of any meshes under GPipe or 1F1B; its published peaks under ZeRO, on 2, 4 and
# 8 ranks, and what ran out of memory there, have all gradients (docs/archive/measurements.md)
ALPA = Target(
    name="alpa",
    fusion="full",
    host_scale=0.0,
    stream_speed=XLA_STREAMS,
    gradient_bytes=2,
    bucket_copies=0,
    whole_gradients=True,
    pure=True,
    excludes=("cp", "eager_1f1b", "interleaved_1f1b", *_ZERO_PP, *_ZERO_BUBBLE, *_TWO_COPIES),
)

TARGETS: Mapping[str, Target] = MappingProxyType(
    {
        target.name: target
        for target in (
            EAGER, COMPILED, MEGATRON, MEGATRON_MOE, MEGATRON_DEEPEP, MEGATRON_LM, DEEPSPEED,
            DEEPSPEED_2021, FSDP, FSDP_COMPILED, TORCHTITAN, ALPA,
        )
    }
)  # fmt: skip


def target_named(name: str) -> Target:
    """A target by its name. Raises ValueError for an unknown one, with the legal names."""
    try:
        return TARGETS[name]
    except (KeyError, TypeError):
        raise ArgumentError.refused("target", name, legal=TARGETS) from None
