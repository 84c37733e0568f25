"""Training frameworks of published runs, as targets and assumptions.

A published row names its framework, hardly ever its kernels. What is assumed about each is written
here, in terms of the named targets (`meshwright.costmodel.targets`) and of the reference models,
and is reported with every prediction as an assumption.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from meshwright.costmodel import targets
from meshwright.costmodel.target import IN_PARTS, Target
from meshwright.profiles.inputs import MeshwrightError

# The part that FSDP of torch 2.1 and earlier, under Composer's limit of gathers in flight, hides of
# what it could: fitted to llm-foundry on A100 and H100 (scripts/fits/fit_fsdp.py, 182 rows of half
# the models, 2026-11-23; 0 to 0.2 are as good)
HIDDEN_FSDP = 0.1
# Triton's attention with ALiBi against FlashAttention-2: fitted to llm-foundry
TRITON_ATTENTION = 0.5
# FlexAttention against FlashAttention-2, by GPU: 90 % in the forward and 85 % in the backward, 2.5
# times as long, on A100; 125 and 103 % on H100 (arXiv 2412.05496)
FLEX_ATTENTION = ((r"A100", 0.86), (r"", 1.08))
# Mixtures of experts: the seconds a message of DeepEP over EFA lie between what DeepSeek-V3 (0.4 to
# 0.7 us) and Qwen3-30B-A3B (1.4 us) want; the exchange hidden by "EP overlap" between DeepSeek-V3
# on EFA (0 to 0.3) and Qwen3-30B-A3B on InfiniBand (0.6). What CUDA graphs leave is assumed.
GRAPHED_HOST = 0.3
EXCHANGE_HIDDEN = 0.4
# Transformer Engine of early 2024 ran FlashAttention-2 on Hopper, cuDNN's kernel later: steps of a
# million tokens of NeMo 24.03, nearly all attention, take what that takes
EARLY_ENGINE = r"NeMo 24\.03"
# GPT-OSS against fused attention of head size 128, with half of its layers' windows, sinks and a
# head size of 64; and the host's work on its experts, whose biases and clamps are operators of
# their own: fitted to Megatron-Bridge 26.02 (scripts/experts/published_later.csv)
SINK_ATTENTION = 0.35
CLAMPED_EXPERT_HOST = 6.0
# what libraries that send a token once to each node are called, and their seconds a message
MESSAGE_S = ((r"DeepEP\+(UCCL|NVSHMEM)", 0.8e-6), (r"DeepEP|HybridEP|Hybrid-EP", 0.0))


class Unpriced(MeshwrightError):
    """A published row that can't be priced; the message is the reason."""

    PLACE = "the published row"
    LEGAL = "models, GPUs and degrees that the catalog and the reference models have"
    WAY_OUT = "mend the row's columns, or leave it out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Framework:
    """`attention` and `dropout` as the framework's recipes of that time have them;
    `sequence_parallel` where tp > 1; `balances_stages`: the head counts when layers are shared
    out among stages; `interleaves`: its users choose the number of virtual stages."""

    target: Target
    attention: str = "fused"
    dropout: float = 0.0
    sequence_parallel: bool = False
    balances_stages: bool = False
    interleaves: bool = False
    assumptions: tuple[str, ...] = ()


_MEGATRON = Framework(
    target=targets.MEGATRON_LM,
    attention="written",
    dropout=0.1,
    assumptions=(
        "fused pointwise and softmax kernels, scores written to memory, dropout 0.1",
        "16-bit gradients reduced after the last backward",
    ),
)
_CORE = Framework(
    target=targets.MEGATRON,
    sequence_parallel=True,
    interleaves=True,
    assumptions=(
        "fused attention and norms, no dropout, sequence parallelism where tp > 1",
        "gradient reduction and parameter gathering overlapped, tensor-parallel communication "
        "beside its products",
    ),
)
# `--tp-comm-overlap` is off unless asked for: NVIDIA's recipes do
_CORE_SCRIPT = replace(
    _CORE,
    target=replace(targets.MEGATRON, overlap_tensor=()),
    assumptions=(
        _CORE.assumptions[0],
        "gradient reduction and parameter gathering overlapped, not tensor-parallel communication",
    ),
)
# Megatron-Core's layers without Transformer Engine and apex, and libraries with such layers: norms
# and pointwise kernels apart from each other, weights' gradients added by kernels of their own
# (InternEvo and the fitted half of the Vocabulary Parallelism artifact: -19 and -15 % with those,
# -4 and 0 without)
_CORE_LOCAL = replace(
    _CORE_SCRIPT,
    target=replace(_CORE_SCRIPT.target, fusion="pointwise", fused_accumulation=False),
    assumptions=(
        "fused attention and pointwise kernels, no dropout, sequence parallelism where tp > 1",
        _CORE_SCRIPT.assumptions[1],
    ),
)
_FSDP = Framework(
    target=targets.FSDP,
    sequence_parallel=True,
    assumptions=("eager kernels, fused attention, gathers and scatters overlapped, no dropout",),
)
_FOUNDRY = replace(
    _FSDP, target=replace(targets.FSDP, attention_scale=TRITON_ATTENTION, hidden_zero3=HIDDEN_FSDP)
)
_XLA = Framework(
    target=targets.ALPA,
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
    target=targets.DEEPSPEED_2021,
    assumptions=(
        *_MEGATRON.assumptions[:1],
        "ZeRO-3 gathers one parameter at a time, not overlapped, at a fifth of the bandwidth",
    ),
)
# Hugging Face's modules are taken to cost the host what Transformer Engine's do
_HF = Framework(
    target=Target(bucket_copies=0, name="eager PyTorch", host_scale=targets.MODULE_HOST),
    attention="written",
    dropout=0.1,
    assumptions=("eager kernels, scores written to memory, dropout 0.1, nothing overlapped",),
)
_PADDLE = Framework(
    target=Target(bucket_copies=0, name="PaddleNLP", gradient_bytes=2, optimizer_passes=2.0),
    dropout=0.0,
    assumptions=("eager kernels, fused attention, nothing overlapped",),
)

