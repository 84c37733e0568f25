"""The tables of the page: the numbers of its charts, as the report's data has them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from meshwright.planner.page import rehearsal
from meshwright.planner.page.cells import (
    REHEARSED,
    Cell,
    Table,
    between,
    gib,
    number,
    peaks_of,
    scaled,
    sent,
    share,
    stage_words,
    time,
    words,
)
from meshwright.planner.plan import peak_words

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
    if "rehearsal" in data:
        found["rehearsal"] = rehearsal.ranks(data["rehearsal"], data)
        if (step := rehearsal.step(data["rehearsal"])) is not None:
            found["rehearsed step"] = step
    if data.get("sensitivity"):
        found["sensitivity"] = sensitivity(data["sensitivity"])
    if data["overrides"]:
        found["overrides"] = overrides(data["overrides"])
    return found


def facts(data: Row) -> list[tuple[str, Cell, str]]:
    """The headline: what, the number, and a line about it."""
    summary, through = data["summary"], data["throughput"]
    with_level = f" with {data['uncertainty']['level']:.0%}"
    step = between(time, summary["step_interval_s"]) + with_level
    found = [("step", time(summary["step_time_s"]), step)]
    if through["tokens_per_s"]:
        each = scaled(through["tokens_per_s_per_device"], "tokens/s")
        tokens = partial(scaled, unit="")
        about = f"{_within(tokens, through, 'tokens_per_s')}{each.text} a device"
        found.append(("tokens a second", tokens(through["tokens_per_s"]), about))
    rows = partial(scaled, unit="")
    about = f"{_within(rows, through, 'rows_per_s')}{data['plan']['global_batch_size']:,} a step"
    flops = scaled(through["model_flops_per_s_per_device"], "FLOP/s")
    used = f"{_within(share, through, 'mfu')}HFU {through['hfu']:.1%}; {flops.text} a device"
    hours = f"{_within(number, through, 'device_hours')}of a step"
    found += [
        ("rows a second", rows(through["rows_per_s"]), about),
        ("MFU", share(through["mfu"]), used),
        ("bubble", share(summary["bubble_fraction"]), "of the pipeline's time devices wait"),
        _memory_fact(summary),
        ("device-hours", number(through["device_hours_per_step"]), hours),
    ]
    return found + _cost(data.get("cost", {}))


def _within(cell: Callable[[float], Cell], through: Row, name: str) -> str:
    """The interval of a number, with what comes after it; reports of before have none."""
    interval = through.get(f"{name}_interval")
    return f"{between(cell, interval)}; " if interval else ""


def _memory_fact(summary: Row) -> tuple[str, Cell, str]:
    peak, capacity = max(summary["peak_memory_bytes"]), gib(summary["memory_bytes"]).text
    about = between(gib, summary["memory_interval_bytes"])
    rehearsed = peaks_of(summary).get(REHEARSED)
    by = f"{REHEARSED} {gib(rehearsed).text} " if rehearsed else ""
    return "peak memory", gib(peak), f"{about}; {by}of {capacity}: {summary['memory_verdict']}"


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
        interval = _within(number, cost, "days")
        found.append(
            ("days", number(cost["days"]), f"{interval}for {tokens}, {hours} device-hours")
        )
    if "price" in cost:
        million = number(cost["price_per_million_tokens"]).text
        found.append(("price", number(cost["price"]), f"{million} a million tokens"))
    if "energy_kwh" in cost:
        million = number(cost["energy_kwh_per_million_tokens"]).text
        found.append(("energy", number(cost["energy_kwh"]), f"kWh, {million} a million tokens"))
    return found


def _zero(row: Row) -> str:
    """ZeRO's stage, the ranks that it divides among, and those with a secondary shard."""
    within = f" in {row['dp_shard']}" if row["dp_shard"] else ""
    sent = row.get("quantized", "none")
    quantized = f", {sent} quantised" if sent != "none" else ""
    return f"{row['zero']}{within}" + (f", hpZ {row['hpz']}" if row.get("hpz") else "") + quantized


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
            words(_zero(row)),
            words(row["recompute"]),
            *(time(row[key]) for key in ("forward_s", "backward_s", "communication_s")),
            gib(row["memory_bytes"]),
            number(row["microbatches_in_flight"]),
        ]
        for k, row in enumerate(data["stages"])
    ]
    return Table(
        caption="Stages: seconds of one micro-batch, bytes of a device", heads=heads, rows=rows
    )


def memory(data: Row) -> Table:
    parts = list(data["memory"][0]["parts"])
    rehearsed = data["summary"].get("rehearsed_memory_bytes", ())
    rows = []
    for place, row in enumerate(data["memory"]):
        cells = [words(stage_words(row["stages"])), words(row["ranks"])]
        cells += [gib(row["parts"][part]) for part in parts]
        cells += [gib(row["priced_bytes"]), *map(gib, row["interval_bytes"])]
        cells.append(words(peak_words(row["moment"], row["block"])))
        cells += [gib(nbytes) for nbytes in rehearsed[place : place + 1]]
        rows.append(cells)
    heads = [
        "device group",
        "ranks",
        *parts,
        "predicted peak",
        "from, 80 %",
        "to, 80 %",
        "comes in",
    ]
    heads += [REHEARSED] * bool(rehearsed)
    return Table(caption="Peak memory of a device of each group", heads=heads, rows=rows)


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
