"""Predicted against published: one row of a published table, priced by the code that prices plans.

A row names a model by its dims, a cluster by its GPUs and a plan by its degrees. From it come a
traced model (`reference_models.py`), a catalog cluster, a target (`frameworks.py`) and a `Plan`,
which is checked and priced like any other (`check.py`, `evaluate.py`). What a row leaves open is
assumed and listed; what can't be priced is refused with the reason.

Rows have the columns layers, hidden, heads, kv_heads, ffn, vocab, seq_len, moe_experts, gpu,
num_gpus, gpus_per_node, precision, tp, pp, cp, ep, vp, dp, zero_stage_fsdp, recompute, micro_batch,
global_batch, framework, interconnect, model, notes; texts, empty where unknown.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from costmodel.factors import FactorTable, analyse
from costmodel.graph import Graph
from planner.blocks import cut_blocks
from planner.check import check_plan
from planner.evaluate import Prediction, evaluate
from planner.families import facts_of
from planner.frameworks import Framework, framework_of, with_experts
from planner.published import Setup, Unpriced, make_plan
from planner.reference_models import TransformerDims, build
from planner.repeat import deepen
from planner.trace import trace
from profiles.cluster import Cluster

# the first pattern that "gpu | interconnect" matches, to a catalog node
_NODES = (
    (r"H100-96GB", "grand-teton-h100"),
    (r"p5\.48xlarge", "p5.48xlarge"),
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
)
_PRECISIONS = {"fp16": "fp16", "bf16": "bf16", "amp": "bf16", "fp32": "fp32"}
_MODERN = re.compile(
    r"llama|qwen|mistral|mixtral|gemma|nemotron|phi|olmo|deepseek|kimi|moonlight|glm", re.I
)


TRACED_LAYERS = 4


def predict_row(row: Mapping[str, str]) -> Prediction:
    """Step time and peak memory of a published configuration.

    `peak_memory_bytes` is what the framework's allocator holds at most, per stage; the driver's
    context and communication libraries, which no allocator sees, are not in it. Raises `Unpriced`
    with the reason where a row can't be priced.
    """
    return predict(read_row(row))


def predict(setup: Setup) -> Prediction:
    """Price a configuration that has been read."""
    graph, table = traced(setup.dims, setup.precision)
    plan = make_plan(setup, graph)
    try:
        assignments = check_plan(plan, graph, table)
    except ValueError as error:
        raise Unpriced(str(error)) from error
    return evaluate(
        plan, graph, table, setup.cluster, assignments, optimizer="adamw",
        target=setup.framework.target,
    ).prediction  # fmt: skip


@lru_cache(maxsize=64)
def traced(dims: TransformerDims, precision: str) -> tuple[Graph, FactorTable]:
    """The reference model of these dims, traced and cut into blocks; of a deep one, some layers
    are traced and copied."""
    few = TRACED_LAYERS + dims.dense_layers
    if dims.layers > few:
        shallow, _ = _traced(dataclasses.replace(dims, layers=few), precision)
        if sum(block.name.startswith("layers.") for block in shallow.blocks) == few:
            graph = deepen(shallow, "layers", dims.layers)
            return graph, analyse(graph)
    return _traced(dims, precision)


def _traced(dims: TransformerDims, precision: str) -> tuple[Graph, FactorTable]:
    model, example = build(dims)
    graph = trace(model, example, loss_fn=None, batch_size=2, precision=precision)
    table = analyse(graph)
    return cut_blocks(graph, table), table


# --- reading a row -------------------------------------------------------------------------------


def read_row(row: Mapping[str, str]) -> Setup:
    """The configuration a row describes, with what had to be assumed; raises `Unpriced`."""
    assumptions: list[str] = []

    def whole(name: str, default: int | None = None) -> int:
        text = (row.get(name) or "").strip()
        if not text and default is not None:
            return default
        if not text:
            raise Unpriced(f"column {name} is empty, and the price depends on it")
        least = 0 if default == 0 else 1
        number = float(text) if re.fullmatch(r"[0-9]+(\.[0-9]*)?", text) else -1.0
        if number < least or not number.is_integer():
            raise Unpriced(f"column {name} is {text!r}; legal: a whole number from {least}")
        return int(number)

    notes = row.get("notes") or ""
    try:
        framework = framework_of(row.get("framework") or "", notes)
    except ValueError as error:
        raise Unpriced(str(error)) from None
    if "offload" in f"{row.get('zero_stage_fsdp')} {notes}":
        raise Unpriced("offloading to the host is not modelled")
    tp, pp, cp, chunks = (whole("tp"), whole("pp"), whole("cp", 1), whole("vp", 1))
    gpus = whole("num_gpus")
    dp = whole("dp", max(1, gpus // (tp * pp * cp)))
    if dp * tp * pp * cp != gpus:
        raise Unpriced(f"dp={dp} × cp={cp} × tp={tp} × pp={pp} is not num_gpus={gpus}")
    micro, batch = whole("micro_batch"), whole("global_batch")
    if batch % (micro * dp):
        raise Unpriced(f"global_batch={batch} is not a multiple of micro_batch={micro} × dp={dp}")
    if not (row.get("vp") or "").strip() and pp > 1:
        assumptions.append("vp is unknown: taken as 1")
    dims = _dims(row, framework, whole, tp, assumptions)
    if dims.layers < pp * chunks:
        raise Unpriced(f"{dims.layers} layers can't fill pp={pp} × vp={chunks} stages")
    assumptions += framework.assumptions
    return Setup(
        dims=dims,
        cluster=_cluster(row, gpus),
        framework=_adapted(framework, row, pp, assumptions),
        precision=_precision(row),
        tp=tp,
        pp=pp,
        cp=cp,
        ep=whole("ep", 1),
        dp=dp,
        chunks=chunks,
        zero=_zero(row, assumptions),
        recompute=_recompute(row, assumptions),
        micro_batch=micro,
        global_batch=batch,
        assumptions=tuple(assumptions),
    )


def _dims(row, framework, whole, tp, assumptions):  # type: ignore[no-untyped-def]
    """Sizes and style of the model: by its family's name where the sizes leave it open."""
    name, experts = row.get("model") or "", whole("moe_experts", 0)
    facts = _facts(name, experts > 1, assumptions)  # first: it knows what can't be priced at all
    heads, hidden = whole("heads"), whole("hidden")
    modern = bool(_MODERN.search(name))
    squared = "nemotron" in name.lower()
    vocab = whole("vocab", 51200)
    padded = math.ceil(vocab / (128 * tp)) * 128 * tp if vocab % tp else vocab
    if padded != vocab:
        assumptions.append(f"vocabulary of {vocab} padded to {padded}, which tp={tp} divides")
    kv_heads = whole("kv_heads", heads)
    if kv_heads < tp and tp % kv_heads == 0:
        assumptions.append(f"{kv_heads} key-value heads repeated for tp={tp}")
        kv_heads = tp
    encoder = "bert" in name.lower()
    ffn = whole("ffn", 4 * hidden)
    sizes = {"ffn": ffn, **facts}
    if experts > 1:
        sizes |= {"experts": experts, "topk": whole("moe_topk"), "expert_ffn": ffn}
        assumptions.append("tokens spread evenly over experts, which are not split by tp")
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


