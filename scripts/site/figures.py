"""Tables of accuracy and measurements, from the results that their commands recorded."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from meshwright.costmodel import intervals as of_prices
from meshwright.planner.plan import Plan, describe
from scripts.record_plans import read
from scripts.recording.results import RESULTS, recorded
from scripts.site.markdown import cell, table

ROOT = Path(__file__).parents[2]
RECORD = ROOT / "scripts" / "recording" / "record.json"
RESIDUALS = Path(of_prices.__file__).with_name("residuals.json")
COVERAGE = ROOT / "scripts" / "coverage.md"
MEASURES = ("rows", "mean abs. error", "bias", "worst", "Spearman", "regret")


def files() -> Iterator[tuple[str, str]]:
    """What the pages of accuracy and measurements include."""
    accuracy = recorded("accuracy")
    yield "generated/accuracy_sources.md", sources(accuracy)
    yield "generated/accuracy_kinds.md", kinds(accuracy)
    yield "generated/accuracy_memory.md", memory(accuracy)
    yield "generated/intervals.md", intervals()
    yield "generated/measurements.md", "\n".join(measurements())
    yield "generated/recorded_plans.md", recorded_plans()
    yield "coverage.md", COVERAGE.read_text(encoding="utf-8")


def made(result: Mapping[str, Any]) -> str:
    """The command that made a result, when and where."""
    where = f"{result['machine']} at load {result['load']:.0f}, torch {result['torch']}"
    return f"`{result['command']}` ({result['date']}, {where})"


def percent(value: float | None, *, signed: bool = False) -> str:
    if value is None:
        return "–"
    return f"{100 * value:+.1f} %" if signed else f"{100 * value:.1f} %"


def _measures(row: Mapping[str, Any]) -> list[str]:
    rank = row["spearman"]
    return [
        str(row["rows"]),
        percent(row["error"]),
        percent(row["bias"], signed=True),
        percent(row["worst"], signed=True),
        "–" if rank is None else f"{rank:.2f}",
        percent(row["regret"]),
    ]


def sources(result: Mapping[str, Any]) -> str:
    """Errors of steps by source: of rows on which nothing was fitted, and of the fitted half."""
    fitted = {row["name"]: row for row in result["families"] if row["part"] == "fit"}
    rows = []
    for row in result["families"]:
        if row["part"] == "score" and row["rows"]:
            other = fitted[row["name"]]
            beside = f"{percent(other['error'])} ({other['rows']})" if other["rows"] else "–"
            rows.append([cell(row["name"]), *_measures(row), beside])
    heads = ("source", *MEASURES, "fitted half (rows)")
    return f"{made(result)}\n\n{table(heads, rows, heads[1:])}"


def kinds(result: Mapping[str, Any]) -> str:
    """Errors of steps by GPU and kind of model, by framework and target, of rows not fitted on."""
    rows = [
        [cell(row["name"]), *_measures(row), percent(row.get("constant_mfu"))]
        for row in result["kinds"]
        if row["part"] == "score"
    ]
    heads = ("kind", *MEASURES, "one constant MFU")
    return f"{made(result)}\n\n{table(heads, rows, heads[1:])}"


def memory(result: Mapping[str, Any]) -> str:
    rows = [
        [row["said_by"], cell(row["name"]), str(row["rows"]), percent(row["error"]),
         percent(row["bias"], signed=True)]
        for row in result["memory"]
    ]  # fmt: skip
    heads = ("peaks said by", "source", "rows", "mean abs. error", "bias")
    return f"{made(result)}\n\n{table(heads, rows, heads[2:])}"


def measurements() -> Iterator[str]:
    """A section for each recorded result but the accuracy's."""
    for file in sorted(RESULTS.glob("*.json")):
        if file.stem == "accuracy":
            continue
        result = recorded(file.stem)
        yield f"## {result['title']}\n\n{made(result)}\n"
        if result.get("note"):
            yield f"{result['note']}\n"
        yield _rows(result["rows"])


def _rows(rows: Sequence[Mapping[str, Any]]) -> str:
    heads = [*rows[0]]
    numbers = [h for h in heads if all(isinstance(r[h], int | float | None) for r in rows)]
    cells = [[_written(row[head]) for head in heads] for row in rows]
    return table(heads, cells, numbers)


def _written(value: Any) -> str:
    if value is None:
        return "–"
    return f"{value:.4g}" if isinstance(value, float) else cell(str(value))


def recorded_plans() -> str:
    """Plans and prices of the last commit, which the tests compare with."""
    rows = []
    for name, entry in read(RECORD).items():
        if "plan" not in entry:
            continue
        summary = entry["price"]["summary"]
        peak = max(summary["peak_memory_bytes"]) / 2**30
        plan = describe(Plan.from_json(json.dumps(entry["plan"])))
        step_ms, mfu = 1e3 * summary["step_time_s"], 100 * summary["mfu"]
        rows.append([cell(name), cell(plan), f"{step_ms:.4g}", f"{mfu:.1f}", f"{peak:.2f}"])
    heads = ("case", "plan", "step, ms", "MFU, %", "peak, GiB")
    return f"`python -m scripts.record_plans record`\n\n{table(heads, rows, heads[2:])}"


def intervals() -> str:
    """80 % intervals of measured over predicted."""
    data = json.loads(RESIDUALS.read_text(encoding="utf-8"))
    found = data["step"]["intervals"]
    rows = [[cell(name), *(f"{of[k]:.2f}" for k in ENDS)] for name, of in sorted(found.items())]
    heads = ("GPU, kind, framework", *ENDS)
    command = f"`python -m scripts.fits.fit_intervals` ({data['date']})"
    return f"{command}\n\n{table(heads, rows, ENDS)}"


ENDS = ("low", "middle", "high")
