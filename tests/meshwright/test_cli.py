"""Commands that plan, show, rehearse, report and run, called in this process: what goes to stdout,
what to stderr, which exit code."""

import argparse
import json
import re
import shlex
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from meshwright import Cluster, Overrides, Plan
from meshwright.cli import main
from meshwright.costmodel.intervals import Quantiles
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.executor.rehearsal import Mismatch, Rehearsal, rehearse
from meshwright.planner.decisions import forbiddable
from meshwright.planner.plan.words import describe
from meshwright.planner.pricing import Prediction, RehearsedMemory
from meshwright.rehearsing import margin_needed
from meshwright.shell.override_flags import add_arguments, overrides_of
from tests.helpers.tiers import second_tier
from tests.meshwright.commands import FOUR, PLAN, Captured, failed, printed

pytestmark = pytest.mark.usefixtures("in_a_folder")
FLAGS = (
    "--tp=2", "--dp=2", "--pp=2", "--num-microbatches=4", "--schedule=gpipe", "--zero=1",
    "--recompute=full", "--sharding=0=colwise",
)  # fmt: skip


@cache
def plan_by_flags() -> str:
    """The text of a plan's file."""
    assert main([*FOUR, *FLAGS, "-o", "flags.json"]) == 0
    return Path("flags.json").read_text()


# --- plan and report -----------------------------------------------------------------------------


def test_plan_prints_the_report_and_nothing_else(capsys: Captured) -> None:
    costs = ["--watts", "700", "--price", "2.5"]
    files = ["-o", "plan.json", "--trace", "trace.json"]
    assert main([*FOUR, *files, *costs, "--full", "--sensitivity"]) == 0
    out, err = capsys.readouterr()
    plan = Plan.load("plan.json")
    assert plan.num_ranks == 8 and plan.global_batch_size == 16
    assert f"Chosen: {describe(plan)}" in out
    assert "plan written to plan.json" in err and "written" not in out
    assert json.loads(Path("trace.json").read_text())["traceEvents"]
    for part in (
        "Why not something else", "the best found of each family", "What would flip the decision",
        "device-hours a step", "at the price given", "kWh at 700 W a device as given",
    ):  # fmt: skip
        assert part in out


