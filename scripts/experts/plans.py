"""Plans that experts and other planners published, with the model, cluster and software of each.

Sources: the rows of `published.csv` (Megatron-LM's SC21 tables, NVIDIA's DGX Cloud recipes,
torchtitan, Alpa's baselines and ablation), the plans that Alpa's search found for p3.16xlarge
(benchmark/alpa of its repository, suites auto_gpt, auto_moe and wresnet), table 4 of "The Llama 3
Herd of Models", and single configurations of papers and recipes (`recipes.py`). Facts only; what a
source leaves open is said in `note`.

Where operators' shardings are not published, as Megatron has them; of Alpa's Wide-ResNet, whose
shardings came out of its integer program and follow no rule, only the cut into stages, the devices
of each and the micro-batches are taken, as `Overrides`: theirs is then the best plan that has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding import FactorTable
from meshwright.costmodel.target import Target
from meshwright.planner.overrides import Overrides
from meshwright.planner.plan import Plan, PlanError, fingerprint, resolve_shardings
from meshwright.profiles.cluster import Cluster
from scripts.experts.alpa import RESNET_50, RESNET_101, moe, traced, wide_resnet
from scripts.experts.recipes import RECIPES
from scripts.experts.rows import published_rows
from scripts.published import (
    Setup,
    Unpriced,
    framework_of,
    make_plan,
    of_layers,
    read_row,
    with_experts,
)
from scripts.published import traced as traced_dims

SOURCES = ("SC21", "Alpa OSDI22", "torchtitan", "DGXC")
# columns in which rows of one configuration, measured with several versions, differ
MEASURED = ("source", "licence", "iteration_time_s", "peak_mem_gib", "notes")

Traced = tuple[Graph, FactorTable]
# layers, dp, tp of a stage
Mesh = tuple[int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class Expert:
    """One published plan. `plans` are the readings of it: several where the source leaves the
    micro-batch open; none where it is given as `pinned` decisions."""

    name: str
    source: str
    cluster: Cluster
    target: Target
    precision: str
    global_batch_size: int
    traced: Callable[[], Traced]
    plans: Callable[[Graph], Sequence[Plan]] = lambda graph: ()
    pinned: Overrides | None = None
    optimizer: str = "adamw"
    measured_s: float | None = None
    note: str = ""


def experts() -> list[Expert]:
    """Every published plan that can be priced, by source."""
    alpa = [*_alpa_gpt(), *_alpa_moe(), *_alpa_wide_resnet()]
    return [*_from_rows(), *alpa, *_llama3(), *_from_recipes()]


# --- rows of published tables --------------------------------------------------------------------


def _from_rows() -> Iterator[Expert]:
    newest: dict[tuple[str, ...], Mapping[str, str]] = {}
    for row in published_rows():
        if any(name in row["source"] for name in SOURCES):
            kernels = "torch.compile" in row["notes"]
            newest[(*(row[c] for c in row if c not in MEASURED), str(kernels))] = row
    for row in newest.values():
        try:
            setup = read_row(row)
        except Unpriced:  # a heuristic without degrees
            continue
        degrees = " ".join(f"{c}{row[c]}" for c in ("tp", "pp", "cp", "dp") if row[c] != "1")
        yield _transformer(
            setup,
            name=f"{row['model']} on {row['num_gpus']}, {degrees or 'one device'}",
            source=row["source"],
            measured_s=float(row["iteration_time_s"]),
        )


def _from_recipes() -> Iterator[Expert]:
    """What a recipe leaves open of recompute is read each way."""
    for row in RECIPES:
        setup = read_row(row)
        policies = (setup.recompute,) if "recompute" in row else ("none", "selective", "full")

        def plans(graph: Graph, setup: Setup = setup, policies: Sequence[str] = policies):
            return [make_plan(replace(setup, recompute=policy), graph) for policy in policies]

        yield _expert(
            setup,
            plans,
            name=f"{row['model']} on {row['num_gpus']}",
            source=row["source"],
            measured_s=float(row["iteration_time_s"]) if "iteration_time_s" in row else None,
            note=row.get("notes", ""),
        )


def _transformer(setup: Setup, *, name: str, source: str, **facts: float | str) -> Expert:
    """A row's configuration, with every micro-batch where it leaves that open."""

    def plans(graph: Graph) -> list[Plan]:
        share = setup.global_batch // setup.dp
        every = [2**k for k in range(share.bit_length()) if share % 2**k == 0]
        sizes = [setup.micro_batch] if setup.micro_batch else every
        return [make_plan(replace(setup, micro_batch=size), graph) for size in sizes]

    return _expert(setup, plans, name=name, source=source, **facts)


