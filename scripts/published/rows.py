"""Rows of published tables, read as configurations with the assumptions that took.

Rows have the columns layers, hidden, heads, kv_heads, ffn, vocab, seq_len, moe_experts, moe_topk,
gpu, num_gpus, gpus_per_node, precision, tp, pp, cp, ep, vp, dp, zero_stage_fsdp, recompute,
micro_batch, global_batch, framework, interconnect, model, notes; texts, empty where unknown.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from meshwright.costmodel.precisions import PRECISIONS
from meshwright.costmodel.sharing import Sharing
from meshwright.profiles.cluster import Cluster, Link
from scripts.published.frameworks import Framework, Unpriced, framework_of, with_experts
from scripts.published.models import Latent, TransformerDims
from scripts.published.setup import Setup

LOSS_PARTS = 8  # of rows that say "chunked cross-entropy", torchtune's
# the first pattern that "gpu | interconnect" matches, to a catalog node
_NODES = (
    (r"H100-96GB", "grand-teton-h100"),
    (r"p5\.48xlarge", "p5.48xlarge"),
    (r"H800", "hgx-h800"),
    (r"A800", "hgx-a800"),
    (r"H100.*PCIe", "pcie-8-h100"),
    (r"H100", "dgx-h100"),
    (r"H200", "dgx-h200"),
    (r"GB200", "gb200-nvl72"),
    (r"GB300", "gb300-nvl72"),
    (r"B300.*EFA", "p6-b300.48xlarge"),
    (r"B300", "dgx-b300"),
    (r"B200", "dgx-b200"),
    (r"A100-40GB.*RoCE", "oci-bm.gpu4.8"),
    (r"A100-80GB.*RoCE", "oci-bm.gpu.a100-v2.8"),
    (r"A100-80GB.*(OPA|Omni-Path)", "jean-zay-a100"),
    (r"A100-80GB.*(4x200Gb|800Gb/s)", "dgx-a100-4hdr"),
    (r"A100-80GB", "dgx-a100"),
    (r"A100-40GB", "dgx-a100-40gb"),
    (r"DGX-2", "dgx-2-v100"),
    (r"V100-16GB|p3\.16xlarge", "p3.16xlarge"),
    (r"V100", "dgx-1-v100"),
    (r"RTX ?4090", "pcie-8-rtx-4090"),
    (r"3090 ?Ti.*P2P_DISABLE", "rtx-3090-ti-pcie-2"),
    (r"3090 ?Ti", "rtx-3090-ti-nvlink-2"),
    (r"MI300X", "mi300x-8"),
    (r"L40S", "pcie-8-l40s"),
    (r"\bL4\b", "pcie-8-l4"),
    (r"A10G", "pcie-8-a10g"),
)
# dims that tables leave out, from the `config.json` that the models' authors published: the size of
# a head where it isn't hidden / heads, latent attention, shared experts and dense first layers;
# `expert_ffn` of a mixture-of-experts row is its column ffn
_LATENT = Latent(q_rank=1536)

# the first pattern that the model's name matches; keys are fields of `TransformerDims`
_FACTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (r"Qwen3-[\d.]+B", {"head_dim": 128}),
    (r"Qwen2-57B-A14B", {"shared_ffn": 20480}),
    (r"Qwen1\.5-MoE-A2\.7B", {"shared_ffn": 5632}),
    (
        r"DeepSeek-V3|DeepSeek-R1",
        {"latent": _LATENT, "shared_ffn": 2048, "dense_layers": 3, "ffn": 18432},
    ),
    (r"Kimi-K2", {"latent": _LATENT, "shared_ffn": 2048, "dense_layers": 1, "ffn": 18432}),
    (
        r"DeepSeek-V2-Lite",
        {"latent": Latent(q_rank=0), "shared_ffn": 2816, "dense_layers": 1, "ffn": 10944},
    ),
    (r"DeepSeek-V2", {"latent": _LATENT, "shared_ffn": 3072, "dense_layers": 1, "ffn": 12288}),
    (
        r"Moonlight-16B",
        {"latent": Latent(q_rank=0), "shared_ffn": 2816, "dense_layers": 1, "ffn": 11264},
    ),
    (
        r"GLM-4\.5-Air|GLM-4\.6-Air",
        {"head_dim": 128, "shared_ffn": 1408, "dense_layers": 1, "ffn": 10944},
    ),
    (r"GLM-4\.[56]", {"head_dim": 128, "shared_ffn": 1536, "dense_layers": 3, "ffn": 12288}),
    (r"gpt-oss", {"head_dim": 64}),
    (r"Llama-?4-Scout", {"head_dim": 128, "shared_ffn": 8192}),
)
# families that the reference models can't stand for, with the reason
_OTHER = (
    (
        r"Nemotron-?3-(Nano|Super|Ultra)|Nemotron-?H\b|Nemotron-Nano-\d+B-v2|Jamba|Zamba",
        "state-space layers",
    ),
    (r"Qwen3-Next", "linear attention in most layers"),
    (r"Llama-?4-Maverick", "dense and sparse layers in turn"),
)
_PRECISIONS = {"fp16": "fp16", "bf16": "bf16", "amp": "bf16", "fp32": "fp32"}
_MODERN = re.compile(
    r"llama|qwen|mistral|mixtral|gemma|nemotron|phi|olmo|deepseek|kimi|moonlight|glm|gpt-oss|internlm",
    re.I,
)


@dataclass(frozen=True, slots=True)
class _Cells:
    """A row's cells, and the assumptions made while reading them."""

    row: Mapping[str, str]
    assumptions: list[str] = field(default_factory=list)

    def text(self, name: str) -> str:
        return (self.row.get(name) or "").strip()

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number; `default` where the cell is empty. Raises `Unpriced` without one."""
        text = self.text(name)
        if not text and default is not None:
            return default
        if not text:
            raise Unpriced(f"column {name} is empty, and the price depends on it")
        least = 0 if default == 0 else 1
        number = float(text) if re.fullmatch(r"[0-9]+(\.[0-9]*)?", text) else -1.0
        if number < least or not number.is_integer():
            raise Unpriced(f"column {name} is {text!r}; legal: a whole number from {least}")
        return int(number)

    def assume(self, what: str) -> None:
        self.assumptions.append(what)


def read_row(row: Mapping[str, str]) -> Setup:
    """The configuration of a row, with its assumptions. Raises `Unpriced` with the reason."""
    cells = _Cells(row)
    name, notes = cells.text("framework"), cells.text("notes")
    framework = framework_of(name, notes, gpu=cells.text("gpu"), model=cells.text("model"))
    if "offload" in cells.text("zero_stage_fsdp") + notes:
        raise Unpriced("offloading to the host is not modelled")
    tp, pp = cells.whole("tp"), cells.whole("pp")
    cp, gpus = cells.whole("cp", 1), cells.whole("num_gpus")
    chosen = framework.interleaves and pp > 1 and not cells.text("vp")
    chunks = 0 if chosen else cells.whole("vp", 1)
    dp = cells.whole("dp", max(1, gpus // (tp * pp * cp)))
    if cp > 1 and framework.attention == "written":
        raise Unpriced(f"cp={cp}: context parallelism is priced for fused attention alone")
    if dp * tp * pp * cp != gpus:
        raise Unpriced(f"dp={dp} × cp={cp} × tp={tp} × pp={pp} is not num_gpus={gpus}")
    micro, batch = cells.whole("micro_batch", 0), cells.whole("global_batch")
    if batch % (max(1, micro) * dp):
        raise Unpriced(f"global_batch={batch} is not a multiple of micro_batch={micro} × dp={dp}")
    if not micro:
        cells.assume("micro_batch is unknown: the power of two predicted fastest of those that fit")
    if chosen:
        cells.assume("vp is unknown: the divisor of a stage's layers predicted fastest")
    elif not cells.text("vp") and pp > 1:
        cells.assume("vp is unknown: taken as 1")
    dims = _dims(cells, framework, tp)
    # some count the embedding and the head as layers, which may be alone in their stages
    if dims.layers + 2 < pp * max(1, chunks):
        raise Unpriced(f"{dims.layers} layers can't fill pp={pp} × vp={chunks} stages")
    adapted = _adapted(framework, cells)
    recompute, part = _recompute(cells)
    return Setup(
        dims=dims,
        cluster=_cluster(cells, gpus),
        framework=adapted,
        precision=_precision(cells),
        tp=tp,
        pp=pp,
        cp=cp,
        ep=_expert_ranks(cells, dp),
        dp=dp,
        chunks=chunks,
        sharing=_sharing(cells, dp * cp),
        recompute=recompute,
        recompute_part=part,
        experts_by_tensor=_experts_by_tensor(cells, tp),
        loss_parts=LOSS_PARTS if "chunked cross-entropy" in cells.text("notes") else 1,
        micro_batch=micro,
        global_batch=batch,
        assumptions=(*cells.assumptions, *framework.assumptions),
    )


def _dims(cells: _Cells, framework: Framework, tp: int) -> TransformerDims:
    """Sizes and style of the model: by its family's name where the sizes leave it open."""
    name, experts, whole = cells.text("model"), cells.whole("moe_experts", 0), cells.whole
    facts = _facts(cells, name, experts > 1)  # first: it knows what can't be priced at all
    heads, hidden = whole("heads"), whole("hidden")
    modern = bool(_MODERN.search(name))
    squared = "nemotron" in name.lower() and "llama" not in name.lower()
    vocab = whole("vocab", 51200)
    padded = math.ceil(vocab / (128 * tp)) * 128 * tp if vocab % tp else vocab
    if padded != vocab:
        cells.assume(f"vocabulary of {vocab} padded to {padded}, which tp={tp} divides")
    kv_heads = whole("kv_heads", heads)
    if kv_heads < tp and tp % kv_heads == 0:
        cells.assume(f"{kv_heads} key-value heads repeated for tp={tp}")
        kv_heads = tp
    encoder = "bert" in name.lower()
    ffn = whole("ffn", 4 * hidden)
    sizes: dict[str, Any] = {"ffn": ffn, **facts}
    if experts > 1:
        sizes |= {"experts": experts, "topk": whole("moe_topk"), "expert_ffn": ffn}
        cells.assume("tokens spread evenly over experts")
        if not _experts_by_tensor(cells, tp):
            cells.assume("experts are not split by tp")
    return TransformerDims(
        **sizes,
        layers=whole("layers"),
        hidden=hidden,
        heads=heads,
        kv_heads=kv_heads,
        vocab=padded,
        seq_len=whole("seq_len"),
        activation="relu2" if squared else "swiglu" if modern else "gelu",
        norm="rms" if modern and not squared else "layer",
        positions="rotary" if modern else "none" if re.search("MPT|BLOOM", name) else "learned",
        bias=not modern and "MPT" not in name,
        attention=framework.attention,
        dropout=0.0 if modern else framework.dropout,
        tied=not modern,
        causal=not encoder,
    )


