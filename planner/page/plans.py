"""The chosen plan and the others of a report, each once, the fastest first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from meshwright.planner.page.cells import more_time

Row = Mapping[str, Any]


def compared(data: Row) -> list[dict[str, Any]]:
    """Plans with a step time: the chosen one, and the best of each family and the runners-up,
    families of one plan together."""
    summary = data["summary"]
    rows: dict[str, dict[str, Any]] = {
        summary["chosen"]: {
            "names": ["chosen"],
            "plan": summary["chosen"],
            "chosen": True,
            "step_time_s": summary["step_time_s"],
            "slower": 0.0,
            "tie": False,
            "peak_memory_bytes": max(summary["peak_memory_bytes"]),
            "components_s": {},
            "why": "",
            "excluded": [],
        }
    }
    for row in (*data["alternatives"], *data["runners_up"]):
        if not row.get("plan"):
            continue
        known = rows.setdefault(
            row["plan"],
            {
                "names": [],
                "plan": row["plan"],
                "chosen": False,
                "step_time_s": row["step_time_s"],
                "slower": row["slower"],
                "tie": bool(row.get("tie")),
                "peak_memory_bytes": row.get("peak_memory_bytes"),
                "components_s": row.get("components_s", {}),
                "why": row["why"],
                "excluded": row.get("excluded", []),
            },
        )
        known["names"] += [row["family"]] if "family" in row else []
    found = sorted(rows.values(), key=lambda row: float(row["step_time_s"]))
    for number, row in enumerate(found):
        row["step"] = _close(float(row["step_time_s"]))
        row["id"] = f"plan-{number}"
        row["name"] = ", ".join(row["names"]) or "runner-up"
        row["differences"] = [(part, more_time(s)) for part, s in row["components_s"].items()]
    return found


def _close(value: float) -> str:
    """Seconds by four digits, so that plans near each other differ."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= scale:
            return f"{value / scale:.4g} {unit}"
    return f"{value / 1e-6:.4g} µs"


def without_plan(data: Row) -> list[Row]:
    """Families of which no plan was found, and why."""
    return [row for row in data["alternatives"] if not row.get("plan")]
