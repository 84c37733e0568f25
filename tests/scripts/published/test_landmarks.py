"""What every careful expert does, found by the search on its own: no overrides, catalog hardware.

Each landmark is tested where it is known to hold, and most with a control beside it: the same model
on hardware, or a similar one, where it must not. Models are deepened from shallow traces and have
few micro-batch counts, so that a search takes about a second.
"""

import dataclasses
import itertools
from collections import Counter
from functools import cache
from typing import Any

from meshwright.costmodel.operators import Problem
from meshwright.costmodel.recompute import PARTIAL
from meshwright.costmodel.sharding.strategies import Placement
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER, MEGATRON
from meshwright.planner.drafts.candidates import Candidate
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.plan.plan import Plan
from meshwright.planner.search.search import Search
from meshwright.profiles.cluster import Cluster
from scripts.experts import alpa as alpa_models
from scripts.published.frameworks import framework_of
from scripts.published.models import TransformerDims
from scripts.published.predict import traced
from tests.helpers.tiers import second_tier

LATER = second_tier("searches of large models; plans of small ones are recorded (test_recorded)")


SWIGLU: dict[str, Any] = {
    "activation": "swiglu", "norm": "rms", "positions": "rotary", "bias": False
}  # fmt: skip


def gpt(*, layers: int, hidden: int, vocab: int = 51200, length: int = 2048) -> TransformerDims:
    """Heads of 128, embedding and head apart."""
    heads = hidden // 128
    return TransformerDims(
        layers=layers, hidden=hidden, heads=heads, kv_heads=heads, ffn=4 * hidden, vocab=vocab,
        seq_len=length, tied=False,
    )  # fmt: skip


def llama(*, layers: int, hidden: int, heads: int, ffn: int) -> TransformerDims:
    """Llama 3's style, 8,192 tokens."""
    return TransformerDims(
        layers=layers, hidden=hidden, heads=heads, kv_heads=8, ffn=ffn, vocab=128256, seq_len=8192,
        tied=False, **SWIGLU,
    )  # fmt: skip


GPT_1_3B = gpt(layers=24, hidden=2048)
GPT_3 = gpt(layers=96, hidden=12288)
GPT_103B = gpt(layers=20, hidden=20480)
GPT_7B = gpt(layers=32, hidden=4096, length=4096)
GPT_13B = gpt(layers=40, hidden=5120, length=4096)
HUGE_VOCABULARY = gpt(layers=12, hidden=2048, vocab=256000, length=256)
MIXTURE = dataclasses.replace(
    gpt(layers=8, hidden=2048), **SWIGLU, experts=32, topk=2, expert_ffn=4096
)
SMALL_VOCABULARY = gpt(layers=32, hidden=2560, vocab=2048, length=256)


@cache
def best(
    dims: TransformerDims,
    node: str,
    *,
    nodes: int,
    devices: int,
    batch: int,
    gib: int = 0,
    target: Target = MEGATRON,
) -> Candidate:
    """The plan chosen on so many devices of each node; `gib` changes their memory."""
    cluster = Cluster.from_catalog(node, num_nodes=nodes, devices_per_node=devices)
    if gib:
        device = dataclasses.replace(cluster.device, memory_bytes=gib * 2**30)
        cluster = dataclasses.replace(cluster, device=device)
    return Search(problem(dims, cluster, target), batch, Overrides()).run().best


def problem(dims: TransformerDims, on: Cluster, target: Target) -> Problem:
    graph, table = traced(dims, "bf16")
    return Problem(graph=graph, factors=table, cluster=on, precision="bf16", target=target)


def large() -> Candidate:
    """A hundred billion parameters on eight DGX A100, with software that hides no communication (as
    Megatron's of 2021; where all is hidden, ZeRO-3 does without a pipeline)."""
    target = framework_of("Megatron-LM").target
    return best(GPT_103B, "dgx-a100", nodes=8, devices=8, batch=64, target=target)