@second_tier("reports as JSON stay, and pages beside their code (test_page)")
def test_json_and_pages_have_the_report(capsys: Captured) -> None:
    files = ["-o", "plan.json", "--html", "searched.html"]
    assert main([*FOUR, *files, "--json", "--sensitivity"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert {row["family"] for row in data["alternatives"]} > {"full recompute"}
    assert "FLOP/s" in {row["property"] for row in data["sensitivity"]}
    assert any("target eager:" in text for text in data["assumptions"])
    assert "page written to searched.html" in err
    step_s = data["summary"]["step_time_s"]
    searched = Path("searched.html").read_text(encoding="utf-8")
    assert f'<data value="{step_s}">' in searched
    line = shlex.join(["meshwright", *FOUR, *files, "--json", "--sensitivity"])
    named = {"module": FOUR[1], "cluster": FOUR[-1], "command": line}
    made = {**named, **Plan.load("plan.json").made}
    assert data["made"] == made and {"model", "date", "torch"} < made.keys()
    assert f"run {FOUR[1]} --cluster {FOUR[-1]} " in searched and made["date"] in searched
    Path("report.json").write_text(out)
    assert main(["report", "report.json", "-o", "again.html"]) == 0
    assert Path("again.html").read_text(encoding="utf-8") == searched
    of = ["cli_targets:mlp", "--cluster", "dgx-a100", "-o", "given.html", "--price", "2.5"]
    assert main(["report", "plan.json", *of]) == 0
    given = Path("given.html").read_text(encoding="utf-8")
    assert "The plan was given, not searched" in given and 'data-fact="price of a step"' in given


def test_what_a_page_needs_is_looked_for_before_the_search(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    monkeypatch.setattr("meshwright.shell.commands.plan.parallelized", None)
    assert "pip install altair vl-convert" in failed(capsys, [*FOUR, "--html", "plan.html"])


def test_what_can_not_be_a_page_is_said(capsys: Captured) -> None:
    Path("old.json").write_text('{"schema": 1}')
    Path("plan.json").write_text("{}")
    for arguments, says in (
        (["old.json"], "schema 1; legal: 3"),
        (["plan.json"], "is no Meshwright plan"),
        (["missing.json"], "No such file"),
        (["plan.json", "--price", "0"], "legal: a number above 0"),
    ):
        assert says in failed(capsys, ["report", *arguments, "-o", "page.html"])
    assert not Path("page.html").exists()


def test_time_limit_software_and_price_are_those_that_are_named(capsys: Captured) -> None:
    asked = ["--time-limit", "0", "--no-profile", "--target", "megatron", "--price", "2.5"]
    data = json.loads(printed(capsys, *FOUR, "--json", *asked))
    assert data["summary"]["complete"] is False and data["summary"].get("gap", 0) >= 0
    assert any("target megatron:" in text for text in data["assumptions"])
    hours = data["summary"]["step_time_s"] * 8 / 3600
    assert data["cost"]["price_per_step"] == pytest.approx(2.5 * hours)
    assert "energy_kwh_per_step" not in data["cost"]  # no power is ever assumed


def test_overrides_are_flags_and_show_prints_the_plan(capsys: Captured) -> None:
    Path("plan.json").write_text(plan_by_flags())
    plan = Plan.load("plan.json")
    assert (plan.num_microbatches, plan.schedule, len(plan.stages)) == (4, "gpipe", 2)
    for stage in plan.stages:
        assert (stage.tp, stage.dp, stage.zero, stage.recompute) == (2, 2, 1, "full")
    assert "colwise" in str(plan.stages[0].shardings)
    out = printed(capsys, "show", "plan.json")
    assert describe(plan) in out and plan.model in out
    assert "stage 1: blocks block.1 on ranks 4-7, dp2×tp2" in out
    assert printed(capsys, "show", "plan.json", "--json") == plan.to_json()


LIGHT = """
import contextlib, io, sys
from meshwright.cli import COMMANDS, main

for line in ("--help", "--version", *(f"{name} --help" for name in COMMANDS), *sys.argv[1:]):
    with contextlib.redirect_stdout(io.StringIO()):
        try:
            code = main(line.split())
        except SystemExit as end:
            code = end.code
    assert code == 0, line
    assert "torch" not in sys.modules, line
"""


@second_tier("exports that are imported when they are asked for stay (test_lazy_exports)")
def test_what_plans_nothing_loads_no_torch(capsys: Captured) -> None:
    Path("plan.json").write_text(plan_by_flags())
    Path("report.json").write_text(printed(capsys, *FOUR, "--json"))
    lines = (
        "show plan.json",
        "diff plan.json plan.json",
        "diff report.json report.json",
        "report report.json -o page.html",
        "catalog",
        "catalog dgx-a100",
    )
    command = [sys.executable, "-c", LIGHT, *lines]
    run = subprocess.run(command, capture_output=True, text=True, check=False, timeout=300)
    assert run.returncode == 0, run.stderr


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["paln"], "no command 'paln'; legal: plan, show, .*; nearest: plan$"),
        (["show", "--jsno", "x"], "unrecognized arguments: --jsno; legal: .*; nearest: --json$"),
    ],
)
def test_a_wrong_word_is_answered_by_the_nearest_one(
    capsys: Captured, arguments: list[str], says: str
) -> None:
    text = failed(capsys, arguments)
    assert re.search(says, text, re.MULTILINE) and len(text) < 250


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "No such file"), ("{", "line 1 is not JSON"), ('{"format": 99}', "is newer than")],
)
def test_show_names_what_is_wrong(capsys: Captured, text: str | None, says: str) -> None:
    if text is not None:
        Path("plan.json").write_text(text)
    err = failed(capsys, ["show", "plan.json"])
    assert "plan.json" in err and says in err


def test_a_model_too_large_exits_with_2(capsys: Captured) -> None:
    err = failed(capsys, [*PLAN, "--cluster", "tiny.toml"], code=2)
    assert err.startswith("infeasible: ") and "shortfall by stage" in err and "(MW210: " in err


