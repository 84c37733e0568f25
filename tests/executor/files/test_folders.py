"""What a folder holds: names, which lead nowhere else, manifests, what is said of bytes, and
metadata, of which nothing runs, and whose damage is told."""

from __future__ import annotations

import io
import json
import logging
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
from meshwright.executor.files.moved_bytes import EVERY_S, MovedBytes
from meshwright.executor.files.ownership import (
    check_files,
    foreign_files,
    read_manifest,
    write_manifest,
)
from meshwright.executor.files.paths import inside
from tests.executor.checkpoint.checkpoint_runs import start

NAMES = (".metadata", "training.pt", "plan.json")
MIB = 2**20


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for place in ("at", "elsewhere", "snapshots/1", "blobs"):
        (tmp_path / place).mkdir(parents=True)
        (tmp_path / place / "file").write_text(place)
    return tmp_path / "at"


def test_names_of_files_inside(folder: Path) -> None:
    (folder / "sub").mkdir()
    (folder / "link").symlink_to(folder / "file")
    (folder.parent / "other").symlink_to(folder)
    for name in ("file", "link", "sub/new", "new"):
        for place in (folder, folder.parent / "other"):
            assert inside(place, name, "x") == place / name


def test_names_and_links_that_lead_outside(folder: Path) -> None:
    (folder / "link").symlink_to(folder.parent / "elsewhere" / "file")
    (folder / "sub").symlink_to(folder.parent / "elsewhere")
    outside = r"x names the file .* outside of its folder; it may only"
    link = r"a link out of its folder, to '.*elsewhere/file'"
    for name, says in (
        ("../elsewhere/file", outside), ("/etc/passwd", outside),
        ("sub/../../elsewhere/file", outside), ("link", link), ("sub/file", link),
    ):  # fmt: skip
        with pytest.raises(ValueError, match=says):
            inside(folder, name, "x")


def test_the_cache_of_a_hub_links_to_its_blobs(folder: Path) -> None:
    snapshot = folder.parent / "snapshots" / "1"
    (snapshot / "good").symlink_to(Path("../../blobs/file"))
    (snapshot / "bad").symlink_to(Path("../../elsewhere/file"))
    assert inside(snapshot, "good", "x").read_text() == "blobs"
    with pytest.raises(ValueError, match=r"a link out of its folder"):
        inside(snapshot, "bad", "x")


@pytest.mark.parametrize("name", ["", "a\0b", 7, None, ["file"], "x" * 256, "\ud800"])
def test_what_no_file_can_be_called_is_refused(folder: Path, name: Any) -> None:
    with pytest.raises(ValueError, match=r"is no name of a file; get it anew"):
        inside(folder, name, "x")


