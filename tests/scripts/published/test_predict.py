"""Published rows through the pricing of plans: within a generous band, refused with the reason,
read with what had to be assumed.

The times are published facts, each with its source. The band is for units and orders of magnitude;
how good the predictions are is `scripts/validate_costmodel`'s to say.
"""

import dataclasses
import itertools

import pytest

from meshwright.planner.plan.check import check_plan
from scripts.experts.rows import memory_rows
from scripts.published.frameworks import Unpriced, framework_of
from scripts.published.predict import evaluate_row, traced
from scripts.published.rows import read_row
from scripts.published.setup import Setup, _cuts, make_plan
from tests.helpers.tiers import second_tier

BAND = 0.3
NEAR = 0.05
MEGATRON = {
    "model": "GPT-7.5B", "layers": "36", "hidden": "4096", "heads": "32", "kv_heads": "32",
    "ffn": "16384", "vocab": "51200", "seq_len": "2048", "gpu": "A100-80GB-SXM", "num_gpus": "128",
    "gpus_per_node": "8", "precision": "fp16", "tp": "4", "pp": "1", "cp": "1", "ep": "1",
    "vp": "1", "dp": "32", "zero_stage_fsdp": "0", "recompute": "full", "micro_batch": "16",
    "global_batch": "512", "framework": "Megatron-LM",
    "interconnect": "NVLink3 600GB/s; 8x200Gb HDR IB/node",
}  # fmt: skip
LLAMA = {
    "model": "Llama3.1-8B", "layers": "32", "hidden": "4096", "heads": "32", "kv_heads": "8",
    "ffn": "14336", "vocab": "128256", "seq_len": "8192", "gpu": "H100-80GB-SXM", "num_gpus": "8",
    "gpus_per_node": "8", "precision": "bf16", "tp": "1", "pp": "1", "cp": "2", "ep": "1",
    "vp": "1", "dp": "4", "zero_stage_fsdp": "1 (distributed optimizer)", "recompute": "none",
    "micro_batch": "1", "global_batch": "128", "framework": "NeMo/Megatron-Core",
    "interconnect": "NVLink4; 8x400Gb IB/node",
}  # fmt: skip
SMALL = {
    "layers": "2", "hidden": "64", "heads": "4", "kv_heads": "4", "ffn": "128", "vocab": "512",
    "seq_len": "32",
}  # fmt: skip
PUBLISHED = [
    # Narayanan et al., "Efficient Large-Scale Language Model Training on GPU Clusters", SC21,
    # table 1
    (MEGATRON, 3.6963),
    # NVIDIA DGX Cloud benchmarking recipes, v25.04
    (LLAMA, 12.27),
    # MosaicML llm-foundry, MPT benchmarks with torch 2
    (
        {
            **MEGATRON, "model": "MPT-1b", "layers": "24", "hidden": "2048", "heads": "16",
            "kv_heads": "16", "ffn": "8192", "vocab": "50368", "seq_len": "1024", "num_gpus": "8",
            "precision": "amp_bf16", "tp": "1", "dp": "8", "recompute": "none",
            "zero_stage_fsdp": "3 (FSDP FULL_SHARD)", "micro_batch": "18", "global_batch": "576",
            "framework": "MosaicML Composer + PyTorch FSDP (llm-foundry)",
            "interconnect": "1600Gb/s RoCE per node",
        },
        3.33426,
    ),
    # Bang et al., "vTrain", MICRO 2024, its published validation measurements
    (
        {
            **MEGATRON, "model": "GPT-1.1B", "layers": "20", "hidden": "2048", "heads": "16",
            "kv_heads": "16", "ffn": "8192", "seq_len": "1024", "num_gpus": "8", "tp": "1",
            "pp": "4", "dp": "2", "micro_batch": "1", "global_batch": "8",
            "framework": "Megatron-DeepSpeed", "interconnect": "NVLink3/NVSwitch 600GB/s",
        },
        0.168453,
    ),
    # Zheng et al., "Alpa", OSDI 2022, artifact, intra-operator ablation
    (
        {
            **MEGATRON, "model": "GPT-1.7B", "layers": "8", "vocab": "25600", "seq_len": "1024",
            "gpu": "V100-16GB-SXM2 (p3.16xlarge)", "num_gpus": "4", "tp": "2", "dp": "2",
            "zero_stage_fsdp": "auto (ILP over logical mesh)", "micro_batch": "4",
            "global_batch": "8", "framework": "Alpa/XLA", "interconnect": "NVLink2",
        },
        0.5806,
    ),
]  # fmt: skip


