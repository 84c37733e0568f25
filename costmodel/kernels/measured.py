"""Protocol of a profile: the timings that prices look up before they model."""

from __future__ import annotations

from typing import Protocol


class OpProfile(Protocol):
    """Measured seconds, where there are any: (forward, backward, label) and (seconds, label)."""

    def op(self, signature_text: str) -> tuple[float, float, str] | None: ...

    def collective(
        self, kind: str, nbytes: float, size: int, per_node: int
    ) -> tuple[float, str] | None: ...
