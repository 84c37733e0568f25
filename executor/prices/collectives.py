"""torch's collectives by the names that prices have for them."""

from __future__ import annotations

COLLECTIVES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce",
    "allgather_": "all_gather",
    "_allgather_base_": "all_gather",
    "reduce_scatter_": "reduce_scatter",
    "_reduce_scatter_base_": "reduce_scatter",
    "alltoall_base_": "all_to_all",
    "broadcast_": "broadcast",
}
PARTS = ("_allgather_base_", "alltoall_base_")  # of which a rank's own bytes are known


def collective_of(operation: str, nbytes: int, size: int) -> tuple[str, float]:
    """The kind of one of torch's operations among `size` ranks, and the bytes of its tensor in
    full: what all of them hold together, or send in an all-to-all. Raises KeyError for an operation
    that has no price."""
    return COLLECTIVES[operation], float(nbytes * (size if operation in PARTS else 1))