OTHERS = second_tier("a pipeline stays; prices are judged by validate_costmodel")


@pytest.mark.parametrize(
    ("row", "seconds"),
    [
        pytest.param(
            row,
            seconds,
            id=row["framework"],
            marks=() if row["framework"] == "Megatron-DeepSpeed" else OTHERS,
        )
        for row, seconds in PUBLISHED
    ],
)
def test_published_steps_are_in_the_band(row: dict[str, str], seconds: float) -> None:
    found = evaluate_row(row).prediction
    assert seconds * (1 - BAND) < found.step_time_s < seconds * (1 + BAND)
    assert len(found.peak_memory_bytes) == int(row["pp"])
    assert 0 < found.mfu < 1
    # Alpa's peak is published; the others fitted, so that they ran
    peak_gib = max(found.peak_memory_bytes) / 2**30
    room = 80 if "A100-80" in row["gpu"] or "H100" in row["gpu"] else 16
    assert 1 < peak_gib < room * 1.1
    assert row["framework"] != "Alpa/XLA" or peak_gib == pytest.approx(8.738, rel=BAND)


# NVIDIA NeMo documentation, "Training with long sequences": Llama-2 7B in fp8, 24.03, one row
LONG = {
    **LLAMA, "model": "Llama2-7B", "kv_heads": "32", "ffn": "11008", "vocab": "32000",
    "precision": "fp8", "recompute": "none", "framework": "NeMo 24.03.01",
}  # fmt: skip


@second_tier("products in 8 bits have prices by hand (test_eight_bits)")
@pytest.mark.parametrize(
    ("changes", "seconds"),
    [
        ({"seq_len": "4096", "num_gpus": "4", "cp": "1", "global_batch": "1024"}, 62.898),
        ({"seq_len": "131072", "num_gpus": "128", "tp": "4", "cp": "4", "dp": "8",
          "global_batch": "32"}, 14.499),
        ({"seq_len": "1048576", "num_gpus": "1024", "tp": "8", "cp": "32",
          "global_batch": "4"}, 12.881),
    ],
)  # fmt: skip
def test_published_steps_in_fp8_are_near(changes: dict[str, str], seconds: float) -> None:
    """Of long sequences, too, whose attention is in 16 bits. Nothing was fitted to them."""
    found = evaluate_row({**LONG, **changes}).prediction
    assert found.step_time_s == pytest.approx(seconds, rel=NEAR)


@second_tier("what is assumed of an unknown column is listed in a test below")
@pytest.mark.parametrize(
    ("column", "says", "row"),
    [
        ("micro_batch", "micro_batch is unknown",
         {**MEGATRON, **SMALL, "hidden": "512", "ffn": "2048", "vocab": "1024", "seq_len": "128",
          "num_gpus": "2", "tp": "1", "dp": "2", "global_batch": "24"}),
        ("vp", "vp is unknown: the divisor",
         {**LLAMA, "layers": "8", "hidden": "512", "heads": "8", "kv_heads": "8", "ffn": "2048",
          "vocab": "1024", "seq_len": "512", "num_gpus": "2", "pp": "2", "cp": "1", "dp": "1",
          "global_batch": "4"}),
    ],
)  # fmt: skip
def test_what_is_unknown_is_the_fastest_that_fits(
    column: str, says: str, row: dict[str, str]
) -> None:
    times = [
        evaluate_row({**row, column: count}).prediction.step_time_s for count in ("1", "2", "4")
    ]
    assert len(set(times)) == 3
    chosen = evaluate_row({**row, column: ""}).prediction
    assert chosen.step_time_s == min(times)
    assert any(says in text for text in chosen.assumptions)


