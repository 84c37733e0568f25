"""Conversion of old checkpoints: what DCP wrote is read whole, nothing of it runs, and damage is
told."""

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

from meshwright.executor.errors import DamagedError, SavedError
from meshwright.executor.files import open_source
from scripts.convert_checkpoint import converted, read_metadata

FEW = {"a": torch.arange(24.0).view(4, 6), "b": torch.arange(3), "note": "an object"}


def written(folder: Path) -> Any:
    """A DCP folder of `FEW`, as torch writes it; returns its metadata."""
    dcp.save({"model": FEW}, checkpoint_id=folder, no_dist=True)
    return pickle.loads((folder / ".metadata").read_bytes())


class Calls:
    def __init__(self, run: Callable[..., Any], *arguments: Any) -> None:
        self.call = run, arguments

    def __reduce__(self) -> Any:
        return self.call


def dotted(module: str, name: str, argument: str) -> bytes:
    """The call of a name with dots, which a pickle follows through attributes."""
    said = [b"\x8c" + bytes([len(x)]) + x.encode() for x in (module, name, argument)]
    return b"\x80\x04" + said[0] + said[1] + b"\x93" + said[2] + b"\x85R."


def exploits(marker: Path) -> dict[str, bytes]:
    command = f"touch {marker}"
    metadata = upstream.Metadata(state_dict_metadata={"x": Calls(os.system, command)})
    return {
        "a command": pickle.dumps(Calls(os.system, command)),
        "by an old protocol": pickle.dumps(Calls(os.system, command), protocol=0),
        "source": pickle.dumps(Calls(exec, f"open({str(marker)!r}, 'w')")),
        "a loader of torch": pickle.dumps(Calls(torch.load, str(marker), "cpu", None)),
        "through a module": dotted("torch.serialization", "os.system", command),
        "through a known class": dotted(upstream.__name__, "os.system", command),
        "inside": pickle.dumps(metadata),
    }


def test_what_dcp_wrote_is_read(tmp_path: Path) -> None:
    written(tmp_path / "at")
    assert set(read_metadata(tmp_path / "at")) == {"model.a", "model.b"}
    converted(tmp_path / "at", tmp_path / "new")
    source = open_source(tmp_path / "new")
    assert source.shapes == {"model.a": (4, 6), "model.b": (3,)}
    with pytest.raises(
        SavedError, match=r"older version.*python -m scripts.convert_checkpoint .*at"
    ):
        open_source(tmp_path / "at")
    with pytest.raises(SavedError, match=r"has no '.metadata'"):
        converted(tmp_path / "new", tmp_path / "again")


def test_no_code_runs(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    written(tmp_path / "at")
    for name, exploit in exploits(marker).items():
        (tmp_path / "at" / ".metadata").write_bytes(exploit)
        with pytest.raises(DamagedError, match=r"\.metadata' can't be read \(.*(names|loader)"):
            converted(tmp_path / "at", tmp_path / "new")
        assert not marker.exists(), name
    pickle.loads(exploits(marker)["a command"])  # which a reader without limits runs
    assert marker.exists()


def test_notes_run_nothing(tmp_path: Path) -> None:
    written(tmp_path / "at")
    torch.save({"model": Calls(os.mkdir, str(tmp_path / "ran"))}, tmp_path / "at" / "training.pt")
    with pytest.raises(DamagedError, match=r"'training.pt': is damaged"):
        converted(tmp_path / "at", tmp_path / "new")
    assert not (tmp_path / "ran").exists()


def test_classes_are_not_changed(tmp_path: Path) -> None:
    """A pickle may set attributes of what it names: here those of stand-ins, or none."""
    before = dict(vars(upstream.MetadataIndex))
    name = b"ctorch.distributed.checkpoint.metadata\nMetadataIndex\n"
    (tmp_path / ".metadata").write_bytes(name + b"(N}V__init__\nctorch\nSize\nst\x86b.")
    with pytest.raises(RuntimeError, match=r"can't be read"):
        read_metadata(tmp_path)
    assert dict(vars(upstream.MetadataIndex)) == before


def _place(metadata: Any, **values: Any) -> None:
    index = next(k for k in metadata.storage_data if k.fqn == "model.a")
    vars(metadata.storage_data[index]).update(values)


def _a(metadata: Any) -> Any:
    return metadata.state_dict_metadata["model.a"]


@pytest.mark.parametrize("name", ["../elsewhere", "link", 7])
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
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_together_is_told(tmp_path: Path, name: str) -> None:
    metadata = written(tmp_path)
    WRONG[name](metadata)
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(RuntimeError, match=r"\.metadata' can't be read \(.*load an earlier"):
        read_metadata(tmp_path)


def test_damage_is_told_or_does_no_harm(tmp_path: Path) -> None:
    """No other error, and no tensor that is not there, whatever became of the file."""
    written(tmp_path)
    path = tmp_path / ".metadata"
    whole, draw, told = path.read_bytes(), random.Random(0), 0
    for k in range(300):
        damaged = bytearray(whole[: draw.randrange(1, len(whole))] if k % 3 == 0 else whole)
        for _ in range(1 + k % 4):
            damaged[draw.randrange(len(damaged))] = draw.randrange(256)
        path.write_bytes(damaged)
        try:
            assert all(isinstance(x.dtype, torch.dtype) for x in read_metadata(tmp_path).values())
        except (RuntimeError, ValueError):
            told += 1
    assert told > 150


def test_bytes_that_are_no_tensor_are_told(tmp_path: Path) -> None:
    written(tmp_path / "at")
    (data,) = (tmp_path / "at").glob("*.distcp")
    data.write_bytes(bytes(len(data.read_bytes())))
    with pytest.raises(DamagedError, match=r"distcp', from byte \d+: is damaged"):
        converted(tmp_path / "at", tmp_path / "new")
    assert not (tmp_path / "new").exists()