# --- what is wrong is named ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([*FOUR, "--tp", "3"], "override tp=3: 3 does not divide the cluster's 8 devices"),
        ([*FOUR, "--forbid", "tpp"], "did you mean 'tp'?"),
        ([*FOUR, "--sharding", "9=colwise"], "sharding '9' matches nothing; legal: a module"),
        ([*FOUR, "--cp", "2", "--cp-kind", "ring"],
         "cp can't split the model's sequences: no input has a sequence dim"),
        ([*FOUR, "--time-limit", "-1"], "time_limit_s=-1.0; legal"),
        pytest.param(
            [*FOUR, "--tokens", "1e9"],
            "no sequence",
            marks=second_tier("it takes a search; what is refused before one stays"),
        ),
        ([*FOUR, "-o", "no/such/plan.json"],
         "--output 'no/such/plan.json'; legal: a file in a folder that exists"),
        (["plan", "cli_targets", "--batch", "4"], "names no function; legal: module:function"),
        (["plan", "no_such_module:f", "--batch", "4"], "No module named 'no_such_module'"),
        (["plan", "cli_targets:mpl", "--batch", "4"],
         "has no function 'mpl'; legal: a function of the module; nearest: mlp"),
        (["plan", "cli_targets:value", "--batch", "4"], "has no function 'value'"),
        (["plan", "cli_targets:alone", "--batch", "4"],
         "returned a Linear; legal: a tuple (model, example_inputs)"),
        ([*PLAN, "--cluster", "h100-smx"], "h100-sxm"),
        ([*PLAN, "--cluster", "h100-sxm:x"], "'h100-sxm:x': after the colon comes a number"),
        ([*PLAN, "--cluster", "local:0"], "n is 0"),
        ([*PLAN, "--cluster", "missing.toml"], "missing.toml"),
        ([*PLAN, "--cluster", "dgx-a100:-1"], "after the colon comes a number"),
    ],
)  # fmt: skip
def test_what_is_refused_is_one_error(capsys: Captured, arguments: list[str], says: str) -> None:
    err = failed(capsys, arguments)
    assert err.startswith("error: ") and says in err
    assert re.fullmatch(r"\(MW\d+: docs/reference/errors\.md#mw\d+\)", err.splitlines()[-1])


def test_the_users_own_error_shows_its_traceback_once(capsys: Captured) -> None:
    assert main(["plan", "cli_targets:raises", "--batch", "4"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("Traceback (most recent call last)") == 1
    assert err.count('raise KeyError("the user\'s own")') == 1 and "in raises" in err
    assert "error: model 'cli_targets:raises': raised KeyError" in err.splitlines()[-2]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["xyz"], "no command 'xyz'; legal: plan, show, "),
        ([*PLAN, "--tp", "two"], "--tp: 'two'; legal: VALUE or GLOB=VALUE; see "),
        (["run", "m:f", "--batch", "4", "--steps", "0"], "'0'; legal: an integer from 1; see "),
        ([*FOUR, "--target", "abacus"], "'abacus' (choose from"),
        ([*PLAN, "--bacth", "4"],
         "unrecognized arguments: --bacth 4; legal: those of `meshwright plan --help`; nearest: "),
        ([], "meshwright: a command is missing; legal: plan | show | "),
        (["plan"], "meshwright plan: model is missing; legal: model (module:"),
        (["report", "a.json"], "meshwright report: -o/--output is missing; legal: --output"),
    ],
)  # fmt: skip
def test_a_wrong_command_line_is_told_in_a_line(
    capsys: Captured, arguments: list[str], says: str
) -> None:
    err = failed(capsys, arguments)
    assert says in err and "--help" in err
    if "missing" in says:
        assert len(err.splitlines()) == 2 and len(err) < 290


