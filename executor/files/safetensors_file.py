"""Writer of a safetensors file, tensor by tensor: no more than one of them is in memory.

    8 bytes, little-endian    the header's length
    the header, JSON          {name: {"dtype": "F32", "shape": [...], "data_offsets": [from, to]}}
    the tensors               one after the other, without gaps

The safetensors library writes a file from tensors that are all there; its reader is what the tests
read with. Larger elements come first, so that each tensor lies at a multiple of its element's size,
which readers that map the file want.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from meshwright.executor.errors import SavedError
from meshwright.executor.files.checksums import Moved, checksum_of

ALIGNMENT = 8
NAMES_OF_DTYPES: Mapping[torch.dtype, str] = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3", torch.float8_e5m2: "F8_E5M2", torch.complex64: "C64",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8",
    torch.uint64: "U64", torch.uint32: "U32", torch.uint16: "U16", torch.uint8: "U8",
    torch.bool: "BOOL",
}  # fmt: skip
Kind = tuple[torch.dtype, tuple[int, ...]]  # dtype and shape


def bytes_of(kind: Kind) -> int:
    return math.prod(kind[1]) * kind[0].itemsize


def in_file_order(kinds: Mapping[str, Kind]) -> list[str]:
    """The names of a file's tensors, as they follow each other in it."""
    return sorted(kinds, key=lambda name: -kinds[name][0].itemsize)


class SafetensorsFile:
    """A file that takes the tensors `kinds`, in the order of `in_file_order`."""

    def __init__(self, path: Path, kinds: Mapping[str, Kind], moved: Moved | None = None) -> None:
        header: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in in_file_order(kinds):
            dtype, shape = kinds[name]
            if dtype not in NAMES_OF_DTYPES:
                raise SavedError(
                    f"is of {dtype}, which safetensors can't hold",
                    place=f"{name!r}",
                    legal=NAMES_OF_DTYPES,
                    way_out="give one of these as dtype=",
                )
            start, end = end, end + bytes_of(kinds[name])
            entry = {"dtype": NAMES_OF_DTYPES[dtype], "shape": list(shape)}
            header[name] = entry | {"data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        head = len(text).to_bytes(8, "little") + text
        self.bytes = len(head) + end
        self._position = 0
        self._moved = moved
        self._checksum = xxhash.xxh3_64(head)
        self._file = path.open("wb", buffering=0)
        self._write(memoryview(head))

    def write(self, x: torch.Tensor) -> None:
        """The next tensor, on the host, which the file's checksum is of."""
        if x.numel():
            view = memoryview(bytes_view(x))
            self._checksum.update(view)
            self._write(view)

    def write_summed(self, x: torch.Tensor) -> tuple[int, str]:
        """The next tensor; the byte of the file where it starts, and its own checksum."""
        start, view = self._position, memoryview(bytes_view(x))
        self._write(view)
        return start, checksum_of([view])

    def _write(self, view: memoryview) -> None:
        self._position += len(view)
        while view:
            count = self._file.write(view)
            view = view[count:]
            if self._moved is not None:
                self._moved(count)

    def finish(self) -> str:
        """Close the file, which is on the disk then; returns the checksum of its header and of what
        `write` took."""
        os.fsync(self._file.fileno())
        self.close()
        return self._checksum.hexdigest()

    def close(self) -> None:
        self._file.close()


def bytes_view(x: torch.Tensor) -> Any:
    """A tensor's bytes in the host's memory, as an array; a copy where it is not contiguous."""
    return x.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
