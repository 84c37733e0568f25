"""The price of parameters per step: gradient reduction, all-gather of weights, optimizer.

n ranks hold the same part of a parameter. ZeRO divides it among s of them, neighbours on the data
axis, and replicates the parts n/s times. Of b bytes of gradients and w bytes of weights

    ZeRO 0      all-reduce of b over the n                                            `reduce_s`
    ZeRO 1-3    reduce-scatter of b over the s                                        `scatter_s`
                all-gather of w over the s                                            `gather_s`
    ZeRO 3      all-gather of w over h of the s, which keep it for the backward `zero3_secondary_s`
                all-reduce of b/s over n/s ranks, s apart (none where s = n)          `replicate_s`
                1/s of the optimizer's traffic                                        `shard_s`

Without ZeRO a matrix may be summed by what stands for it (`compressed.py`): its collectives in
`reduce_s`, what is computed for them in `compress_s`, beside nothing, as it waits for each.

A matrix that an optimizer steps whole (`memory/optimizers.py`) is gathered with its gradient where
ranks hold parts of it; each of the m ranks of a stage steps 1/m of all of these, and sends them to
the others (`executor/parameters/whole_tensors.py`).

(s < n is torch's `fully_shard` on a mesh of two dims, HSDP.) A frozen parameter has ZeRO-3's
gathers alone. A collective moves a whole unit at once, a bucket or a block's parameters; each
parameter bears its share of the unit's seconds. ZeRO-3's unit may be another, hence its own prices
(`zero3_*_s`). Experts are held by fewer ranks than other parameters: as many of these share them as
divide both s and their number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

from meshwright.costmodel.compressed import NUMBER, Compression, as_matrix
from meshwright.costmodel.graph import Graph
from meshwright.costmodel.kernels import Group, matmul_seconds, stream_seconds
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.memory import Sides, frozen_bytes
from meshwright.costmodel.operators.cost import BACKWARD_S, NOTHING, Entry, Priced, priced
from meshwright.costmodel.operators.matrices import fullest, owners_of
from meshwright.costmodel.operators.setting import Setting
from meshwright.costmodel.precisions import FP32
from meshwright.costmodel.quantized import (
    CAST_BYTES,
    DEQUANTIZE_BYTES,
    GRADIENT_BITS,
    QUANTIZE_BYTES,
    SCALE_BYTES,
    WEIGHT_BITS,
    wire_bytes,
)
from meshwright.costmodel.sharding import FactorTable, Placement
from meshwright.profiles.steps import BACKWARD

# a collective of ZeRO-3: column, kind, bytes in full, group
Zero3: TypeAlias = Callable[[str, str, float, Group], Entry]
# columns of frozen parameters, too
GATHERED = ("zero3_gather_s", "zero3_again_s", "zero3_secondary_s")


@dataclass(slots=True, kw_only=True)
class ParameterPricer:
    """Once-per-step prices of one graph's parameters in one setting. `numel` gives local elements,
    `unit_numel` the elements that travel with one's gradient, and with itself where ZeRO-3 gathers
    it, `matrices` those that the optimizer steps whole; `known`: prices so far on any mesh."""

    graph: Graph
    table: FactorTable
    setting: Setting
    numel: Callable[[str, Placement], float]
    unit_numel: Mapping[str, tuple[float, float]]
    matrices: Mapping[str, Sides] = field(default_factory=dict)
    known: Memo[Any, Memo[Any, Priced]] = field(default_factory=Memo)
    _known: Memo[Any, Priced] = field(init=False)  # in this setting

    def __post_init__(self) -> None:
        of = self.setting = self.setting.of_parameters
        self._known = self.known.of(of.parts, Memo)

    def priced(self, value: str, placement: Placement) -> Priced:
        """Price of a parameter once per step, for each ZeRO stage and for none."""
        if not self.graph.values[value].numel:
            return (), NOTHING
        return self._known.of((value, placement), lambda: self._alike(value, placement))

    def _alike(self, value: str, placement: Placement) -> Priced:
        """Price shared by all parameters of one size that travel with as many others."""
        meta, unit = self.graph.values[value], self.unit_numel.get(value)
        twice = value in self.graph.gathered_twice
        sides = self.matrices.get(value)
        size = self.numel(value, placement), meta.numel, unit, meta.requires_grad, twice, sides
        # also of settings that differ in who shares experts out
        of = self.setting
        where = replace(of.mesh, ep=1), of.secondary, of.sharing, of.batch, of.stepping
        how = self.compression_of(value, placement)
        known, key = self.known.of(where, Memo), (size, self._parts(value, placement), how)
        return known.of(key, lambda: priced(self._entries(value, placement)))

    def _entries(self, value: str, placement: Placement) -> Iterator[Entry]:
        setting, target, parts = self.setting, self.setting.target, self._parts(value, placement)
        numel, streamed = self.numel(value, placement), self._streamed
        reduced, weights = numel * setting.gradient_bytes, numel * setting.weight_bytes

        def group(size: int, apart: int = 1) -> Group:
            return setting.group(size=size, stride=parts * apart)

        holders = group(self.holders(value, placement))
        shards = group(self.shard_count(value, placement))
        again = group(holders.size // shards.size, shards.size)

        def shared(
            column: str, kind: str, nbytes: float, unit: str, group: Group, part: int = 1
        ) -> Entry:
            """Its share of a collective over 1/part of a unit."""
            full = self._unit_bytes(value, nbytes, unit, holders.size, column in GATHERED)
            return setting.collective(column, kind, full / part, group, calls=nbytes / full)

        def zero3(column: str, kind: str, nbytes: float, group: Group) -> Entry:
            slower = target.zero_bandwidth
            entry = shared(column, kind, nbytes / slower, target.gathered_unit, group)
            return entry._replace(calls=entry.calls * slower, sent_bytes=entry.sent_bytes * slower)

        near = group(math.gcd(setting.secondary, shards.size))
        twice = value in self.graph.gathered_twice
        for gather in self._gathered(numel, shards, zero3):
            yield gather
            if twice:
                yield gather._replace(column="zero3_again_s")
        if twice:
            yield zero3("zero3_secondary_s", "all_gather", weights, near)
        if not self.graph.values[value].requires_grad:
            return
        if setting.batch.microbatches > 1 and not target.fused_accumulation:
            added = setting.correction(BACKWARD)
            yield streamed(BACKWARD_S, "accumulation", 2 * reduced + weights, added)
        if target.bucket_copies > 0 and holders.size > 1:
            for column in ("reduce_s", "scatter_s", "zero3_scatter_s"):
                yield streamed(column, "copy", 2 * reduced)
        if how := self.compression_of(value, placement):
            yield from self._compressed_sum(*how, holders)
        else:
            yield shared("reduce_s", "all_reduce", reduced, "bucket", holders)
        yield shared("scatter_s", "reduce_scatter", reduced, target.unit, shards)
        yield shared("gather_s", "all_gather", weights, target.unit, shards)
        part = math.gcd(setting.hops, shards.size) if setting.hops else 1
        far = group(shards.size // part, part)
        yield from self._scattered(numel, (shards,) if part == 1 else (near, far), zero3)
        units = {"replicate_s": target.unit, "zero3_replicate_s": target.gathered_unit}
        for column, unit in units.items():
            yield shared(column, "all_reduce", reduced, unit, again, shards.size)
        yield from self._stepped(value, placement)

    def compression_of(
        self, value: str, placement: Placement
    ) -> tuple[Compression, tuple[int, int]] | None:
        """The compression of a parameter's gradient, and the sides of the matrix that it is on a
        rank; None where it is summed as it is."""
        how, shape = self.setting.sharing.compression, self.graph.values[value].shape
        sides, ranks = as_matrix(shape), self.holders(value, placement)
        if how is None or sides is None or ranks == 1 or not math.prod(shape):
            return None
        part = self.numel(value, placement) / math.prod(shape)
        rows, columns = sides
        if placement.sharded and placement.dim == 0:
            rows = max(1, round(rows * part))
        else:
            columns = max(1, round(columns * part))
        shrinks = how.shrinks(rows, columns, ranks, self.setting.gradient_bytes)
        return (how, (rows, columns)) if shrinks else None

    def compressing_bytes(self, value: str, placement: Placement) -> tuple[float, float, float]:
        """Bytes of the compressed sum of a parameter's gradient: while it is under way, and for a
        moment at its start and its end; none of one that is summed as it is."""
        if (found := self.compression_of(value, placement)) is None:
            return 0.0, 0.0, 0.0
        (how, sides), ranks = found, self.holders(value, placement)
        moments = how.moment_bytes(*sides, self.setting.gradient_bytes)
        return how.under_way_bytes(*sides, ranks), *moments

    def _compressed_sum(
        self, how: Compression, sides: tuple[int, int], group: Group
    ) -> Iterator[Entry]:
        """Entries of the sum of a matrix by what stands for it: its share of the collectives of a
        bucket, with a number that says whether there is a gradient, and what is computed."""
        setting, on, (rows, columns) = self.setting, self.setting.cluster.device, sides
        numel, rank = float(rows * columns), how.rank
        reduced = numel * setting.gradient_bytes
        calls = reduced / self._unit_bytes("", reduced, "bucket", group.size, False)
        if rank:
            sent = [("all_reduce", NUMBER * rank * side) for side in (rows + 1 / rank, columns)]
        else:
            sent = [("all_gather", NUMBER * (2 * how.kept(rows, columns) + 1) * group.size)]
        for kind, nbytes in sent:
            yield setting.collective("reduce_s", kind, nbytes / calls, group, calls=calls)
        read = NUMBER * (numel + rank * (rows + columns))
        for m, n, k in ((rows, rank, columns), (columns, rank, rows), (rows, columns, rank)):
            if rank:
                seconds = matmul_seconds(on, "fp32", m, n, k, 1, read)
                flops = 2.0 * m * n * k
                yield Entry("compress_s", "cast", seconds, flops=flops, moved_bytes=read)
        moved = how.moved_bytes(rows, columns, group.size, on.kind)
        yield self._streamed("compress_s", "cast", moved)
        issued = how.operators(group.size) * on.launch_overhead_s
        yield Entry("compress_s", "cast", issued)

    def _stepped(self, value: str, placement: Placement) -> Iterator[Entry]:
        """Entries of the optimizer's step of a parameter, without and with ZeRO."""
        shards = self.shard_count(value, placement)
        for column, parts in (("optimizer_s", 1), ("shard_s", shards)):
            if value not in self.matrices:
                yield self._of_elements(column, self.numel(value, placement), parts)
                yield from self._norms(column, value, placement, parts)
                continue
            own = self._of_matrix(column, value)
            if self.owned_numel(value, placement, divided=parts > 1):
                yield own.times(self._fullest_share())
                yield from self._to_owners_and_back(column, value, placement, parts)
            else:
                yield own

    def _of_elements(self, column: str, numel: float, parts: int) -> Entry:
        """Entry of the step of a rank's own elements of a parameter, divided in so many parts."""
        setting = self.setting
        optimizer, on = setting.optimizer, setting.cluster.device
        moved = numel * optimizer.moved * setting.target.optimizer_passes
        issued = optimizer.issues(on.kind, alone=setting.in_backward) * on.launch_overhead_s
        stepped = self._streamed(column, "optimizer", moved)
        if setting.in_backward and on.kind != "cpu":  # a host issues it ahead of the device
            issued = max(issued - stepped.seconds, 0.0)
        stepped = stepped.times(1 / parts)
        return stepped._replace(seconds=stepped.seconds + issued)

    def _norms(self, column: str, value: str, placement: Placement, parts: int) -> Iterator[Entry]:
        """Entries of numbers that ranks with parts of a parameter sum in its step."""
        setting, count = self.setting, self.setting.optimizer.norms
        apart = setting.mesh.devices // self.holders(value, placement)
        local, numel = self.numel(value, placement), self.graph.values[value].numel
        if count and parts > 1:
            group = setting.group(size=parts, stride=apart)
            yield setting.collective(column, "all_reduce", FP32, group, calls=count)
        if count and local < numel:
            group = setting.group(size=apart, stride=1)
            yield setting.collective(column, "all_reduce", FP32, group, "tensor", count)

    def _fullest_share(self) -> float:
        """The part of all matrices' work that the fullest owner of a stage has, where stages have
        alike many."""
        mesh, values = self.setting.mesh, self.graph.values
        stages = max(1, self.setting.cluster.num_devices // mesh.devices)
        sizes = [float(values[value].numel) for value in [*self.matrices][::stages]]
        return fullest(sizes, owners_of(sizes, mesh.devices)) / max(sum(sizes), 1.0)

    def _of_matrix(self, column: str, value: str) -> Entry:
        """Entry of the step of a whole matrix on one rank."""
        sides, on, kept = self.matrices[value], self.setting.cluster.device, self.setting.kept_bytes
        matrices = self.setting.optimizer.matrices
        assert matrices is not None
        moved = self.graph.values[value].numel * kept * matrices.moved
        seconds = stream_seconds(on, moved) + matrices.operators * on.launch_overhead_s
        flops = 0.0
        itemsize = kept if matrices.dtype == "fp32" else kept / 2
        for m, n, k, each in matrices.products(sides.rows, sides.columns):
            batch = each * sides.stacked
            nbytes = itemsize * batch * (m * k + k * n + m * n)
            seconds += matmul_seconds(on, matrices.dtype, m, n, k, batch, nbytes)
            flops += 2 * m * n * k * batch
        return Entry(column, "optimizer", seconds, flops=flops, moved_bytes=moved)

    def _to_owners_and_back(
        self, column: str, value: str, placement: Placement, shards: int
    ) -> Iterator[Entry]:
        """Entries of a matrix and its gradient on their way to an owner, and of it to all."""
        setting, kept = self.setting, self.setting.kept_bytes
        numel, holders = self.graph.values[value].numel, self.holders(value, placement)
        parts, local = setting.mesh.devices // holders, self.numel(value, placement)
        among = setting.group(size=parts, stride=1)
        if shards > 1:
            group = setting.group(size=shards, stride=parts)
            yield setting.collective(column, "all_gather", kept * local, group, calls=2)
        if local < numel:
            yield setting.collective(column, "all_gather", kept * numel, among, "tensor", 2)
        apart = setting.group(size=holders, stride=parts)
        yield setting.collective(column, "broadcast", kept * numel, apart)
        yield setting.collective(column, "broadcast", kept * numel, among, "tensor")

    def _gathered(self, numel: float, group: Group, zero3: Zero3) -> Iterator[Entry]:
        """ZeRO-3's all-gather of weights, with the codec where they are quantised."""
        setting, column = self.setting, "zero3_gather_s"
        itemsize = setting.weight_bytes
        if not setting.sharing.quantizes_weights or group.size == 1:
            yield zero3(column, "all_gather", numel * itemsize, group)
            return
        cast = CAST_BYTES if itemsize < SCALE_BYTES else 0.0
        encoded = numel / group.size * (QUANTIZE_BYTES[WEIGHT_BITS] + cast)
        yield zero3(column, "all_gather", wire_bytes(numel, WEIGHT_BITS), group)
        yield self._streamed(column, "cast", encoded + numel * DEQUANTIZE_BYTES[WEIGHT_BITS])

    def _scattered(self, numel: float, hops: Sequence[Group], zero3: Zero3) -> Iterator[Entry]:
        """ZeRO-3's sum of gradients, with the codec where they are quantised."""
        setting, column = self.setting, "zero3_scatter_s"
        if not setting.sharing.quantizes_gradients or hops[0].size == 1:
            yield zero3(column, "reduce_scatter", numel * setting.gradient_bytes, hops[0])
            return
        codec = QUANTIZE_BYTES[GRADIENT_BITS] + DEQUANTIZE_BYTES[GRADIENT_BITS]
        for group in hops:
            # each rank has all of what is exchanged, and keeps its part of the sum
            yield zero3(column, "all_to_all", wire_bytes(numel, GRADIENT_BITS) * group.size, group)
            yield self._streamed(column, "cast", numel * codec)
            numel /= group.size

    def _streamed(self, column: str, kind: str, nbytes: float, correction: float = 1.0) -> Entry:
        seconds = correction * stream_seconds(self.setting.cluster.device, nbytes)
        return Entry(column, kind, seconds, moved_bytes=nbytes)

    def holders(self, value: str, placement: Placement) -> int:
        """Ranks that hold the same part of a parameter, context-parallel ones included."""
        return self.setting.mesh.devices // self._parts(value, placement)

    def shard_count(self, value: str, placement: Placement) -> int:
        """Parts that ZeRO makes of what one rank holds of a parameter."""
        setting, holders = self.setting, self.holders(value, placement)
        all_ranks = setting.shards == setting.mesh.holders
        return holders if all_ranks else math.gcd(setting.shards, holders)

    def owned_numel(self, value: str, placement: Placement, *, divided: bool) -> float:
        """Elements of a matrix that one of its ranks steps for all; 0 where each steps its own:
        vectors, and what is whole on each and takes no products."""
        matrices = self.setting.optimizer.matrices
        if matrices is None or value not in self.matrices or self.setting.mesh.devices == 1:
            return 0.0
        numel, sides = self.graph.values[value].numel, self.matrices[value]
        cut = divided or self.numel(value, placement) < numel
        return numel if cut or matrices.products(sides.rows, sides.columns) else 0.0

    def moment_bytes(self, value: str, placement: Placement) -> tuple[float, float]:
        """Bytes of a rank of the moments of a parameter, where ZeRO does not divide it, with what
        its compressed sum remembers, and where it does; of matrices that others step for all, the
        mean of ranks."""
        meta, numel = self.graph.values[value], self.numel(value, placement)
        optimizer, shards = self.setting.optimizer, self.shard_count(value, placement)
        sides = self.matrices.get(value)
        remembered = 0.0
        if how := self.compression_of(value, placement):  # and nothing is divided
            remembered = how[0].memory_bytes(*how[1])
        if sides is None:
            nbytes = optimizer.moments * numel
            return nbytes + remembered, nbytes / shards
        full = optimizer.moment_bytes(meta.numel, sides)
        owned = (self.owned_numel(value, placement, divided=d) for d in (False, shards > 1))
        each = full / self.setting.mesh.devices
        part = full * numel / meta.numel
        whole, divided = owned
        return (each if whole else part) + remembered, each if divided else part / shards

    def frozen_bytes(self, value: str, placement: Placement) -> tuple[float, float]:
        """Bytes of a frozen parameter: whole, and where ZeRO-3 divides it."""
        meta, numel = self.graph.values[value], self.numel(value, placement)
        shards = self.shard_count(value, placement)
        return frozen_bytes(meta, numel), frozen_bytes(meta, numel, shards)

    def _parts(self, value: str, placement: Placement) -> int:
        """Neighbours that hold other parts of the parameter, or of others of its kind."""
        if not self.table.has_experts(value):
            return self.setting.mesh.tp
        return self.setting.mesh.ep * (self.setting.mesh.tp if placement.sharded else 1)

    def _unit_bytes(
        self, value: str, nbytes: float, unit: str, ranks: int, gathered: bool
    ) -> float:
        """Bytes that travel at once where a parameter's are `nbytes`."""
        if unit == "parameter":
            return nbytes
        if unit == "block":
            return nbytes * self.unit_numel[value][gathered] / self.graph.values[value].numel
        target = self.setting.target
        if 0 < target.alone_bytes <= nbytes:
            return nbytes
        return float(max(target.bucket_bytes, target.bucket_bytes_per_rank * ranks))


def unit_numels(graph: Graph) -> dict[str, tuple[float, float]]:
    """Parameter -> elements of its block's trained parameters, and of all."""
    units: dict[str, tuple[float, float]] = {}
    for block in graph.blocks:
        metas = [graph.values[value] for value in block.parameters]
        trained = sum(meta.numel for meta in metas if meta.requires_grad)
        units |= dict.fromkeys(block.parameters, (trained, sum(meta.numel for meta in metas)))
    return units