def _facts(cells: _Cells, name: str, sparse: bool) -> Mapping[str, Any]:
    facts = facts_of(name)
    if not sparse:  # distilled into a dense model, of which the rest is in the row
        facts = {key: value for key, value in facts.items() if key == "head_dim"}
    if facts:
        cells.assume(f"from the model's public configuration: {dict(facts)}")
    return facts


def facts_of(name: str) -> Mapping[str, Any]:
    """Fields of `TransformerDims` that a model's name stands for; raises `Unpriced` for a family
    that the reference models don't cover."""
    for pattern, reason in _OTHER:
        if re.search(pattern, name, re.I):
            raise Unpriced(
                f" has {reason}, which no reference model has",
                place=f"model {name!r}",
                legal="decoders of attention and MLPs, dense or with experts",
                way_out="leave the row out, or plan for the model itself",
            )
    return next((facts for pattern, facts in _FACTS if re.search(pattern, name, re.I)), {})


def _cluster(cells: _Cells, gpus: int) -> Cluster:
    text = f"{cells.text('gpu')} | {cells.text('interconnect')}"
    per_node = cells.whole("gpus_per_node", 8)
    node = next((name for pattern, name in _NODES if re.search(pattern, text)), None)
    if node is None:
        raise Unpriced(f"gpu {cells.text('gpu')!r} is not in the catalog")
    if "nvl72" in node:  # what counts is the NVLink domain, of which runs take an even part
        per_node = max(n for n in range(1, min(gpus, 72) + 1) if gpus % n == 0)
    nodes = math.ceil(gpus / per_node)
    cluster = Cluster.from_catalog(
        node, num_nodes=nodes, devices_per_node=gpus if nodes == 1 else per_node
    )
    # published peaks are an allocator's, which has what the driver and NCCL's buffers leave
    device = dataclasses.replace(
        cluster.device,
        memory_bytes=cluster.device.usable_bytes,
        reserved_bytes=0,
        communicator_bytes=0,
    )
    link = _network(cells, cluster.inter_link)
    return dataclasses.replace(cluster, inter_link=link, device=device)


