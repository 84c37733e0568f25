"""Lines and tables for a reader, which plain text aligns and a terminal may draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

MAX_CELL = 36  # characters of a table's second column in plain text


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Rows of cells under their heads; `plain` are its lines where plain text has other words."""

    heads: Sequence[str]
    rows: Sequence[Sequence[str]]
    plain: Sequence[str] = ()

    def __str__(self) -> str:
        return "\n".join(self.plain or table((self.heads, *self.rows)))


Part = str | Table


@dataclass(frozen=True, slots=True)
class Document:
    """Lines and tables, from top to bottom."""

    parts: tuple[Part, ...]

    @staticmethod
    def of(*sections: Sequence[Part]) -> Document:
        """Sections with a line between them; those without a part are left out."""
        parts: list[Part] = []
        for section in filter(None, sections):
            parts += ["", *section] if parts else section
        return Document(tuple(parts))

    def __str__(self) -> str:
        return "\n".join(map(str, self.parts))


def table(rows: Sequence[Sequence[str]]) -> list[str]:
    """Columns aligned; the second one shortened."""
    rows = [
        [
            cell if i != 1 or len(cell) <= MAX_CELL else cell[: MAX_CELL - 3] + "..."
            for i, cell in enumerate(row)
        ]
        for row in rows
    ]
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  " + "  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
