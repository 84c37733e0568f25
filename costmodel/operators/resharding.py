"""Prices of moving values between states on the tensor axis, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.costmodel.graph import Op
from meshwright.costmodel.kernels import Group
from meshwright.costmodel.operators.beside import exposed_seconds, products_beside
from meshwright.costmodel.operators.cost import (
    BACKWARD_S,
    FORWARD_S,
    NOTHING,
    Cost,
    Entry,
    Priced,
    priced,
)
from meshwright.costmodel.operators.sizes import LocalSizes
from meshwright.costmodel.sharding import Placement, R, stays_with_experts, transition
from meshwright.profiles.steps import HOST


@dataclass(slots=True, kw_only=True)
class ReshardPricer(LocalSizes):
    """Prices of re-shards of one graph's values in one setting: those of their collectives
    (`strategies.TRANSITIONS`)."""

    tensor_group: Group = field(init=False)
    _comm: dict[tuple[str, str, float, float], Entry] = field(default_factory=dict)
    _moves: dict[tuple[str, str, str], Priced] = field(default_factory=dict)
    _alike: dict[tuple[str, str, float], Priced] = field(default_factory=dict)
    _beside: Mapping[str, tuple[Op, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        LocalSizes.__post_init__(self)
        if self.setting.mesh.tp > 1 and self.setting.target.overlap_tensor:
            self._beside = products_beside(self.graph, self.table)
        self.tensor_group = self.setting.group(size=self.setting.mesh.tp, stride=1)

    def comm(self, column: str, kind: str, nbytes: float, host_s: float = 0.0) -> Entry:
        """A collective over the tensor axis, issued by the host in so many seconds; `nbytes` is the
        full tensor's."""
        key = (column, kind, nbytes, host_s)
        if key not in self._comm:
            found = self.setting.collective(column, kind, nbytes, self.tensor_group, "tensor")
            self._comm[key] = found._replace(host_s=host_s)
        return self._comm[key]

    def reshard(self, value: str, source: Placement, target: Placement) -> Cost | None:
        """Moving an activation between two states, once per micro-batch; None where it is
        illegal."""
        found = self.moved(value, source, target)
        return found and found[1]

    def reshard_parameter(self, value: str, source: Placement, target: Placement) -> Cost | None:
        """Moving a parameter: as `reshard`, but a gradient that comes out partial is reduced once
        per step, not per micro-batch."""
        found = self.moved(value, source, target, once=True)
        return found and found[1]

    def moved(
        self, value: str, source: Placement, target: Placement, *, once: bool = False
    ) -> Priced | None:
        """Either with its entries; `once` for parameters."""
        if once and source == R and target.kind == "Rp":
            if self.table.has_experts(value):
                return (), NOTHING  # reduced with all ranks that hold it, `parameter_cost`
            return priced([self.comm("reduce_s", "all_reduce", self.numel(value) * 4)])
        kinds = transition(source, target)
        if kinds is None:
            return None
        if self.setting.mesh.ep > 1 and stays_with_experts(self.table, value, source, target):
            return None
        key = (value, *kinds)
        if key not in self._moves:
            self._moves[key] = self._priced(value, *kinds)
        return self._moves[key]

    def _priced(self, value: str, forward: str, backward: str) -> Priced:
        if not self.graph.values[value].requires_grad:
            backward = ""
        nbytes, products = self.nbytes(value), self._beside.get(value)
        key = forward, backward, nbytes
        if not products and key in self._alike:
            return self._alike[key]
        host = self.setting.cluster.device.host_overhead_s * self.setting.target.host_scale
        host *= self.setting.correction(HOST)
        ways = ((FORWARD_S, forward), (BACKWARD_S, backward))
        entries = [self.comm(column, kind, nbytes, host) for column, kind in ways if kind]
        if products:
            return priced(self.exposed(value, entry) for entry in entries)
        self._alike[key] = found = priced(entries)
        return found

    def exposed(self, value: str, entry: Entry) -> Entry:
        """A collective of a value with the seconds that no product beside it hides."""
        if not entry.seconds or entry.collective not in self.setting.target.overlap_tensor:
            return entry
        exposed = exposed_seconds(self, entry.seconds, self._beside[value])
        return entry._replace(seconds=exposed, hidden_s=entry.seconds - exposed)
