"""Schemas of plans, reports and cluster files: from the records of decisions, from reports that are
made here, and from the readers' keys."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from meshwright.costmodel.precisions import PRECISIONS
from meshwright.costmodel.recompute import RECOMPUTE
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.planner.decisions import CONTRADICTIONS, DECISIONS, Decision
from meshwright.planner.plan.plan import FORMAT
from meshwright.profiles.cluster_file import schema as cluster_schema
from meshwright.profiles.hardware.catalog_reader import catalog_names
from scripts.record_plans import planned, read
from scripts.recording.cases import small_cases
from scripts.site.markdown import cell, code, table

RECORD = Path(__file__).parents[1] / "recording" / "record.json"
REPORTED = ("small llama, h100", "small llama, interleaved")  # cases whose reports are looked at
SHOWN = "small llama, interleaved"  # the plan that is printed
KEYS = Path(__file__).parents[2] / "docs" / "reference" / "report_data.md"


def files() -> Iterator[tuple[str, str]]:
    """The schemas as JSON, and what pages include of them."""
    schemas = {"plan": plan_schema(), "cluster": cluster_schema(catalog_names())}
    for name, schema in schemas.items():
        yield f"schemas/{name}.schema.json", json.dumps(schema, indent=2) + "\n"
        yield f"generated/{name}_schema.md", code(json.dumps(schema, indent=2), "json")
    yield "generated/plan_example.md", code(plan_example(), "json")
    yield "generated/decisions.md", decisions()
    yield "generated/contradictions.md", contradictions()
    yield "generated/report_fields.md", report_fields()


# --- plans ----------------------------------------------------------------------------------------


def plan_schema() -> dict[str, Any]:
    """The JSON schema of a plan file."""
    count, text = {"type": "integer", "minimum": 1}, {"type": "string"}
    names = {"type": "array", "items": text, "minItems": 1}
    policies = {"enum": [*RECOMPUTE]}
    by_policy = {
        "type": "object",
        "propertyNames": policies,
        "additionalProperties": {"type": "array", "items": text},
    }
    mesh = _object({}, "mesh")
    stage = {
        "blocks": names,
        "ranks": text,
        "mesh": mesh,
        "recompute": {"anyOf": [policies, by_policy]},
        "shardings": {"type": "object", "additionalProperties": text},
    }
    top = {
        "format": {"type": "integer", "minimum": 1, "maximum": FORMAT},
        "model": text,
        "global_batch_size": count,
        "num_microbatches": count,
        "schedule": {"enum": [*SCHEDULES]},
        "precision": {"enum": [*PRECISIONS]},
        "stages": {"type": "array", "items": _object(stage, "stage"), "minItems": 1},
    }
    head = {"$schema": "http://json-schema.org/draft-07/schema#", "title": "A plan of Meshwright"}
    schema = _object(top, "plan")
    schema["properties"]["outer_loop"] = _object({}, "outer_loop")
    return head | schema


def _object(keys: dict[str, Any], where: str) -> dict[str, Any]:
    """An object of these keys and those of the decisions that are written there."""
    of_place = {name: d for name, d in DECISIONS.items() if d.written == where}
    return {
        "type": "object",
        "properties": keys | {name: _values(d) for name, d in of_place.items()},
        "required": [*keys, *(name for name, d in of_place.items() if d.always)],
        "additionalProperties": False,
    }


def _values(decision: Decision) -> dict[str, Any]:
    about = {"description": decision.what}
    if decision.is_flag:
        return about | {"type": "boolean"}
    if decision.parts:
        part = {"type": "number", "minimum": 0, "maximum": 1}
        keys = dict.fromkeys(decision.parts, part)
        return about | {"type": "object", "properties": keys, "additionalProperties": False}
    if decision.legal:
        return about | {"enum": [*decision.legal]}
    return about | {"type": "integer", "minimum": 1}


def plan_example() -> str:
    """A recorded plan, as its file has it."""
    return json.dumps(read(RECORD)[SHOWN]["plan"], indent=2)


def decisions() -> str:
    """Every decision: what may be said of it, by block or not, forbidden or allowed."""
    rows = []
    for name, d in DECISIONS.items():
        more = ["by glob over blocks"] * d.by_block
        more += [f'`forbid=["{name}"]`'] * d.forbidden
        more += [f'only with `allow=["{name}"]`'] * bool(d.allowed)
        flag = "--" + name.replace("_", "-")
        values = cell(d.values) if d.legal or d.parts or d.is_flag else "from 1"
        rows.append([f"`{name}` `{flag}`", cell(d.what), values, d.written, "; ".join(more)])
    heads = ("decision, flag", "meaning", "values", "in a plan file", "also")
    return table(heads, rows)


def contradictions() -> str:
    """Values that rule each other out, and why."""
    rows = [[f"`{c.a}`", f"`{c.b}`", cell(c.why), cell(c.legal)] for c in CONTRADICTIONS]
    return table(("decision", "against", "reason", "legal"), rows)


# --- reports --------------------------------------------------------------------------------------


def report_fields() -> str:
    """Each key of reports with its type. Raises where the page's table lacks one, or has one that
    is not there."""
    types: dict[str, set[str]] = defaultdict(set)
    keys: set[str] = set()
    every = dict(small_cases())
    for name in REPORTED:
        data = planned(every[name]).report.to_dict()
        keys |= data.keys()
        for path, kind in _typed(data):
            types[path].add(kind)
    said = KEYS.read_text(encoding="utf-8")
    if missing := [key for key in keys if f"`{key}`" not in said]:
        raise ValueError(f"{KEYS.name} says nothing about {', '.join(sorted(missing))}")
    rows = [[f"`{path}`", " or ".join(sorted(kinds))] for path, kinds in sorted(types.items())]
    return table(("key", "type"), rows)


DEEPEST = 4  # levels of keys that are listed
_TYPES = {
    bool: "boolean", int: "integer", float: "number", str: "text", type(None): "null",
}  # fmt: skip


def _typed(data: Any, at: str = "", depth: int = 0) -> Iterator[tuple[str, str]]:
    """Paths of values and their types; `[]` is any of a list."""
    if isinstance(data, dict) and depth < DEEPEST:
        if at:
            yield at, "object"
        for key, value in data.items():
            yield from _typed(value, f"{at}.{key}" if at else key, depth + 1)
    elif isinstance(data, list | tuple):
        yield at, "list"
        for value in data:
            yield from _typed(value, f"{at}[]", depth)
    else:
        yield at, _TYPES.get(type(data), "object")