# FSDP2 with Transformer Engine's kernels where the name says so; its checkpoints are torch's, whose
# recompute stops at the last tensor that a backward wants (torch.utils.checkpoint, early stopping)
_AUTOMODEL = replace(
    _FSDP,
    target=replace(
        targets.TORCHTITAN,
        name="automodel",
        fusion="full",
        tuned_attention=True,
        host_scale=targets.FSDP_HOST,
        repeats_whole=False,
    ),
    assumptions=("fused attention and norms", *_FSDP.assumptions[1:]),
)
# DeepSpeed of today, under the kernels of Hugging Face
_DEEPSPEED = replace(
    _HF,
    target=targets.DEEPSPEED,
    attention="fused",
    dropout=0.0,
    assumptions=("eager kernels, fused attention, ZeRO's collectives overlapped, no dropout",),
)
_TITAN = replace(
    _FSDP, target=targets.TORCHTITAN, assumptions=(*_FSDP.assumptions, "gradients reduced in fp32")
)
# one engine in Python per micro-batch; fused norms and rotary embeddings; its ZeRO-1 and its
# reduction follow the last backward (nanotron/optim/zero.py, parallel/data_parallel/utils.py)
_NANOTRON = Framework(
    target=Target(
        name="nanotron",
        fusion="full",
        host_scale=targets.FSDP_HOST,
        bucket_copies=0,
        overlap_tensor=("all_gather",),
    ),
    sequence_parallel=True,
    balances_stages=True,  # nanotron/models/base.py: by each block's FLOPs
    assumptions=(
        "fused attention, norms and pointwise kernels, no dropout, fp32 gradients reduced after "
        "the last backward, sequence parallelism where tp > 1",
    ),
)

# the first pattern found in "framework; gpu; model"
_KNOWN = (
    (r"torchtitan", _TITAN),
    (r"Nanotron", _NANOTRON),
    (r"llm-foundry", _FOUNDRY),
    (r"Automodel.*\bTE\b", _AUTOMODEL),
    (r"FSDP", _FSDP),
    (r"NeMo\b(?! Megatron launcher)|Megatron-Bridge", _CORE),
    (r"zero-bubble", _CORE_LOCAL),
    (r"Megatron-Core|Mcore|core_r\d|Megatron-LM main", _CORE_SCRIPT),
    (r"NeMo Megatron launcher", _NEMO_LAUNCHER),
    (r"(?<!Megatron-)DeepSpeed.*(\b(GH|GB|H|B)\d00|Llama|Qwen|Mistral)", _DEEPSPEED),
    (r"ZeRO-3", _ZERO_3),
    (r"Megatron-DeepSpeed", _MEGATRON),
    # what trains Llamas, or on GPUs since Hopper, is Megatron-Core
    (r"Megatron.*(\b(GH|GB|H|B)\d00|Llama|Qwen)", _CORE_SCRIPT),
    (r"Megatron", _MEGATRON),
    (r"Alpa", _XLA),
    (r"Paddle", _PADDLE),
    (r"DeepSpeed", _DEEPSPEED),
    (r"HF", _HF),
)
# what no target was written for, to the name of what stands in for it
_STAND_INS = (
    (r"InternEvo", "Megatron-Core of zero-bubble"),  # flash-attn's kernels
    (r"Fast-LLM", "Megatron-Core"),  # fused kernels, its own distributed optimizer
    (r"Colossal-?AI", "FSDP"),  # Gemini shards states and parameters alike
)


