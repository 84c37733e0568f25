"""Prices of re-shards on the tensor axis, forward and backward, less what their products hide.

A product's operand is gathered, or its result summed and scattered, part by part round a ring of n
ranks while other parts are multiplied (Wang et al., ASPLOS 2023; Transformer Engine's user buffers,
torch's async tensor parallelism). A rank begins, or ends, with its own part, so that the n products
of p seconds each run beside n - 1 sends of c seconds; while both run, a product loses the part s of
the shorter to the send (`Device.overlap_slowdown`):

    time = p + (n - 1) max(p + s min(p, c), c)

The parts are issued to several streams, so that together they fill a device as the whole product
does. What is left of the collective is that time less the whole product's n p. In a backward the
same is taken of the gradient of what was scattered, which is gathered, and of what was gathered.
Collectives without a product beside them (an embedding's) wait.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.kernels import Group
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.operators import cost
from meshwright.costmodel.operators.fusion import is_free
from meshwright.costmodel.operators.products import split_product_seconds
from meshwright.costmodel.operators.sizes import LocalSizes
from meshwright.costmodel.rules import traits_of
from meshwright.costmodel.sharding import FactorTable, Placement, R, stays_with_experts, transition
from meshwright.profiles.steps import HOST


@dataclass(slots=True, kw_only=True)
class ReshardPricer(LocalSizes):
    """Prices of re-shards in one setting, by their collectives (`strategies.TRANSITIONS`)."""

    tensor_group: Group = field(init=False)
    _comm: Memo[tuple[str, str, float, float], cost.Entry] = field(default_factory=Memo)
    _moves: Memo[tuple[str, str, str], cost.Priced] = field(default_factory=Memo)
    _alike: dict[tuple[str, str, float], cost.Priced] = field(default_factory=dict)
    _beside: Mapping[str, tuple[Op, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        LocalSizes.__post_init__(self)
        if self.setting.mesh.tp > 1 and self.setting.target.overlap_tensor:
            self._beside = products_beside(self.graph, self.table)
        self.tensor_group = self.setting.group(size=self.setting.mesh.tp, stride=1)

    def comm(self, column: str, kind: str, nbytes: float, host_s: float = 0.0) -> cost.Entry:
        """A collective over the tensor axis of `nbytes` in full, issued in `host_s`."""
        collective, group = self.setting.collective, self.tensor_group
        return self._comm.of(
            (column, kind, nbytes, host_s),
            lambda: collective(column, kind, nbytes, group, "tensor")._replace(host_s=host_s),
        )

    def reshard(
        self, value: str, source: Placement, target: Placement, *, once: bool = False
    ) -> cost.Cost | None:
        """Price of moving a value between two states, per micro-batch; None where it is illegal.
        Partial gradients of parameters (`once`) are reduced once per step."""
        moved = self.moved(value, source, target, once=once)
        return moved and moved[1]

    def moved(
        self, value: str, source: Placement, target: Placement, *, once: bool = False
    ) -> cost.Priced | None:
        """Entries of moving a value, and their sums."""
        if once and source == R and target.kind == "Rp":
            if self.table.has_experts(value):
                return (), cost.NOTHING  # reduced with all ranks that hold it, `parameter_cost`
            return cost.priced([self.comm("reduce_s", "all_reduce", self.numel(value) * 4)])
        kinds = transition(source, target)
        if kinds is None:
            return None
        if self.setting.mesh.ep > 1 and stays_with_experts(self.table, value, source, target):
            return None
        key = (value, *kinds)
        return self._moves.of(key, lambda: self._priced(value, *kinds))

    def _priced(self, value: str, forward: str, backward: str) -> cost.Priced:
        if not self.graph.values[value].requires_grad:
            backward = ""
        nbytes, products = self.nbytes(value), self._beside.get(value)
        key = forward, backward, nbytes
        if not products and key in self._alike:
            return self._alike[key]
        host = self.setting.cluster.device.host_overhead_s * self.setting.target.host_scale
        host *= self.setting.correction(HOST)
        ways = ((cost.FORWARD_S, forward), (cost.BACKWARD_S, backward))
        entries = [self.comm(column, kind, nbytes, host) for column, kind in ways if kind]
        if products:
            return cost.priced(self.exposed(value, entry) for entry in entries)
        return self._alike.setdefault(key, cost.priced(entries))

    def exposed(self, value: str, entry: cost.Entry) -> cost.Entry:
        """A collective of a value with the seconds that no product beside it hides."""
        if not entry.seconds or entry.collective not in self.setting.target.overlap_tensor:
            return entry
        ranks, slowdown = self.setting.mesh.tp, self.setting.cluster.device.overlap_slowdown
        product_s = sum(split_product_seconds(self, op) for op in self._beside[value])
        part_s = product_s / ranks
        send_s = entry.seconds / (ranks - 1)
        together_s = part_s + (ranks - 1) * max(part_s + slowdown * min(part_s, send_s), send_s)
        exposed = min(entry.seconds, together_s - product_s)
        return entry._replace(seconds=exposed, hidden_s=entry.seconds - exposed)


def products_beside(graph: Graph, table: FactorTable) -> Mapping[str, tuple[Op, ...]]:
    """Value -> the products that make it or, where none does, that take it, but for views."""
    makers: dict[str, tuple[Op, ...]] = {}
    takers: dict[str, tuple[Op, ...]] = {}
    source: dict[str, str] = {}
    for op in graph.ops:
        if is_free(table, op) and op.operands:
            first = source.get(op.operands[0], op.operands[0])
            source |= dict.fromkeys(op.results, first)
            makers |= {value: makers[first] for value in op.results if first in makers}
        elif table.ops[op.name].matmul and traits_of(op).kernel != "attention":
            makers |= {value: (op,) for value in op.results}
            for value in {source.get(v, v) for v in op.operands if v not in graph.parameters}:
                takers[value] = (*takers.get(value, ()), op)
    takers |= {view: takers[first] for view, first in source.items() if first in takers}
    return {**takers, **makers}
