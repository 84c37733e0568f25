"""Metadata of a checkpoint: nothing in it runs, nothing in it leads outside, damage is told."""

from __future__ import annotations

import io
import os
import pickle
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import metadata as upstream

from meshwright.executor.checkpoint.weights import load_weights
from meshwright.executor.files.dcp_metadata import read_metadata
from tests.executor.checkpoint.checkpoint_runs import start

STATE = {"a": torch.arange(24.0).view(4, 6), "b": torch.arange(3), "note": "an object"}


def written(folder: Path) -> Any:
    """A DCP folder of `STATE`, as torch writes it; returns its metadata."""
    dcp.save({"model": STATE}, checkpoint_id=folder, no_dist=True)
    return pickle.loads((folder / ".metadata").read_bytes())


class Calls:
    """Pickled, a call."""

    def __init__(self, run: Callable[..., Any], *arguments: Any) -> None:
        self.call = run, arguments

    def __reduce__(self) -> Any:
        return self.call


def dotted(module: str, name: str, argument: str) -> bytes:
    """The call of a name with dots, which a pickle follows through attributes."""
    found = io.BytesIO(b"\x80\x04")
    found.seek(0, io.SEEK_END)
    for text in (module, name):
        found.write(b"\x8c" + bytes([len(text)]) + text.encode())
    found.write(b"\x93\x8c" + bytes([len(argument)]) + argument.encode() + b"\x85R.")
    return found.getvalue()


def exploits(marker: Path) -> dict[str, bytes]:
    command = f"touch {marker}"
    metadata = upstream.Metadata(state_dict_metadata={}, storage_data={})
    nested = {}
    for field in ("planner_data", "storage_meta", "state_dict_metadata"):
        value = {"x": Calls(os.system, command)} if field != "storage_meta" else None
        held = Calls(os.system, command) if value is None else value
        nested[field] = pickle.dumps(upstream.Metadata(**{**vars(metadata), field: held}))
    return {
        "a command": pickle.dumps(Calls(os.system, command)),
        "by an old protocol": pickle.dumps(Calls(os.system, command), protocol=0),
        "source": pickle.dumps(Calls(exec, f"open({str(marker)!r}, 'w')")),
        "an import": pickle.dumps(Calls(__import__, "antigravity")),
        "a loader of torch": pickle.dumps(Calls(torch.load, str(marker), "cpu", None)),
        "through a module": dotted("torch.serialization", "os.system", command),
        "through a known class": dotted(
            "torch.distributed.checkpoint.metadata", "os.system", command
        ),
        **nested,
    }


@pytest.mark.parametrize("name", exploits(Path()))
def test_no_code_runs(tmp_path: Path, name: str) -> None:
    marker = tmp_path / "ran"
    run = start("mlp", "alone")
    run.save(tmp_path / "at")
    (tmp_path / "at" / "manifest.json").unlink()  # an older checkpoint, or one that was forged
    (tmp_path / "at" / ".metadata").write_bytes(exploits(marker)[name])
    for load in (run.load, lambda path: load_weights(run.runtime, path)):
        with pytest.raises(RuntimeError, match=r"\.metadata' can't be read \(.*(names|loader)"):
            load(tmp_path / "at")
    assert not marker.exists()


def test_the_exploit_works_on_a_reader_without_limits(tmp_path: Path) -> None:
    """Else the tests above would show nothing."""
    pickle.loads(exploits(tmp_path / "ran")["a command"])
    assert (tmp_path / "ran").exists()


def test_classes_are_not_changed(tmp_path: Path) -> None:
    """A pickle may set attributes of what it names: here those of stand-ins, or none."""
    before = dict(vars(upstream.MetadataIndex))
    name = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    (tmp_path / ".metadata").write_bytes(name + b"(N}V__init__\nctorch\nSize\nst\x86b.")
    with pytest.raises(RuntimeError, match=r"can't be read"):
        read_metadata(tmp_path)
    assert dict(vars(upstream.MetadataIndex)) == before
    written(tmp_path / "at")
    assert set(read_metadata(tmp_path / "at")) == {"model.a", "model.b"}


