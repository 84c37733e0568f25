"""The tables of the page: the numbers of its charts, as the report's data has them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from meshwright.planner.page.cells import (
    Cell,
    Table,
    gib,
    number,
    scaled,
    sent,
    share,
    stage_words,
    time,
    words,
)

Row = Mapping[str, Any]


def tables(data: Row) -> dict[str, Table]:
    """Tables by the view they are in."""
    found = {
        "stages": stages(data),
        "memory": memory(data),
        "components": components(data),
        "communication": communication(data),
        "ranks": ranks(data),
    }
    if data.get("sensitivity"):
        found["sensitivity"] = sensitivity(data["sensitivity"])
    if data["overrides"]:
        found["overrides"] = overrides(data["overrides"])
    return found


def facts(data: Row) -> list[tuple[str, Cell, str]]:
    """The headline: what, the number, and a line about it."""
    summary, through = data["summary"], data["throughput"]
    low, high = map(time, summary["step_interval_s"])
    level = data["uncertainty"]["level"]
    found = [("step", time(summary["step_time_s"]), f"{low.text} to {high.text} with {level:.0%}")]
    if through["tokens_per_s"]:
        each = scaled(through["tokens_per_s_per_device"], "tokens/s")
        tokens = scaled(through["tokens_per_s"], "tokens/s")
        found.append(("throughput", tokens, f"{each.text} a device"))
    rows = scaled(through["rows_per_s"], "rows/s")
    flops = scaled(through["model_flops_per_s_per_device"], "FLOP/s")
    found += [
        ("rows", rows, f"{data['plan']['global_batch_size']:,} rows a step"),
        ("MFU", share(through["mfu"]), f"HFU {through['hfu']:.1%}; {flops.text} a device"),
        ("bubble", share(summary["bubble_fraction"]), "of the pipeline's time devices wait"),
        _memory_fact(summary),
        ("device-hours", number(through["device_hours_per_step"]), "of a step"),
    ]
    return found + _cost(data.get("cost", {}))


def _memory_fact(summary: Row) -> tuple[str, Cell, str]:
    peak, capacity = max(summary["peak_memory_bytes"]), gib(summary["memory_bytes"])
    low, high = map(gib, summary["memory_interval_bytes"])
    about = f"of {capacity.text}; {low.text} to {high.text}: {summary['memory_verdict']}"
    if summary["memory_verdict_by"] == "rehearsal":
        rehearsed = gib(max(summary["rehearsed_memory_bytes"]))
        about = f"of {capacity.text}; rehearsed {rehearsed.text}: {summary['memory_verdict']}"
    return "peak memory", gib(peak), about


def _cost(cost: Row) -> list[tuple[str, Cell, str]]:
    found = []
    if "price_per_step" in cost:
        found.append(("price of a step", number(cost["price_per_step"]), "at the price given"))
    if "energy_kwh_per_step" in cost:
        told = f"kWh, at {number(cost['power_watts']).text} W a device as given"
        found.append(("energy of a step", number(cost["energy_kwh_per_step"]), told))
    if "days" in cost:
        tokens = scaled(cost["tokens"], "tokens").text
        hours = number(cost["device_hours"]).text
        found.append(("days", number(cost["days"]), f"for {tokens}, {hours} device-hours"))
    if "price" in cost:
        million = number(cost["price_per_million_tokens"]).text
        found.append(("price", number(cost["price"]), f"{million} a million tokens"))
    if "energy_kwh" in cost:
        million = number(cost["energy_kwh_per_million_tokens"]).text
        found.append(("energy", number(cost["energy_kwh"]), f"kWh, {million} a million tokens"))
    return found


def stages(data: Row) -> Table:
    heads = (
        "stage", "blocks", "ranks", "mesh", "ZeRO", "recompute", "forward", "backward",
        "exposed communication", "memory", "in flight",
    )  # fmt: skip
    rows = [
        [
            words(k),
            words(", ".join(row["blocks"])),
            words(row["ranks"]),
            words(row["mesh"]),
            words(f"{row['zero']}" + (f" in {row['dp_shard']}" if row["dp_shard"] else "")),
            words(row["recompute"]),
            *(time(row[key]) for key in ("forward_s", "backward_s", "communication_s")),
            gib(row["memory_bytes"]),
            number(row["microbatches_in_flight"]),
        ]
        for k, row in enumerate(data["stages"])
    ]
    return Table(caption="Stages, seconds of one micro-batch", heads=heads, rows=rows)


def memory(data: Row) -> Table:
    parts = list(data["memory"][0]["parts"])
    followed = "course_bytes" in data["memory"][0]
    more = ("at once in a step", "highest in") if followed else ()
    rows = []
    for row in data["memory"]:
        cells = [words(stage_words(row["stages"])), words(row["ranks"])]
        cells += [gib(row["parts"][part]) for part in parts]
        cells += [gib(row["priced_bytes"])]
        if followed:
            block = f" of {row['block']}" if row["block"] else ""
            cells += [gib(row["course_bytes"]), words(row["moment"].replace("_", " ") + block)]
        rows.append(cells)
    heads = ("device group", "ranks", *parts, "peak", *more)
    return Table(caption="Memory of a device", heads=heads, rows=rows)


def components(data: Row) -> Table:
    groups = data["device_groups"]
    names = list(groups[0]["components_s"])
    rows = [
        [words(stage_words(group["stages"])), *(time(group["components_s"][n]) for n in names)]
        for group in groups
    ]
    return Table(caption="Seconds of a step", heads=("device group", *names), rows=rows)


def communication(data: Row) -> Table:
    heads = (
        "stage", "axis", "collective", "link", "calls", "sent by a rank", "seconds", "exposed",
        "exposed share",
    )  # fmt: skip
    rows = [
        [
            *(words(row[key]) for key in heads[:4]),
            number(row["calls"]),
            sent(row["sent_bytes"]),
            time(row["seconds"]),
            time(row["exposed_s"]),
            share(row["exposed_s"] / row["seconds"] if row["seconds"] else 0.0),
        ]
        for row in data["communication"]
    ]
    return Table(caption="Communication of a rank in a step", heads=heads, rows=rows)


def busiest_stage(rows: Sequence[Row]) -> int:
    """The stage with most exposed communication."""
    exposed: dict[int, float] = {}
    for row in rows:
        exposed[row["stage"]] = exposed.get(row["stage"], 0.0) + row["exposed_s"]
    return max(exposed, key=lambda stage: (exposed[stage], -stage))


def ranks(data: Row) -> Table:
    axes = ("dp", "cp", "ep", "tp")
    rows = [
        [words(stage_words(row["stages"])), words(row["ranks"]), *(number(row[a]) for a in axes)]
        for row in data["device_groups"]
    ]
    heads = ("device group", "ranks", *axes)
    return Table(caption="Device groups, ranks laid out dp, cp, tp", heads=heads, rows=rows)


def sensitivity(found: Sequence[Row]) -> Table:
    rows = []
    for row in found:
        factor, plan = row["factor"], row["plan"]
        if factor is None:
            cells = [words("no flip between 1/4 and 4"), words("")]
        else:
            cells = [number(factor), words(plan or "no plan known from the search fits")]
        rows.append([words(row["property"]), *cells])
    heads = ("property", "times", "then chosen")
    return Table(caption="What would flip the decision", heads=heads, rows=rows)


def overrides(found: Sequence[Row]) -> Table:
    rows = [
        [
            words(row["override"]),
            time(row["cost_s"]) if "cost_s" in row else words(""),
            share(row["cost"]) if "cost" in row else words(""),
            words(row["effect"]),
        ]
        for row in found
    ]
    heads = ("override", "costs a step", "share", "effect")
    return Table(caption="What each override costs", heads=heads, rows=rows)
