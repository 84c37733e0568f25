"""Tensors of a checkpoint folder: read in boxes, verified, whatever their layout."""

from __future__ import annotations

import pickle
import random
import threading
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from meshwright.executor.files import checksums
from meshwright.executor.files.chunks import Chunk, ChunkRead, LocalChunks
from meshwright.executor.files.dcp_metadata import read_metadata
from meshwright.executor.files.dcp_reads import overlap, read_tensors
from meshwright.executor.files.dcp_writes import write_tensors

LARGE = checksums.BLOCK_BYTES // 4 + 1000  # elements: it is read in several parts
STATE = {
    "large": torch.arange(float(LARGE)),
    "small": torch.arange(24.0).view(4, 6),
    "transposed": torch.arange(24.0).view(4, 6).t(),
    "view": torch.arange(24.0)[3:9],
    "bytes": torch.arange(200, dtype=torch.uint8),
    "half": torch.arange(9).to(torch.bfloat16).view(3, 3),
    "truth": torch.tensor([True, False, True]),
    "scalar": torch.tensor(7),
}


def write(folder: Path) -> dict[str, int]:
    folder.mkdir(exist_ok=True)
    chunks = {name: LocalChunks.of(x) for name, x in STATE.items()}
    return write_tensors({"model": chunks}, folder, None)


def read(folder: Path) -> dict[str, torch.Tensor]:
    into = {name: torch.empty_like(x) for name, x in STATE.items()}
    reads = [r for name, x in into.items() for r in LocalChunks.of(x).reads(f"model.{name}")]
    read_tensors(reads, read_metadata(folder))
    return into


def test_what_was_written_is_read_by_us_and_by_torch(tmp_path: Path) -> None:
    bytes_of = write(tmp_path)
    found = read(tmp_path)
    assert all(torch.equal(found[name], x) for name, x in STATE.items())
    theirs = {name: torch.zeros_like(x) for name, x in STATE.items()}
    dcp.load({"model": theirs}, checkpoint_id=tmp_path, no_dist=True)
    assert all(torch.equal(theirs[name], x) for name, x in STATE.items())
    assert bytes_of == {"__0_0.distcp": (tmp_path / "__0_0.distcp").stat().st_size}
    chunks = [chunk for x in read_metadata(tmp_path).values() for chunk in x.chunks]
    assert sum(chunk.length for chunk in chunks) == sum(bytes_of.values()), "bytes without checksum"
    data = (tmp_path / "__0_0.distcp").read_bytes()
    for chunk in chunks:
        part = data[chunk.start : chunk.start + chunk.length]
        assert chunk.xxh3_64 == xxhash.xxh3_64_hexdigest(part)


def test_any_bit_that_flips_is_told(tmp_path: Path) -> None:
    """60 of 60, each with the tensor that it is part of."""
    write(tmp_path)
    path, draw = tmp_path / "__0_0.distcp", random.Random(1)
    whole = path.read_bytes()
    stored = read_metadata(tmp_path)
    for _ in range(60):
        name, x = draw.choice(sorted(stored.items()))  # most bits are of the large one
        at = x.chunks[0].start + draw.randrange(x.chunks[0].length)
        damaged = bytearray(whole)
        damaged[at] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(RuntimeError, match=rf"'{name}' in '.*__0_0\.distcp' is damaged: its"):
            read(tmp_path)


def test_zeroed_and_missing_bytes_are_told(tmp_path: Path) -> None:
    write(tmp_path)
    path = tmp_path / "__0_0.distcp"
    whole = path.read_bytes()
    at = next(k for k in range(0, len(whole) - 4096, 4096) if any(whole[k : k + 4096]))
    for damaged in (whole[:at] + bytes(4096) + whole[at + 4096 :], bytes(len(whole))):
        path.write_bytes(damaged)
        with pytest.raises(RuntimeError, match=r"is damaged: its checksum"):
            read(tmp_path)
    path.write_bytes(whole[:-1])
    with pytest.raises(RuntimeError, match=rf"has {len(whole) - 1} bytes, and {len(whole)} were"):
        read(tmp_path)
    path.unlink()
    with pytest.raises(RuntimeError, match=r"the file has 0 bytes"):
        read(tmp_path)


