"""Tensors of a checkpoint folder: what a rank holds and writes of each, how boxes are read, and the
metadata, of which nothing runs, and whose damage is told."""

import math
import os
import pickle
import random
import threading
from collections.abc import Callable
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.checkpoint import metadata as upstream
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from meshwright.executor.checkpoint.optimizer_state import collect
from meshwright.executor.checkpoint.weights import load_weights
from meshwright.executor.files import checksums
from meshwright.executor.files.chunks import (
    Chunk,
    ChunkRead,
    LocalChunks,
    ReplicaWriters,
    local_chunks,
)
from meshwright.executor.files.dcp_metadata import read_metadata
from meshwright.executor.files.dcp_reads import read_tensors
from meshwright.executor.files.dcp_writes import write_tensors
from tests.executor.checkpoint.checkpoint_runs import start

LARGE = checksums.BLOCK_BYTES // 4 + 1000  # elements: it is read in several parts
STATE = {
    "large": torch.arange(float(LARGE)), "small": torch.arange(24.0).view(4, 6),
    "transposed": torch.arange(24.0).view(4, 6).t(),
    "view": torch.arange(24.0)[3:9], "bytes": torch.arange(200, dtype=torch.uint8),
    "half": torch.arange(9).to(torch.bfloat16).view(3, 3),
    "truth": torch.tensor([True, False, True]), "scalar": torch.tensor(7),
}  # fmt: skip


def write(folder: Path, state: dict[str, torch.Tensor] = STATE) -> dict[str, int]:
    chunks = {name: LocalChunks.of(x) for name, x in state.items()}
    return write_tensors({"model": chunks}, folder, None)


def read(folder: Path, state: dict[str, torch.Tensor] = STATE) -> dict[str, torch.Tensor]:
    into = {name: torch.empty_like(x) for name, x in state.items()}
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


