"""Sharing of a stage's states among the ranks that hold the same parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace

from meshwright.costmodel.compressed import COMPRESSED, Compression, compression
from meshwright.costmodel.quantized import QUANTIZED, A, buffer_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Sharing:
    """Sharing of a stage's states. The stage `zero` of ZeRO divides them among `dp_shard`
    neighbours on the data axis and replicates across the others; None for all dp·cp. Under ZeRO-3
    `hpz` neighbours keep a secondary shard of the weights from the forward to the backward, which
    gathers from it; None for none. `quantized`: what ZeRO-3 sends in blocks of 8 and 4 bits,
    "none", "weights", "gradients" or "both" (`costmodel/quantized.py`). `compressed`: what stands
    for gradients in their sum without ZeRO (`costmodel/compressed.py`)."""

    zero: int = 0
    dp_shard: int | None = None
    hpz: int | None = None
    quantized: str = "none"
    compressed: str = "none"

    @property
    def divides(self) -> bool:
        """Whether each rank steps a part of the states alone (ZeRO-1 to 3)."""
        return self.zero > 0

    @property
    def divides_gradients(self) -> bool:
        """Whether each keeps its part of the gradients alone (ZeRO-2 and 3)."""
        return self.zero > 1

    @property
    def gathers(self) -> bool:
        """Whether weights, frozen ones too, are divided and gathered to be used (ZeRO-3)."""
        return self.zero > 2

    @property
    def scatters_whole(self) -> bool:
        """Whether every backward scatters gradients of weights that stay whole (ZeRO-2)."""
        return self.divides_gradients and not self.gathers

    @property
    def of_any_stage(self) -> Sharing:
        """The sharing without its ZeRO stage."""
        return replace(self, zero=0)

    @property
    def quantizes_weights(self) -> bool:
        """Whether weights are gathered in quantised blocks."""
        return self.quantized in ("weights", "both")

    @property
    def quantizes_gradients(self) -> bool:
        """Whether gradients are summed in quantised blocks."""
        return self.quantized in ("gradients", "both")

    @property
    def compression(self) -> Compression | None:
        """Compression of matrices of gradients in their sum; None: as they are."""
        return compression(self.compressed)

    @property
    def order(self) -> tuple[int, ...]:
        """Key to sort by."""
        sent = QUANTIZED.index(self.quantized), COMPRESSED.index(self.compressed)
        return self.zero, self.dp_shard or 0, self.hpz or 0, *sent

    @property
    def extras(self) -> int:
        """Number of ways in which ZeRO's states are shared otherwise than among all."""
        return sum(map(bool, self.order[1:4]))

    @property
    def sent_otherwise(self) -> bool:
        """Whether weights are kept twice or sent in blocks of few bits, or gradients compressed."""
        return any(self.order[2:])

    def among(self, holders: int) -> int:
        """Ranks among which ZeRO divides, of so many that hold the same parameters."""
        return self.dp_shard or holders

    def parts(self, shards: A | int) -> A | int:
        """Parts of what the optimizer steps, where ZeRO divides among so many."""
        return shards if self.divides else 1

    def buffer_bytes(self, elements: A) -> A:
        """Bytes beside those of exact collectives while a unit of so many elements travels."""
        weights, gradients = self.quantizes_weights, self.quantizes_gradients
        return buffer_bytes(elements, weights=weights, gradients=gradients)


UNSHARED = Sharing()