def nodes_of(ranks: tuple[int, ...], per_node: int = 8) -> set[int]:
    return {rank // per_node for rank in ranks}


# --- degrees and placement -----------------------------------------------------------------------


@LATER
def test_tensor_parallelism_stays_in_the_node_and_the_pipeline_crosses_nodes() -> None:
    plan = large().plan
    for stage in plan.stages:
        assert stage.tp > 1
        for start in range(0, len(stage.ranks), stage.tp):
            assert len(nodes_of(stage.ranks[start : start + stage.tp])) == 1
    homes = [nodes_of(ranks) for ranks in plan.devices]
    assert len(homes) > 1
    assert all(a.isdisjoint(b) for a, b in itertools.combinations(homes, 2))


@LATER
def test_zero_rather_than_tensor_parallelism_where_links_are_fast() -> None:
    """13 B parameters on four H100 nodes: gradients or weights divided, no matrix split."""
    (stage,) = best(GPT_13B, "dgx-h100", nodes=4, devices=8, batch=64).plan.stages
    assert (stage.dp, stage.tp) == (32, 1)
    assert stage.zero >= 2


# --- what people run ------------------------------------------------------------------------------


def signed(dims: TransformerDims, node: str, *, nodes: int, batch: int, target: Target) -> Plan:
    """The plan that users get: the simplest of those that prices can't tell apart, 5 % of memory
    left."""
    on = problem(dims, Cluster.from_catalog(node, num_nodes=nodes), target)
    found = Search(on, batch, Overrides(), objective="robust", memory_margin=0.05).run().best
    used = max(found.evaluation.prediction.peak_memory_bytes)
    assert used <= 0.95 * on.cluster.device.memory_bytes
    return found.plan


@LATER
def test_zero_in_one_node() -> None:
    """Where tensor parallelism hides behind products it ties with ZeRO, which is simpler; with the
    overlaps of `train_step` it hides nothing, and gradients hide behind the backward."""
    (stage,) = signed(GPT_7B, "dgx-h100", nodes=1, batch=32, target=MEGATRON).stages
    assert (stage.dp, stage.tp) == (8, 1)
    assert stage.zero >= 2
    (stage,) = signed(GPT_7B, "dgx-h100", nodes=1, batch=64, target=EAGER).stages
    assert (stage.dp, stage.tp, stage.cp) == (8, 1, 1)


@LATER
def test_data_parallelism_beats_a_zero_bubble_pipeline_by_simplicity() -> None:
    """Llama-2-7B's size on 64 A100: a pipeline gains a percent or two, less than prices resolve."""
    (stage,) = signed(GPT_7B, "dgx-a100", nodes=8, batch=1024, target=EAGER).stages
    assert (stage.dp, stage.tp) == (64, 1)


@LATER
def test_gpt3_on_a_thousand_gpus_is_megatrons_recipe() -> None:
    """Narayanan et al. 2021: tensor parallelism in the node, a pipeline over nodes, and no ZeRO-3
    over hundreds of ranks, which Megatron does not combine with it."""
    plan = signed(GPT_3, "dgx-a100", nodes=128, batch=1536, target=MEGATRON)
    assert len(plan.devices) > 1
    assert plan.schedule == "interleaved_1f1b"
    assert {stage.tp for stage in plan.stages} == {8}
    assert {stage.zero for stage in plan.stages} <= {0, 1}
    assert {policy for stage in plan.stages for policy in stage.policies} == {"none"}


@LATER
def test_llama_405b_on_16384_gpus_is_metas_recipe() -> None:
    """Grattafiori et al. 2024, table 4: tensor parallelism in the node, an interleaved pipeline of
    16 (32 takes 1 % more by price, holds less, and is taken for that), nothing recomputed in full,
    38 to 43 % MFU."""
    dims = llama(layers=126, hidden=16384, heads=128, ffn=53248)
    plan = signed(dims, "dgx-h100", nodes=2048, batch=2048, target=MEGATRON)
    assert {stage.tp for stage in plan.stages} == {8}
    assert len(plan.devices) in (8, 16, 32)
    assert plan.schedule == "interleaved_1f1b"
    assert "full" not in {policy for stage in plan.stages for policy in stage.policies}


@LATER
def test_plain_zero_3_for_70b_on_64_h100() -> None:
    """Gathers hide behind a long enough pass: no axis but the data axis is needed."""
    dims = llama(layers=80, hidden=8192, heads=64, ffn=28672)
    on = problem(dims, Cluster.from_catalog("dgx-h100", num_nodes=8), EAGER)
    free, plain = (
        Search(on, 256, Overrides(forbid=["offload"], tp=tp), memory_margin=0.05).run().best
        for tp in (None, 1)
    )
    (stage,) = plain.plan.stages
    assert (stage.dp, stage.zero) == (64, 3)
    assert plain.step_time_s < 1.05 * free.step_time_s  # no more than prices can tell


# --- memory --------------------------------------------------------------------------------------


def recomputed(gib: int) -> set[str]:
    stages = best(GPT_1_3B, "dgx-a100", nodes=1, devices=1, batch=8, gib=gib).plan.stages
    return {policy for stage in stages for policy in stage.policies} - {"none"}


@LATER
def test_recompute_where_memory_binds_alone() -> None:
    assert recomputed(gib=28) and not recomputed(gib=80)


# --- cuts ----------------------------------------------------------------------------------------


def layers_of(candidate: Candidate) -> list[int]:
    """Layers on each device group."""
    plan = candidate.plan
    return [
        sum(
            name.startswith("layers.") for s in plan.stages if s.ranks == ranks for name in s.blocks
        )
        for ranks in plan.devices
    ]


def piped(dims: TransformerDims) -> Candidate:
    """On single devices behind a 25 Gb/s network, where pipelining is what pays."""
    return best(dims, "p3.16xlarge", nodes=4, devices=1, batch=64)


@LATER
def test_a_large_vocabulary_makes_the_last_stage_short() -> None:
    *others, last = layers_of(piped(HUGE_VOCABULARY))
    assert others and last < min(others) - 1
    layers = layers_of(piped(SMALL_VOCABULARY))
    assert len(layers) > 1 and max(layers) - min(layers) <= 1


# --- shardings -----------------------------------------------------------------------------------


@LATER
def test_layers_are_split_as_megatron_splits_them() -> None:
    """Attention by heads and the feed-forward by its width: two partial sums a layer. What norms
    read is split along the sequence."""
    candidate, (graph, _) = large(), traced(GPT_103B, "bf16")
    wanted = {"attention.qkv": "out", "attention.proj": "in", "mlp.up": "out", "mlp.down": "in"}
    norms: list[Placement] = []
    for stage, assignments in zip(candidate.plan.stages, candidate.assignments, strict=True):
        for block in graph.blocks:
            if block.name in stage.blocks and block.name.startswith("layers."):
                chosen = assignments[block.name].strategies
                assert wanted == {
                    op.module.removeprefix(f"{block.name}."): chosen[op.name].split_factor
                    for op in block.ops if op.short == "linear"
                }  # fmt: skip
                norms += [
                    chosen[op.name].operands[0] for op in block.ops if op.short == "layer_norm"
                ]
    assert norms == [Placement("S", 1)] * (2 * 20)


# --- mixtures and convolutions -------------------------------------------------------------------


@LATER
def test_experts_are_shared_over_the_data_axis() -> None:
    for stage in best(MIXTURE, "dgx-h100", nodes=1, devices=8, batch=32).plan.stages:
        assert stage.tp == 1
        assert stage.ep > 1


@LATER
def test_parts_of_blocks_are_recomputed_before_whole_ones() -> None:
    """Scores written to memory are most of what is kept, and cheap to make again."""
    written = dataclasses.replace(gpt(layers=24, hidden=2048), attention="written")
    stages = best(written, "dgx-a100", nodes=1, devices=1, batch=8, gib=28).plan.stages
    policies = Counter(policy for stage in stages for policy in stage.policies)
    parts = sum(policies[policy] for policy in PARTIAL)
    assert parts > policies["full"]


@LATER
def test_early_convolutions_split_rows_and_late_ones_channels() -> None:
    """Large activations first, large weights last, as Alpa found for its Wide-ResNet of 2 B
    parameters on 8 V100: no tensor parallelism in its first half, four ways in its second."""
    graph, table = alpa_models.traced(
        alpa_models.wide_resnet(groups=alpa_models.RESNET_50, channels=448, width=2), "fp32"
    )
    cluster = Cluster.from_catalog("p3.16xlarge", num_nodes=1, devices_per_node=8)
    # it fits 16 GiB by a hair: without what is assumed of NCCL's buffers on a V100
    device = dataclasses.replace(cluster.device, communicator_bytes=0)
    cluster = dataclasses.replace(cluster, device=device)
    target = framework_of("Alpa").target
    on = Problem(
        graph=graph, factors=table, cluster=cluster, precision="fp32", optimizer="momentum",
        target=target,
    )  # fmt: skip
    *early, late = Search(on, 1536, Overrides()).run().best.plan.stages
    assert all(stage.tp == 1 for stage in early)
    assert any(stage.dp > 1 for stage in early)
    assert late.tp == 4
