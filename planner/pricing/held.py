"""Memory of a plan by what holds it."""

from __future__ import annotations

from dataclasses import dataclass, fields

from meshwright.costmodel.stages import Peak


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryParts:
    """Bytes of a device of one device group at its peak, whose sum they are.

    `weights` that are computed with, trained or not; `gradients` of parameters; states of the
    `optimizer`; `activations` that micro-batches in flight keep; `buffers` of messages; in passing
    (`transient`) what is made again, the gradients of activations, gathered weights and the like;
    `reserved` for the device's context and communicators, and on a CPU the caller's batch.
    """

    weights: float
    gradients: float
    optimizer: float
    activations: float
    buffers: float
    transient: float
    reserved: float

    @staticmethod
    def at(peak: Peak) -> MemoryParts:
        """What is held at a peak."""
        parts = dict.fromkeys((each.name for each in fields(MemoryParts)), 0.0) | {**peak.parts}
        rest = peak.nbytes - sum(parts.values())
        parts["activations"] += min(rest, 0.0)  # which the backward has let go of until then
        return MemoryParts(**parts | {"transient": max(rest, 0.0)})

    def as_dict(self) -> dict[str, float]:
        return {each.name: getattr(self, each.name) for each in fields(self)}