def test_what_torch_writes_is_read(tmp_path: Path) -> None:
    metadata = written(tmp_path)
    stored = read_metadata(tmp_path)
    assert set(stored) == {"model.a", "model.b"}
    for name, x in stored.items():
        known = metadata.state_dict_metadata[name]
        assert (x.shape, x.dtype) == (tuple(known.size), known.properties.dtype)
        (chunk,) = x.chunks
        place = metadata.storage_data[upstream.MetadataIndex(name, chunk.box[0])]
        assert (chunk.start, chunk.length) == (place.offset, place.length)
        assert chunk.file == tmp_path / place.relative_path and chunk.xxh3_64 is None


def _place(metadata: Any, **values: Any) -> None:
    index = next(k for k in metadata.storage_data if k.fqn == "model.a")
    vars(metadata.storage_data[index]).update(values)


def _a(metadata: Any) -> Any:
    return metadata.state_dict_metadata["model.a"]


OUTSIDE = ("../elsewhere", "/etc/passwd", "link", "sub/../../elsewhere", "", "a\0b", 7, None)


@pytest.mark.parametrize("name", OUTSIDE)
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: Any) -> None:
    metadata = written(tmp_path / "at")
    (tmp_path / "elsewhere").write_bytes(b"secret")
    (tmp_path / "at" / "link").symlink_to(tmp_path / "elsewhere")
    _place(metadata, relative_path=name)
    (tmp_path / "at" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(ValueError, match=r"\.metadata' names the file .*, which is"):
        read_metadata(tmp_path / "at")


WRONG: dict[str, Callable[[Any], Any]] = {
    "a size": lambda m: setattr(_a(m), "size", torch.Size((4, 7))),
    "a size of text": lambda m: setattr(_a(m), "size", "46"),
    "a negative size": lambda m: setattr(_a(m), "size", (-4, -6)),
    "no chunks": lambda m: _a(m).chunks.clear(),
    "a chunk twice": lambda m: _a(m).chunks.append(_a(m).chunks[0]),
    "a chunk outside": lambda m: setattr(_a(m).chunks[0], "sizes", torch.Size((5, 6))),
    "another dtype": lambda m: setattr(_a(m).properties, "dtype", "float32"),
    "an offset": lambda m: _place(m, offset=-1),
    "an offset of text": lambda m: _place(m, offset="1"),
    "too few bytes": lambda m: _place(m, length=95),
    "a compression": lambda m: _place(m, transform_descriptors=["stream.zstd"]),
    "a checksum": lambda m: _place(m, xxh3_64=5),
    "no places": lambda m: m.storage_data.clear(),
    "another object": lambda m: setattr(m, "state_dict_metadata", ["model.a"]),
    "another record": lambda m: m.state_dict_metadata.update({"model.a": torch.Size((1,))}),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_together_is_told(tmp_path: Path, name: str) -> None:
    metadata = written(tmp_path)
    WRONG[name](metadata)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    if name == "another record":  # it is no tensor then
        assert set(read_metadata(tmp_path)) == {"model.b"}
        return
    with pytest.raises(RuntimeError, match=r"\.metadata' can't be read \(.*load an earlier"):
        read_metadata(tmp_path)


def test_damage_is_told_or_does_no_harm(tmp_path: Path) -> None:
    """No other error, and no tensor that is not there, whatever became of the file."""
    written(tmp_path)
    path = tmp_path / ".metadata"
    whole, draw = path.read_bytes(), random.Random(0)
    told = 0
    for k in range(300):
        damaged = bytearray(whole[: draw.randrange(len(whole))] if k % 3 == 0 else whole)
        for _ in range(1 + k % 4):
            if damaged:
                damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            stored = read_metadata(tmp_path)
        except (RuntimeError, ValueError):
            told += 1
        else:
            assert all(isinstance(x.dtype, torch.dtype) for x in stored.values())
    assert told > 150
