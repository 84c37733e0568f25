"""`meshwright catalog`: the devices and nodes that are known, and where each number is from."""

from __future__ import annotations

import argparse
from collections import Counter
from typing import Any

from meshwright.planner.document import Document, Part, Table
from meshwright.profiles.hardware import catalog_reader
from meshwright.shell.terminal import Answer

Listing = tuple[Any, Document]  # data, text


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("name", nargs="?", help="a device or node: each of its numbers")


def run(args: argparse.Namespace) -> Answer:
    data, text = entry(args.name) if args.name else entries()
    return Answer(data=lambda: data, text=lambda: text)


def entries() -> Listing:
    """All entries, a row each."""
    rows = [_row(catalog_reader.read_entry(name)) for name in catalog_reader.catalog_names()]
    parts: list[Part] = []
    for kind in ("device", "node"):
        shown = [row for row in rows if row["entry"] == kind]
        heads = [key for key in shown[0] if key not in ("entry", "numbers")]
        cells = [[*(str(row[key]) for key in heads), _counted(row["numbers"])] for row in shown]
        parts += [f"{kind.capitalize()}s", Table(heads=[*heads, "numbers"], rows=cells), ""]
    last = "`meshwright catalog NAME` lists the numbers and sources."
    return rows, Document((*parts, last))


# the rates that training takes, the one shown first where a device has it
_PEAKS = tuple(f"peak_flops.{precision}" for precision in ("bf16", "fp16", "fp32"))


def _row(entry: catalog_reader.Entry) -> dict[str, Any]:
    kinds = Counter(quantity.kind for quantity in entry.quantities.values())
    numbers = {kind: kinds[kind] for kind in catalog_reader.SOURCE_KINDS if kinds[kind]}
    row: dict[str, Any] = {key: entry.texts[key] for key in ("entry", "name", "title")}
    if entry.is_node:
        row |= {
            "device": entry.texts["device"],
            "devices": int(entry.value("devices_per_node")),
            "intra": entry.texts["intra_link.name"],
            "inter": entry.texts["inter_link.name"],
        }
    else:
        rates = {key: q.text for key, q in entry.quantities.items() if key.startswith("peak_")}
        row |= {
            "memory": entry.quantities["memory"].text,
            "peak": next(f"{rates[key]} {key[-4:]}" for key in _PEAKS if key in rates),
            "usual_node": entry.texts["usual_node"],
        }
    return row | {"numbers": numbers}


def _counted(numbers: dict[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in numbers.items())


def entry(name: str) -> Listing:
    """One entry: each number, as written, with its source. Raises ValueError for unknown names."""
    texts, quantities = (read := catalog_reader.read_entry(name)).texts, read.quantities
    heads = ("key", "value", "kind", "date", "source")
    cells = [[key, q.text, q.kind, q.date, q.source] for key, q in quantities.items()]
    plain: list[str] = []
    for key, text, kind, date, source in cells:
        plain += [f"  {key} = {text}", f"    {kind}, {date}: {source}"]
    numbers = Table(heads=heads, rows=cells, plain=plain)
    rows = [dict(zip(heads, row, strict=True)) for row in cells]
    data = {"name": name, "texts": dict(texts), "quantities": rows}
    return data, Document((f"{name}: {texts['title']}", numbers))