def _network(cells: _Cells, link: Link) -> Link:
    """The catalog's network, slower or faster where the row says how many Gb/s a node has."""
    stated = re.search(r"^(\d+) ?Gb/s per node", cells.text("interconnect"))
    usual = re.search(r"(\d+) x (\d+) Gb/s", link.name)
    if not stated or not usual:
        return link
    share = float(stated[1]) / (float(usual[1]) * float(usual[2]))
    each = link.per_rank_bandwidth
    cells.assume(f"{link.name} at {share:.3g} of its bandwidth")
    return dataclasses.replace(
        link,
        bandwidth=link.bandwidth * share,
        per_rank_bandwidth=None if each is None else each * share,
    )


def _adapted(framework: Framework, cells: _Cells) -> Framework:
    """The framework as this row runs it."""
    if cells.whole("moe_experts", 0) > 1:
        text = f"{cells.text('framework')} {cells.text('notes')}"
        framework = with_experts(framework, text, cells.assumptions, cells.text("model"))
    target = framework.target
    for width, said in ((4, "fp32 grad"), (2, "bf16 grad")):
        if said in cells.text("precision"):
            target = dataclasses.replace(target, gradient_bytes=width)
    return dataclasses.replace(framework, target=target)


def _precision(cells: _Cells) -> str:
    text, legal = cells.text("precision").lower(), ", ".join(PRECISIONS)
    if "fp4" in text:
        return "nvfp4"
    if "mx" in text:
        return "mxfp8"
    if "fp8" in text:
        return "fp8_rowwise" if "row" in text else "fp8"
    if "bf16 weights and states" in cells.text("notes"):
        return "bf16_pure"
    for known, precision in _PRECISIONS.items():
        if known in text:
            return precision
    raise Unpriced(f"precision {text!r} is not modelled; legal: {legal}")