def test_any_bit_that_flips_and_missing_bytes_are_told(tmp_path: Path) -> None:
    """Each with the tensor that it is part of."""
    write(tmp_path)
    path, draw = tmp_path / "__0_0.distcp", random.Random(1)
    whole = path.read_bytes()
    stored = read_metadata(tmp_path)
    for _ in range(30):
        name, x = draw.choice(sorted(stored.items()))  # most bits are of the large one
        at = x.chunks[0].start + draw.randrange(x.chunks[0].length)
        damaged = bytearray(whole)
        damaged[at] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(RuntimeError, match=rf"'{name}' in '.*__0_0\.distcp' is damaged: its"):
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
    write(tmp_path, state)
    stored = read_metadata(tmp_path)
    path = tmp_path / "__0_0.distcp"
    data = bytearray(path.read_bytes())
    starts = sorted((x.chunks[0].start, x.chunks[0].length, name) for name, x in stored.items())
    for at, length, _ in starts[1:3]:
        data[at + length // 2] ^= 1
    data[starts[3][0] : starts[3][0] + 64] = bytes(64)  # no archive
    path.write_bytes(data)
    threads = threading.active_count()
    with pytest.raises(RuntimeError, match=rf"'{starts[1][2]}' in '.*' is damaged: its checksum"):
        read(tmp_path, state)
    assert threading.active_count() == threads


def test_threads_do_not_share_a_buffer(tmp_path: Path) -> None:
    state = {f"t{k}": torch.randn(700, 2000).t() for k in range(5)}  # can't be read in place
    write(tmp_path, state)
    found = read(tmp_path, {name: x.contiguous() for name, x in state.items()})
    assert all(torch.equal(found[name], x) for name, x in state.items())


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


def test_a_box_of_another_layout(tmp_path: Path) -> None:
    write(tmp_path)
    stored = read_metadata(tmp_path)
    for name in ("small", "transposed"):
        into = torch.full((2, 3), -1.0, dtype=torch.float64)
        read_tensors([ChunkRead(name=f"model.{name}", ranges=((1, 3), (0, 3)), into=into)], stored)
        assert torch.equal(into, STATE[name][1:3, 0:3].double())


def test_a_box_over_several_chunks(tmp_path: Path) -> None:
    x = torch.arange(24.0).view(4, 6)
    boxes = [(row, column) for row in (0, 2) for column in (0, 3)]
    chunks = tuple(Chunk(offset=at, local_offset=at, sizes=(2, 3)) for at in boxes)
    write_tensors({"m": {"x": LocalChunks(shape=x.shape, local=x, chunks=chunks)}}, tmp_path, None)
    stored = read_metadata(tmp_path)
    assert sorted(chunk.box for chunk in stored["m.x"].chunks) == [(at, (2, 3)) for at in boxes]
    for ranges in (((1, 3), (2, 5)), ((0, 4), (0, 6)), ((2, 4), (3, 6)), ((3, 4), (0, 1))):
        wanted = x[tuple(slice(*ends) for ends in ranges)]
        into = torch.full_like(wanted, -1)
        read_tensors([ChunkRead(name="m.x", ranges=ranges, into=into)], stored)
        assert torch.equal(into, wanted)


@st.composite
def layouts(draw: st.DrawFn) -> tuple[tuple[int, ...], list[Placement], tuple[int, ...]]:
    """A shape, and placements on a mesh of up to three axes. Strided shards are even ones, on every
    rank."""
    shape = draw(st.lists(st.integers(1, 24), min_size=0, max_size=3))
    mesh = draw(st.lists(st.integers(1, 4), min_size=1, max_size=3))
    left = list(shape)  # of each dim, on the first rank
    even = [True] * len(shape)  # as on all others
    placements: list[Placement] = []
    for ranks in mesh:
        kinds: list[Placement] = [Replicate()]
        for dim, size in enumerate(left):
            kinds.append(Shard(dim))
            splits = [f for f in (2, 3, 4) if even[dim] and size % (f * ranks) == 0]
            kinds += [_StridedShard(dim, split_factor=f) for f in splits]
        chosen = draw(st.sampled_from(kinds))
        placements.append(chosen)
        if not isinstance(chosen, Replicate):
            even[chosen.dim] &= left[chosen.dim] % ranks == 0
            left[chosen.dim] = -(-left[chosen.dim] // ranks)
    return tuple(shape), placements, tuple(mesh)


@settings(max_examples=200, deadline=None)
@given(layouts())
def test_boxes_are_what_torch_gives_each_rank(
    layout: tuple[tuple[int, ...], list[Placement], tuple[int, ...]],
) -> None:
    shape, placements, mesh = layout
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    seen = torch.zeros(shape, dtype=torch.int64)
    for coordinate in product(*(range(n) for n in mesh)):
        local = whole
        for placement, ranks, rank in zip(placements, mesh, coordinate, strict=True):
            if isinstance(placement, (Shard, _StridedShard)):
                local = placement._split_tensor(local, ranks, with_padding=False)[0][rank]
        held = local_chunks(shape, placements, mesh, coordinate)
        assert sum(torch.Size(box.sizes).numel() for box in held) == local.numel()
        for box in held:
            there = tuple(slice(a, a + n) for a, n in zip(box.offset, box.sizes, strict=True))
            here = tuple(slice(a, a + n) for a, n in zip(box.local_offset, box.sizes, strict=True))
            assert torch.equal(whole[there], local[here])
            seen[there] += 1
    copies = 1
    for placement, ranks in zip(placements, mesh, strict=True):
        copies *= ranks if isinstance(placement, Replicate) else 1
    assert bool((seen == copies).all())


def _mesh(shape: tuple[int, ...], coordinate: tuple[int, ...]) -> Any:
    ranks = torch.arange(5, 5 + math.prod(shape)).view(shape)
    return SimpleNamespace(
        shape=shape, ndim=len(shape), mesh=ranks, get_coordinate=lambda: coordinate
    )


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(1, 3), min_size=1, max_size=3).map(tuple),
    st.lists(st.integers(1, 1000), min_size=1, max_size=30),
)
def test_one_replica_writes_each_tensor_and_none_much_more(
    shape: tuple[int, ...], sizes: list[int]
) -> None:
    tensors = [torch.empty(size, device="meta") for size in sizes]
    written = []
    for rank, coordinate in enumerate(product(*(range(n) for n in shape)), 5):
        writers, mesh = ReplicaWriters(), _mesh(shape, coordinate)
        chosen = [writers.choose(x, mesh) for x in tensors]
        written.append([replica.mine for replica in chosen])
        for replica in chosen:  # of which all ranks know the one
            assert (rank in replica.ranks(mesh)) == replica.mine
    assert all(sum(chosen) == 1 for chosen in zip(*written, strict=True))
    loads = [sum(n for n, mine in zip(sizes, own, strict=True) if mine) for own in written]
    assert max(loads) - min(loads) <= max(sizes)


def test_a_scalar_parameter_is_stored_like_any_other() -> None:
    """Its states have no dims, as counters have none; they go where it goes."""
    parameters = {"scale": nn.Parameter(torch.ones(())), "weight": nn.Parameter(torch.ones(3))}
    optimizer = torch.optim.AdamW(parameters.values())
    for p in parameters.values():
        p.grad = torch.ones_like(p)
    optimizer.step()
    tensors, notes = collect(optimizer, parameters, parameters)
    for fqn in ("scale", "weight"):
        assert set(tensors[fqn]) == {"exp_avg", "exp_avg_sq"}
        assert set(notes["values"][fqn]) == {"step"}


# --- metadata -------------------------------------------------------------------------------------


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


def test_no_code_runs(tmp_path: Path) -> None:
    marker, run = tmp_path / "ran", start("mlp", "alone")
    run.save(tmp_path / "at")
    (tmp_path / "at" / "manifest.json").unlink()  # an older checkpoint, or one that was forged
    for name, exploit in exploits(marker).items():
        (tmp_path / "at" / ".metadata").write_bytes(exploit)
        for load in (run.load, lambda path: load_weights(run.runtime, path)):
            with pytest.raises(RuntimeError, match=r"\.metadata' can't be read \(.*(names|loader)"):
                load(tmp_path / "at")
        assert not marker.exists(), name
    pickle.loads(exploits(marker)["a command"])  # which a reader without limits runs
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
