"""Pages that are made from code: schemas hold for recorded plans, commands have their flags, text
stays text."""

import copy
import dataclasses
import json

import jsonschema
import pytest

import meshwright
from meshwright.cli import COMMANDS
from scripts.record_plans import read
from scripts.site import api, command_line, figures, gallery, hardware, rules, schemas
from scripts.site.markdown import cell, prose


def test_recorded_plans_are_of_the_schema() -> None:
    check = jsonschema.Draft7Validator(schemas.plan_schema())
    plans = [entry["plan"] for entry in read(schemas.RECORD).values() if "plan" in entry]
    assert len(plans) > 40
    for plan in plans:
        assert not [*check.iter_errors(plan)]


@pytest.mark.parametrize(
    ("place", "value"),
    [("schedule", "none"), ("num_microbatches", 0), ("unknown", 1), ("stages", [])],
)
def test_other_files_are_not(place: str, value: object) -> None:
    plan = copy.deepcopy(read(schemas.RECORD)[schemas.SHOWN]["plan"])
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(plan | {place: value}, schemas.plan_schema())
    plan["stages"][0]["mesh"]["dp"] = 0
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(plan, schemas.plan_schema())


def test_every_command_has_its_section_and_flags() -> None:
    text = command_line.text()
    for name in COMMANDS:
        assert f"\n## {name}\n" in text
    for flag in ("--memory-margin PART", "--net RATE", "--max-shard-size", "--cp-kind"):
        assert f"`{flag}" in text


def test_text_stays_text() -> None:
    assert cell("a|b `c|d`\n<x>") == r"a\|b `c\|d` \<x\>"
    assert prose("$x$ `$y` *z\n\n    $ code <x>") == "\\$x\\$ `$y` \\*z\n\n    $ code <x>"


def function(model: object, *, rows: int = 2, clock: object = object()) -> None: ...


@dataclasses.dataclass
class Record:
    """Fields."""

    name: str


def test_signatures_are_written_with_defaults_that_can_be() -> None:
    assert api.signature(function) == "(model, *, rows=2, clock=...)"
    assert "| `name` |" in api.described("Record", Record)
    cluster = api.described("Cluster", meshwright.Cluster)
    assert "{py:classmethod} detect(environ: Mapping[str, str] = ...) -> Cluster" in cluster
    assert "{py:attribute} num_devices" in cluster and "{py:method} describe() -> str" in cluster


def test_hardware_has_its_sources() -> None:
    pages = dict(hardware.files())
    devices = pages["reference/catalog/devices.md"]
    assert "## h100-sxm\n" in devices and "| kind | date | source |" in devices
    assert "## dgx-h100\n" in pages["reference/catalog/nodes.md"]


def test_rules_are_listed() -> None:
    assert "| `aten.bmm` | `b m i, b i o -> b m o` |" in dict(rules.files())["generated/rules.md"]


def test_results_name_their_command() -> None:
    row = {"name": "A|B", "part": "score", "rows": 2, "error": 0.05, "bias": -0.01}
    row |= {"worst": 0.1, "spearman": None, "regret": None}
    head = {"command": "python -m x", "date": "2026-11-29", "machine": "m", "load": 1, "torch": "2"}
    text = figures.sources(head | {"families": [row, row | {"part": "fit", "rows": 0}]})
    assert text.startswith("`python -m x` (2026-11-29, m at load 1, torch 2)")
    assert r"| A\|B | 2 | 5.0 % | -1.0 % | +10.0 % | – | – | – |" in text


def test_scripts_and_notebooks_have_pages() -> None:
    pages = dict(gallery.files())
    assert "dp2 x tp2" in pages["gallery/leaf.md"] and "@leaf(rule=" in pages["gallery/leaf.md"]
    cells = [("markdown", ["# Title\n", "Text."]), ("code", ["x = 1\n", "y"])]
    text = json.dumps({"cells": [{"cell_type": k, "source": lines} for k, lines in cells]})
    assert gallery._notebook(text) == ("Title", "Text.\n\n```python\nx = 1\ny\n```\n")
