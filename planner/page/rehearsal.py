"""What a rehearsal found, beside what the price says: peaks, FLOPs and bytes of ranks, the step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.planner.page.cells import (
    Cell,
    Table,
    gib,
    number,
    scaled,
    sent,
    stage_words,
    time,
    words,
)

Row = Mapping[str, Any]


def rehearsed(found: Row) -> str:
    """What was rehearsed, and whether ranks agree."""
    ranks, wrong = found["ranks"], len(found["mismatches"])
    count = sum(row["stands_for"] for row in ranks.values())
    agree = f"{wrong:,} do not match" if wrong else "all match"
    return (
        f"{len(ranks):,} of {count:,} ranks, one of each kind, ran the plan's own step here on "
        f"tensors without values, in {time(found['seconds']).text}. Of their collectives, messages "
        f"and parts of a checkpoint {agree}."
    )


def ranks(found: Row, data: Row) -> Table:
    """A row of each rank that was rehearsed; the price is that of its device group."""
    groups, own = data["device_groups"], found["ranks"]
    kinds = list(dict.fromkeys(kind for row in own.values() for kind in row["peak_by_kind"]))
    rows = []
    for rank, row in sorted(own.items(), key=lambda item: int(item[0])):
        group = groups[row["group"]]
        priced = found["priced_bytes"][row["group"]] if found["priced_bytes"] else None
        rows.append([
            words(rank),
            number(row["stands_for"]),
            words(stage_words(group["stages"])),
            gib(row["peak_bytes"]),
            _known(gib, priced),
            scaled(sum(row["flops"].values()), "FLOP"),
            _known(lambda value: scaled(value, "FLOP"), group.get("flops")),
            _known(sent, _total(row.get("link_bytes"))),
            _known(sent, _total(group.get("sent_bytes"))),
            *(gib(row["peak_by_kind"].get(kind, 0)) for kind in kinds),
        ])  # fmt: skip
    heads = (
        "rank", "stands for", "device group", "peak", "priced", "FLOPs", "priced",
        "given to links", "priced", *kinds,
    )  # fmt: skip
    caption = "Ranks that were rehearsed: bytes of tensors at the peak, FLOPs and bytes of a step"
    return Table(caption=caption, heads=heads, rows=rows)


def step(found: Row) -> Table | None:
    """The price of the step beside a second estimate, of every operator that was rehearsed."""
    both = found.get("step", {})
    if not {"priced", "estimated"} <= set(both):
        return None
    priced, estimated = both["priced"], both["estimated"]
    names = list(dict.fromkeys([*priced, *estimated]))
    rows = [
        [
            words("the step" if name == "step_s" else name),
            *(_known(time, of.get(name)) for of in (priced, estimated)),
        ]
        for name in names
        if priced.get(name) or estimated.get(name)
    ]
    heads = ("of the busiest device group", "priced", "estimated from the rehearsal")
    return Table(caption="Seconds of a step", heads=heads, rows=rows)


def _total(parts: Mapping[str, float] | None) -> float | None:
    return None if parts is None else sum(parts.values())


def _known(cell: Any, value: float | None) -> Cell:
    return words("") if value is None else cell(value)