def _expert(
    setup: Setup,
    plans: Callable[[Graph], Sequence[Plan]],
    *,
    name: str,
    source: str,
    measured_s: float | None = None,
    note: str = "",
) -> Expert:
    return Expert(
        name=name,
        source=source,
        cluster=setup.cluster,
        target=setup.framework.target,
        precision=setup.precision,
        global_batch_size=setup.global_batch,
        traced=partial(traced_dims, setup.dims, setup.precision),
        plans=plans,
        measured_s=measured_s,
        note=note,
    )


# --- stages of their own meshes ------------------------------------------------------------------


def staged(
    setup: Setup, graph: Graph, meshes: Sequence[Mesh], *, microbatches: int, per_device: int = 1
) -> Plan:
    """Stages of so many layers each, on meshes of their own; `per_device` of them on each device
    group in turn (interleaved). A stage of no layers at an end is the embedding or the head."""
    names = [block.name for block in graph.blocks]
    first = names.index("layers.0")
    ends, position = [], first
    for layers, _, _ in meshes:
        position += layers
        ends.append(position)
    ends[-1] = len(names)
    groups = len(meshes) // per_device
    stages = []
    for k, (_, dp, tp) in enumerate(meshes):
        start = ends[k - 1] if k else 0
        offset = sum(d * t for _, d, t in meshes[: k % groups]) * setup.cp
        own = replace(setup, dp=dp, tp=tp, pp=1, chunks=1, micro_batch=1)
        whole = make_plan(own, graph).stages[0]
        blocks = graph.blocks[start : ends[k]]
        stages.append(
            replace(
                whole,
                blocks=tuple(names[start : ends[k]]),
                recompute=of_layers(setup.recompute, names[start : ends[k]]),
                ranks=tuple(rank + offset for rank in whole.ranks),
                shardings={
                    pattern: decision
                    for pattern, decision in whole.shardings.items()
                    if _matches(graph, blocks, pattern, decision)
                },
            )
        )
    return Plan(
        model=fingerprint(graph),
        global_batch_size=setup.global_batch,
        num_microbatches=microbatches,
        schedule="interleaved_1f1b" if per_device > 1 else "1f1b",
        precision=setup.precision,
        stages=tuple(stages),
    )


def _matches(graph: Graph, blocks: Sequence, pattern: str, decision: str) -> bool:
    try:
        resolve_shardings(graph, blocks, {pattern: decision})
    except PlanError:
        return False
    return True


# --- Alpa's plans for p3.16xlarge ----------------------------------------------------------------

