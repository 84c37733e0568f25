"""The cells of tables that others measured: rows of a CSV file, numbers in range."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from meshwright.profiles.inputs import MeshwrightError, read_text, shown
from meshwright.profiles.inputs.limits import LEAST_NUMBER, MOST_NUMBER


def csv_rows(place: Path, needed: tuple[str, ...]) -> Iterator[tuple[int, Mapping[str, str]]]:
    """Line number and cells of every row."""
    reader = csv.DictReader(io.StringIO(read_text(place), newline=""), strict=True)
    try:
        missing = [name for name in needed if name not in (reader.fieldnames or ())]
        if missing:
            raise MeshwrightError(
                f"no column {', '.join(missing)}",
                place=f"{place}:1",
                legal=needed,
                way_out="add the columns, empty where they may be",
            )
        for cells in reader:
            for name in needed:
                if cells[name] is None:
                    raise MeshwrightError(
                        f"the row ends before {name}",
                        place=f"{place}:{reader.line_num}",
                        legal=f"{len(needed)} cells or more",
                        way_out="fill the row up",
                    )
            yield reader.line_num, cells
    except csv.Error as error:
        where = f"{place}:{reader.line_num + 1}"
        raise MeshwrightError(
            f"not a row of a CSV file in UTF-8 ({error})",
            place=where,
            legal="a row as the csv module writes it",
            way_out="correct the row",
        ) from None


def number(text: str, what: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not LEAST_NUMBER <= value <= MOST_NUMBER:
        legal = f"a finite number above 0, {LEAST_NUMBER:g} to {MOST_NUMBER:g}"
        raise MeshwrightError(f" is {shown(text)}", place=what, legal=legal)
    return value


def whole(text: str, what: str) -> int:
    if not re.fullmatch("[0-9]{1,15}", text) or int(text) < 1:
        legal = "a whole number, 1 or more, of up to 15 digits"
        raise MeshwrightError(f" is {shown(text)}", place=what, legal=legal)
    return int(text)
