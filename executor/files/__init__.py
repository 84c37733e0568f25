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
from meshwright.executor.files.manifest import (
    MANIFEST,
    Manifest,
    SavedFile,
    StoredChunk,
    StoredTensor,
    files_beside,
    holds_checkpoint,
    read_checkpoint,
    read_manifest,
)
from meshwright.executor.files.safetensors_file import (
    NAMES_OF_DTYPES,
    Kind,
    SafetensorsFile,
    bytes_of,
    in_file_order,
)
from meshwright.executor.files.tensors import read_tensors, read_whole, write_tensors
from meshwright.executor.files.weight_files import WeightFiles, open_source
