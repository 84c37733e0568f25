"""Configurations that papers and recipes publish without a table of measurements.

Rows as `published.csv` has them, read by `read_row`; what a source leaves open is absent, and
`plans.py` then takes the fastest reading that fits. Facts of papers; recipes are Apache-2.0.
"""

from __future__ import annotations

from collections.abc import Mapping

_HOPPER = {"gpu": "H100-80GB-SXM", "gpus_per_node": "8", "precision": "bf16"}
_AMPERE = {"gpu": "A100-80GB-SXM", "gpus_per_node": "8", "precision": "bf16"}
_CORE = {"framework": "Megatron-Core", "zero_stage_fsdp": "1"}
_QWEN3_30B = {
    "model": "Qwen3-30B-A3B", "layers": "48", "hidden": "2048", "heads": "32", "kv_heads": "4",
    "ffn": "768", "vocab": "151936", "seq_len": "4096", "moe_experts": "128", "moe_topk": "8",
}  # fmt: skip

RECIPES: tuple[Mapping[str, str], ...] = (
    {
        **_HOPPER, **_CORE,
        "source": "Nemotron-4 340B Technical Report (arXiv 2406.11704), table 2",
        "model": "Nemotron4-340B", "layers": "96", "hidden": "18432", "heads": "96",
        "kv_heads": "8", "ffn": "73728", "vocab": "256000", "seq_len": "4096", "num_gpus": "6144",
        "tp": "8", "pp": "12", "vp": "8", "dp": "64", "micro_batch": "1", "global_batch": "2304",
        "iteration_time_s": "8.0",
    },
    {
        **_AMPERE, **_CORE, "source": "MegaScale (Jiang et al., NSDI 2024), table 2",
        "model": "GPT-175B", "layers": "96", "hidden": "12288", "heads": "128", "vocab": "64000",
        "seq_len": "2048", "num_gpus": "12288", "tp": "8", "pp": "8", "vp": "6", "dp": "192",
        "micro_batch": "1", "global_batch": "6144", "iteration_time_s": "6.34",
    },
    {
        **_AMPERE, "source": "BLOOM (arXiv 2211.05100), section 3.4; BigScience's tr11-176B-ml",
        "framework": "Megatron-DeepSpeed", "zero_stage_fsdp": "1", "recompute": "full",
        "interconnect": "4x100Gb Omni-Path (OPA)", "model": "BLOOM-176B", "layers": "70",
        "hidden": "14336", "heads": "112", "vocab": "250880", "seq_len": "2048", "num_gpus": "384",
        "tp": "4", "pp": "12", "dp": "8", "micro_batch": "2", "global_batch": "2048",
        "iteration_time_s": "105",
    },
    {
        **_HOPPER, **_CORE,
        "source": "DeepSeek-V3 Technical Report (arXiv 2412.19437), section 3.2",
        "model": "DeepSeek-V3", "layers": "61", "hidden": "7168", "heads": "128", "kv_heads": "128",
        "ffn": "2048", "vocab": "129280", "seq_len": "4096", "moe_experts": "256", "moe_topk": "8",
        "num_gpus": "2048", "tp": "1", "pp": "16", "ep": "64", "dp": "128", "micro_batch": "1",
        "global_batch": "15360", "notes": "DeepEP; EP overlap (DualPipe); H800 and fp8 in fact",
    },
    {
        **_HOPPER, **_CORE, "source": "Megatron-Core MoE's recipe for Mixtral 8x7B (Apache-2.0)",
        "model": "Mixtral-8x7B", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8",
        "ffn": "14336", "vocab": "32000", "seq_len": "4096", "moe_experts": "8", "moe_topk": "2",
        "num_gpus": "64", "tp": "1", "pp": "4", "vp": "8", "ep": "8", "dp": "16",
        "micro_batch": "1", "global_batch": "256",
    },
    {
        **_HOPPER, **_CORE, **_QWEN3_30B,
        "source": "Megatron-Bridge's recipe for Qwen3-30B-A3B (Apache-2.0)", "num_gpus": "16",
        "tp": "1", "pp": "1", "ep": "16", "dp": "16", "micro_batch": "1", "global_batch": "1024",
        "notes": "HybridEP; EP overlap; TE graphs", "iteration_time_s": "20.15",
    },
)  # fmt: skip
