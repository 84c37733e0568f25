"""The mesh of a stage's devices."""

from __future__ import annotations

from dataclasses import dataclass

from meshwright.costmodel.sharding import ContextKind


@dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Mesh:
    """Devices of one stage: (dp, cp, tp) with tp innermost, `ep` neighbours sharing the experts;
    `cp_kind` is that of attention over tokens, None for the cheapest; `spread` > 1 where so many
    stages lie between neighbours on the data axis."""

    dp: int
    tp: int
    cp: int = 1
    ep: int = 1
    spread: int = 1
    cp_kind: ContextKind | None = None

    @property
    def devices(self) -> int:
        return self.dp * self.cp * self.tp
