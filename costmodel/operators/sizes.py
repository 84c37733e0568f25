"""Elements and bytes of values on one rank of a mesh, at its rows."""

from __future__ import annotations

from dataclasses import dataclass, field

from meshwright.costmodel import sharding
from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.operators.setting import Setting
from meshwright.costmodel.precisions import PRECISIONS
from meshwright.costmodel.rules import is_narrow, traits_of


@dataclass(slots=True, kw_only=True)
class LocalSizes:
    """Sizes of one graph's values in one setting; `context` is the layout of its context axis."""

    graph: Graph
    table: sharding.FactorTable
    setting: Setting
    context: sharding.ContextLayout | None = None
    _numels: Memo[tuple[str, int], float] = field(default_factory=Memo)

    def __post_init__(self) -> None:
        mesh = self.setting.mesh
        if mesh.cp > 1 and self.context is None and self.table.sequence is not None:
            self.context = sharding.context_layout(self.graph, self.table, mesh.cp, mesh.kind)

    def numel(self, value: str, placement: sharding.Placement = sharding.R) -> float:
        """Local elements of a value at `rows` rows, on this mesh."""
        key = value, placement.dim
        return self._numels.of(key, lambda: self._numel(value, placement))

    def _numel(self, value: str, placement: sharding.Placement) -> float:
        numel = float(self.graph.values[value].numel)
        if self.table.has_batch(value):
            numel *= self.setting.batch.rows / self.graph.batch_size
        if self.splits_context(value):
            numel /= self.setting.mesh.cp
        if self.table.has_experts(value):
            numel /= self.setting.mesh.ep
        numel *= self.crowding(value)
        if not placement.sharded:
            return numel
        size = self.graph.values[value].shape[placement.dim]
        return numel * sharding.largest_part(size, self.setting.mesh.tp) / size

    def splits_context(self, value: str) -> bool:
        """Whether the context axis splits a value."""
        return self.context is not None and self.context.states[value].sharded

    def crowding(self, value: str) -> float:
        """Tokens' copies on the busiest rank of an expert axis over the mean; else 1."""
        shared = self.setting.mesh.ep > 1 and value in self.table.copies
        return self.setting.target.expert_imbalance if shared else 1.0

    def nbytes(self, value: str, placement: sharding.Placement = sharding.R) -> float:
        """Local bytes of a value."""
        return self.numel(value, placement) * self.graph.values[value].dtype.itemsize

    def moved_bytes(self, op: Op, strategy: sharding.Strategy) -> float:
        """Bytes of all operands and results."""
        placed = [
            *zip(op.operands, strategy.operands, strict=True),
            *zip(op.results, strategy.results, strict=True),
        ]
        return sum(self.nbytes(value, placement) for value, placement in placed)

    def dtype(self, op: Op) -> str:
        """The precision an operator computes in: "bf16", "fp32", "fp8", ..."""
        told = op.operands if traits_of(op).kernel == "chunked" else op.results
        itemsize = self.graph.values[told[0]].dtype.itemsize if told else 4
        if itemsize != self.setting.weight_bytes:
            return "fp32"
        precision = PRECISIONS[self.setting.precision]
        return precision.narrow if self.in_narrow(op) else precision.wide

    def in_narrow(self, op: Op) -> bool:
        """Whether an operator is a product in 8 bits or 4."""
        return bool(PRECISIONS[self.setting.precision].narrow) and is_narrow(self.graph, op)