# GPUs -> (name, layers, hidden, heads, micro-batches, stages); logical meshes are (batch, operator)
ALPA_GPT: Mapping[int, tuple[str, int, int, int, int, tuple[Mesh, ...]]] = {
    1: ("350M", 24, 1024, 16, 512, ((24, 1, 1),)),
    2: ("760M", 24, 1536, 16, 128, ((12, 1, 1),) * 2),
    4: ("1.3B", 24, 2048, 32, 128, ((12, 2, 1),) * 2),
    8: ("2.6B", 32, 2560, 32, 128, ((8, 2, 1), (8, 2, 1), (16, 4, 1))),
    16: ("6.7B", 32, 4096, 32, 64, ((16, 2, 4),) * 2),
    32: ("15B", 48, 5120, 40, 128, ((12, 2, 4),) * 4),
    64: ("39B", 48, 8192, 64, 1024, ((3, 1, 4),) * 16),
}
# GPUs -> (name, layers, hidden, experts, micro-batches, stages, data-parallel ranks of each)
ALPA_MOE: Mapping[int, tuple[str, int, int, int, int, int, int]] = {
    1: ("380M", 8, 768, 8, 512, 1, 1),
    2: ("690M", 8, 768, 16, 32, 1, 2),
    4: ("1.3B", 16, 768, 16, 32, 2, 2),
    8: ("2.4B", 16, 1024, 16, 32, 2, 4),
    16: ("10B", 16, 1536, 32, 16, 2, 8),
    32: ("27B", 16, 2048, 48, 128, 8, 4),
    64: ("70B", 32, 2048, 64, 64, 8, 8),
}
# GPUs -> (name, groups, channels, width, batch, micro-batches, bottlenecks of each stage)
ALPA_WIDE_RESNET: Mapping[int, tuple[str, tuple[int, ...], int, int, int, int, tuple[int, ...]]] = {
    1: ("250M", RESNET_50, 160, 2, 1536, 24, (16,)),
    2: ("500M", RESNET_50, 224, 2, 1536, 24, (16,)),
    4: ("1B", RESNET_50, 320, 2, 1536, 24, (16,)),
    8: ("2B", RESNET_50, 448, 2, 1536, 24, (8, 8)),
    16: ("4B", RESNET_50, 640, 2, 1536, 32, (5, 4, 7)),
    32: ("6.8B", RESNET_50, 320, 16, 1536, 32, (5, 4, 4, 3)),
    64: ("13B", RESNET_101, 320, 16, 1520, 38, (4, 4, 4, 4, 4, 4, 5, 4)),
}
_ALPA = "Alpa OSDI22, plans found by its search (p3.16xlarge)"
_ALPA_ROW = {
    "model": "GPT", "vocab": "51200", "seq_len": "1024", "gpu": "V100-16GB-SXM2 (p3.16xlarge)",
    "gpus_per_node": "8", "precision": "fp16", "tp": "1", "pp": "1", "micro_batch": "1",
    "zero_stage_fsdp": "1", "recompute": "full", "framework": "Alpa/XLA", "global_batch": "1024",
}  # fmt: skip


def _alpa_setup(gpus: int, **columns: int) -> Setup:
    cells = {name: str(value) for name, value in columns.items()}
    return read_row({**_ALPA_ROW, **cells, "num_gpus": str(gpus), "dp": str(gpus)})


def _alpa_gpt() -> Iterator[Expert]:
    for gpus, (name, layers, hidden, heads, microbatches, meshes) in ALPA_GPT.items():
        setup = _alpa_setup(gpus, layers=layers, hidden=hidden, heads=heads)

        def plans(graph: Graph, setup=setup, meshes=meshes, m=microbatches) -> list[Plan]:
            return [staged(setup, graph, meshes, microbatches=m)]

        yield _expert(
            setup,
            plans,
            name=f"GPT-{name} on {gpus}",
            source=_ALPA,
            note="groups of layers taken as equal; sharded as Megatron on the operator axis",
        )


