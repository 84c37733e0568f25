"""Tensors of a checkpoint folder: what a rank holds and writes of each, how boxes are read, and
damage, which is told."""

import json
import math
import random
import threading
from collections.abc import Callable, Mapping
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import safetensors.torch
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from meshwright.executor.checkpoint.optimizer_state import collect
from meshwright.executor.errors import DamagedError, SavedError
from meshwright.executor.files import (
    MANIFEST,
    Manifest,
    StoredTensor,
    checksums,
    read_checkpoint,
    read_tensors,
    write_tensors,
)
from meshwright.executor.files.chunks import (
    Chunk,
    ChunkRead,
    LocalChunks,
    ReplicaWriters,
    local_chunks,
)

LARGE = checksums.BLOCK_BYTES // 4 + 1000  # elements: it is read in several parts
STATE = {
    "large": torch.arange(float(LARGE)), "small": torch.arange(24.0).view(4, 6),
    "transposed": torch.arange(24.0).view(4, 6).t(),
    "view": torch.arange(24.0)[3:9], "bytes": torch.arange(200, dtype=torch.uint8),
    "half": torch.arange(9).to(torch.bfloat16).view(3, 3),
    "truth": torch.tensor([True, False, True]), "scalar": torch.tensor(7),
    "odd": torch.tensor([1 + 2j], dtype=torch.complex128),  # which safetensors has no name for
    "empty": torch.empty(0, 3),
}  # fmt: skip


def write(folder: Path, state: dict[str, torch.Tensor] = STATE) -> dict[str, StoredTensor]:
    chunks = {f"model.{name}": LocalChunks.of(x) for name, x in state.items()}
    stored, files = write_tensors(chunks, folder, None)
    manifest = Manifest(files=files, tensors=stored, training={})
    (folder / MANIFEST).write_bytes(manifest.to_json())
    return stored


def read(folder: Path, state: dict[str, torch.Tensor] = STATE) -> dict[str, torch.Tensor]:
    into = {name: torch.empty_like(x) for name, x in state.items()}
    reads = [r for name, x in into.items() for r in LocalChunks.of(x).reads(f"model.{name}")]
    read_tensors(reads, stored_in(folder))
    return into


def stored_in(folder: Path) -> Mapping[str, StoredTensor]:
    return read_checkpoint(folder, "here", check_files=False).tensors


def test_what_was_written_is_read_by_us_and_by_safetensors(tmp_path: Path) -> None:
    write(tmp_path)
    back = read(tmp_path)
    assert all(torch.equal(back[name], x) for name, x in STATE.items())
    path = tmp_path / "tensors-00000.safetensors"
    theirs = safetensors.torch.load_file(path)
    plain = STATE.keys() - {"odd", "empty"}
    assert all(torch.equal(theirs[f"model.{name}"], STATE[name]) for name in plain)
    assert theirs["model.odd"].view(torch.complex128).tolist() == STATE["odd"].tolist()
    data = path.read_bytes()
    for x in stored_in(tmp_path).values():
        for chunk in x.chunks:
            part = data[chunk.start : chunk.start + x.length(chunk)]
            assert chunk.xxh3_64 == xxhash.xxh3_64_hexdigest(part)


def test_any_bit_that_flips_and_missing_bytes_are_told(tmp_path: Path) -> None:
    """Each with the tensor that it is part of."""
    write(tmp_path)
    path, draw = tmp_path / "tensors-00000.safetensors", random.Random(1)
    whole = path.read_bytes()
    stored = stored_in(tmp_path)
    for _ in range(30):
        name, x = draw.choice([(name, x) for name, x in sorted(stored.items()) if x.chunks])
        at = x.chunks[0].start + draw.randrange(x.length(x.chunks[0]))
        damaged = bytearray(whole)
        damaged[at] ^= 1 << draw.randrange(8)
        path.write_bytes(damaged)
        with pytest.raises(
            RuntimeError, match=rf"'{name}' in '.*tensors-00000\.safetensors' is damaged: its"
        ):
            read(tmp_path)
    path.write_bytes(whole[:-1])
    with pytest.raises(RuntimeError, match=rf"has {len(whole) - 1} bytes, and {len(whole)} were"):
        read(tmp_path)
    path.unlink()
    with pytest.raises(RuntimeError, match=r"the file has 0 bytes"):
        read(tmp_path)


