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
import xxhash
from safetensors.torch import save as safetensors_bytes

from meshwright.executor.files import MANIFEST
from meshwright.executor.ranks import launch
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.store import DeviceId, Store, import_json
from scripts.fuzzing import ground
from scripts.fuzzing.mutations import json_case, mutated
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
    "tensors-00000.safetensors/x",
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
    name = rng.choice([*sorted(files), MANIFEST])
    how = rng.choice(("bytes", "tree", "tree", "gone", "other"))
    if how == "tree" and name == MANIFEST:
        files[name] = _forged(files[name], rng)
    elif how == "other":
        files[name] = files[rng.choice(sorted(files))]
    elif how == "gone":
        del files[name]
    else:
        files[name] = damaged(files[name], rng)
    at.mkdir()
    for own, data in files.items():
        (at / own).write_bytes(data)
    verb = rng.choice(("load_checkpoint", "load_checkpoint", "load_weights", "save_checkpoint"))

    def run() -> None:
        result, optimizer = model()
        before = {p: x.clone() for p, x in result.named_parameters()}
        try:
            getattr(result, verb)(at, *((optimizer,) if verb != "load_weights" else ()))
            if name != MANIFEST:
                after = dict(result.named_parameters())
                assert all(torch.equal(x, after[p]) for p, x in before.items()), "silently wrong"
        finally:
            assert not Path("exploited").exists(), "a file ran code"

    return f"{verb}: {how} of {name}", run


def _forged(data: bytes, rng: Random) -> bytes:
    """A manifest that says something else, half of the time with its right checksum."""
    tree = json.loads(data)
    del tree["format"], tree["xxh3_64"]
    part = rng.choice(("files", "tensors", "training"))
    tree[part] = mutated(tree[part], rng)
    body = json.dumps(tree[part] if rng.random() < 0.1 else tree).encode()[1:]
    checksum = xxhash.xxh3_64_hexdigest(body if rng.random() < 0.5 else data)
    return json.dumps({"format": 2, "xxh3_64": checksum}).encode()[:-1] + b",\n" + body


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
