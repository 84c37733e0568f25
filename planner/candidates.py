"""From a solution of the inter-op DP to a plan: ranks, shardings as globs, the price by
simulation."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from costmodel.graph import Block
from costmodel.strategies import Placement
from planner.check import fingerprint
from planner.evaluate import Evaluation, evaluate
from planner.layouts import Assignment, BlockLayouts, Entry
from planner.plan import Plan, StagePlan
from planner.shardings import express_shardings
from planner.stage_costs import ChainCosts, StageCoster
from profiles.cluster import Cluster

MAX_KEPT = 6  # plans of different families kept for the report


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    """One way to run a stage: mesh, ZeRO stage, recompute, and the chain its costs come from."""

    dp: int
    tp: int
    zero: int
    recompute: str
    chain: ChainCosts


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan the search considered, priced by simulation."""

    evaluation: Evaluation
    assignments: list[dict[str, Assignment]]
    fits: bool

    @property
    def plan(self) -> Plan:
        return self.evaluation.plan

    @property
    def step_time_s(self) -> float:
        return self.evaluation.prediction.step_time_s


def make_candidate(
    coster: StageCoster,
    chosen: Sequence[tuple[int, int, Variant]],
    global_batch_size: int,
    num_microbatches: int,
    schedule: str,
) -> Candidate:
    """The plan of stages (first block, last block + 1, variant), priced by simulation."""
    graph, cluster = coster.graph, coster.cluster
    ranks = place_stages([v.dp * v.tp for _, _, v in chosen], cluster)
    stages, assignments = [], []
    for (start, stop, v), here in zip(chosen, ranks, strict=True):
        found = coster.assignments(v.chain, start, stop)
        assignments.append(found)
        blocks = graph.blocks[start:stop]
        stages.append(
            StagePlan(
                blocks=tuple(b.name for b in blocks),
                ranks=here,
                dp=v.dp,
                tp=v.tp,
                zero=v.zero,
                recompute=v.recompute,
                shardings=_shardings(coster, blocks, found, v.tp),
            )
        )
    plan = Plan(
        model=fingerprint(graph),
        global_batch_size=global_batch_size,
        num_microbatches=num_microbatches,
        schedule=schedule,
        precision=coster.precision,
        stages=tuple(stages),
    )
    priced = evaluate(
        plan, graph, coster.table, cluster, assignments, optimizer=coster.optimizer, coster=coster
    )
    fits = not any(priced.prediction.shortfall_bytes(cluster))
    return Candidate(evaluation=priced, assignments=assignments, fits=fits)


def _shardings(
    coster: StageCoster, blocks: Sequence[Block], found: Mapping[str, Assignment], tp: int
) -> dict[str, str]:
    """The decisions that do not follow, as globs."""
    if tp == 1:
        return {}
    entries: dict[str, Entry] = {}
    states: dict[str, Placement] = {}
    for block in blocks:
        layouts = BlockLayouts(coster.graph, coster.table, block, tp)
        inputs = {n: states[n] for n in block.inputs if n in states}
        entries |= layouts.compress(found[block.name], inputs)
        states |= {n: found[block.name].states[n] for n in block.outputs}
    _like_repeats(blocks, entries)
    return express_shardings(coster.graph, blocks, entries)


def _like_repeats(blocks: Sequence[Block], entries: dict[str, Entry]) -> None:
    """What leaves the stage is replicated whatever its entry says: give it the entry of its
    repeats, so that one glob serves all."""
    last = blocks[-1]
    peers = [b for b in blocks[:-1] if b.class_id == last.class_id]
    for k, op in enumerate(last.ops):
        if peers and op.results[0] in last.outputs:
            alike = entries.get(peers[0].ops[k].name)
            if alike and alike.state:
                own = entries.get(op.name, Entry())
                entries[op.name] = dataclasses.replace(own, state=alike.state)


def place_stages(sizes: Sequence[int], cluster: Cluster) -> list[tuple[int, ...]]:
    """Ranks of every stage: in pipeline order, moved where needed so that no part of a node
    straddles two."""
    node = cluster.devices_per_node
    free = set(range(cluster.num_devices))
    placed: dict[int, tuple[int, ...]] = {}
    for k in sorted(range(len(sizes)), key=lambda k: (-sizes[k], k)):
        size = sizes[k]
        starts = range(0, cluster.num_devices - size + 1, min(size, node))
        start = next((s for s in starts if free.issuperset(range(s, s + size))), None)
        if start is None:  # sizes that don't nest: one after the other
            return [tuple(range(sum(sizes[:k]), sum(sizes[: k + 1]))) for k in range(len(sizes))]
        placed[k] = tuple(range(start, start + size))
        free.difference_update(placed[k])
    return [placed[k] for k in range(len(sizes))]


def distinct(ranked: Sequence[Candidate]) -> list[Candidate]:
    """The best few that differ in more than schedule and number of micro-batches."""
    kept: dict[tuple[tuple[int | str, ...], ...], Candidate] = {}
    for candidate in ranked:
        stages = candidate.plan.stages
        kept.setdefault(tuple((s.dp, s.tp, s.zero, s.recompute) for s in stages), candidate)
    return list(kept.values())[:MAX_KEPT]