def folder_of(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    for name in NAMES:
        (path / name).write_bytes(name.encode() * 100)
    (path / "__0_0.distcp").write_bytes(bytes(50))
    (path / "manifest.json").write_bytes(write_manifest(path, {"__0_0.distcp": 50}))
    return path


def test_what_is_as_it_was_saved_passes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    files = read_manifest(folder)
    assert files is not None and set(files) == {*NAMES, "__0_0.distcp"}
    assert files["__0_0.distcp"].xxh3_64 is None and files[".metadata"].xxh3_64 is not None
    assert check_files(folder)
    (folder / "plan.json").unlink()  # a load does not read it
    assert check_files(folder)
    (folder / "manifest.json").unlink()
    assert not check_files(folder)


@pytest.mark.parametrize("name", [".metadata", "training.pt", "__0_0.distcp"])
def test_a_flipped_bit_a_missing_byte_a_missing_file(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path)
    whole = (folder / name).read_bytes()
    if name in NAMES:  # tensors have checksums of their own
        (folder / name).write_bytes(whole[:37] + bytes([whole[37] ^ 16]) + whole[38:])
        with pytest.raises(RuntimeError, match=rf"'{name}' is damaged: its checksum"):
            check_files(folder)
    (folder / name).write_bytes(whole[1:])
    with pytest.raises(RuntimeError, match=rf"'{name}' has {len(whole) - 1} bytes, and"):
        check_files(folder)
    (folder / name).unlink()
    with pytest.raises(RuntimeError, match=rf"'{name}' is missing; load an earlier"):
        check_files(folder)


DAMAGED: list[Any] = [
    [], {}, {"format": 1}, {"format": 2, "files": {}}, {"format": 1, "files": []},
    {"format": 1, "files": {"training.pt": 5}}, {"format": 1, "files": {"training.pt": {}}},
    {"format": 1, "files": {"training.pt": {"bytes": "5"}}},
    {"format": 1, "files": {"training.pt": {"bytes": True}}},
    {"format": 1, "files": {"training.pt": {"bytes": 5, "xxh3_64": 5}}},
    {"format": 1, "files": {"training.pt": {"bytes": 5, "md5": "5"}}},
]  # fmt: skip


@pytest.mark.parametrize("found", DAMAGED, ids=repr)
def test_a_damaged_manifest_is_told(tmp_path: Path, found: Any) -> None:
    folder = folder_of(tmp_path)
    for text in (json.dumps(found).encode(), b"\xff", b"[" * 100_000):
        (folder / "manifest.json").write_bytes(text)
        with pytest.raises(RuntimeError, match=r"manifest.json' is damaged: it must say format 1"):
            check_files(folder)
    (folder / "manifest.json").write_text('{"format": 1, "files": {}}')
    with pytest.raises(RuntimeError, match=r"is not in its manifest"):
        check_files(folder)


OURS = (
    "training.pt", "plan.json", "manifest.json", ".metadata", ".metadata.tmp", "__0_0.distcp",
    "__1023_12.distcp", "model.safetensors", "adapter_model.safetensors",
    "model-00001-of-00012.safetensors", "model.safetensors.index.json", "config.json",
    "adapter_config.json", "generation_config.json",
)  # fmt: skip
FOREIGN = (
    "notes.txt", "training.pt.bak", "xtraining.pt", "__0.distcp", "__0_0.pt", "model.pt",
    "model-1-of-2.safetensors", "config.yaml", "my_config.json", ".metadata.bak",
)  # fmt: skip


def test_what_a_save_may_write_is_known_by_name(tmp_path: Path) -> None:
    for name in (*OURS, *FOREIGN):
        (tmp_path / name).write_text("")
    assert foreign_files(tmp_path, finished=False) == sorted(FOREIGN)
    for name in FOREIGN:
        (tmp_path / name).unlink()
    assert foreign_files(tmp_path, finished=True) == []
    (tmp_path / "manifest.json").write_text('{"format": 1, "files": {"plan.json": {"bytes": 0}}}')
    unlisted = sorted({*OURS} - {"plan.json", "manifest.json"})
    assert foreign_files(tmp_path, finished=True) == unlisted
    (tmp_path / "manifest.json").write_text("{}")  # damaged: its names say what is a save's
    assert foreign_files(tmp_path, finished=True) == []
    (tmp_path / "manifest.json").unlink()
    assert foreign_files(tmp_path, finished=True) == []
    (tmp_path / "training.pt").unlink()  # an older version's save has it
    assert foreign_files(tmp_path, finished=True) == sorted(x.name for x in tmp_path.iterdir())


def test_it_is_said_now_and_then_and_at_the_end(caplog: pytest.LogCaptureFixture) -> None:
    now = [0.0]
    with caplog.at_level(logging.DEBUG, "meshwright.progress"):
        moved = MovedBytes("reading", 4 * MIB, clock=lambda: now[0])
        for _ in range(4):
            moved(MIB)
            now[0] += 0.6 * EVERY_S
        now[0] += EVERY_S
        moved(512)  # what a file holds beside its tensors
    assert [record.getMessage() for record in caplog.records] == [
        "reading: 1 MiB of 4 MiB",
        "reading: 3 MiB of 4 MiB",
        "reading: 4 MiB of 4 MiB",
    ]


# --- metadata -------------------------------------------------------------------------------------


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
    metadata = upstream.Metadata(state_dict_metadata={"x": Calls(os.system, command)})
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
        "inside": pickle.dumps(metadata),
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
    if name == "a command":  # which a reader without limits runs
        pickle.loads(exploits(marker)[name])
        assert marker.exists()


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
