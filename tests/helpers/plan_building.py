"""Plans written by tests: meshes, cuts and knobs in, a `Plan` out, nothing searched.

A pipeline of `p` device groups runs `v` stages on each, `p·v` in all, of whose blocks a few are
left over once every stage has one with parameters. Where they go is the `cut`: to the first stage
("front"), the last ("back"), or evenly to all.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from meshwright.costmodel.graph import Block, Graph
from meshwright.costmodel.mesh import ALL_GATHER, ContextKind
from meshwright.costmodel.schedules import SCHEDULES, stages_of_devices
from meshwright.planner.plan.check import fingerprint
from meshwright.planner.plan.flow import depths
from meshwright.planner.plan.plan import Plan, PlanError, StagePlan, recompute_of
from meshwright.planner.plan.shardings import resolve_shardings

CUTS = ("front", "back", "even")
MIXED = (
    "products",
    "none",
    "pointwise",
    "full",
    "selective",
)  # policies of a stage's blocks in turn


@dataclass(frozen=True, slots=True, kw_only=True)
class Knobs:
    """One (dp, tp) mesh per device group, each running `virtual` stages, and what they do. Every
    data rank of a mesh is `cp` ranks, which share out its tokens.

    `cut` may list the first blocks of the stages after the first. ZeRO goes to the stages with
    dp > 1. `recompute` may be "mixed". `offload` is the part of each stage's optimizer states in
    host memory, `weights` that of its weights, `away` of its blocks' activations,
    `nvme` that of the states in files.
    """

    meshes: Sequence[tuple[int, int]]
    rows: int
    num_microbatches: int
    schedule: str = "1f1b"
    virtual: int = 1
    placement: str = "tp,dp,pp"
    cut: str | Sequence[int] = "even"
    cp: int = 1
    cp_kind: ContextKind = ALL_GATHER
    zero: int = 0
    dp_shard: int | None = None
    hpz: int | None = None
    quantized: str = "none"
    compressed: str = "none"
    recompute: str = "none"
    segments: int = 1
    precision: str = "fp32"
    shardings: Mapping[str, str] = field(default_factory=dict)
    offload: float = 0.0
    weights: float = 0.0
    away: float = 0.0
    nvme: float = 0.0


def build_plan(graph: Graph, knobs: Knobs) -> Plan:
    """Shardings go to the stages with tp > 1 where they match; one that matches nowhere in the
    model raises `PlanError`."""
    meshes = knobs.meshes
    count = len(meshes) * knobs.virtual
    placed = stages_of_devices(knobs.schedule, num_stages=count, num_devices=len(meshes))
    group_of = {stage: group for group, stages in enumerate(placed) for stage in stages}
    ranks = ranks_of(meshes, knobs.placement, knobs.cp)
    cut = knobs.cut
    copies = SCHEDULES[knobs.schedule].copies
    own = count // copies
    starts = cut_points(graph.blocks, own, cut) if isinstance(cut, str) else tuple(cut)
    bounds = (0, *starts, len(graph.blocks))
    if any(tp > 1 for _, tp in meshes):
        resolve_shardings(graph, graph.blocks, knobs.shardings)
    stages = []
    for k in range(count):
        dp, tp = meshes[group_of[k]]
        first = bounds[k % own]
        blocks = graph.blocks[first : bounds[k % own + 1]]
        names = tuple(block.name for block in blocks)
        mixed = [MIXED[(first + i) % len(MIXED)] for i in range(len(names))]
        recompute = recompute_of(names, mixed) if knobs.recompute == "mixed" else knobs.recompute
        stages.append(
            StagePlan(
                blocks=names,
                ranks=ranks[group_of[k]],
                dp=dp,
                tp=tp,
                hpz=knobs.hpz if knobs.zero == 3 and dp > 1 else None,
                quantized=knobs.quantized if knobs.zero == 3 and dp > 1 else "none",
                compressed=knobs.compressed if dp * knobs.cp > 1 else "none",
                cp=knobs.cp,
                cp_kind=knobs.cp_kind,
                zero=knobs.zero if dp * knobs.cp > 1 else 0,
                dp_shard=knobs.dp_shard if knobs.zero and dp * knobs.cp > 1 else None,
                recompute=recompute,
                segments=knobs.segments,
                shardings=matching(graph, blocks, knobs.shardings) if tp > 1 else {},
                offload=parts_of(
                    optimizer=knobs.offload,
                    weights=knobs.weights,
                    activations=knobs.away,
                    nvme=knobs.nvme,
                ),
            )
        )
    return Plan(
        model=fingerprint(graph),
        global_batch_size=knobs.rows,
        precision=knobs.precision,
        staleness=SCHEDULES[knobs.schedule].staleness(knobs.num_microbatches, len(meshes)),
        schedule=knobs.schedule,
        num_microbatches=knobs.num_microbatches,
        stages=tuple(stages),
    )


def parts_of(**parts: float) -> dict[str, float]:
    """What of a stage lies in host memory, as a plan says it."""
    return {name: part for name, part in parts.items() if part}


def ranks_of(
    meshes: Sequence[tuple[int, int]], placement: str, cp: int = 1
) -> list[tuple[int, ...]]:
    """Ranks of each device group, as `planner.plan.ranks` defines the placements; "tp,pp,dp" needs
    equal meshes."""
    meshes = [(dp, tp * cp) for dp, tp in meshes]
    if placement == "tp,pp,dp":
        (dp, tp), p = meshes[0], len(meshes)
        return [tuple((d * p + g) * tp + t for d in range(dp) for t in range(tp)) for g in range(p)]
    found: list[tuple[int, ...]] = []
    first = 0
    for dp, tp in meshes:
        found.append(tuple(range(first, first + dp * tp)))
        first += dp * tp
    return found


def cut_points(blocks: Sequence[Block], count: int, cut: str) -> tuple[int, ...]:
    """Indices of the blocks that start stages 1 to `count` - 1; each stage has a block with
    parameters."""
    trained = [k for k, block in enumerate(blocks) if block.parameters]
    if count > len(trained):
        raise PlanError(
            f"{count} stages of a model with {len(trained)} blocks that have parameters: every "
            f"stage needs one; legal: at most {len(trained)} stages"
        )
    if cut == "back":
        return tuple(trained[k] for k in range(1, count))
    if cut == "front":
        return tuple(trained[len(trained) - count + k] for k in range(1, count))
    return tuple(trained[len(trained) * k // count] for k in range(1, count))


def matching(graph: Graph, blocks: Sequence[Block], shardings: Mapping[str, str]) -> dict[str, str]:
    """The shardings that match something in these blocks."""
    found = {}
    for pattern, decision in shardings.items():
        try:
            resolve_shardings(graph, blocks, {pattern: decision})
        except PlanError:
            continue
        found[pattern] = decision
    return found


def apart(plan: Plan, graph: Graph, host: int | None = None) -> Plan:
    """The plan with branches apart: as deep as its stages are, the last one on the ranks of stage
    `host`, with its mesh, if there is one."""
    *stages, last = plan.stages
    if host is not None:
        mesh = ("ranks", "dp", "tp", "cp", "zero")
        last = replace(last, **{name: getattr(stages[host], name) for name in mesh})
    placed = replace(plan, stages=(*stages, last))
    return replace(placed, branches=depths(placed, graph))
