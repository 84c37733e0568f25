"""Published mixtures of experts: their models' sizes, and rows that are read and priced."""

import dataclasses
import json
from pathlib import Path

import pytest

from meshwright import profiles
from meshwright.profiles.cluster import Cluster
from scripts.published.frameworks import EXCHANGE_HIDDEN, Unpriced
from scripts.published.models import Latent, TransformerDims, build
from scripts.published.predict import evaluate, evaluate_row, traced
from scripts.published.rows import facts_of, read_row
from tests.helpers.tiers import second_tier

CATALOG = Path(profiles.__file__).parent / "catalog"
DENSE = TransformerDims(
    layers=3, hidden=64, heads=4, kv_heads=4, ffn=96, vocab=128, seq_len=32, activation="swiglu",
    norm="rms", positions="rotary", bias=False, tied=False,
)  # fmt: skip
SPARSE = dataclasses.replace(DENSE, experts=16, topk=3, expert_ffn=32)


def test_dense_first_layers_and_latent_attention_are_deepened() -> None:
    """Parameters of the deep stack, counted by hand."""
    dims = dataclasses.replace(
        SPARSE, layers=9, dense_layers=2, shared_ffn=48, latent=Latent(q_rank=24, kv_rank=16)
    )
    graph, _ = traced(dims, "bf16")
    h, heads, of = dims.hidden, dims.heads, dims.latent
    assert of is not None
    attention = (
        h * 24 + 24 + 24 * heads * 192 + h * (16 + 64) + 16 + 16 * heads * 256 + heads * 128 * h
    )
    sparse = h * dims.experts + 3 * h * (dims.experts * dims.expert_ffn + 48)
    wanted = 9 * (attention + 2 * h) + 7 * sparse + 2 * 3 * h * dims.ffn + 2 * dims.vocab * h + h
    assert graph.num_parameters() == wanted
    names = [block.name for block in graph.blocks]
    assert names == ["embed", *(f"layers.{k}" for k in range(9)), "head"]


@pytest.mark.parametrize(
    ("name", "shape", "billions"),
    [  # layers, hidden, heads, kv_heads, expert ffn, vocab, experts, topk
        ("Qwen3-30B-A3B", (48, 2048, 32, 4, 768, 151936, 128, 8), 30.5),
        ("DeepSeek-V3-671B", (61, 7168, 128, 128, 2048, 129280, 256, 8), 671),
        ("Kimi-K2", (61, 7168, 64, 64, 2048, 163840, 384, 8), 1026),
        ("Moonlight-16B-A3B", (27, 2048, 16, 16, 1408, 163840, 64, 6), 16),
    ],
)
def test_public_configurations_add_up(name: str, shape: tuple[int, ...], billions: float) -> None:
    """Parameters of a model from the columns of a table and its family's facts."""
    layers, hidden, heads, kv_heads, ffn, vocab, experts, topk = shape
    dims = dataclasses.replace(
        DENSE, layers=layers, hidden=hidden, heads=heads, kv_heads=kv_heads, vocab=vocab,
        head_dim=0, experts=experts, topk=topk, expert_ffn=ffn,
    )  # fmt: skip
    model, _ = build(dataclasses.replace(dims, **{"ffn": ffn, **facts_of(name)}))
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, rel=0.02)


ROW = {
    "model": "Qwen3-30B-A3B", "layers": "48", "hidden": "2048", "heads": "32", "kv_heads": "4",
    "ffn": "768", "vocab": "151936", "seq_len": "4096", "moe_experts": "128", "moe_topk": "8",
    "gpu": "H100-80GB SXM", "num_gpus": "16", "gpus_per_node": "8", "precision": "bf16",
    "tp": "1", "pp": "1", "cp": "1", "ep": "16", "vp": "1", "dp": "16", "recompute": "none",
    "micro_batch": "1", "global_batch": "1024", "framework": "Megatron-Bridge",
    "notes": "EP overlap off; HybridEP, TE graphs router/preprocess, forced balance",
}  # fmt: skip


@second_tier("prices are judged by validate_costmodel; the models' sizes stay")
def test_a_published_step_is_in_the_region() -> None:
    """24.7 s (Megatron-Bridge); the margin leaves room for other fits, not for other physics."""
    assert evaluate_row(ROW).prediction.step_time_s == pytest.approx(24.7, rel=0.35)


@pytest.mark.parametrize("says", ["EP overlap", "EP comm overlap", "a2a overlap on"])
def test_overlap_of_experts_is_read_from_notes(says: str) -> None:
    assert read_row({**ROW, "notes": says}).framework.target.overlap_experts == EXCHANGE_HIDDEN
    for no in (f"no {says}", "EP overlap off", ""):
        assert not read_row({**ROW, "notes": no}).framework.target.overlap_experts


@second_tier("full recompute of blocks is priced by hand in test_price")
def test_checkpoints_of_automodel_stop_early() -> None:
    """A layer's recompute ends at the last tensor that a backward wants: what comes after the last
    product of the experts, and it, are not run again."""
    name = "NeMo Automodel (PyTorch FSDP2/DTensor); TE + DeepEP"
    fsdp = {"zero_stage_fsdp": "3 (FSDP2)", "num_gpus": "8", "ep": "8", "dp": "8"}
    row = {**ROW, **fsdp, "layers": "4", "global_batch": "8", "recompute": "full"}
    early = read_row({**row, "framework": name})
    target = dataclasses.replace(early.framework.target, repeats_whole=True)
    framework = dataclasses.replace(early.framework, target=target)
    whole = dataclasses.replace(early, framework=framework)
    assert not early.framework.target.repeats_whole
    assert evaluate(early).prediction.step_time_s < evaluate(whole).prediction.step_time_s


def test_a_model_with_other_layers_is_refused_by_name() -> None:
    with pytest.raises(Unpriced, match=r"Nemotron-3.* state-space layers"):
        evaluate_row({**ROW, "model": "Nemotron-3-Nano-30B-A3B"})


def test_dense_relatives_keep_their_own_sizes() -> None:
    """A name may be that of a mixture's distillation; only heads have sizes of their own there."""
    sizes = {"layers": "4", "hidden": "512", "heads": "8", "kv_heads": "8", "ffn": "1024"}
    dense = {**ROW, **sizes, "moe_experts": "", "moe_topk": "", "ep": ""}
    named = read_row({**dense, "model": "DeepSeek-R1-Distill-Llama-8B"}).dims
    assert named == read_row({**dense, "model": "Llama3-8B"}).dims
    assert read_row({**dense, "model": "Qwen3-8B"}).dims.head_dim == 128


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 65}, "hidden=65, heads=4: without a head_dim"),
        ({"kv_heads": 3}, "heads=4, kv_heads=3: heads must be a multiple"),
        ({"topk": 17}, "experts=16, topk=17, expert_ffn=32"),
        ({"expert_ffn": 0}, "experts need a width"),
    ],
)
def test_dims_that_cannot_be_are_refused(changes: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(SPARSE, head_dim=0, **changes)


def test_a_node_may_have_a_host_of_its_own() -> None:
    """The catalog's device says what a usual host needs; a node's own figure goes first."""
    entry = json.loads((CATALOG / "p5.48xlarge.json").read_text())
    own, usual = (Cluster.from_catalog(name).device for name in ("p5.48xlarge", "dgx-h100"))
    assert own.host_overhead_s == pytest.approx(entry["host_overhead"]["value"] * 1e-6)
    assert dataclasses.replace(own, host_overhead_s=usual.host_overhead_s) == usual
