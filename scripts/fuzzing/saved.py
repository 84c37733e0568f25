"""Cases of what runs leave and find: checkpoints, weights, the cache, the environment of ranks."""

from __future__ import annotations

import io
import json
import os
import pickle
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save as safetensors_bytes

from meshwright.executor.ranks import launch
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.store import DeviceId, Store, import_json
from scripts.fuzzing import ground
from scripts.fuzzing.mutations import json_case, mutated, value
from tests.helpers.tiny import net, planned

Case = tuple[str, Callable[[], object]]
NAMES = (
    "../x",
    "/etc/passwd",
    "..",
    "",
    "no",
    "a\0b",
    "x" * 300,
    "\ud800",
    "__0_0.distcp/x",
    3,
    None,
)
DEVICE = DeviceId(name="cpu", driver="AVX2", torch="2")


class Runs:
    """Pickled, a command."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("exploited",)


@cache
def model() -> tuple[Any, torch.optim.Optimizer]:
    """A parallel model and its optimizer, with states. No backward has run: autograd's threads
    outlive no fork."""
    result = planned(net(), profile=False)
    optimizer = torch.optim.AdamW(result.parameters(), foreach=False)
    for p in result.parameters():
        p.grad = torch.ones_like(p)
    optimizer.step()
    return result, optimizer


@cache
def saved() -> dict[str, bytes]:
    """The files of a checkpoint, by name."""
    result, optimizer = model()
    with TemporaryDirectory() as folder:
        result.save_checkpoint(Path(folder) / "saved", optimizer)
        return {path.name: path.read_bytes() for path in (Path(folder) / "saved").iterdir()}


@cache
def cached() -> bytes:
    """A file of the cache with measurements in it."""
    with TemporaryDirectory() as folder:
        export, store = Path(folder) / "p.json", Store(Path(folder) / "cache")
        export.write_text(json.dumps(ground.PROFILE))
        store.add(import_json(export, accepts=lambda name: True, expected="cpu"))
        return store.file_of(DEVICE).read_bytes()


def damaged(data: bytes, rng: Random) -> bytes:
    """Bytes with something wrong in them."""
    at, length = rng.randrange(len(data) + 1), rng.choice((1, 8, 512, 4096))
    changes: tuple[Callable[[], bytes], ...] = (
        lambda: data[:at],
        lambda: data[:at] + bytes([data[at] ^ 1 << rng.randrange(8)]) + data[at + 1 :],
        lambda: data[:at] + bytes(length) + data[at + length :],
        lambda: data[:at] + rng.randbytes(length) + data[at + length :],
        lambda: data[:at] + data[at + length :],
        lambda: data + data[:length],
        lambda: pickle.dumps(Runs()),
        lambda: b"",
    )
    return rng.choice(changes)() if at < len(data) else b""


def checkpoint(rng: Random, folder: Path) -> Case:
    """A checkpoint's folder with something wrong in it, loaded whole or for its weights."""
    files, at = dict(saved()), folder / "saved"
    listed = rng.random() < 0.5
    name = rng.choice([*sorted(files), ".metadata", "training.pt"])
    how = rng.choice(("bytes", "tree", "tree", "gone", "other"))
    if how == "tree" and name in (".metadata", "training.pt", "manifest.json"):
        files[name] = _TREES[name](files[name], rng)
    elif how == "other":
        files[name] = files[rng.choice(sorted(files))]
    elif how == "gone":
        del files[name]
    else:
        files[name] = damaged(files[name], rng)
    if not listed:
        files.pop("manifest.json", None)
    at.mkdir()
    for own, data in files.items():
        (at / own).write_bytes(data)
    verb = rng.choice(("load_checkpoint", "load_checkpoint", "load_weights", "save_checkpoint"))

    def run() -> None:
        result, optimizer = model()
        before = {p: x.clone() for p, x in result.named_parameters()}
        try:
            getattr(result, verb)(at, *((optimizer,) if verb != "load_weights" else ()))
            if listed and name != "manifest.json":
                after = dict(result.named_parameters())
                assert all(torch.equal(x, after[p]) for p, x in before.items()), "silently wrong"
        finally:
            assert not Path("exploited").exists(), "a file ran code"

    return f"{verb}: {how} of {name}, {'listed' if listed else 'no manifest'}", run


def _metadata(data: bytes, rng: Random) -> bytes:
    """Metadata that says something else of its chunks."""
    tree = pickle.loads(data)
    places = list(tree.storage_data.items())
    for _ in range(rng.choice((1, 1, 2))):
        index, place = rng.choice(places)
        stored = tree.state_dict_metadata[index.fqn]
        field = rng.choice(("relative_path", "offset", "length", "sizes", "chunk", "whole", "drop"))
        if field in ("offset", "length"):
            setattr(place, field, value(rng))
        elif field == "relative_path":
            place.relative_path = rng.choice(NAMES)
        elif field == "drop":
            tree.storage_data.pop(index, None)
        elif field == "whole":
            tree.storage_data = value(rng)
        else:
            holder = stored.chunks[0] if field == "chunk" and stored.chunks else stored
            found = rng.choice((torch.Size([10**9] * 3), torch.Size([]), value(rng)))
            setattr(holder, "sizes" if holder is not stored else "size", found)
        if not isinstance(tree.storage_data, dict):
            break
    return pickle.dumps(tree)


