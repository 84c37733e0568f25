"""Manifests: what they say is checked, and what is damaged is told with its name."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from meshwright.executor.files.ownership import (
    check_files,
    foreign_files,
    read_manifest,
    write_manifest,
)

NAMES = (".metadata", "training.pt", "plan.json")


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


@pytest.mark.parametrize("name", [".metadata", "training.pt"])
def test_a_flipped_bit_a_missing_byte_a_missing_file(tmp_path: Path, name: str) -> None:
    folder = folder_of(tmp_path)
    whole = (folder / name).read_bytes()
    for k in range(0, len(whole), 37):
        flipped = bytearray(whole)
        flipped[k] ^= 1 << k % 8
        (folder / name).write_bytes(flipped)
        with pytest.raises(RuntimeError, match=rf"'{name}' is damaged: its checksum"):
            check_files(folder)
    (folder / name).write_bytes(whole[1:])
    with pytest.raises(RuntimeError, match=rf"'{name}' has {len(whole) - 1} bytes, and"):
        check_files(folder)
    (folder / name).unlink()
    with pytest.raises(RuntimeError, match=rf"'{name}' is missing; load an earlier"):
        check_files(folder)


def test_files_of_tensors_have_their_sizes(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    (folder / "__0_0.distcp").write_bytes(bytes(49))
    with pytest.raises(RuntimeError, match=r"'__0_0.distcp' has 49 bytes, and 50 were saved"):
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
    (tmp_path / "manifest.json").unlink()
    (tmp_path / "training.pt").unlink()  # an older version's save has it
    assert foreign_files(tmp_path, finished=True) == sorted(x.name for x in tmp_path.iterdir())
