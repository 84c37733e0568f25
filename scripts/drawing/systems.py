"""Tables of docs/systems/: a row for each system, and the index that lists all of them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "docs" / "systems"
FAMILIES = ("data", "zero", "tensor", "context", "pipeline", "experts", "memory", "planners")
COLUMNS = ("system", "paper", "here", "as", "volume", "memory", "bubble")
HERE = ("yes", "other form", "no")
BEGIN, END = "<!-- the table -->", "<!-- end of the table -->"


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """A row: the page that it is on, and its cells by column; planners have no costs."""

    family: str
    cells: dict[str, str]

    @property
    def name(self) -> str:
        return self.cells["system"]

    @property
    def here(self) -> str:
        """One of `HERE`."""
        return self.cells["here"]


def systems(family: str) -> list[System]:
    """The rows of a page's table of systems. Raises ValueError where it is none."""
    text = (FOLDER / f"{family}.md").read_text(encoding="utf-8")
    rows = [*_rows(text)]
    if not rows or len(rows[0]) != len(COLUMNS) or tuple(rows[0][:4]) != COLUMNS[:4]:
        raise ValueError(f"docs/systems/{family}.md: its first table has columns {COLUMNS}")
    names = rows[0]
    return [System(family=family, cells=dict(zip(names, row, strict=True))) for row in rows[2:]]


def _rows(text: str) -> Iterator[list[str]]:
    """Cells of the first table of a page."""
    _, _, table = text.partition("\n| ")
    for line in f"| {table}".splitlines():
        if not line.startswith("|"):
            return
        yield [cell.strip() for cell in line.strip("|").split("|")]


def with_table(index: str) -> str:
    """The index with the rows of all pages."""
    before, _, rest = index.partition(BEGIN)
    _, _, after = rest.partition(END)
    lines = ["| system | paper | here | as | volume · memory · bubble |", "|---|---|---|---|---|"]
    for family in FAMILIES:
        for system in systems(family):
            cells = system.cells
            costs = " · ".join(cells.get(name) or "–" for name in COLUMNS[4:])
            linked = f"[{system.name}]({family}.md)"
            lines.append(
                f"| {linked} | {cells['paper']} | {system.here} | {cells['as']} | {costs} |"
            )
    return "\n".join([f"{before}{BEGIN}", "", *lines, "", f"{END}{after}"])
