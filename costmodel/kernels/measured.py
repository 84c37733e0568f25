"""Protocol of a profile: the timings that prices look up before they model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class OpProfile(Protocol):
    """Measured seconds, where there are any: (forward, backward, label) and (seconds, label); and
    factors of steps that ran over these, or over the model."""

    def op(self, signature_text: str) -> tuple[float, float, str] | None: ...

    def collective(
        self, kind: str, nbytes: float, size: int, per_node: int
    ) -> tuple[float, str] | None: ...

    def host_bandwidth(self, kind: str, ranks: int = 1) -> float | None:
        """Bytes per second of a kind of `profiles.timings.OF_HOST`, None where not timed."""
        return None

    def correction(self, component: str) -> float:
        """Factor on the seconds of a component of `profiles.steps.COMPONENTS`."""
        return 1.0

    def corrected_by(self) -> Sequence[str]:
        """Its corrections in words."""
        return ()