def _facts(name: str, sparse: bool, assumptions: list[str]) -> Mapping[str, Any]:
    try:
        facts = facts_of(name)
    except ValueError as error:
        raise Unpriced(str(error)) from None
    if not sparse:  # distilled into a dense model, of which the rest is in the row
        facts = {key: value for key, value in facts.items() if key == "head_dim"}
    if facts:
        assumptions.append(f"from the model's public configuration: {dict(facts)}")
    return facts


def _cluster(row: Mapping[str, str], gpus: int) -> Cluster:
    text = f"{row.get('gpu')} | {row.get('interconnect')}"
    node = next((name for pattern, name in _NODES if re.search(pattern, text)), None)
    if node is None:
        raise Unpriced(f"gpu {row.get('gpu')!r} is not in the catalog")
    per_node = int(float(row.get("gpus_per_node") or 8))
    if "nvl72" in node:  # what counts is the NVLink domain, of which runs take an even part
        per_node = max(n for n in range(1, min(gpus, 72) + 1) if gpus % n == 0)
    nodes = math.ceil(gpus / per_node)
    cluster = Cluster.from_catalog(
        node, num_nodes=nodes, devices_per_node=gpus if nodes == 1 else per_node
    )
    # published peaks are an allocator's: without the driver's context
    device = dataclasses.replace(cluster.device, reserved_bytes=0)
    return dataclasses.replace(cluster, device=device)


def _adapted(
    framework: Framework, row: Mapping[str, str], pp: int, assumptions: list[str]
) -> Framework:
    """The framework as this row runs it."""
    if (row.get("moe_experts") or "0").strip() not in ("", "0", "1"):
        text = f"{row.get('framework')} {row.get('notes')}"
        framework = with_experts(framework, text, assumptions)
    target = framework.target
    if "fp32 grad" in (row.get("precision") or ""):
        target = dataclasses.replace(target, gradient_bytes=4)
    if target.name == "Megatron-LM" and pp == 1 and "DeepSpeed" not in (row.get("framework") or ""):
        target = dataclasses.replace(target, overlap_gradients=True, bucket_bytes=25 * 2**20)
        assumptions.append("gradient reduction overlapped (torch DDP) where pp = 1")
    return dataclasses.replace(framework, target=target)


def _precision(row: Mapping[str, str]) -> str:
    text = (row.get("precision") or "").lower()
    if "fp8" in text or "fp4" in text:
        raise Unpriced(f"precision {text!r} is not modelled; legal: fp32, bf16, fp16")
    for known, precision in _PRECISIONS.items():
        if known in text:
            return precision
    raise Unpriced(f"precision {text!r} is not modelled; legal: fp32, bf16, fp16")


def _zero(row: Mapping[str, str], assumptions: list[str]) -> int:
    text = row.get("zero_stage_fsdp") or ""
    if "auto" in text:
        assumptions.append("ZeRO chosen by the framework: taken as 2")
        return 2
    found = re.search(r"[0-3]", text)
    if not text and "Megatron-Bridge" in (row.get("framework") or ""):
        assumptions.append("ZeRO stage is unknown: the distributed optimizer of the recipes, 1")
        return 1
    if not found:
        assumptions.append(f"ZeRO stage {text!r} is unknown: taken as 0")
        return 0
    return int(found[0])


def _recompute(row: Mapping[str, str], assumptions: list[str]) -> str:
    text = (row.get("recompute") or "").strip().lower()
    if text == "selective (op)":
        return "alternate"
    for known in ("none", "full", "selective"):
        if text.startswith(known):
            if text not in ("none", "full", "selective"):
                assumptions.append(f"recompute {text!r} taken as {known}")
            return known
    if "use recompute" in text:
        assumptions.append(f"recompute {text!r} taken as full")
        return "full"
    assumptions.append(f"recompute {text!r} is unknown: taken as none")
    return "none"
