"""The catalog of hardware: every number with its source, kind and date."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from meshwright.profiles.hardware.catalog_reader import CATALOG_DIR, SOURCE_KINDS, Entry, read_entry
from scripts.site.markdown import cell, directive, table

FIRST = {
    "devices": "Devices: `--cluster NAME:COUNT` takes a device in its usual node.",
    "nodes": "Nodes: `--cluster NAME:DEVICES` takes whole nodes; links and hosts are theirs.",
}


def files() -> Iterator[tuple[str, str]]:
    """A page of devices and one of nodes."""
    names = sorted(file.stem for file in CATALOG_DIR.glob("*.json"))
    entries = {name: read_entry(name) for name in names}
    for page, nodes in (("devices", False), ("nodes", True)):
        of_page = {name: entry for name, entry in entries.items() if entry.is_node == nodes}
        parts = [f"# {page.capitalize()}\n", FIRST[page], "", _listed(of_page)]
        parts += [_shown(name, entry) for name, entry in of_page.items()]
        yield f"reference/catalog/{page}.md", "\n".join(parts)


def _listed(entries: dict[str, Entry]) -> str:
    rows = []
    for name, entry in entries.items():
        kinds = Counter(quantity.kind for quantity in entry.quantities.values())
        counts = [str(kinds[kind] or "") for kind in SOURCE_KINDS]
        rows.append([f"[{name}](#{_anchor(name)})", cell(entry.texts["title"]), *counts])
    return table(("name", "hardware", *SOURCE_KINDS), rows, SOURCE_KINDS)


def _anchor(name: str) -> str:
    return "hw-" + name.replace(".", "-")


def _shown(name: str, entry: Entry) -> str:
    texts = [[f"`{key}`", cell(text), "", "", ""] for key, text in entry.texts.items()]
    rows = [
        [f"`{key}`", cell(q.text), q.kind, q.date, cell(q.source)]
        for key, q in entry.quantities.items()
    ]
    numbers = table(("key", "value", "kind", "date", "source"), [*texts, *rows])
    title = cell(entry.texts["title"])
    return f"({_anchor(name)})=\n## {name}\n\n{title}\n\n" + directive(
        "dropdown", "Numbers", numbers
    )