def test_help_exits_with_0(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--help"])
    assert caught.value.code == 0
    assert "--microbatch-size" in capsys.readouterr().out


# --- flags of overrides --------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="plan", exit_on_error=False)
    add_arguments(made)
    return made


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {}),
        ("--tp 4 --dp=2 --cp 2 --ep 8 --pp 3", {"tp": 4, "dp": 2, "cp": 2, "ep": 8, "pp": 3}),
        ("--virtual-stages 2 --microbatch-size 1", {"virtual_stages": 2, "microbatch_size": 1}),
        ("--schedule zb_v --placement tp,pp,dp", {"schedule": "zb_v", "placement": "tp,pp,dp"}),
        ("--zero 3 --dp-shard 8", {"zero": 3, "dp_shard": 8}),
        ("--zero h.0-11=2 --zero head=0", {"zero": {"h.0-11": 2, "head": 0}}),
        ("--recompute h.*=selective", {"recompute": {"h.*": "selective"}}),
        ("--dp-shard a=b=2", {"dp_shard": {"a=b": 2}}),
        ("--stage embed,h.0-5 --stage h.6,head", {"stages": [["embed", "h.0-5"], ["h.6", "head"]]}),
        ("--forbid tp --forbid zero-3", {"forbid": ("tp", "zero-3")}),
    ],
)
def test_flags_are_overrides(flags: str, expected: dict[str, Any]) -> None:
    assert overrides_of(parser().parse_args(flags.split())) == Overrides(**expected)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--zero 1 --zero head=0", "--zero 1, head=0; legal: one VALUE for all blocks, or GLOB="),
        ("--tp 2 --tp 4", "--tp 2, 4; legal: one VALUE"),
        ("--dp-shard h=2 --dp-shard h=4", "--dp-shard h=2, h=4; legal: .* once per glob"),
        ("--sharding colwise", "--sharding 'colwise': no decision; legal: GLOB=DECISION"),
        ("--sharding =colwise", "legal: GLOB=DECISION"),
        ("--zero 4", "zero=4; legal: 0, 1, 2, 3"),
        ("--recompute h=some", "recompute=.*legal: none, regather, selective"),
    ],
)
def test_values_that_cannot_be_are_named(flags: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        overrides_of(parser().parse_args(flags.split()))


@pytest.mark.parametrize("flags", ["--tp two", "--zero =2", "--cp h=", "--pp 1.5", "--dp-shard h"])
def test_what_is_no_number_is_refused_with_the_form(flags: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=r"VALUE or GLOB=VALUE|invalid int value"):
        parser().parse_args(flags.split())


def test_the_help_names_what_is_legal() -> None:
    text = " ".join(parser().format_help().split())
    assert "ZeRO stage: 0, 1, 2, 3; repeatable with GLOB=VALUE" in text
    assert "products+regather, full" in text and "tp,dp,pp or tp,pp,dp" in text
    assert ", ".join(SCHEDULES) in text and ", ".join(forbiddable()) in text


# --- rehearse ------------------------------------------------------------------------------------

REHEARSE = ["rehearse", *FOUR[1:], "--plan", "plan.json"]


@second_tier("plan rehearses, too, and the executor's rehearsals stay")
def test_rehearse_speaks_for_ranks_that_are_not_there(capsys: Captured) -> None:
    Path("plan.json").write_text(plan_by_flags())
    assert "kinds of 8 ranks, no mismatch, peak" in printed(capsys, *REHEARSE)
    found = json.loads(printed(capsys, *REHEARSE, "--every", "--json"))
    assert found["mismatches"] == [] and len(found["ranks"]) == 8
    assert all(rank["peak_bytes"] > 0 for rank in found["ranks"].values())


@second_tier("a plan whose rehearsal does not fit stays")
def test_plan_and_rehearse(capsys: Captured) -> None:
    assert main([*FOUR, "--pp", "2", "--num-microbatches", "2", "--rehearse", "--json"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert "rehearsing" not in out + err
    assert data["rehearsal"]["mismatches"] == [] and data["rehearsal"]["ranks"]
    assert data["summary"]["memory_verdict_by"] == "rehearsal"


@second_tier("mismatches are found in tests of the executor's proofs")
def test_plan_and_rehearse_what_does_not_match(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    unmet = Mismatch(proof="messages", ranks=(0, 1), text="what the first never sends")
    rehearsing = sys.modules[rehearse.__module__]
    monkeypatch.setattr(rehearsing, "mismatches", lambda logs, kind_of: [unmet])
    assert main([*FOUR, "--pp", "2", "--rehearse", "-o", "plan.json"]) == 1
    out, err = capsys.readouterr()
    last = out.rstrip().splitlines()[-1]
    assert last.startswith("rehearsed: ") and " of 8 ranks, 1 mismatch, peak " in last
    assert f"mismatch: {unmet}" in err and str(unmet) in out
    assert str(unmet) in printed(capsys, *REHEARSE, code=1)


def test_a_plan_that_does_not_fit_when_rehearsed_exits_with_2(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rehearsal, "peak_bytes", [2**40])
    assert main([*FOUR, "--tp", "8", "--rehearse"]) == 2
    out, err = capsys.readouterr()
    assert "rehearsed 1,024 GiB of tensors" in out and "; does not fit: 0%" in out
    assert "infeasible: the plan was rehearsed, and does not fit" in err


@second_tier("the margin of a second search is computed in a test below")
def test_the_next_plan_that_fits_when_rehearsed_is_the_answer(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    first: list[Rehearsal] = []  # which alone takes more than there is

    def peak_bytes(found: Rehearsal) -> list[int]:
        first[:] = first or [found]
        return [2**40 if found is first[0] else own for own in found.priced_bytes]

    monkeypatch.setattr(Rehearsal, "peak_bytes", property(peak_bytes))
    monkeypatch.setattr("meshwright.rehearsing.margin_needed", lambda prediction, margin, _: 0.5)
    assert main([*FOUR, "--tp", "8", "--rehearse", "-o", "plan.json"]) == 0
    out, err = capsys.readouterr()
    assert (
        "rehearsed 1,024 GiB of tensors" in err
        and "searching again with memory_margin=0.500" in err
    )
    assert "does not fit by its rehearsal; this one does: " in err
    assert "does not fit" not in out and Plan.load("plan.json").stages[0].tp == 8


def test_memory_beyond_the_price_is_left_free_by_the_next_search() -> None:
    cluster = Cluster.from_catalog("h100-sxm")
    memory = cluster.device.memory_bytes
    exact = Quantiles(low=1.0, middle=1.0, high=1.0, rows=1, models=1, of="")
    rehearsed = RehearsedMemory(tensor_bytes=[memory], beside_bytes=[memory // 20])
    found = Prediction(
        step_time_s=1.0,
        peak_memory_bytes=[memory * 9 // 10],
        bubble_fraction=0.0,
        model_flops=1.0,
        mfu=0.5,
        step_error=exact,
        memory_error=exact,
        rehearsed=rehearsed,
    )
    assert margin_needed(found, 0.01, cluster) == pytest.approx(0.01 + 0.15)


@pytest.mark.parametrize(
    ("file", "target", "says"),
    [
        ("plan.json", "own", "made for model"),
        ("ranks.json", "mlp", "ranks"),
        *(
            pytest.param(file, "mlp", says, marks=second_tier("as files of plans"))
            for file, says in (("none.json", "No such file"), ("less.json", "less.json"))
        ),
    ],
)
def test_a_plan_that_is_no_plan_for_this_is_one_clear_error(
    capsys: Captured, file: str, target: str, says: str
) -> None:
    plan = json.loads(plan_by_flags())
    capsys.readouterr()
    stages = [plan["stages"][0] | {"ranks": [0, 1, 2, 9]}, *plan["stages"][1:]]
    Path("plan.json").write_text(json.dumps(plan))
    Path("ranks.json").write_text(json.dumps({**plan, "stages": stages}))
    Path("less.json").write_text(json.dumps({k: x for k, x in plan.items() if k != "stages"}))
    err = failed(capsys, ["rehearse", f"cli_targets:{target}", *FOUR[2:], "--plan", file])
    assert err.startswith("error: ") and err.count("\n") == 2 and says in err


def test_the_report_is_printed_where_the_plan_can_not_be_rehearsed(capsys: Captured) -> None:
    assert main([*FOUR, "--dp", "8", "--rehearse", "--optimizer", "lion"]) == 1
    out, err = capsys.readouterr()
    assert "Chosen: dp8" in out and "ehearsed" not in out
    assert "error: rehearse: optimizer 'lion': torch has none" in err


# --- run -----------------------------------------------------------------------------------------


def test_run_trains_models_with_their_own_loss(capsys: Captured) -> None:
    arguments = ["run", "cli_targets:own", "--batch", "4", "--precision", "fp32", "--steps", "4"]
    assert main([*arguments, "--lr", "0.01", "--json"]) == 0
    out, err = capsys.readouterr()
    losses = json.loads(out)["losses"]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert "step 4/4: loss" in err


def test_run_takes_a_plan_and_speaks_plainly(capsys: Captured) -> None:
    of = ["cli_targets:mlp", "--batch", "6", "--precision", "fp32"]
    run = ["run", *of, "--cluster", "local:1", "--steps", "2", "--plan", "plan.json"]
    assert main(["plan", *of, "--num-microbatches", "3", "-o", "plan.json"]) == 0
    assert printed(capsys, *run).startswith("loss ")
    assert "global_batch_size=6, called with 8" in failed(capsys, [*run, "--batch", "8"])


@second_tier("a model without ranks says it in test_api")
def test_run_without_ranks_says_how_to_launch(capsys: Captured) -> None:
    err = failed(capsys, ["run", *FOUR[1:], "--steps", "2"])
    assert "torchrun --standalone --nproc-per-node 8" in err and "-m meshwright run" in err