# --- refused -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"tp": ""}, "column tp is empty, and the price depends on it"),
        ({"layers": "32.5"}, "column layers is '32.5'; legal: a whole number from 1"),
        ({"tp": "0"}, "column tp is '0'; legal: a whole number from 1"),
        ({"num_gpus": "1e99"}, "column num_gpus is '1e99'"),
        ({"gpus_per_node": "16"}, "devices_per_node is 16; legal: for node"),
        ({"zero_stage_fsdp": "2 + offload"}, "offloading to the host is not modelled"),
        ({"notes": "optimizer offload"}, "offloading to the host is not modelled"),
        ({"precision": "int8"}, "precision 'int8' is not modelled; legal: fp32, bf16, bf16_pure"),
        ({"gpu": "Abacus"}, "gpu 'Abacus' is not in the catalog"),
        ({"framework": "homebrew"}, "framework 'homebrew' is not known; legal: .*torchtitan"),
        ({"dp": "16"}, r"dp=16 × cp=1 × tp=4 × pp=1 is not num_gpus=128"),
        ({"cp": "2", "dp": "16"}, "cp=2: context parallelism is priced for fused attention alone"),
        ({"global_batch": "500"}, "global_batch=500 is not a multiple of micro_batch=16 × dp=32"),
        ({"pp": "64", "dp": "1", "tp": "2", "micro_batch": "1"}, "36 layers can't fill pp=64"),
        ({"heads": "33"}, "hidden must be a multiple of heads"),
    ],
    ids=str,
)
def test_what_cannot_be_priced_is_refused_with_the_reason(
    changes: dict[str, str], says: str
) -> None:
    with pytest.raises(Unpriced, match=says):
        evaluate_row({**MEGATRON, **changes})


@second_tier("mixtures have tests of their own (test_moe_models), without experts that are split")
def test_experts_may_be_split_by_tensor_parallel_ranks() -> None:
    """A rank holds a half of each of its experts' matrices, and gathers tokens for them."""
    mixtral = {
        **LLAMA, "model": "Mixtral-8x7B", "layers": "4", "moe_experts": "8", "moe_topk": "2",
        "ffn": "14336", "tp": "2", "cp": "1", "dp": "4", "ep": "4", "micro_batch": "1",
    }  # fmt: skip
    whole, split = (
        evaluate_row({**mixtral, "notes": notes}) for notes in ("", "expert-tensor-parallel 2")
    )
    parts = {name: at for name, at in split.plan.stages[0].shardings.items() if "experts" in name}
    assert sorted(parts.values()) == ["S(1)", "S(2)", "S(2)"]
    assert max(split.prediction.peak_memory_bytes) < max(whole.prediction.peak_memory_bytes)
    assert split.stages[0].forward_comm_s > whole.stages[0].forward_comm_s
    with pytest.raises(Unpriced, match="expert-tensor-parallel 4 beside tp=2"):
        evaluate_row({**mixtral, "notes": "expert-tensor-parallel 4"})


def test_peaks_that_allocators_said_are_apart() -> None:
    own, others = (memory_rows(by_allocator=by) for by in (True, False))
    assert len(own) == 24 and len(others) == 17
    assert all(
        "allocated" in r["mem_metric"]
        or "reserved" in r["mem_metric"]
        or "active" in r["mem_metric"]
        for r in own
    )
    assert any("nvidia-smi" in r["mem_metric"] for r in others)


@second_tier("cuts of layers into stages stay, and a row with a pipeline")
def test_what_ran_is_priced() -> None:
    """Interleaving with micro-batches that are no multiple of the pipeline's groups; the embedding
    and the head alone in their stages; a head that is worth more than a stage's layers."""
    core = {**MEGATRON, "framework": "Megatron-Core", "tp": "1", "dp": "4", "num_gpus": "16"}
    odd = {**core, "pp": "4", "vp": "3", "layers": "36", "micro_batch": "4", "global_batch": "96"}
    assert evaluate_row(odd).plan.num_microbatches == 6
    alone = {**core, "pp": "4", "vp": "2", "layers": "6", "micro_batch": "8", "global_batch": "128"}
    sizes = [len(stage.blocks) for stage in evaluate_row(alone).plan.stages]
    assert sizes == [1] * 8
    nano = {**core, "framework": "Nanotron", "pp": "8", "dp": "2", "layers": "32"}
    nano |= {"vocab": "400000"}
    *others, last = evaluate_row({**nano, "vp": ""}).plan.stages
    assert len(last.blocks) == 1 and sum(len(stage.blocks) for stage in others) == 33


# --- read ----------------------------------------------------------------------------------------


def assumed(changes: dict[str, str]) -> tuple[Setup, str]:
    setup = read_row({**MEGATRON, **changes})
    return setup, "; ".join(setup.assumptions)


