"""Seconds of moving values between states on the tensor axis, forward and backward."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from meshwright.costmodel.graph import Op
from meshwright.costmodel.kernels import Group
from meshwright.costmodel.operators.beside import exposed_seconds, products_beside
from meshwright.costmodel.operators.cost import NOTHING, Cost
from meshwright.costmodel.operators.sizes import LocalSizes
from meshwright.costmodel.sharding import Placement, R, stays_with_experts, transition
from meshwright.profiles.steps import HOST, TENSOR_AXIS


@dataclass(slots=True, kw_only=True)
class ReshardPricer(LocalSizes):
    """Prices of re-shards of one graph's values in one setting: those of their collectives
    (`strategies.TRANSITIONS`)."""

    tensor_group: Group = field(init=False)
    _comm: dict[tuple[str, float], float] = field(default_factory=dict)
    _moves: dict[tuple[str, str, str], Cost] = field(default_factory=dict)
    _beside: Mapping[str, tuple[Op, ...]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        LocalSizes.__post_init__(self)
        if self.setting.mesh.tp > 1 and self.setting.target.overlap_tensor:
            self._beside = products_beside(self.graph, self.table)
        self.tensor_group = self.setting.group(size=self.setting.mesh.tp, stride=1)

    def comm(self, kind: str, nbytes: float) -> float:
        """Seconds of a collective over the tensor axis; `nbytes` is the full tensor's."""
        if not kind or self.setting.mesh.tp == 1:
            return 0.0
        key = (kind, nbytes)
        if key not in self._comm:
            self._comm[key] = self.setting.collective_s(
                kind, nbytes, self.tensor_group, TENSOR_AXIS
            )
        return self._comm[key]

    def reshard(self, value: str, source: Placement, target: Placement) -> Cost | None:
        """Moving an activation between two states, once per micro-batch; None where it is
        illegal."""
        kinds = transition(source, target)
        if kinds is None:
            return None
        if self.setting.mesh.ep > 1 and stays_with_experts(self.table, value, source, target):
            return None
        key = (value, *kinds)
        if key not in self._moves:
            self._moves[key] = self._moved(value, *kinds)
        return self._moves[key]

    def _moved(self, value: str, forward: str, backward: str) -> Cost:
        nbytes = self.nbytes(value)
        if not self.graph.values[value].requires_grad:
            backward = ""
        if not forward and not backward:
            return NOTHING
        f, b = (self._exposed(value, kind, nbytes) for kind in (forward, backward))
        host = self.setting.cluster.device.host_overhead_s * self.setting.target.host_scale
        host *= self.setting.correction(HOST)
        return Cost(
            forward_s=f,
            backward_s=b,
            forward_comm_s=f,
            backward_comm_s=b,
            forward_host_s=host * bool(forward),
            backward_host_s=host * bool(backward),
        )

    def _exposed(self, value: str, kind: str, nbytes: float) -> float:
        """Seconds of a value's collective that no product beside it hides."""
        seconds = self.comm(kind, nbytes)
        products = self._beside.get(value, ())
        if not seconds or not products or kind not in self.setting.target.overlap_tensor:
            return seconds
        return exposed_seconds(self, seconds, products)

    def reshard_parameter(self, value: str, source: Placement, target: Placement) -> Cost | None:
        """Moving a parameter: as `reshard`, but a gradient that comes out partial is reduced once
        per step, not per micro-batch."""
        if source == R and target.kind == "Rp" and self.table.has_experts(value):
            return NOTHING  # reduced with all ranks that hold it, `parameter_cost`
        if source == R and target.kind == "Rp":
            return Cost(reduce_s=self.comm("all_reduce", self.numel(value) * 4))
        return self.reshard(value, source, target)