def test_the_first_of_several_damaged_tensors_is_told(tmp_path: Path) -> None:
    """Whichever thread is first."""
    state = {f"t{k}": torch.full((LARGE,), float(k)) for k in range(4)}
    write(tmp_path, state)
    stored = stored_in(tmp_path)
    path = tmp_path / "tensors-00000.safetensors"
    data = bytearray(path.read_bytes())
    starts = sorted((x.chunks[0].start, x.length(x.chunks[0]), name) for name, x in stored.items())
    for at, length, _ in starts[1:]:
        data[at + length // 2] ^= 1
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


def test_a_box_of_another_layout(tmp_path: Path) -> None:
    write(tmp_path)
    stored = stored_in(tmp_path)
    for name in ("small", "transposed"):
        into = torch.full((2, 3), -1.0, dtype=torch.float64)
        read_tensors([ChunkRead(name=f"model.{name}", ranges=((1, 3), (0, 3)), into=into)], stored)
        assert torch.equal(into, STATE[name][1:3, 0:3].double())


def test_a_box_over_several_chunks(tmp_path: Path) -> None:
    x = torch.arange(24.0).view(4, 6)
    boxes = [(row, column) for row in (0, 2) for column in (0, 3)]
    chunks = tuple(Chunk(offset=at, local_offset=at, sizes=(2, 3)) for at in boxes)
    of_x = LocalChunks(shape=x.shape, local=x, chunks=chunks)
    stored, _ = write_tensors({"m.x": of_x}, tmp_path, None)
    names = set(safetensors.torch.load_file(tmp_path / "tensors-00000.safetensors"))
    assert names == {f"m.x[{a}:{a + 2},{b}:{b + 3}]" for a, b in boxes}
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


WRONG: dict[str, Callable[[Any], Any]] = {
    "a size": lambda x: x.update(shape=[4, 7]),
    "a size of text": lambda x: x.update(shape="46"),
    "a negative size": lambda x: x.update(shape=[-4, -6]),
    "no chunks": lambda x: x["chunks"].clear(),
    "a chunk twice": lambda x: x["chunks"].append(x["chunks"][0]),
    "a chunk outside": lambda x: x["chunks"][0].__setitem__(1, [1, 0]),
    "no dtype": lambda x: x.update(dtype="float33"),
    "another name of torch": lambda x: x.update(dtype="save"),
    "an offset": lambda x: x["chunks"][0].__setitem__(3, -1),
    "an offset of text": lambda x: x["chunks"][0].__setitem__(3, "1"),
    "a checksum": lambda x: x["chunks"][0].__setitem__(4, 5),
    "no such file": lambda x: x["chunks"][0].__setitem__(0, "other"),
    "nothing": lambda x: x.clear(),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_does_not_fit_together_is_told(tmp_path: Path, name: str) -> None:
    """In a manifest that was forged, with a checksum of its own."""
    write(tmp_path)
    forge(tmp_path, lambda tree: WRONG[name](tree["tensors"]["model.small"]))
    with pytest.raises(DamagedError, match=r"here: '.*manifest.json' is damaged.*load an earlier"):
        stored_in(tmp_path)


@pytest.mark.parametrize("name", ["../elsewhere", "link", "/etc/passwd"])
def test_no_name_leads_out_of_the_folder(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "at"
    folder.mkdir()
    write(folder)
    (tmp_path / "elsewhere").write_bytes(b"secret")
    (folder / "link").symlink_to(tmp_path / "elsewhere")
    forge(folder, lambda tree: tree["files"].update({name: {"bytes": 6}}))
    with pytest.raises(SavedError, match=r"manifest.json' names the file .*, which is"):
        stored_in(folder)


def forge(folder: Path, change: Callable[[Any], Any]) -> None:
    """Change a manifest, whose checksum is right again then."""
    tree = json.loads((folder / MANIFEST).read_bytes())
    change(tree)
    del tree["format"], tree["xxh3_64"]
    body = json.dumps(tree).encode()[1:]
    head = {"format": 2, "xxh3_64": xxhash.xxh3_64_hexdigest(body)}
    (folder / MANIFEST).write_bytes(json.dumps(head).encode()[:-1] + b",\n" + body)


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
