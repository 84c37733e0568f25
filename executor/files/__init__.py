"""Files of weights and checkpoints: read without running code, verified, replaced atomically."""

from meshwright.executor.files import atomic_folder
from meshwright.executor.files.chunks import (
    Box,
    ChunkRead,
    LocalChunks,
    Replica,
    ReplicaWriters,
    placements_on,
    untiled,
)
from meshwright.executor.files.dcp_metadata import StoredTensor, read_metadata
from meshwright.executor.files.dcp_reads import read_tensors
from meshwright.executor.files.dcp_writes import planned_writes, write_tensors
from meshwright.executor.files.ownership import MANIFEST, NOTES, PLAN, check_files, write_manifest
from meshwright.executor.files.weight_files import open_source

__all__ = [
    "MANIFEST", "NOTES", "PLAN", "Box", "ChunkRead", "LocalChunks", "Replica", "ReplicaWriters",
    "StoredTensor", "atomic_folder", "check_files", "open_source", "placements_on",
    "planned_writes", "read_metadata", "read_tensors", "untiled", "write_manifest",
    "write_tensors",
]  # fmt: skip