def _expert_ranks(cells: _Cells, dp: int) -> int:
    """Ranks that share experts out; a library that exchanges tokens tells of several."""
    ep, experts = cells.whole("ep", 1), cells.whole("moe_experts", 0)
    if ep > 1 or experts <= 1 or "DeepEP" not in cells.text("framework"):
        return ep
    ranks = math.gcd(dp, experts)
    cells.assume(f"ep is unknown beside DeepEP: taken as {ranks}, all that experts divide among")
    return ranks


def _experts_by_tensor(cells: _Cells, tp: int) -> bool:
    """Whether experts are split by tp, as notes that say "expert-tensor-parallel 2" mean. Raises
    `Unpriced` for another degree of theirs."""
    found = re.search(r"expert-tensor-parallel (\d+)", cells.text("notes"))
    if not found or int(found[1]) == 1:
        return False
    if int(found[1]) != tp:
        raise Unpriced(f"expert-tensor-parallel {found[1]} beside tp={tp} is not modelled")
    return tp > 1


def _sharing(cells: _Cells, ranks: int) -> Sharing:
    """ZeRO, also among so many of the data ranks only as the notes say ("zero1=8")."""
    zero, among = _zero(cells), re.search(r"\bzero1=(\d+)", cells.text("notes"))
    if not among or not zero or ranks % int(among[1]) or int(among[1]) == ranks:
        return Sharing(zero=zero)
    cells.assume(f"states shared out over {among[1]} ranks")
    return Sharing(zero=zero, dp_shard=int(among[1]))