def _notes(data: bytes, rng: Random) -> bytes:
    file = io.BytesIO()
    torch.save(mutated(torch.load(io.BytesIO(data), weights_only=True), rng), file)
    return file.getvalue()


_TREES: dict[str, Callable[[bytes, Random], bytes]] = {
    ".metadata": _metadata,
    "training.pt": _notes,
    "manifest.json": lambda data, rng: json_case(json.loads(data), rng),
}


def weights(rng: Random, folder: Path) -> Case:
    """Files of weights: safetensors with an index, or of `torch.save`."""
    result, _ = model()
    state = {name: x.detach().clone() for name, x in result.named_parameters()}
    data, kind = safetensors_bytes(state), rng.choice(("safetensors", "index", "bin"))
    if kind == "index":
        path = folder / "model.safetensors.index.json"
        names = {name: "a.safetensors" for name in state}
        if rng.random() < 0.5:
            names[rng.choice(sorted(names))] = rng.choice(NAMES)  # type: ignore[assignment]
        path.write_bytes(json_case({"weight_map": names}, rng))
        (folder / "a.safetensors").write_bytes(data)
        path = folder
    elif kind == "bin":
        path = folder / "a.bin"
        file = io.BytesIO()
        torch.save(mutated(dict(state), rng) if rng.random() < 0.5 else state, file)
        path.write_bytes(damaged(file.getvalue(), rng) if rng.random() < 0.5 else file.getvalue())
    else:
        path = folder / "a.safetensors"
        size = int.from_bytes(data[:8], "little")
        head = json_case(json.loads(data[8 : 8 + size]), rng)
        count = rng.choice((len(head), len(head), 2**60, 0))
        other = count.to_bytes(8, "little") + head + data[8 + size :]
        path.write_bytes(other if rng.random() < 0.6 else damaged(data, rng))

    def run() -> None:
        try:
            result.load_weights(path)
        finally:
            assert not Path("exploited").exists(), "a file ran code"

    return kind, run


def cache_file(rng: Random, folder: Path) -> Case:
    """A file of the cache with something wrong in it, read and written."""
    store = Store(folder, lock_timeout_s=0.2)
    path = store.file_of(DEVICE)
    path.write_bytes(cached())
    said = rng.choice(("bytes", "value", "beside", "folder", "loop"))
    if said == "bytes":
        path.write_bytes(damaged(cached(), rng))
    elif said == "value":
        path.write_bytes(json_case(json.loads(cached()), rng))
    elif said == "beside":
        Path(f"{path}.lock").write_bytes(rng.randbytes(rng.choice((0, 32, 5000))))
    else:
        path.unlink()
        path.mkdir() if said == "folder" else path.symlink_to(path)

    def run() -> None:
        with suppress(OSError):  # what it says where the file can't be had
            read = store.read(DEVICE)
            store.devices()
            store.add(read)
            store.read(DEVICE)

    return said, run


NUMBERS = ("0", "1", "2", "-1", "", "x", "1.5", "9" * 30, "9" * 5000, " 1", "٣", "0x1", "70000")
VARIABLES: dict[str, tuple[str, ...]] = {
    "RANK": NUMBERS,
    "WORLD_SIZE": NUMBERS,
    "LOCAL_RANK": NUMBERS,
    "LOCAL_WORLD_SIZE": NUMBERS,
    "MASTER_PORT": (*NUMBERS, "65536", "22"),
    "MASTER_ADDR": ("", "localhost", "127.0.0.1", "..", "a" * 300, "ä..", "[::1]", "no host"),
    "MESHWRIGHT_TIMEOUT_S": ("0.5", "0", "-1", "x", "nan", "inf", "1e400", ""),
}


def environment(rng: Random, folder: Path) -> Case:
    """The environment of a rank, with nonsense in it."""
    given = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    given["MESHWRIGHT_TIMEOUT_S"] = "0.5"
    for name in rng.sample(sorted(VARIABLES), rng.choice((1, 1, 2, 3))):
        given[name] = rng.choice(VARIABLES[name])
    if rng.random() < 0.1:
        del given[rng.choice(sorted(given))]

    def run() -> None:
        for name in VARIABLES:
            os.environ.pop(name, None)
        os.environ.update(given)
        if rng.random() < 0.5:
            Cluster.detect()
        launch.start("gloo")

    return str({name: text[:40] for name, text in given.items()}), run