def test_a_row_says_what_is_built() -> None:
    setup = read_row(LLAMA)
    dims = setup.dims
    assert (dims.layers, dims.hidden, dims.heads, dims.kv_heads) == (32, 4096, 32, 8)
    made = (dims.activation, dims.norm, dims.positions, dims.tied)
    assert made == ("swiglu", "rms", "rotary", False)
    assert (setup.dp, setup.cp, setup.tp, setup.pp, setup.sharing.zero) == (4, 2, 1, 1, 1)
    assert (setup.cluster.num_nodes, setup.cluster.devices_per_node) == (1, 8)
    # an allocator's peaks do not see the driver's context
    assert setup.cluster.device.reserved_bytes == 0
    gpt = read_row(MEGATRON)
    assert (gpt.dims.activation, gpt.dims.norm, gpt.dims.positions) == ("gelu", "layer", "learned")
    assert (gpt.cluster.num_nodes, gpt.cluster.devices_per_node) == (16, 8)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"pp": "2", "dp": "16", "vp": ""}, "vp is unknown: taken as 1"),
        ({"micro_batch": ""}, "micro_batch is unknown: the power of two predicted fastest"),
        ({"recompute": ""}, "recompute '' is unknown: taken as none"),
        ({"recompute": "selective (fraction of blocks)"}, "unknown part of the layers: taken as"),
        ({"interconnect": "400Gb/s per node"}, "InfiniBand HDR at 0.25 of its bandwidth"),
        ({"zero_stage_fsdp": "?"}, "ZeRO stage '?' is unknown: taken as 0"),
        ({"zero_stage_fsdp": "FSDP2"}, "ZeRO stage 'FSDP2' is unknown: taken as 3"),
        ({"zero_stage_fsdp": "auto"}, "ZeRO chosen by the framework: taken as 2"),
        ({"kv_heads": "2"}, "2 key-value heads repeated for tp=4"),
    ],
    ids=str,
)
def test_what_is_assumed_is_listed(changes: dict[str, str], says: str) -> None:
    setup, found = assumed(changes)
    assert says in found
    assert set(framework_of("Megatron-LM").assumptions) <= set(setup.assumptions)
    assert setup.dims.kv_heads == (4 if "kv_heads" in changes else 32)
    assert says not in assumed({})[1]


def test_frameworks_are_known_by_name_gpu_and_model() -> None:
    core = framework_of("NeMo/Megatron-Core")
    script = framework_of("Megatron-LM (Mcore v0.6)")
    assert (core.attention, script.attention) == ("fused", "fused")
    assert core.target.overlap_tensor
    assert not script.target.overlap_tensor
    assert framework_of("Megatron-LM", gpu="H100-80GB") == script
    assert framework_of("Megatron-LM", model="Llama3-8B") == script
    assert framework_of("Megatron-LM", gpu="A100-80GB").attention == "written"
    assert framework_of("torchtitan", "async TP; compile").target.overlap_tensor
    assert framework_of("torchtitan", "async TP; compile").target.fusion == "full"
    assert framework_of("Megatron-LM main", gpu="A100-80GB") == script  # dated by the row
    assert framework_of("DeepSpeed ZeRO-3", gpu="V100").target.zero_bandwidth < 1  # that of 2021
    today = framework_of("DeepSpeed ZeRO-3", gpu="A100", model="Llama-2-7B").target
    assert today.zero_bandwidth == 1 and today.overlap_gradients
    plain = framework_of("Megatron-Core", "sp=False dropout=0.1 flash attention")
    assert (script.sequence_parallel, script.dropout) == (True, 0.0)
    assert (plain.sequence_parallel, plain.dropout) == (False, 0.1)
    graphed = (
        framework_of("Megatron-Core", f"cuda_graph_impl={x}") for x in ("x", "full_iteration")
    )
    assert [each.target.host_scale for each in graphed] == [script.target.host_scale, 0.0]
    evo = framework_of("InternEvo")
    assert evo.target == framework_of("Megatron-Core (zero-bubble fork)").target != script.target
    assert "InternEvo is not modelled: Megatron-Core" in evo.assumptions[0]
    name = "NeMo Automodel (FSDP2); TE+DeepEP"
    te, flex = framework_of(name), framework_of(f"{name}+FlexAttn", gpu="H100-80GB")
    assert (flex.target.tuned_attention, te.target.tuned_attention) == (False, True)
    older = framework_of(f"{name}+FlexAttn", gpu="A100-80GB").target.attention_scale
    assert older < te.target.attention_scale == 1 < flex.target.attention_scale