def _alpa_moe() -> Iterator[Expert]:
    for gpus, (name, layers, hidden, experts, microbatches, pp, dp) in ALPA_MOE.items():
        setup = _alpa_setup(gpus, layers=layers, hidden=hidden, heads=16, vocab=32000)
        framework = with_experts(framework_of("Alpa/XLA"), "Alpa/XLA", [])
        meshes = ((layers // pp, dp, 1),) * pp

        def plans(graph: Graph, setup=setup, meshes=meshes, m=microbatches) -> list[Plan]:
            plan = staged(setup, graph, meshes, microbatches=m)
            return [replace(plan, stages=tuple(replace(s, ep=s.dp) for s in plan.stages))]

        yield replace(
            _expert(
                replace(setup, framework=framework),
                plans,
                name=f"MoE-{name} on {gpus}",
                source=_ALPA,
                note="experts shared over the data axis",
            ),
            traced=_once(
                lambda made=(layers, hidden, experts): traced(
                    moe(layers=made[0], hidden=made[1], experts=made[2]), "fp16"
                )
            ),
            optimizer="sgd",  # Adafactor's second moments are a row and a column of each matrix
        )


def _alpa_wide_resnet() -> Iterator[Expert]:
    for gpus, (name, groups, channels, width, batch, m, stages) in ALPA_WIDE_RESNET.items():
        cluster = _alpa_setup(gpus, layers=1, hidden=64, heads=1).cluster
        blocks, position = [], 0
        for count in stages:
            blocks.append([f"layers.{k}" for k in range(position, position + count)])
            position += count
        blocks[0].insert(0, "embed")
        blocks[-1].append("head")
        yield Expert(
            name=f"Wide-ResNet-{name} on {gpus}",
            source=_ALPA,
            cluster=cluster,
            target=framework_of("Alpa/XLA").target,
            precision="fp32",
            global_batch_size=batch,
            traced=_once(
                lambda made=(groups, channels, width): traced(
                    wide_resnet(groups=made[0], channels=made[1], width=made[2]), "fp32"
                )
            ),
            pinned=Overrides(stages=blocks, num_microbatches=m, schedule="1f1b", recompute="full"),
            optimizer="momentum",
            note="cut and micro-batches as published, operators' shardings free",
        )


def _once(make: Callable[[], Traced]) -> Callable[[], Traced]:
    return cache(make)


# --- Llama 3 -------------------------------------------------------------------------------------

# GPUs, context ranks, data-parallel ranks, sequence, rows of a batch, published MFU (table 4)
LLAMA3 = (
    (8192, 1, 64, 8192, 2048, 0.43),
    (16384, 1, 128, 8192, 2048, 0.41),
    (16384, 16, 8, 131072, 128, 0.38),
)
_LLAMA3_ROW = {
    "model": "Llama-3-405B", "layers": "126", "hidden": "16384", "heads": "128", "kv_heads": "8",
    "ffn": "53248", "vocab": "128256", "gpu": "H100-80GB-SXM", "gpus_per_node": "8",
    "precision": "bf16", "tp": "8", "pp": "16", "micro_batch": "1", "zero_stage_fsdp": "2",
    "recompute": "none", "framework": "Megatron-Core",
}  # fmt: skip


def _llama3() -> Iterator[Expert]:
    """The pipeline is interleaved with a layer per stage; the first and the last of the 128 hold
    the embedding and the head alone (section 3.3.2). When gradients are scattered (ZeRO 1 or 2) and
    what is recomputed is left open."""
    for gpus, cp, dp, length, batch, mfu in LLAMA3:
        cells = {"num_gpus": gpus, "cp": cp, "dp": dp, "seq_len": length, "global_batch": batch}
        setup = read_row({**_LLAMA3_ROW, **{name: str(value) for name, value in cells.items()}})
        meshes = ((0, dp, 8), *(((1, dp, 8),) * 126), (0, dp, 8))

        def plans(graph: Graph, setup=setup, meshes=meshes, m=batch // dp) -> list[Plan]:
            found = staged(setup, graph, meshes, microbatches=m, per_device=8)
            return [
                replace(
                    found,
                    stages=tuple(
                        replace(s, zero=zero, recompute=of_layers(policy, s.blocks))
                        for s in found.stages
                    ),
                )
                for zero in (1, 2)
                for policy in ("none", "selective", "full")
            ]

        yield _expert(
            setup,
            plans,
            name=f"Llama-3-405B on {gpus}, sequence {length}",
            source="The Llama 3 Herd of Models (arXiv 2407.21783), table 4",
            note=f"published MFU {mfu:.0%}; fastest reading of FSDP and recompute that fits",
        )