def framework_of(name: str, notes: str = "", *, gpu: str = "", model: str = "") -> Framework:
    """The framework of a published name, with its assumptions; notes that say "torch.compile",
    "compile" or "flash" count, and the GPU and the model, which date it. Raises `Unpriced` for one
    that is not known."""
    stand_in = next((known for pattern, known in _STAND_INS if re.search(pattern, name)), "")
    text = f"{stand_in or name}; {gpu}; {model}"
    framework = next((known for pattern, known in _KNOWN if re.search(pattern, text)), None)
    if framework is None:
        raise Unpriced(
            " is not known",
            place=f"framework {name!r}",
            legal=f"names that contain one of: {', '.join(p for p, _ in (*_STAND_INS, *_KNOWN))}",
            way_out="name one of those, or add its habits here",
        )
    target, said = framework.target, list(framework.assumptions)
    if stand_in:
        said.insert(0, f"{name} is not modelled: {stand_in} stands in for it")
    if framework in (_FSDP, _TITAN) and re.search(r"\bcompile\b", f"{name}; {notes}"):
        target = replace(target, fusion="full", host_scale=targets.COMPILED_HOST)
        said[0] = "compiled blocks"
    if framework is _FSDP and re.search(r"\bHF\b|Hugging", name):
        target = replace(target, host_scale=targets.MODULE_HOST)
        said.append("modules of Hugging Face")
    if re.search(EARLY_ENGINE, name):
        target = replace(target, tuned_attention=False)
        said.append("FlashAttention-2")
    if "flash" in notes:
        framework = replace(framework, attention="fused")
    if "sequence parallelism" in notes and not framework.sequence_parallel:
        framework = replace(framework, sequence_parallel=True)
        said.append("sequence parallelism where tp > 1")
    if "sp=False" in notes and framework.sequence_parallel:
        framework = replace(framework, sequence_parallel=False)
        said[:] = [each.replace(", sequence parallelism where tp > 1", "") for each in said]
        said.append("no sequence parallelism")
    if dropout := re.search(r"\bdropout=([\d.]+)", notes):
        framework = replace(framework, dropout=float(dropout[1]))
    if re.search(r"Flex-?Att", f"{name}; {notes}"):
        scale = next(known for pattern, known in FLEX_ATTENTION if re.search(pattern, gpu))
        target = replace(target, tuned_attention=False, attention_scale=scale)
        said.append("FlexAttention")
    if re.search(r"cuda_graph_impl=full_iteration", notes):
        target = replace(target, host_scale=0.0)
        said.append("a whole step captured in a CUDA graph")
    elif re.search(r"CUDA graphs?(?! off)|TE graphs|cuda_graph_impl=transformer_engine", notes):
        target = replace(target, host_scale=target.host_scale * GRAPHED_HOST)
        said.append("part of each layer captured in CUDA graphs")
    if re.search(r"async TP|overlaps:.*TP comm|tp[-_]comm[-_]overlap", notes):
        target = replace(target, overlap_tensor=IN_PARTS)
        said.append("tensor-parallel communication beside products")
    return replace(framework, target=target, assumptions=tuple(said))


def with_experts(
    framework: Framework, text: str, assumptions: list[str], model: str = ""
) -> Framework:
    """The framework as it trains mixtures of experts, as far as a row's `text` and its `model` say;
    what is assumed is added to `assumptions`."""
    target = replace(framework.target, expert_host=targets.EXPERT_HOST)
    assumptions.append("the host issues the layers of mixtures operator by operator")
    if re.search(r"gpt-oss", model, re.I):
        target = replace(
            target,
            attention_scale=target.attention_scale * SINK_ATTENTION,
            expert_host=CLAMPED_EXPERT_HOST,
        )
        assumptions.append(
            f"attention with sinks at {SINK_ATTENTION:.0%} of the fused kernel's speed"
        )
    if target.name == targets.MEGATRON.name:
        target = replace(target, name=targets.MEGATRON_MOE.name)
    for pattern, seconds in MESSAGE_S:
        if re.search(pattern, text):
            target = replace(target, dispatch="per_node", message_s=seconds)
            assumptions.append("a token is sent once to each node that has experts for it")
            break
    else:
        if "Megatron-Bridge" in text and not re.search(r"all-?to-?all", text):
            target = replace(target, dispatch="per_node")
            assumptions.append(
                "dispatcher unknown: the recipes' DeepEP, which sends a token once to each node"
            )
    if re.search(r"(?<!no )\b(EP|a2a) (comm )?overlap(?! off)", text):
        target = replace(target, overlap_experts=EXCHANGE_HIDDEN)
        assumptions.append(f"{EXCHANGE_HIDDEN:.0%} of the exchange between experts hidden")
    return replace(framework, target=target)
