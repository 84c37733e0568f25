"""What checksums cost a checkpoint: reads and writes with and without them, in turns in one run.

    python -m scripts.bench_checkpoint --folder /tmp/bench --mib 1024

The tensors are as those of a small language model and its optimizer. Files are loaded from the page
cache, where checksums cost most beside the rest, and from the storage, as after a restart: before
each of these runs the files' pages are given up. `--pairs` runs of each kind are taken in turns. A
ratio is that of two runs beside each other; the median of them is printed, and the quarters around
it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import safetensors.torch
import torch

from meshwright.executor.files import LocalChunks, checksums, read_tensors, write_tensors
from meshwright.executor.files import tensors as tensor_files

WIDTH = 1024


def tensors(mib: int) -> dict[str, torch.Tensor]:
    """Layers of a transformer of `WIDTH`, as many as fit, behind an embedding."""
    found = {"embedding": torch.randn(16 * WIDTH, WIDTH)}
    shapes = {"qkv": (3 * WIDTH, WIDTH), "up": (4 * WIDTH, WIDTH), "norm": (WIDTH,), "bias": (8,)}
    layer = 0
    while sum(x.nbytes for x in found.values()) < mib * 2**20:
        found |= {f"layers.{layer}.{name}": torch.randn(shape) for name, shape in shapes.items()}
        layer += 1
    return found


def timed(run: Callable[[], object]) -> tuple[float, float]:
    """Seconds on the clock and of the CPUs."""
    clock, cpu = time.perf_counter(), time.process_time()
    run()
    return time.perf_counter() - clock, time.process_time() - cpu


def give_up_pages(folder: Path) -> None:
    """Have the next reads of a folder's files come from the storage, where it is not memory."""
    for path in folder.iterdir():
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def nothing() -> None:
    pass


def compare(
    label: str,
    runs: Mapping[str, Callable[[], object]],
    pairs: int,
    size: int,
    before: Callable[[], object] = nothing,
) -> None:
    """Print, for each kind of run, its speed and its ratio to the first kind; `before` is called
    before each, and not timed."""
    found: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for k in range(pairs + 1):
        order = list(runs) if k % 2 else list(runs)[::-1]
        for name in order:
            before()
            result = timed(runs[name])
            if k:  # the first warms up
                found[name].append(result)
    base = next(iter(runs))
    for name, results in found.items():
        speed = size / statistics.median(clock for clock, _ in results) / 1e9
        said = []
        for unit, what in enumerate(("clock", "CPU")):
            ratios = [a[unit] / b[unit] for a, b in zip(results, found[base], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            said.append(f"{what} × {middle:.3f} ({low:.3f} to {high:.3f})")
        print(f"{label}, {name}: {speed:.2f} GB/s, {', '.join(said)}")


class Unsummed:
    """In place of xxhash: sums nothing up."""

    def update(self, data: object) -> None:
        pass

    def hexdigest(self) -> Unsummed:
        return self

    def __ne__(self, other: object) -> bool:  # no checksum differs from it
        return False


def unsummed(run: Callable[[], object]) -> Callable[[], None]:
    """The same without checksums."""

    def running() -> None:
        real = checksums.xxhash
        checksums.xxhash = SimpleNamespace(xxh3_64=Unsummed)  # type: ignore[assignment]
        try:
            run()
        finally:
            checksums.xxhash = real

    return running


def in_one_thread(run: Callable[[], object]) -> Callable[[], None]:
    """The same, read by one thread."""

    def running() -> None:
        real = tensor_files.READERS
        tensor_files.READERS = 1
        try:
            run()
        finally:
            tensor_files.READERS = real

    return running


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", type=Path, required=True, help="made, and removed at the end")
    parser.add_argument("--mib", type=int, default=1024)
    parser.add_argument("--pairs", type=int, default=9)
    chosen = parser.parse_args()
    given = tensors(chosen.mib)
    size = sum(x.nbytes for x in given.values())
    chunks = {name: LocalChunks.of(x) for name, x in given.items()}
    chosen.folder.mkdir(parents=True)
    try:

        def write() -> None:
            write_tensors(chunks, chosen.folder, None)

        compare("save", {"without checksums": unsummed(write), "with": write}, chosen.pairs, size)
        stored, _ = write_tensors(chunks, chosen.folder, None)
        into = {name: torch.empty_like(x) for name, x in given.items()}
        reads = [read for name, x in into.items() for read in LocalChunks.of(x).reads(name)]

        def read() -> None:
            read_tensors(reads, stored)

        def theirs() -> None:
            (path,) = chosen.folder.iterdir()
            for name, x in safetensors.torch.load_file(path).items():
                into[name].copy_(x)

        runs = {
            "without checksums": unsummed(read),
            "with": read,
            "without, in one thread": in_one_thread(unsummed(read)),
            "safetensors' reader, unverified": theirs,
        }
        compare("load", runs, chosen.pairs, size)
        from_storage = partial(give_up_pages, chosen.folder)
        compare("load from the storage", runs, chosen.pairs, size, from_storage)
        for x in into.values():
            x.zero_()
        read_tensors(reads, stored)
        wrong = [name for name, x in given.items() if not torch.equal(x, into[name])]
        if wrong:
            raise SystemExit(f"not read as written: {wrong}")
    finally:
        shutil.rmtree(chosen.folder)


if __name__ == "__main__":
    main()
