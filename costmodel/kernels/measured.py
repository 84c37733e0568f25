"""Protocol of a profile: the timings that prices look up before they model."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol


class OpProfile(Protocol):
    """Measured seconds, where there are any: (forward, backward, label) and (seconds, label); and
    by how much a step that runs takes longer than these, or than what is modelled."""

    def op(self, signature_text: str) -> tuple[float, float, str] | None: ...

    def collective(
        self, kind: str, nbytes: float, size: int, per_node: int
    ) -> tuple[float, str] | None: ...

    def host_bandwidth(self, kind: str, ranks: int = 1) -> float | None:
        """Bytes per second of a kind of `profiles.timings.OF_HOST`, which so many ranks of a node
        did at once; None where none was timed."""
        return None

    def correction(self, component: str) -> float:
        """What the seconds of a component are multiplied by, whoever says them: a name of
        `profiles.steps.COMPONENTS`."""
        return 1.0

    def corrected_by(self) -> Sequence[str]:
        """Its corrections in words."""
        return ()
