"""Rows of published measurements."""

import csv
import hashlib
from collections.abc import Mapping
from pathlib import Path

PUBLISHED = Path(__file__).with_name("published.csv")
PUBLISHED_FP8 = Path(__file__).with_name("published_fp8.csv")  # on which nothing is fitted
PUBLISHED_LATER = Path(__file__).with_name("published_later.csv")  # halved by `fitted_by_hash`
PUBLISHED_MEMORY = Path(__file__).with_name("published_memory.csv")  # on which nothing is fitted
OUT_OF_MEMORY = Path(__file__).with_name("out_of_memory.csv")  # it ended them


def published_rows(source: str = "", folder: Path | None = None) -> list[dict[str, str]]:
    """Rows whose source contains a text, of `published.csv` or of a folder's `step_times.csv`."""
    return _read(folder / "step_times.csv" if folder else PUBLISHED, source)


def fp8_rows(source: str = "") -> list[dict[str, str]]:
    """Rows of steps with products in 8 or 4 bits, of dense models."""
    return _read(PUBLISHED_FP8, source)


def later_rows(source: str = "") -> list[dict[str, str]]:
    """Rows that were found after the first fits, dense models and mixtures of experts."""
    return _read(PUBLISHED_LATER, source)


def memory_rows(*, by_allocator: bool) -> list[dict[str, str]]:
    """Rows of peak memory: read from torch's allocator (allocated, active or reserved), or by
    nvidia-smi and unknown means, with the context of the driver; `mem_metric` says which."""
    rows = _read(PUBLISHED_MEMORY, "")
    return [row for row in rows if row["mem_metric"].startswith("torch") == by_allocator]


def fitted_by_hash(row: Mapping[str, str]) -> bool:
    """Whether constants may be fitted on a later row: half of the models of all sources, and of
    the host's work, of which one source of one model tells, half of the layouts."""
    name = f"{row['source']}|{row['model']}"
    if "tiny GPT" in row["source"]:
        name += "".join(f"|{row[column]}" for column in ("gpu", "tp", "pp", "vp"))
    return hashlib.sha256(name.encode()).digest()[0] % 2 == 0


def out_of_memory_rows() -> list[dict[str, str]]:
    """Runs that were published to have run out of memory."""
    return _read(OUT_OF_MEMORY, "")


def _read(path: Path, source: str) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if source in row["source"]]
