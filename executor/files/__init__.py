"""Files of weights and checkpoints: read without running code, verified, replaced atomically."""

from meshwright.executor.files import atomic_folder
from meshwright.executor.files.chunks import (
    Box,
    Chunk,
    ChunkRead,
    LocalChunks,
    Replica,
    ReplicaWriters,
    local_chunks,
    narrowed,
    placements_on,
    untiled,
)
from meshwright.executor.files.dcp_metadata import StoredTensor, read_metadata
from meshwright.executor.files.dcp_reads import read_tensors
from meshwright.executor.files.dcp_writes import planned_writes, write_tensors
from meshwright.executor.files.ownership import (
    MANIFEST,
    METADATA,
    NOTES,
    PLAN,
    OwnFile,
    check_every_file,
    check_files,
    manifest,
    write_manifest,
)
from meshwright.executor.files.weight_files import WeightFiles, open_source
