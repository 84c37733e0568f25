"""Results of measurements as files, each with the command that made it: the documents' tables.

`scripts/recording/results/NAME.json` has a title, the `command`, `date`, `machine` with its
load at the end, torch's version, and tables: lists of rows, which are objects of the same keys.
"""

from __future__ import annotations

import datetime
import json
import os
import platform
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).with_name("results")
DIGITS = 6  # of numbers as they are kept


def record(
    name: str, command: str, *, title: str, note: str = "", **tables: Iterable[Mapping[str, Any]]
) -> Path:
    """Write a result's file anew; a `note` says what its columns are."""
    file = RESULTS / f"{name}.json"
    head = {
        "title": title,
        "note": note,
        "command": command,
        "date": datetime.date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores of {platform.machine()}",
        "torch": torch.__version__,
        "load": os.getloadavg()[0],
    }
    RESULTS.mkdir(exist_ok=True)
    rows = {key: [_rounded(row) for row in of] for key, of in tables.items()}
    file.write_text(json.dumps(head | rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return file


def _rounded(row: Mapping[str, Any]) -> dict[str, Any]:
    return {
        key: float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value
        for key, value in row.items()
    }


def recorded(name: str) -> dict[str, Any]:
    """The result that was written last."""
    found: dict[str, Any] = json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))
    return found