def test_the_first_of_several_damaged_tensors_is_told(tmp_path: Path) -> None:
    """Whichever thread is first, and though a later one is no archive at all."""
    state = {f"t{k}": torch.full((LARGE,), float(k)) for k in range(4)}
    chunks = {"model": {name: LocalChunks.of(x) for name, x in state.items()}}
    write_tensors(chunks, tmp_path, None)
    stored = read_metadata(tmp_path)
    path = tmp_path / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    starts = sorted((x.chunks[0].start, x.chunks[0].length, name) for name, x in stored.items())
    for start, length, _ in starts[1:3]:
        data[start + length // 2] ^= 1
    data[starts[3][0] : starts[3][0] + 64] = bytes(64)  # no archive
    path.write_bytes(data)
    threads = threading.active_count()
    into = {name: torch.empty_like(x) for name, x in state.items()}
    reads = [r for name, x in into.items() for r in LocalChunks.of(x).reads(f"model.{name}")]
    with pytest.raises(RuntimeError, match=rf"'{starts[1][2]}' in '.*' is damaged: its checksum"):
        read_tensors(reads, stored)
    assert threading.active_count() == threads


def test_threads_do_not_share_a_buffer(tmp_path: Path) -> None:
    state = {f"t{k}": torch.randn(700, 2000).t() for k in range(5)}  # can't be read in place
    chunks = {"model": {name: LocalChunks.of(x) for name, x in state.items()}}
    write_tensors(chunks, tmp_path, None)
    into = {name: torch.empty(2000, 700) for name in state}
    reads = [r for name, x in into.items() for r in LocalChunks.of(x).reads(f"model.{name}")]
    read_tensors(reads, read_metadata(tmp_path))
    assert all(torch.equal(into[name], x) for name, x in state.items())


def test_chunks_without_a_checksum_are_read(tmp_path: Path) -> None:
    """Of torch, and of older versions; another tensor in the archive is told all the same."""
    dcp.save({"model": STATE}, checkpoint_id=tmp_path, no_dist=True)
    found = read(tmp_path)
    assert all(torch.equal(found[name], x) for name, x in STATE.items())
    metadata = pickle.loads((tmp_path / ".metadata").read_bytes())
    place = {index.fqn: place for index, place in metadata.storage_data.items()}
    large, small = place["model.large"], place["model.small"]
    small.offset, small.length = large.offset, large.length
    (tmp_path / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(RuntimeError, match=r"is no tensor of torch.float32 and shape"):
        read(tmp_path)


boxes = st.tuples(*[st.tuples(st.integers(0, 5), st.integers(0, 4))] * 2).map(
    lambda dims: (tuple(a for a, _ in dims), tuple(n for _, n in dims))
)


@given(boxes, boxes)
def test_two_boxes_share_the_elements_that_are_in_both(one: object, other: object) -> None:
    def elements(box: object) -> set[tuple[int, int]]:
        (a, b), (n, m) = box  # type: ignore[misc]
        return {(i, j) for i in range(a, a + n) for j in range(b, b + m)}

    both = overlap(one, other)  # type: ignore[arg-type]
    assert (elements(both) if both else set()) == elements(one) & elements(other)


@pytest.mark.parametrize("name", ["small", "transposed"])
def test_a_box_of_another_layout(tmp_path: Path, name: str) -> None:
    write(tmp_path)
    stored = read_metadata(tmp_path)
    into = torch.full((2, 3), -1.0, dtype=torch.float64)
    box = ((1, 3), (0, 3))
    read_tensors([ChunkRead(name=f"model.{name}", ranges=box, into=into)], stored)
    assert torch.equal(into, STATE[name][1:3, 0:3].double())


@pytest.mark.parametrize(
    "ranges", [((1, 3), (2, 5)), ((0, 4), (0, 6)), ((2, 4), (3, 6)), ((3, 4), (0, 1))], ids=str
)
def test_a_box_over_several_chunks(tmp_path: Path, ranges: tuple[tuple[int, int], ...]) -> None:
    x = torch.arange(24.0).view(4, 6)
    boxes = [(row, column) for row in (0, 2) for column in (0, 3)]
    chunks = tuple(Chunk(offset=at, local_offset=at, sizes=(2, 3)) for at in boxes)
    write_tensors({"m": {"x": LocalChunks(shape=x.shape, local=x, chunks=chunks)}}, tmp_path, None)
    stored = read_metadata(tmp_path)
    assert sorted(chunk.box for chunk in stored["m.x"].chunks) == [(at, (2, 3)) for at in boxes]
    wanted = x[tuple(slice(*ends) for ends in ranges)]
    into = torch.full_like(wanted, -1)
    read_tensors([ChunkRead(name="m.x", ranges=ranges, into=into)], stored)
    assert torch.equal(into, wanted)