@pytest.mark.parametrize(
    ("text", "notes", "wanted"),
    [
        ("selective (every 2nd layer)", "", ("full", 0.5)),
        # a forward is a third of the model's FLOPs
        ("selective (fraction of blocks)", "MFU = 0.6; HFU A100/H100 = .7/.5", ("full", 0.5)),
        ("full", "", ("full", 1.0)),
    ],
)
def test_part_of_the_layers_is_recomputed(text: str, notes: str, wanted: tuple[str, float]) -> None:
    setup, _ = assumed({"recompute": text, "notes": notes})
    assert (setup.recompute, pytest.approx(setup.recompute_part)) == wanted


def test_a_balanced_pipeline_counts_the_head() -> None:
    names = ["embed", *(f"layers.{k}" for k in range(8)), "head"]
    assert _cuts(names, 8, 2) == [0, 5, 10]
    assert _cuts(names, 8, 2, head=4.0) == [0, 6, 10]  # 5 | 3 and a head worth 4


@pytest.mark.parametrize(
    ("vocab", "tp", "padded"), [(50257, 1, 50257), (50257, 4, 50688), (51200, 8, 51200)]
)
def test_vocabularies_are_padded_to_what_the_degree_divides(
    vocab: int, tp: int, padded: int
) -> None:
    degrees = {"tp": str(tp), "dp": str(128 // tp), "micro_batch": "1"}
    setup, found = assumed({"vocab": str(vocab), **degrees})
    assert setup.dims.vocab == padded
    assert padded % (128 * tp) == 0 or padded == vocab
    assert ("padded" in found) == (padded != vocab)


# --- planned -------------------------------------------------------------------------------------

EVEN = second_tier("the same cuts stay in chunks, and an odd number of layers")


@pytest.mark.parametrize(
    ("layers", "pp", "chunks", "counts"),
    [
        pytest.param(8, 4, 1, [2, 2, 2, 2], marks=EVEN),
        (7, 3, 1, [2, 3, 2]),  # the ends have the embedding and the head
        pytest.param(6, 4, 1, [1, 2, 2, 1], marks=EVEN),
        (8, 2, 2, [2, 2, 2, 2]),
        (6, 2, 2, [1, 2, 2, 1]),
    ],
)
def test_layers_are_cut_into_stages(layers: int, pp: int, chunks: int, counts: list[int]) -> None:
    shape = {"pp": str(pp), "vp": str(chunks), "dp": "8", "num_gpus": str(32 * pp)}
    setup, _ = assumed({**SMALL, "layers": str(layers), **shape})
    graph, table = traced(setup.dims, setup.precision)
    plan = make_plan(setup, graph)
    found = [sum(name.startswith("layers.") for name in s.blocks) for s in plan.stages]
    assert found == counts
    assert "embed" in plan.stages[0].blocks[0]
    assert [name for s in plan.stages for name in s.blocks] == [b.name for b in graph.blocks]
    check_plan(plan, graph, table)
    groups = [s.ranks for s in plan.stages]
    assert groups[: len(groups) // chunks] == list(plan.devices)
    assert list(itertools.chain(*plan.devices)) == list(range(setup.dp * setup.tp * pp))
    assert plan.schedule == ("interleaved_1f1b" if chunks > 1 else "1f1b")
    assert plan.num_microbatches * setup.micro_batch * setup.dp == setup.global_batch


def test_megatron_splits_columns_then_rows() -> None:
    setup, _ = assumed(SMALL)
    graph, table = traced(setup.dims, setup.precision)
    (found,) = check_plan(make_plan(setup, graph), graph, table)
    chosen = {
        op.key: found[block.name].strategies[op.name].name
        for block in graph.blocks
        for op in block.ops
    }
    assert chosen["layers.1.attention.qkv:linear"].startswith("colwise")
    assert chosen["layers.1.attention.proj:linear"].startswith("rowwise")
    assert chosen["layers.1.mlp.up:linear"] == "colwise"
    assert chosen["layers.1.mlp.down:linear"] == "rowwise"
    assert chosen["embedding:embedding"] == "vocab"
    alone = dataclasses.replace(setup, tp=1, dp=128, micro_batch=1)
    assert not any(stage.shardings for stage in make_plan(alone, graph).stages)
