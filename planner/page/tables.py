"""Tables of the page: the numbers of its charts, as the report's data has them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

from meshwright.planner.page.cells import (
    REHEARSED,
    Cell,
    Row,
    Table,
    between,
    gib,
    more_time,
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


def tables(data: Row) -> dict[str, Table]:
    """Tables by the view they are in."""
    by_view = {
        "stages": stages(data),
        "memory": memory(data),
        "components": components(data),
        "communication": communication(data),
        "ranks": ranks(data),
    }
    if "rehearsal" in data:
        by_view["rehearsal"] = rehearsed_ranks(data["rehearsal"], data)
        if (step := rehearsed_step(data["rehearsal"])) is not None:
            by_view["rehearsed step"] = step
    if data.get("sensitivity"):
        by_view["sensitivity"] = sensitivity(data["sensitivity"])
    if data["overrides"]:
        by_view["overrides"] = overrides(data["overrides"])
    return by_view


def facts(data: Row) -> list[tuple[str, Cell, str]]:
    """The headline: name, number, and a line about it."""
    summary, through, count = data["summary"], data["throughput"], partial(scaled, unit="")
    step = f"{between(time, summary['step_interval_s'])} with {data['uncertainty']['level']:.0%}"
    headline = [("step", time(summary["step_time_s"]), step)]
    if through["tokens_per_s"]:
        tokens = scaled(through["tokens_per_s_per_device"], "tokens/s")
        about = f"{_within(count, through, 'tokens_per_s')}{tokens.text} a device"
        headline.append(("tokens a second", count(through["tokens_per_s"]), about))
    rows = f"{_within(count, through, 'rows_per_s')}{data['plan']['global_batch_size']:,} a step"
    flops = scaled(through["model_flops_per_s_per_device"], "FLOP/s")
    used = f"{_within(share, through, 'mfu')}HFU {through['hfu']:.1%}; {flops.text} a device"
    hours = f"{_within(number, through, 'device_hours')}of a step"
    rehearsed = peaks_of(summary).get(REHEARSED)
    by = f"{REHEARSED} {gib(rehearsed).text} " if rehearsed else ""
    peak = (
        f"{between(gib, summary['memory_interval_bytes'])}; {by}of "
        f"{gib(summary['memory_bytes']).text}: {summary['memory_verdict']}"
    )
    headline += [
        ("rows a second", count(through["rows_per_s"]), rows),
        ("MFU", share(through["mfu"]), used),
        ("bubble", share(summary["bubble_fraction"]), "of the pipeline's time devices wait"),
        ("peak memory", gib(max(summary["peak_memory_bytes"])), peak),
        ("device-hours", number(through["device_hours_per_step"]), hours),
    ]
    return headline + _cost(data.get("cost", {}))


def _within(cell: Callable[[float], Cell], through: Row, name: str) -> str:
    """The interval of a number, before the text about it; reports of before have none."""
    interval = through.get(f"{name}_interval")
    return f"{between(cell, interval)}; " if interval else ""


def _cost(cost: Row) -> list[tuple[str, Cell, str]]:
    rows = []
    if "price_per_step" in cost:
        rows.append(("price of a step", number(cost["price_per_step"]), "at the price given"))
    if "energy_kwh_per_step" in cost:
        power = f"kWh, at {number(cost['power_watts']).text} W a device as given"
        rows.append(("energy of a step", number(cost["energy_kwh_per_step"]), power))
    if "days" in cost:
        tokens, hours = scaled(cost["tokens"], "tokens").text, number(cost["device_hours"]).text
        about = f"{_within(number, cost, 'days')}for {tokens}, {hours} device-hours"
        rows.append(("days", number(cost["days"]), about))
    for title, name, unit in (("price", "price", ""), ("energy", "energy_kwh", "kWh, ")):
        if name in cost:
            million = number(cost[f"{name}_per_million_tokens"]).text
            rows.append((title, number(cost[name]), f"{unit}{million} a million tokens"))
    return rows


def stages(data: Row) -> Table:
    # reports of earlier versions have no words for all decisions
    decided = [row.get("decided") or {"mesh": row["mesh"]} for row in data["stages"]]
    columns = dict.fromkeys(chain(*decided))
    heads = (
        "stage", "blocks", "ranks", *columns, "forward", "backward", "exposed communication",
        "memory", "in flight",
    )  # fmt: skip
    rows = [
        [
            words(k),
            words(", ".join(row["blocks"])),
            words(row["ranks"]),
            *(words(cells.get(name, "")) for name in columns),
            *(time(row[key]) for key in ("forward_s", "backward_s", "communication_s")),
            gib(row["memory_bytes"]),
            number(row["microbatches_in_flight"]),
        ]
        for k, (row, cells) in enumerate(zip(data["stages"], decided, strict=True))
    ]
    caption = "Stages: seconds of one micro-batch, bytes of a device"
    return Table(caption=caption, heads=heads, rows=rows)


def memory(data: Row) -> Table:
    parts = list(data["memory"][0]["parts"])
    rehearsed = data["summary"].get("rehearsed_memory_bytes", ())
    rows = [
        [
            words(stage_words(row["stages"])),
            words(row["ranks"]),
            *(gib(row["parts"][part]) for part in parts),
            gib(row["priced_bytes"]),
            *map(gib, row["interval_bytes"]),
            words(peak_words(row["moment"], row["block"])),
            *map(gib, rehearsed[place : place + 1]),
        ]
        for place, row in enumerate(data["memory"])
    ]
    heads = (
        "device group", "ranks", *parts, "predicted peak", "from, 80 %", "to, 80 %", "comes in",
        *[REHEARSED] * bool(rehearsed),
    )  # fmt: skip
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
    exposed = defaultdict[int, float](float)
    for row in rows:
        exposed[row["stage"]] += row["exposed_s"]
    return max(exposed, key=lambda stage: (exposed[stage], -stage))


def ranks(data: Row) -> Table:
    axes = ("dp", "cp", "ep", "tp")
    rows = [
        [words(stage_words(row["stages"])), words(row["ranks"]), *(number(row[a]) for a in axes)]
        for row in data["device_groups"]
    ]
    heads = ("device group", "ranks", *axes)
    return Table(caption="Device groups, ranks laid out dp, cp, tp", heads=heads, rows=rows)


def rehearsed_ranks(rehearsal: Row, data: Row) -> Table:
    """A row of each rank that was rehearsed; the price is that of its device group."""
    by_rank, prices = rehearsal["ranks"], rehearsal["priced_bytes"]
    kinds = list(dict.fromkeys(kind for row in by_rank.values() for kind in row["peak_by_kind"]))
    rows = []
    for rank, row in sorted(by_rank.items(), key=lambda pair: int(pair[0])):
        group = data["device_groups"][row["group"]]
        rows.append([
            words(rank),
            number(row["stands_for"]),
            words(stage_words(group["stages"])),
            gib(row["peak_bytes"]),
            _known(gib, prices[row["group"]] if prices else None),
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


def rehearsed_step(rehearsal: Row) -> Table | None:
    """The price of the step beside a second estimate, of every operator that was rehearsed."""
    step = rehearsal.get("step", {})
    if not {"priced", "estimated"} <= set(step):
        return None
    priced, estimated = step["priced"], step["estimated"]
    rows = [
        [
            words("the step" if name == "step_s" else name),
            *(_known(time, of.get(name)) for of in (priced, estimated)),
        ]
        for name in dict.fromkeys([*priced, *estimated])
        if priced.get(name) or estimated.get(name)
    ]
    heads = ("of the busiest device group", "priced", "estimated from the rehearsal")
    return Table(caption="Seconds of a step", heads=heads, rows=rows)


def _total(parts: Mapping[str, float] | None) -> float | None:
    return None if parts is None else sum(parts.values())


def _known(cell: Any, value: float | None) -> Cell:
    return words("") if value is None else cell(value)


def sensitivity(flips: Sequence[Row]) -> Table:
    rows = []
    for row in flips:
        cells = [words("no flip between 1/4 and 4"), words("")]
        if row["factor"] is not None:
            plan = row["plan"] or "no plan known from the search fits"
            cells = [number(row["factor"]), words(plan)]
        rows.append([words(row["property"]), *cells])
    heads = ("property", "times", "then chosen")
    return Table(caption="What would flip the decision", heads=heads, rows=rows)


def overrides(priced: Sequence[Row]) -> Table:
    rows = [
        [
            words(row["override"]),
            _known(time, row.get("cost_s")),
            _known(share, row.get("cost")),
            words(row["effect"]),
        ]
        for row in priced
    ]
    heads = ("override", "costs a step", "share", "effect")
    return Table(caption="What each override costs", heads=heads, rows=rows)


# --- plans beside each other ----------------------------------------------------------------------


def compared(data: Row) -> list[dict[str, Any]]:
    """Plans with a step time: the chosen one, and the best of each family and the runners-up,
    families of one plan together."""
    summary = data["summary"]
    chosen = {
        "family": "chosen",
        "plan": summary["chosen"],
        "step_time_s": summary["step_time_s"],
        "slower": 0.0,
        "peak_memory_bytes": max(summary["peak_memory_bytes"]),
        "why": "",
    }
    rows: dict[str, dict[str, Any]] = {}
    for row in (chosen, *data["alternatives"], *data["runners_up"]):
        if not row.get("plan"):
            continue
        plan = rows.setdefault(
            row["plan"],
            {key: row[key] for key in ("plan", "step_time_s", "slower", "why")}
            | {
                "names": [],
                "chosen": row is chosen,
                "tie": bool(row.get("tie")),
                "peak_memory_bytes": row.get("peak_memory_bytes"),
                "components_s": row.get("components_s", {}),
                "excluded": row.get("excluded", []),
            },
        )
        plan["names"] += [row["family"]] if "family" in row else []
    plans = sorted(rows.values(), key=lambda row: float(row["step_time_s"]))
    for place, row in enumerate(plans):
        row["step"] = _close(float(row["step_time_s"]))
        row["id"] = f"plan-{place}"
        row["name"] = ", ".join(row["names"]) or "runner-up"
        row["differences"] = [(part, more_time(s)) for part, s in row["components_s"].items()]
    return plans


def _close(value: float) -> str:
    """Four digits of seconds, so that plans near each other differ."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value / 1e-6:.4g} µs"


def without_plan(data: Row) -> list[Row]:
    """Families without a plan, and why."""
    return [row for row in data["alternatives"] if not row.get("plan")]
