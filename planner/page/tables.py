"""Tables of the page: the numbers of its charts, as the report's data has them."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

from meshwright.planner.page.cells import (
    REHEARSED,
    Cell,
    Row,
    Table,
    gib,
    more_time,
    number,
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
    """Families without a plan, and why; those for one reason in a row."""
    rows: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in data["alternatives"]:
        if not row.get("plan"):
            excluded = row.get("excluded", [])
            same = rows.setdefault((row["why"], *excluded), {**row, "family": []})
            same["family"].append(row["family"])
    return [row | {"family": ", ".join(row["family"])} for row in rows.values()]


# --- diagrams of blocks: lines from top to bottom as a rank runs them -----------------------------


MOST_NAMES = 4  # of blocks in the title of a diagram


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a diagram, drawn by its `kind`; `about` is shown on request."""

    kind: str
    what: str
    how: str = ""
    states: str = ""
    forward: Cell | None = None
    backward: Cell | None = None
    about: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Diagram:
    """`blocks` names all of them where the title has no room."""

    title: str
    blocks: str
    about: str
    lines: Sequence[Line]
    count: int


def diagrams(data: Row) -> list[Diagram]:
    """A diagram for each distinct block."""
    return [_diagram(row) for row in data["blocks"]]


def _diagram(row: Row) -> Diagram:
    first, last = row["stages"][0], row["stages"][-1]
    stages = f"stage {first}" if first == last else f"stages {first} to {last}"
    degrees = " × ".join(f"{a} {row[a]}" for a in ("dp", "cp", "ep", "tp") if row[a] > 1)
    names, more = row["blocks"], len(row["blocks"]) - MOST_NAMES
    return Diagram(
        title=", ".join(names[:MOST_NAMES]) + f" and {more} more" * (more > 0),
        blocks=", ".join(names) if more > 0 else "",
        about=f"{stages}; {degrees or 'one rank'}",
        lines=[*map(line, row["steps"])],
        count=sum(step["kind"] == "run" for step in row["steps"]),
    )


def line(step: Row) -> Line:
    """One step of a block."""
    match step["kind"]:
        case "enter":
            return Line(kind="enter", what=_shaped(step), how=step["role"], states=step["state"])
        case "leave":
            return Line(kind="leave", what=_shaped(step), how="output", states=step["state"])
        case "move":
            states = f"{step['from']} → {step['to']}"
            return Line(kind="move", what=_shaped(step), how="re-shard", states=states)
        case "collective":
            cell, forward = time(step["seconds"]), step["pass"] == "forward"
            return Line(
                kind="collective",
                what=f"{step['collective']} on the {step['axis']} axis",
                how=f"in the {step['pass']}",
                forward=cell if forward else None,
                backward=None if forward else cell,
            )
    operands, results = (", ".join(step[key]) for key in ("operands", "results"))
    return Line(
        kind="run",
        what=" ".join(filter(None, operator_words(step))),
        how=strategy_words(step["strategy"]),
        states=f"{operands} → {results}" if operands else results,
        forward=time(step["forward_s"]),
        backward=time(step["backward_s"]),
        about=" · ".join(filter(None, (step["key"], step["source"]))),
    )


def operator_words(step: Row) -> tuple[str, str]:
    """The module that an operator runs in, where it has a name, and the operator."""
    module = step["key"].partition(":")[0].rpartition(".")[2]
    return "" if module.isdecimal() else module, step["operator"]


def strategy_words(name: str) -> str:
    """The factor that the tensor axis splits, in words; the atom of a dim is in the shardings."""
    factor = re.sub(r"\.\d+$", "", name)
    dim = re.fullmatch(r"d(\d+)", factor)
    return f"dim {dim[1]}" if dim else "by dims" if re.fullmatch(r"f\d+", factor) else factor


def _shaped(step: Row) -> str:
    return f"{step['value']} [{' × '.join(map(str, step['shape']))}]"
