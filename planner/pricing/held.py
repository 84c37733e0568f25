"""Memory of a plan by what holds it, as its price adds it up (`costmodel/stages/peak.py`)."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace

from meshwright.costmodel.schedules import peak_activation, stages_of_devices
from meshwright.costmodel.stages import HeldBytes, held_bytes
from meshwright.planner.pricing.evaluate import Evaluation
from meshwright.planner.pricing.priced_stage import PricedStage


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes of a device of one device group; together they are its `peak_memory_bytes`.

    `weights` that are computed with, trained or not; `activations` of all micro-batches in flight;
    `buffers` of gradients under way and gathered weights; `transient`, what is made again, the
    gradients of activations, and what else the peak in the course of a step holds beyond the most
    of each kind; `reserved` for the device's context and communicators.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    transient: float
    reserved: float

    @property
    def total(self) -> float:
        return sum(self.as_dict().values())

    def as_dict(self) -> dict[str, float]:
        return {each.name: getattr(self, each.name) for each in fields(self)}


def memory_parts(evaluation: Evaluation) -> list[MemoryParts]:
    """Of each device group of a plan whose stages were walked."""
    plan = evaluation.plan
    held = [_held(own) for own in evaluation.priced]
    device = evaluation.priced[0].setting.cluster.device
    counts = {"num_devices": len(plan.devices)}
    active = peak_activation(
        plan.schedule,
        num_microbatches=plan.num_microbatches,
        bytes_per_stage=[own.activation_bytes for own in evaluation.stages],
        **counts,
    )
    placed = stages_of_devices(plan.schedule, num_stages=len(plan.stages), **counts)
    found = []
    for number, members in enumerate(placed):
        own = [held[k] for k in members]
        # one stage is in a backward: the one that holds most in it
        passing = max(own, key=lambda h: h.transient + h.communicators)
        parts = MemoryParts(
            weights=sum(h.weights + h.frozen for h in own),
            gradients=sum(h.gradients for h in own),
            optimizer=sum(h.optimizer for h in own),
            activations=float(active[number]),
            buffers=sum(h.buffers for h in own),
            transient=passing.transient,
            reserved=passing.communicators + device.reserved_bytes,
        )
        beyond = evaluation.prediction.peak_memory_bytes[number] - parts.total
        found.append(replace(parts, transient=parts.transient + max(0.0, beyond)))
    return found


def _held(own: PricedStage) -> HeldBytes[float]:
    found = held_bytes(own.sums, own.setting, own.repeated)
    return HeldBytes(**{each.name: float(getattr(found, each.name)) for each in fields(found)})