def _zero(cells: _Cells) -> int:
    text = cells.text("zero_stage_fsdp")
    if "auto" in text:
        cells.assume("ZeRO chosen by the framework: taken as 2")
        return 2
    found = re.search(r"(?:^|zero[-_ ]?|stage[-_ ]?)([0-3])\b", text, re.I)
    if not text and "Megatron-Bridge" in cells.text("framework"):
        cells.assume("ZeRO stage is unknown: the distributed optimizer of the recipes, 1")
        return 1
    if not found:
        stage = 3 if "fsdp" in text.lower() else 0
        cells.assume(f"ZeRO stage {text!r} is unknown: taken as {stage}")
        return stage
    return int(found[1])


def _recompute(cells: _Cells) -> tuple[str, float]:
    """The policy of layers, and the part of them that it is for."""
    text = cells.text("recompute").lower()
    if text == "selective (op)":
        return "alternate", 1.0
    if "every 2nd layer" in text:
        return "full", 0.5
    if "fraction of blocks" in text:
        return "full", _repeated_part(cells)
    some = re.search(r"recompute_num_layers=(\d+)", cells.text("notes"))
    if text.startswith("full (partial") and some:
        return "full", min(1.0, int(some[1]) / cells.whole("layers"))
    for known in ("none", "full", "selective"):
        if text.startswith(known):
            if text not in ("none", "full", "selective"):
                cells.assume(f"recompute {text!r} taken as {known}")
            return known, 1.0
    if "use recompute" in text:
        cells.assume(f"recompute {text!r} taken as full")
        return "full", 1.0
    cells.assume(f"recompute {text!r} is unknown: taken as none")
    return "none", 1.0


def _repeated_part(cells: _Cells) -> float:
    """The part of the layers whose forward, a third of a step's FLOPs, is repeated: from the FLOPs
    that a row says the hardware did (HFU, by GPU in its notes) over the model's (MFU)."""
    found = re.search(r"HFU ([\w/]+) = ([\d./]+)", cells.text("notes"))
    mfu = re.search(r"MFU = ([\d.]+)", f"{cells.text('notes')} MFU = {cells.text('mfu')}")
    if not found or not mfu:
        cells.assume("recompute of an unknown part of the layers: taken as half of them")
        return 0.5
    done = dict(zip(found[1].split("/"), found[2].split("/"), strict=True))
    gpu = next((name for name in done if name in cells.text("gpu")), "")
    part = 3 * (float(done.get(gpu) or "nan") / float(mfu[1]) - 1)
    if math.isnan(part):
        raise Unpriced(f"notes give HFU of {found[1]}, not of {cells.text('gpu')}")
    part = min(1.0, max(0.0, part))
    cells.assume(f"recompute of {part:.0%} of the layers, by HFU over MFU")
    return part
