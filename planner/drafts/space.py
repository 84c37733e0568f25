"""The search space: micro-batches, meshes, ZeRO, placements, schedules, cuts.

Left out, because something in the space is never worse under the cost model:

    cp > 1 where the micro-batch divides by dp·cp    dp·cp ranks on the batch compute the same
                                                     share of it and gather no keys and values
    a larger cp than the batch needs                 likewise; fewer rows at a time need it
    GPipe beside 1F1B in the stage DP                1F1B is as fast, holds less (both are judged)

Left out for other reasons, unless asked for: sequences cut into pieces of less than 4,096 tokens,
in which attention kernels lose more than the price knows; token slices of micro-batches of several
rows (slices of fewer rows are as small, and hold less); stages that straddle nodes without
filling them; different meshes with numbers of micro-batches far from the best equal ones; tensor
parallelism across nodes; what a schedule's record excludes (itself, ZeRO stages, recompute).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property, partial
from itertools import product

import numpy as np

from meshwright.costmodel.compressed import COMPRESSED
from meshwright.costmodel.graph import Graph
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.mesh import ULYSSES, Batch, HostParts, Mesh, Stepping
from meshwright.costmodel.operators import Problem, Setting
from meshwright.costmodel.quantized import QUANTIZED
from meshwright.costmodel.rules import draws_anew
from meshwright.costmodel.schedules import SCHEDULES, Pipeline, Schedule, in_flight
from meshwright.costmodel.sharding import FactorTable, why_not_sliced
from meshwright.costmodel.sharing import UNSHARED, Sharing
from meshwright.costmodel.stages import room_bytes
from meshwright.costmodel.written_buffers import inseparable
from meshwright.planner.branches import branches_of, shapes_of
from meshwright.planner.decisions import slices_in
from meshwright.planner.drafts.reliefs import Relief, legal_stages, reliefs, with_segments
from meshwright.planner.overrides import OverrideError, Restrictions
from meshwright.planner.plan import (
    PlanError,
    check_blocks,
    compress_names,
    divisors,
    fewest_experts,
    has_experts,
    kept_together,
    ulysses_degrees,
)
from meshwright.planner.plan.slices import WAY_OUT
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.inputs import shown

MAX_MICROBATCH_CHOICES = 12
MIN_CONTEXT = 4096  # tokens of a sequence that a rank keeps, or in a slice
SLICES = (2, 4, 8, 16, 32)  # that the search tries
MOST_SLICES = 128
FULL = 8  # micro-batches for each device group but one that leave little of a pipeline empty
NODE_COUNTS = 16  # whole nodes that a stage may have where branches lie apart, in steps
MAX_CUTS = 160  # of a model with more blocks some cuts are left out
PIPELINE_INSIDE = "tp,pp,dp"


@dataclass(frozen=True, kw_only=True)
class Space:
    """The choices for one model, cluster and batch, within the user's restrictions; the part
    `memory_margin` of each device is left free."""

    problem: Problem
    global_batch_size: int
    restrictions: Restrictions
    memory_margin: float = 0.0

    @property
    def memory_bytes(self) -> float:
        """Bytes of a device that a plan may fill, reserved ones included."""
        return self.cluster.device.memory_bytes * (1.0 - self.memory_margin)

    @property
    def room_bytes(self) -> float:
        """Bytes of a device that a plan's tensors may take."""
        return room_bytes(self.cluster) - self.cluster.device.memory_bytes * self.memory_margin

    @property
    def graph(self) -> Graph:
        return self.problem.graph

    @property
    def factors(self) -> FactorTable:
        return self.problem.factors

    @property
    def cluster(self) -> Cluster:
        return self.problem.cluster

    @cached_property
    def experts(self) -> int:
        """The fewest experts of any operator; 1 without any, or where ranks can't share them."""
        return 1 if self.unshared_experts else fewest_experts(self.graph, self.factors)

    @cached_property
    def unshared_experts(self) -> str:
        """Why no ranks share experts out, whatever the mesh; else empty."""
        if not has_experts(self.graph):
            return ""
        try:
            check_blocks(self.graph.blocks, self.graph, self.factors)
        except PlanError as error:
            return str(error)
        return ""

    @property
    def may_differ(self) -> bool:
        """Whether stages may have different meshes; those lie one after the other."""
        over = self.restrictions
        several = self.cluster.num_devices > 1 and over.pp != 1
        return over.unequal_meshes and several and over.placements != (PIPELINE_INSIDE,)

    @cached_property
    def reliefs(self) -> tuple[Relief, ...]:
        """Reliefs of plans that don't fit, behind the user's, or none."""
        return reliefs(self.problem, self.restrictions)

    @cached_property
    def most_away(self) -> HostParts:
        """The most of each kind that may lie in host memory."""
        hosts = [asdict(relief.most) for relief in self.reliefs]
        return HostParts(**{kind: max(host[kind] for host in hosts) for kind in hosts[0]})

    def policies(self, record: Schedule, *, segmented: bool = False) -> tuple[str, ...]:
        """Recompute policies that a schedule allows, "none" always; last those in segments."""
        allowed = record.recomputed
        if allowed is None:
            return with_segments(self.restrictions, free=segmented)
        legal = tuple(policy for policy in self.restrictions.policies if policy in allowed)
        return legal or allowed[:1]

    # --- micro-batches ---

    @cached_property
    def _tried(self) -> Memo[int, list[int]]:
        return Memo()  # by data-parallel degree

    def microbatch_counts(self) -> list[int]:
        """Numbers of micro-batches that some mesh may have: divisors of the global batch; times
        the slices that were asked for, of which each counts. Raises `OverrideError` where it
        leaves none."""
        batch, over = self.global_batch_size, self.restrictions
        counts, slices = divisors(batch), self.slices_asked or 1
        for name in ("num_microbatches", "microbatch_size"):
            asked = getattr(over, name)
            if asked is not None and batch % asked:
                raise OverrideError(
                    f"={asked} does not divide global_batch_size={batch}",
                    place=f"override {name}",
                    legal=counts[:16],
                )
        if self.problem.meetings:
            if (over.num_microbatches or 1) > 1:
                raise OverrideError(
                    f"={over.num_microbatches}: {kept_together(self.problem.meetings)}",
                    place="override num_microbatches",
                    legal="1",
                    way_out="or drop the override",
                )
            counts = [1]
        if over.num_microbatches is not None:
            counts = [over.num_microbatches]
        elif over.microbatch_size is not None:
            counts = [m for m in counts if batch // m % over.microbatch_size == 0]
        return [m * slices for m in counts]

    def tried_counts(self, dp: int = 1) -> list[int]:
        """`_thinned` for a degree, found once."""
        return self._tried.of(dp, partial(self._thinned, dp))

    def _thinned(self, dp: int) -> list[int]:
        """Numbers of micro-batches to try on meshes of this data-parallel degree: those that leave
        each rank whole rows, thinned to a dozen between the least and the most."""
        counts = [m for m in self.microbatch_counts() if self.rows(m) % dp == 0]
        if len(counts) > MAX_MICROBATCH_CHOICES:
            wanted = np.geomspace(1, counts[-1], MAX_MICROBATCH_CHOICES)
            counts = sorted({_nearest(counts, float(w)) for w in wanted})
        return counts

    def between(self, dp: int, m: int) -> list[int]:
        """Numbers of micro-batches that thinning left out, between those tried next to m."""
        tried = self.tried_counts(dp)
        low = max((n for n in tried if n < m), default=m)
        high = min((n for n in tried if n > m), default=m)
        between = (n for n in self.microbatch_counts() if low < n < high and n != m)
        return [n for n in between if self.rows(n) % dp == 0]

    # --- branches ---

    @cached_property
    def branches(self) -> tuple[range, ...]:
        """The blocks of each branch that may lie on devices of its own; none where none may. Raises
        `OverrideError` where another number is asked for than there is."""
        asked = self.restrictions.branches
        count = None if asked is None else slices_in(asked)
        if count == 1:
            return ()
        runs = branches_of(self.graph, self.factors)
        why = self._why_together(runs)
        fits: object = asked == len(runs)
        model = f"the model has {len(runs)}"
        if isinstance(asked, Sequence):
            fits = shapes_of(asked, len(runs))
            model += " and a trunk, each stage of one a device group nearer to the end"
        if count and (why or not fits):
            raise OverrideError(
                f"={shown(asked)}: {why or model}",
                place="override branches",
                legal="1" if why else f"1, {len(runs)}",
                way_out="drop the override",
            )
        sliced, validated = (self.slices_asked or 1) > 1, self.restrictions.steppings[0] != "at_end"
        apart = self.problem.target.gradients_come and not (why or sliced or validated)
        return runs if apart else ()

    def _why_together(self, runs: Sequence[range]) -> str:
        """Why the branches of the model lie on no devices of their own; empty if they may."""
        if not runs:
            return "the model has no two that begin with it, one after the other"
        if not self.may_differ:
            return "they need device groups of their own, of any meshes, side by side"
        blocks, values = self.graph.blocks, self.graph.values
        for run in runs:
            here = [blocks[k] for k in run]
            if not any(values[v].requires_grad for block in here for v in block.parameters):
                names = ", ".join(compress_names([block.name for block in here]))
                return f"{names} hold no trained parameter, so its devices would have no optimizer"
        return ""

    @property
    def must_be_apart(self) -> bool:
        """Whether the user asked for branches apart."""
        asked = self.restrictions.branches
        return asked is not None and slices_in(asked) > 1

    # --- token slices: m counts what goes through a stage at a time, be it micro-batches or slices

    @cached_property
    def slices_asked(self) -> int | None:
        """Slices of each micro-batch, where the user says how many. Raises `OverrideError` where
        the model has none."""
        asked = self.restrictions.slices
        count = None if asked is None else slices_in(asked)
        if count in (None, 1):
            return count
        if why := self.unsliced:
            raise OverrideError(
                f"={shown(asked)}: {why}", place="override slices", legal="1", way_out=WAY_OUT
            )
        length, tp = self.factors.length, self.restrictions.uniform("tp") or 1
        if count > (most := min(MOST_SLICES, length // tp)):
            raise OverrideError.refused("override slices", asked, legal=f"1 to {most}")
        if length % tp or any(size % tp for size in self.slice_sizes):
            raise OverrideError(
                f"={shown(asked)} with tp={tp}: the tensor axis splits the tokens of each slice",
                place="override slices",
                legal=f"multiples of {tp} that add up to the {length} tokens",
                way_out="give such sizes, pad the sequences, or another tp",
            )
        if not isinstance(asked, int) and asked and sum(asked) != length:
            raise OverrideError(
                f"={shown(asked)} are {sum(asked)} tokens in all",
                place="override slices",
                legal=f"sizes that add up to {length}, or how many there are to be",
            )
        return count

    @property
    def slice_sizes(self) -> tuple[int, ...]:
        """The tokens of each slice, where the user says; else none."""
        asked = self.restrictions.slices
        return () if asked is None or isinstance(asked, int) or len(asked) < 2 else tuple(asked)

    @cached_property
    def unsliced(self) -> str:
        """Why micro-batches can't go through a pipeline in token slices; empty where they can."""
        if self.problem.meetings:
            return kept_together(self.problem.meetings)
        return why_not_sliced(self.graph, self.factors)

    def rows(self, m: int) -> int:
        """Rows of a micro-batch where m, or slices of them, go through; 0 where m is none."""
        rows, rest = divmod(self.global_batch_size * (self.slices_asked or 1), m)
        return 0 if rest else rows

    def slices(self, mesh: Mesh, m: int) -> int:
        """Slices of each micro-batch where m of them go through: 1 for whole ones. Where nothing
        is asked, those are cut that have one row on each rank."""
        return self.slices_asked or max(1, m * mesh.dp // self.global_batch_size)

    @cached_property
    def _cuts(self) -> list[int]:
        """Numbers of slices that are tried where nothing is asked."""
        decided = self.slices_asked or self.restrictions.microbatch_size not in (None, 1)
        decided = decided or not self.problem.target.gradients_come
        cuts = [n for n in SLICES if not decided and self.factors.length // n >= MIN_CONTEXT]
        return [] if cuts and self.unsliced else cuts

    def counts(self) -> list[int]:
        """`microbatch_counts`, and those of slices that some mesh may have."""
        return sorted({m * n for m in self.microbatch_counts() for n in (1, *self._cuts)})

    def tries(self, mesh: Mesh, m: int, groups: int) -> bool:
        """Whether m is tried on a mesh: whole micro-batches as thinned out; slices where whole ones
        leave a pipeline of so many device groups empty for long, and no more than fill it."""
        slices = self.slices(mesh, m)
        if self.slices_asked or slices == 1:
            return m in self.tried_counts(mesh.dp)
        few = FULL * (groups - 1)
        return m // slices < few and m < 2 * few

    def sliced_meshes(self, devices: int, m: int) -> list[Mesh]:
        """Every mesh of so many devices whose data ranks, with one row each of a micro-batch, cut
        it so that m go through, where nothing is asked."""
        meshes = []
        for tp in divisors(devices) if self._cuts else ():
            slices, rest = divmod(m * devices // tp, self.global_batch_size)
            if rest or slices not in self._cuts or m // slices not in self.microbatch_counts():
                continue
            if self.factors.length % tp:
                continue
            shared = divisors(math.gcd(self.experts, devices // tp))
            meshes += [Mesh(dp=devices // tp, tp=tp, ep=ep) for ep in shared]
        return [mesh for mesh in meshes if self._divides(mesh.tp) and self.allowed(mesh)]

    def batch(self, mesh: Mesh, m: int) -> Batch:
        """Rows, or those of as many tokens, that a rank of this mesh has at a time, where m go."""
        rows = self.global_batch_size / m / mesh.dp
        return Batch(rows=rows, microbatches=m, slices=self.slices(mesh, m))

    def notes(self) -> list[str]:
        """Choices that were thinned out, in words."""
        tried, legal = len(self.tried_counts()), len(self.microbatch_counts())
        notes = []
        if tried < legal and self.restrictions.num_microbatches is None:
            notes.append(
                f"of each mesh at most {MAX_MICROBATCH_CHOICES} of the numbers of micro-batches "
                f"that divide {self.global_batch_size} were tried, and those next to the best; "
                "num_microbatches= takes any"
            )
        inputs = (self.graph.values[name].shape for name in self.graph.batched)
        longest = max((shape[1] for shape in inputs if len(shape) in (2, 3)), default=0)
        if self.cluster.num_devices > 1:
            if self.factors.sequence is None and longest >= 2 * MIN_CONTEXT:
                notes.append(f"cp can't split sequences of {longest}: {self.factors.tokens.why}")
            notes += filter(None, (self.own_draws, self.unshared_experts))
        places, blocks = len(self.cut_at), len(self.graph.blocks)
        if places <= blocks:
            notes.append(
                f"a stage may start at {places - 1} of the {blocks} blocks; stages= cuts anywhere"
            )
        return notes

    # --- meshes ---

    def sizes(self) -> list[int]:
        """Devices that a stage may have where stages are not alike: any part of a single node;
        of several nodes the parts that divide one, and whole nodes that divide all; for branches of
        unequal work other numbers of nodes, too."""
        node, nodes = self.cluster.devices_per_node, self.cluster.num_nodes
        if nodes == 1:
            return list(range(1, node + 1))
        whole = {*divisors(nodes)}
        if self.branches:
            whole |= {*range(1, nodes, math.ceil(nodes / NODE_COUNTS))}
        return divisors(node) + [node * k for k in sorted(whole - {1})]

    def stage_counts(self) -> list[int]:
        """Numbers of equal device groups that the cluster divides into, no part straddling."""
        total, node = self.cluster.num_devices, self.cluster.devices_per_node
        asked, least = self.restrictions.pp, 2 if self._validates else 1
        counts = [p for p in divisors(total) if least <= p < len(self.cut_at)]
        if asked is not None:
            return [p for p in counts if p == asked]
        return [p for p in counts if (total // p) % node == 0 or node % (total // p) == 0]

    def meshes(self, devices: int, m: int) -> list[Mesh]:
        """Every mesh of so many devices for m micro-batches."""
        over, rows = self.restrictions, self.rows(m)
        meshes = []
        for tp in filter(self._divides, divisors(devices)):
            ranks = devices // tp
            for cp in self._context(ranks, rows) if rows else ():
                dp = ranks // cp
                if over.microbatch_size not in (None, rows // dp):
                    continue
                kind = over.cp_kind if cp > 1 else None
                if kind == ULYSSES and cp not in ulysses_degrees(self.graph, tp):
                    continue
                shared = divisors(math.gcd(self.experts, dp * cp))
                meshes += [Mesh(dp=dp, tp=tp, cp=cp, ep=ep, cp_kind=kind) for ep in shared]
        return [mesh for mesh in meshes if self.allowed(mesh)]

    def _divides(self, tp: int) -> bool:
        """Whether a tensor axis lies within a node, or is asked for."""
        return not self.cluster.devices_per_node % tp or tp in self.restrictions.tp

    def _context(self, ranks: int, rows: int) -> list[int]:
        """Context-parallel degrees on so many ranks: the least that lets `rows` divide among the
        rest, and those asked for."""
        legal = [cp for cp in divisors(ranks) if rows % (ranks // cp) == 0]
        if self.factors.sequence is None or (self.slices_asked or 1) > 1:
            return [cp for cp in legal if cp == 1]
        length = self.factors.length
        legal = [cp for cp in legal if length % cp == 0]
        offered = [cp for cp in legal[:1] if cp == 1 or length // cp >= MIN_CONTEXT]
        return [cp for cp in legal if cp in self.restrictions.cp or cp in offered]

    def allowed(self, mesh: Mesh) -> bool:
        """Whether some stage may have this mesh."""
        if self._held_twice and mesh.cp * mesh.ep > 1:
            return False
        if any(tokens % mesh.tp for tokens in self.slice_sizes):
            return False
        slices = self.slices_asked or 1
        if slices > 1 and (
            self.factors.length % mesh.tp or slices > self.factors.length // mesh.tp
        ):
            return False
        if self.own_draws and mesh.devices > 1:
            return False
        return all(
            not {None, getattr(mesh, axis)}.isdisjoint(getattr(self.restrictions, axis))
            for axis in ("dp", "tp", "cp", "ep")
        )

    @cached_property
    def own_draws(self) -> str:
        """The reason why stages have one device, where draws can't be repeated; else empty."""
        op = next(filter(draws_anew, self.graph.ops), None)
        if op is None:
            return ""
        at = f"{op.target}, {op.source}" if op.source else op.target
        return (
            f"{op.key} ({at}) draws random numbers in a way of its own, which would differ from "
            "rank to rank: every stage has one device, unless they are drawn by dropout, rand, "
            "randn, bernoulli or exponential"
        )

    @property
    def _held_twice(self) -> bool:
        return all(SCHEDULES[name].copies > 1 for name in self.restrictions.schedules)

    def placements(self, mesh: Mesh, stages: int) -> list[Mesh]:
        """The mesh contiguous, and with the pipeline inside the node where that differs."""
        placements = self.restrictions.placements
        meshes = [] if placements == (PIPELINE_INSIDE,) else [mesh]
        node, plain = self.cluster.devices_per_node, mesh.cp == mesh.ep == 1 and mesh.dp > 1
        if plain and stages > 1 and self.cluster.num_nodes > 1:
            spread = 0 if node % mesh.tp else math.gcd(stages, node // mesh.tp)
            if spread > 1 and PIPELINE_INSIDE in placements:
                meshes.append(Mesh(dp=mesh.dp, tp=mesh.tp, spread=spread))
        return meshes

    # --- ZeRO ---

    def zeros(self, mesh: Mesh) -> list[Sharing]:
        """ZeRO stages that a mesh may have, and among which ranks they divide."""
        over, ranks = self.restrictions, mesh.dp * mesh.cp
        zero = over.uniform("zero")
        free = {z for z in (*over.zeros, *over.zero) if z is not None}
        stages = free if zero is None else {zero}
        if ranks == 1:  # nothing to divide: no answer to who asks for ZeRO and leaves dp free
            refused = zero and None in over.dp and self.cluster.num_devices > 1
            return [] if refused else [UNSHARED]
        stages = {z for z in stages if self.problem.target.combines(z, tp=mesh.tp, pp=1)}
        alone = self._validates or over.host_weights or over.host_files
        stages -= {3} if alone else set()
        ways = [Sharing(zero=z) for z in sorted(stages) if z != 1 or self.undivided(mesh) is None]
        asked = {n for n in over.dp_shard if n}
        within = {n for n in asked if ranks % n == 0}
        node = self._neighbours(mesh)
        if over.partial_shards and None in over.dp_shard and node > 1 and ranks % node == 0:
            within.add(node)
        parts = () if mesh.ep > 1 else product(sorted(stages - {0}), sorted(within))
        ways += [Sharing(zero=z, dp_shard=n) for z, n in parts if n < ranks]
        return [way for way in ways if None in over.dp_shard or way.among(ranks) in asked]

    def undivided(self, mesh: Mesh) -> str | None:
        """A matrix that ZeRO-1 can divide neither along a dim that the tensor axis leaves alone nor
        along one that both divide, so that it would not shrink as priced; None where there is
        none."""
        ranks = mesh.dp * mesh.cp
        for shape, name in self._matrices.items():
            free = sum(size % ranks == 0 for size in shape) > (mesh.tp > 1)
            if not free and all(size % (ranks * mesh.tp) for size in shape):
                return f"{name}, shape {shape},"
        return None

    @cached_property
    def _matrices(self) -> dict[tuple[int, ...], str]:
        """Shapes of trained parameters of two dims and more, each with the first one's name."""
        names: dict[tuple[int, ...], str] = {}
        for parameter, name in self.graph.parameters.items():
            meta = self.graph.values[parameter]
            if len(meta.shape) > 1 and meta.requires_grad:
                names.setdefault(tuple(meta.shape), name)
        return names

    # --- how weights and gradients travel ---

    def transports(self, mesh: Mesh) -> dict[Sharing, list[Sharing]]:
        """Sharings that a mesh may have, by the one that prices of its data axis depend on
        (`Setting.of_step`). Gathers within a node are priced beside those of all. Parameters that
        come from the host are neither kept twice nor sent in blocks."""
        ways: dict[Sharing, list[Sharing]] = {}
        setting = Setting(problem=self.problem, mesh=mesh, batch=Batch(rows=0.0))
        for plain in self.zeros(mesh):
            choices = self.quantizations(mesh, plain), self.compressions(mesh, plain)
            for quantized, compressed in product(*choices):
                for hpz in self.secondaries(mesh, plain):
                    sharing = replace(plain, hpz=hpz, quantized=quantized, compressed=compressed)
                    transport = replace(setting, sharing=sharing).of_step.sharing
                    ways.setdefault(transport, []).append(sharing)
        return ways

    def secondaries(self, mesh: Mesh, plain: Sharing) -> list[int | None]:
        """Ranks that may keep a secondary shard of the weights, None for none; else a node's."""
        over, ranks = self.restrictions, mesh.dp * mesh.cp
        asked = {n for n in over.hpz if n}
        if not plain.gathers:  # asked for everywhere, it asks for ZeRO-3
            return [None] if None in over.hpz or ranks == 1 else []
        shards = plain.among(ranks)
        none: list[int | None] = [None] * (None in over.hpz or shards in asked)
        if mesh.ep > 1 or self.reliefs[0].host.states:
            return none
        if over.secondary_shards and None in over.hpz:
            asked.add(self._neighbours(mesh))
        return [*none, *sorted(n for n in asked if 1 < n < shards and shards % n == 0)]

    def quantizations(self, mesh: Mesh, plain: Sharing) -> list[str]:
        """Collectives that a stage with this sharing may send in quantised blocks."""
        over = self.restrictions
        if mesh.dp * mesh.cp == 1:  # nothing is sent
            return ["none"]
        legal = set(over.quantized) | set(over.quantizations if None in over.quantized else ())
        may = plain.gathers and mesh.ep == 1 and not self.reliefs[0].host.states
        return [choice for choice in QUANTIZED if choice in legal and (may or choice == "none")]

    def compressions(self, mesh: Mesh, plain: Sharing) -> list[str]:
        """Compressions that sums of gradients in a stage with this sharing may have."""
        over = self.restrictions
        if mesh.dp * mesh.cp == 1:
            return ["none"]
        legal = set(over.compressed) | set(over.compressions if None in over.compressed else ())
        alone = plain.divides or mesh.ep > 1 or self._validates or self._held_twice
        may = not (alone or self.reliefs[0].host.states)
        return [choice for choice in COMPRESSED if choice in legal and (may or choice == "none")]

    def _neighbours(self, mesh: Mesh) -> int:
        """Neighbours on the data axis that share a node."""
        return self.cluster.devices_per_node // (mesh.tp * mesh.spread)

    # --- schedules ---

    @property
    def _validates(self) -> bool:
        """Whether all steps are validated afterwards."""
        return self.restrictions.steppings[0] == "validated"

    @property
    def other_steppings(self) -> tuple[Stepping, ...]:
        """Ways of stepping optimizers besides the first, where the search finds that they pay."""
        others = self.restrictions.steppings[1:]
        runs = self.problem.target.gradients_come and not self.reliefs[0].host
        return others if runs else ()

    def may_step(self, stepping: Stepping, pipeline: Pipeline, sharing: Sharing) -> bool:
        """Whether optimizers may step so."""
        if sharing.compression:
            return False
        if stepping == "stale":
            return not pipeline.record.flushes
        if stepping == "in_backward":
            alone = pipeline.num_stages * pipeline.num_microbatches == 1 and not sharing.zero
            return alone and not pipeline.record.splits_backward
        writes = self.graph.weight_writes or self._held_twice
        staggered = pipeline.record.staggered and pipeline.num_devices > 1
        return staggered and not writes and not sharing.gathers

    def schedules(
        self,
        groups: int,
        m: int,
        sharing: Sharing = UNSHARED,
        slices: int | None = None,
        stepping: Stepping | None = None,
    ) -> list[Pipeline]:
        """Equal stages under each schedule; on one device group only the one that holds least.
        Where m are `slices` of micro-batches, those schedules that take them; None: as asked. Of
        optimizers that step so, the first way where nothing is said."""
        slices = slices or self.slices_asked or 1
        over, most = self.restrictions, len(self.cut_at) - 1
        if self._held_twice and (self._validates or self.reliefs[0].host):
            return []
        legal = {
            name: schedule
            for name, schedule in ((name, SCHEDULES[name]) for name in over.schedules)
            if not schedule.on_request or len(over.schedules) == 1
            if slices == 1 or (schedule.sliced and not sharing.gathers)
            if (schedule.gathers or not sharing.gathers) and schedule.runs(m, groups)
            if schedule.copies == 1 or not sharing.compression
            if schedule.flushes or self._may_be_late(schedule, groups, m, sharing)
            if schedule.flushes == ((stepping or over.steppings[0]) != "stale")
            if self.problem.target.combines(sharing.zero, tp=1, pp=groups)
        }
        # of schedules as late, those that are on all groups, and drop what is not finite
        evenly = {s.staleness(m, groups) for s in legal.values() if s.is_evenly_late(m, groups)}
        legal = {
            name: schedule
            for name, schedule in legal.items()
            if schedule.flushes
            or schedule.is_evenly_late(m, groups)
            or schedule.staleness(m, groups) not in evenly
        }
        if groups == 1:
            if slices > 1 and not self.slices_asked:
                return []
            alone = [
                Pipeline(name, 1, m, 1, slices)
                for name, schedule in legal.items()
                if schedule.stages_per_device == 1 and schedule.offered(over.virtual_stages)
            ]
            # by the micro-batches in flight of two: some free the first before the second starts
            alone.sort(key=lambda p: in_flight(p._replace(num_microbatches=2 * slices), 0))
            return [] if self._validates else alone[:1]
        return [
            Pipeline(name, groups * v, m, groups, slices)
            for name, schedule in legal.items()
            for v in schedule.offered(over.virtual_stages)
            if groups * v // schedule.copies <= most
        ]

    def late_schedules(
        self, mesh: Mesh, groups: int, m: int, sharing: Sharing = UNSHARED
    ) -> list[Pipeline]:
        """Equal stages under schedules without a flush, where the search may find that they pay."""
        if "stale" not in self.other_steppings or mesh.cp * mesh.ep > 1:
            return []
        return self.schedules(groups, m, sharing, 1, stepping="stale")

    def _may_be_late(self, schedule: Schedule, groups: int, m: int, sharing: Sharing) -> bool:
        """Whether a schedule without a flush may have such stages."""
        alone = sharing.zero < 2 and not sharing.compression and not self.reliefs[0].host
        return alone and self.restrictions.staleness in (None, schedule.staleness(m, groups))

    # --- cuts ---

    @cached_property
    def cut_at(self) -> tuple[int, ...]:
        """Boundaries of blocks where stages may start or end; of very long rows every so many."""
        classes = [block.class_id for block in self.graph.blocks]
        count = len(classes)
        if count <= MAX_CUTS:
            return tuple(range(count + 1))
        every = 2 ** math.ceil(math.log2(count / MAX_CUTS))
        cuts, row = {0, count, *(self.restrictions.cuts or ())}, 0
        cuts |= {at for run in self.branches for at in (run.start, run.stop)}
        for k in range(1, count):
            row = row + 1 if classes[k] == classes[k - 1] else 0
            if row % every == 0:
                cuts.add(k)
        return tuple(sorted(cuts))

    def legal_stages(self) -> np.ndarray:
        """(K+1, K+1): stages that hold a trained parameter, so that their ranks' optimizers have
        something to do, that do not part who reads a buffer from who writes it, and that end where
        the user cut."""
        blocks, values = self.graph.blocks, self.graph.values
        trained = [any(values[v].requires_grad for v in b.parameters) for b in blocks]
        before = np.concatenate([[0], np.cumsum(trained)])
        legal = np.triu(before[None, :] > before[:, None], 1)
        for first, last in inseparable(self.graph):
            legal[first + 1 : last + 1] = legal[:, first + 1 : last + 1] = False
        legal &= legal_stages(self.restrictions)
        cuts = self.restrictions.cuts
        if cuts is not None:
            only = np.zeros_like(legal)
            for start, stop in zip((0, *cuts), cuts, strict=False):
                only[start, stop] = True
            legal &= only
        return legal


def _nearest(counts: Sequence[int], wanted: float) -> int:
    """The count with the least ratio to the wanted one."""
    return min(counts, key=lambda count: abs(float(np.log(count / wanted))))
