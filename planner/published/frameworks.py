"""Training frameworks of published runs, as targets and assumptions.

A published row names its framework, hardly ever its kernels. What is assumed about each is written
here, in terms of the named targets (`meshwright.costmodel.targets`) and of the reference models,
and is reported with every prediction as an assumption.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import (
    ALPA,
    COMPILED_HOST,
    DEEPSPEED,
    EXPERT_HOST,
    FSDP,
    MEGATRON,
    MEGATRON_LM,
    MEGATRON_MOE,
    TORCHTITAN,
)

# Triton's attention with ALiBi against FlashAttention-2: fitted to llm-foundry
TRITON_ATTENTION = 0.5
# Mixtures of experts: the seconds a message of DeepEP over EFA lie between what DeepSeek-V3 (0.4 to
# 0.7 us) and Qwen3-30B-A3B (1.4 us) want; the exchange hidden by "EP overlap" between DeepSeek-V3
# on EFA (0 to 0.3) and Qwen3-30B-A3B on InfiniBand (0.6). What CUDA graphs leave is assumed.
GRAPHED_HOST = 0.3
EXCHANGE_HIDDEN = 0.4
# what libraries that send a token once to each node are called, and their seconds a message
MESSAGE_S = ((r"DeepEP\+(UCCL|NVSHMEM)", 0.8e-6), (r"DeepEP|HybridEP|Hybrid-EP", 0.0))


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """`attention` and `dropout` as the framework's recipes of that time have them;
    `sequence_parallel` where tp > 1."""

    target: Target
    attention: str = "fused"
    dropout: float = 0.0
    sequence_parallel: bool = False
    assumptions: tuple[str, ...] = ()


_MEGATRON = Framework(
    target=MEGATRON_LM,
    attention="written",
    dropout=0.1,
    assumptions=(
        "fused pointwise and softmax kernels, scores written to memory, dropout 0.1",
        "16-bit gradients reduced after the last backward",
    ),
)
_CORE = Framework(
    target=MEGATRON,
    sequence_parallel=True,
    assumptions=(
        "fused attention and norms, no dropout, sequence parallelism where tp > 1",
        "gradient reduction and parameter gathering overlapped, half of the tensor-parallel "
        "communication overlapped",
    ),
)
_FSDP = Framework(
    target=replace(FSDP, attention_scale=TRITON_ATTENTION),
    assumptions=("eager kernels, fused attention, gathers and scatters overlapped, no dropout",),
)
_XLA = Framework(
    target=ALPA,
    attention="written",
    assumptions=("compiled by XLA, scores written to memory, gradient reduction not overlapped",),
)
_NEMO_LAUNCHER = replace(
    _MEGATRON,
    sequence_parallel=True,
    assumptions=(*_MEGATRON.assumptions, "sequence parallelism where tp > 1"),
)
_ZERO_3 = replace(
    _MEGATRON,
    target=DEEPSPEED,
    assumptions=(
        *_MEGATRON.assumptions[:1],
        "ZeRO-3 gathers one parameter at a time, not overlapped, at a fifth of the bandwidth",
    ),
)
_HF = Framework(
    target=Target(bucket_copies=0, name="eager PyTorch"),
    attention="written",
    dropout=0.1,
    assumptions=("eager kernels, scores written to memory, dropout 0.1, nothing overlapped",),
)
_PADDLE = Framework(
    target=Target(bucket_copies=0, name="PaddleNLP", gradient_bytes=2, optimizer_passes=2.0),
    dropout=0.0,
    assumptions=("eager kernels, fused attention, nothing overlapped",),
)

_TITAN = replace(
    _FSDP, target=TORCHTITAN, assumptions=(*_FSDP.assumptions, "gradients reduced in fp32")
)

# the first name that the row's framework contains
_KNOWN = (
    ("torchtitan", _TITAN),
    ("FSDP", _FSDP),
    ("Megatron-Core", _CORE),
    ("Megatron-Bridge", _CORE),
    ("NeMo Megatron launcher", _NEMO_LAUNCHER),
    ("ZeRO-3", _ZERO_3),
    ("Megatron-DeepSpeed", _MEGATRON),
    ("Megatron", _MEGATRON),
    ("Alpa", _XLA),
    ("Paddle", _PADDLE),
    ("HF", _HF),
)


def framework_of(name: str, notes: str = "") -> Framework:
    """The framework of a published name, with its assumptions; notes that say "torch.compile" or
    "flash" count. Raises ValueError for one that is not known."""
    framework = next((known for part, known in _KNOWN if part in name), None)
    if framework is None:
        raise ValueError(
            f"framework {name!r} is not known; known: {', '.join(part for part, _ in _KNOWN)}"
        )
    if framework in (_FSDP, _TITAN) and "torch.compile" in f"{name} {notes}":
        target = replace(framework.target, fusion="full", host_scale=COMPILED_HOST)
        framework = replace(
            framework, target=target, assumptions=("compiled blocks", *framework.assumptions[1:])
        )
    if "flash" in notes:
        framework = replace(framework, attention="fused")
    return framework


def with_experts(framework: Framework, text: str, assumptions: list[str]) -> Framework:
    """The framework as it trains mixtures of experts, as far as a row's `text` says; what is
    assumed is added to `assumptions`."""
    target = replace(framework.target, expert_host=EXPERT_HOST)
    if framework.target is MEGATRON:
        target = MEGATRON_MOE
        assumptions.append("the host issues the layers of mixtures operator by operator")
    for pattern, seconds in MESSAGE_S:
        if re.search(pattern, text):
            target = replace(target, dispatch="per_node", message_s=seconds)
            assumptions.append("a token is sent once to each node that has experts for it")
            break
    if re.search(r"CUDA graphs?(?! off)|TE graphs", text):
        target = replace(target, host_scale=target.host_scale * GRAPHED_HOST)
        assumptions.append("part of each layer captured in CUDA graphs")
    if re.search(r"(?<!no )\b(EP|a2a) overlap(?! off)", text):
        target = replace(target, overlap_experts=EXCHANGE_HIDDEN)
        assumptions.append(f"{EXCHANGE_HIDDEN:.0%} of the exchange between experts hidden")
    return replace(framework, target=target)
