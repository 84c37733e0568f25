"""A file of safetensors that is written tensor by tensor: no more than one of them is in memory.

    8 bytes, little-endian    the header's length
    the header, JSON          {name: {"dtype": "F32", "shape": [...], "data_offsets": [from, to]}}
    the tensors               one after the other, without gaps

The safetensors library writes a file from tensors that are all there, a file's 5 GB at a time; its
reader is what the tests read with. Larger elements come first, so that each tensor lies at a
multiple of its element's size, which readers that map the file want.
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

    def __init__(self, path: Path, kinds: Mapping[str, Kind]) -> None:
        header: dict[str, dict[str, Any]] = {"__metadata__": {"format": "pt"}}
        end = 0
        for name in in_file_order(kinds):
            dtype, shape = kinds[name]
            if dtype not in NAMES_OF_DTYPES:
                raise SavedError(
                    f"is of {dtype}, which safetensors can't hold",
                    place=f"{name!r}",
                    legal=", ".join(map(str, NAMES_OF_DTYPES)),
                    way_out="give one of these as dtype=",
                )
            start, end = end, end + bytes_of(kinds[name])
            entry = {"dtype": NAMES_OF_DTYPES[dtype], "shape": list(shape)}
            header[name] = entry | {"data_offsets": [start, end]}
        text = json.dumps(header, separators=(",", ":")).encode()
        text += b" " * (-len(text) % ALIGNMENT)
        self.bytes = 8 + len(text) + end
        self._sum = xxhash.xxh3_64()
        self._file = path.open("wb", buffering=0)
        self._write(len(text).to_bytes(8, "little") + text)

    def write(self, x: torch.Tensor) -> None:
        """The next tensor, on the host."""
        if x.numel():
            self._write(x.contiguous().reshape(-1).view(torch.uint8).numpy())

    def _write(self, data: Any) -> None:
        """Write bytes, or an array of them."""
        self._sum.update(data)
        left = memoryview(data)
        while left:
            left = left[self._file.write(left) :]

    def finish(self) -> str:
        """Close the file, which is on the disk then; returns its checksum."""
        os.fsync(self._file.fileno())
        self.close()
        return self._sum.hexdigest()

    def close(self) -> None:
        self._file.close()
