"""Rows of published measurements."""

import csv
from pathlib import Path

PUBLISHED = Path(__file__).with_name("published.csv")


def published_rows(source: str = "", folder: Path | None = None) -> list[dict[str, str]]:
    """Rows whose source contains a text, of `published.csv` or of a folder's `step_times.csv`."""
    path = folder / "step_times.csv" if folder else PUBLISHED
    with path.open(encoding="utf-8", newline="") as file:
        return [row for row in csv.DictReader(file) if source in row["source"]]
