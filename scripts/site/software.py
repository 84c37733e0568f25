"""Keys of other software beside our decisions, from the table that reads and writes them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator

from meshwright.planner.frameworks import FORMATS, Format
from scripts.site.markdown import table

SHOWN = 3  # keys of a cell


def files() -> Iterator[tuple[str, str]]:
    """What the page of other software includes."""
    names = sorted({name for kind in FORMATS.values() for name in kind.names})
    cells = {kind.name: _cells(kind) for kind in FORMATS.values()}
    heads = ["ours", *(f"{kind.name} {kind.version}" for kind in FORMATS.values())]
    rows = [[f"`{name}`", *(cells[kind][name] for kind in FORMATS)] for name in names]
    yield "generated/software.md", table(heads, rows)


def _cells(kind: Format) -> dict[str, str]:
    """The keys that say a decision, or how a script does."""
    keys: dict[str, list[str]] = defaultdict(list)
    for each in kind.table:
        for name in each.names:
            keys[name] += [key for key in each.keys if key not in keys[name]]
    said: dict[str, str] = defaultdict(str)
    for name, found in keys.items():
        more = f" and {len(found) - SHOWN} more" if len(found) > SHOWN else ""
        said[name] = ", ".join(f"`{key}`" for key in found[:SHOWN]) + more
    for name, how in kind.by_script.items():
        said[name] = f"by the script: {how}"
    return said
