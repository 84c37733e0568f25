"""Tensors between states on one mesh axis: cut, joined, moved by collectives."""

from meshwright.executor.resharding.reshard import (
    MOVES,
    Axis,
    Reshard,
    SliceAxis,
    Waiting,
    all_gather,
    all_gather_flat,
    all_reduce,
    into_zigzag,
    join_parts,
    local_part,
    part_of,
    reduce_scatter_flat,
    slice_axes,
    split_parts,
    zigzag_chunks,
)
