"""The table of decisions: what one typed field and its record add to it is there everywhere."""

import argparse
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from meshwright.costmodel.operators import Problem
from meshwright.planner import decisions
from meshwright.planner.decisions import CONTRADICTIONS, DECISIONS, Decision
from meshwright.planner.overrides import OverrideError, Overrides
from meshwright.planner.plan import Plan, PlanError, StagePlan, describe, plan
from meshwright.planner.pricing import Evaluator
from meshwright.planner.report import explain_plan
from meshwright.shell import override_flags
from meshwright.shell.commands.diff import between
from tests.helpers import tiny
from tests.helpers.refusals import refused
from tests.helpers.tiny import plan_for, slow_host
from tests.planner.plan.test_check import model

COLOUR = Decision(
    name="colour",
    what="what stages are painted in",
    legal=("none", "red", "blue"),
    off="none",
    written="stage",
    column="colour",
    line=lambda found: "/".join(sorted({*found} - {"none"})),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Painted(StagePlan):
    colour: str = "none"


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked(Overrides):
    colour: str | Mapping[str, str] | None = None


@pytest.fixture
def colour(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(decisions._BY_NAME, "colour", COLOUR)
    for module in (plan, tiny):
        monkeypatch.setattr(module, "StagePlan", Painted)
    monkeypatch.setattr(override_flags, "Overrides", Asked)


def painted(*colours: str) -> Plan:
    data = json.loads(plan_for(model()[0], stages=len(colours)).to_json())
    for stage, own in zip(data["stages"], colours, strict=True):
        stage |= {} if own == "none" else {"colour": own}
    return Plan.from_json(json.dumps(data))


@pytest.mark.usefixtures("colour")
def test_a_decision_that_is_added_has_its_flag() -> None:
    parser = argparse.ArgumentParser()
    override_flags.add_arguments(parser)
    said = " ".join(parser.format_help().split())
    assert "what stages are painted in: none, red, blue; repeatable with GLOB=VALUE" in said
    flags = ["--colour", "h.*=red", "--colour", "head=blue"]
    found: Any = override_flags.overrides_of(parser.parse_args(flags))
    assert found.colour == {"h.*": "red", "head": "blue"}
    assert found.given() == {"colour": found.colour}
    legal = "none, red, blue, {glob over block names: such a value}, or None to leave it free"
    with refused(OverrideError, f"override colour='pink'; legal: {legal}"):
        override_flags.overrides_of(parser.parse_args(["--colour", "pink"]))


@pytest.mark.usefixtures("colour")
def test_it_is_in_the_plan_file_and_the_diff(tmp_path: Path) -> None:
    files = [tmp_path / "a.json", tmp_path / "b.json"]
    for file, own in zip(files, (painted("none", "none"), painted("none", "red")), strict=True):
        own.save(file)
        assert Plan.load(file) == own
    assert "colour" not in files[0].read_text() and '"colour": "red"' in files[1].read_text()
    (change,) = between(*files).changes
    assert (change.a, change.b) == ("not there", "red") and change.what.startswith("colour of ")
    with pytest.raises(PlanError, match=r"stage 0: colour='pink'; legal: none, red, blue"):
        painted("pink")


@pytest.mark.usefixtures("colour")
def test_it_is_in_the_report() -> None:
    graph, factors = model()
    own = painted("none", "red")
    assert describe(own).endswith(", red") and not describe(painted("none")).endswith("none")
    on = Problem(graph=graph, factors=factors, cluster=slow_host(own.num_ranks), precision="fp32")
    report = explain_plan(Evaluator(on).price(own), on, {})
    first, second = report.to_dict()["stages"]
    assert (first["colour"], second["colour"]) == ("none", "red")
    lines = str(report).splitlines()
    assert "colour" in next(line for line in lines if "recompute" in line and "mesh" in line)


def test_every_row_is_about_decisions_that_there_are() -> None:
    names = {*DECISIONS, "precision"}
    for row in CONTRADICTIONS:
        assert {row.a, row.b} <= names and row.why and row.legal


def test_no_decision_rules_out_what_does_without() -> None:
    """A row may clash with one of a decision's values, not with a plan that has it not."""
    for row in CONTRADICTIONS:
        a, b = DECISIONS[row.a], DECISIONS.get(row.b)
        off = "1f1b" if row.a == "schedule" else a.off
        for value in [*b.legal] or [b.off] if b else ["fp16"]:
            assert not row.clash(off, value), (row.a, row.b, value)
