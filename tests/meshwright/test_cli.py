"""The commands, called in this process: what goes to stdout, what to stderr, which exit code."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from meshwright import Plan
from meshwright.cli import main
from meshwright.planner.plan.words import describe
from tests.meshwright.commands import FOUR, PLAN, Captured, failed, in_a_folder


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_folder(tmp_path, monkeypatch)


# --- plan ----------------------------------------------------------------------------------------


def test_plan_prints_the_report_and_nothing_else(capsys: Captured) -> None:
    assert main([*FOUR, "-o", "plan.json", "--trace", "trace.json"]) == 0
    out, err = capsys.readouterr()
    plan = Plan.load("plan.json")
    assert plan.num_ranks == 8 and plan.global_batch_size == 16
    assert f"Chosen: {describe(plan)}" in out
    assert "plan written to plan.json" in err and "written" not in out
    assert json.loads(Path("trace.json").read_text())["traceEvents"]


def test_a_time_limit_is_kept_and_told(capsys: Captured) -> None:
    assert main([*FOUR, "--time-limit", "0", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["summary"]["complete"] is False and data["summary"].get("gap", 0) >= 0
    assert "time_limit_s=-1.0; legal" in failed(capsys, [*FOUR, "--time-limit", "-1"])


def test_alternatives_and_sensitivity_are_printed(capsys: Captured) -> None:
    assert main([*FOUR, "--sensitivity"]) == 0
    out = capsys.readouterr().out
    assert "Why not something else" in out and "What would flip the decision" in out
    assert main([*FOUR, "--sensitivity", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert {row["family"] for row in data["alternatives"]} > {"full recompute"}
    assert "FLOP/s" in {row["property"] for row in data["sensitivity"]}


def test_features_are_no_sequence(capsys: Captured) -> None:
    error = failed(capsys, [*FOUR, "--cp", "2", "--cp-kind", "ring"])
    assert "cp can't split the model's sequences: no input has a sequence dim" in error


@pytest.mark.parametrize("software", ["eager", "megatron"])
def test_the_prices_are_for_the_software_that_is_named(capsys: Captured, software: str) -> None:
    assert main([*FOUR, "--json", "--no-profile", "--target", software]) == 0
    found = json.loads(capsys.readouterr().out)
    assert any(f"target {software}:" in text for text in found["assumptions"])


def test_software_that_is_not_known_is_refused_with_the_known(capsys: Captured) -> None:
    assert "'abacus' (choose from" in failed(capsys, [*FOUR, "--target", "abacus"])


def test_overrides_are_flags(capsys: Captured) -> None:
    flags = [
        "--tp=2", "--dp=2", "--pp=2", "--num-microbatches=4", "--schedule=gpipe", "--zero=1",
        "--recompute=full", "--sharding=0=colwise", "--full", "-o", "plan.json",
    ]  # fmt: skip
    assert main([*FOUR, *flags]) == 0
    assert "pp=2" in capsys.readouterr().out
    plan = Plan.load("plan.json")
    assert (plan.num_microbatches, plan.schedule, len(plan.stages)) == (4, "gpipe", 2)
    for stage in plan.stages:
        assert (stage.tp, stage.dp, stage.zero, stage.recompute) == (2, 2, 1, "full")
    assert "colwise" in str(plan.stages[0].shardings)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--tp", "3"], "override tp=3: 3 does not divide the cluster's 8 devices"),
        (["--forbid", "tpp"], "did you mean 'tp'?"),
        (["--sharding", "=colwise"], "legal: GLOB=DECISION"),
        (["--sharding", "9=colwise"], "sharding '9' matches nothing; legal: a module"),
    ],
)
def test_bad_overrides(capsys: Captured, flags: list[str], says: str) -> None:
    assert says in failed(capsys, [*FOUR, *flags])


def test_a_model_too_large_exits_with_2(capsys: Captured) -> None:
    err = failed(capsys, [*PLAN, "--cluster", "tiny.toml"], code=2)
    assert err.startswith("infeasible: ") and "shortfall by stage" in err


# --- what is wrong is named ----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("target", "says"),
    [
        ("cli_targets", "names no function; legal: module:function"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        ("cli_targets:mpl", "has no function 'mpl'; legal: a function of the module; nearest: mlp"),
        ("cli_targets:value", "has no function 'value'"),
        ("cli_targets:alone", "returned a Linear; legal: a tuple (model, example_inputs)"),
    ],
)
def test_bad_target(capsys: Captured, target: str, says: str) -> None:
    err = failed(capsys, ["plan", target, "--batch", "4"])
    assert err.startswith("error: ") and says in err


def test_the_users_own_error_shows_its_traceback_once(capsys: Captured) -> None:
    assert main(["plan", "cli_targets:raises", "--batch", "4"]) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.count("Traceback (most recent call last)") == 1
    assert err.count('raise KeyError("the user\'s own")') == 1 and "in raises" in err
    assert "error: model 'cli_targets:raises': raised KeyError" in err.splitlines()[-1]


def test_a_file_that_cannot_be_written_is_refused_before_the_search(capsys: Captured) -> None:
    err = failed(capsys, [*FOUR, "-o", "no/such/plan.json"])
    assert "--output 'no/such/plan.json'; legal: a file in a folder that exists" in err


@pytest.mark.parametrize(
    ("cluster", "says"),
    [
        ("h100-smx", "h100-sxm"),
        ("h100-sxm:x", "'h100-sxm:x': after the colon comes a number"),
        ("local:0", "n is 0"),
        ("missing.toml", "missing.toml"),
        ("dgx-a100:-1", "after the colon comes a number"),
    ],
)
def test_bad_cluster(capsys: Captured, cluster: str, says: str) -> None:
    assert says in failed(capsys, [*PLAN, "--cluster", cluster])


@pytest.mark.parametrize(
    "arguments",
    [
        ["plna"],
        [*PLAN, "--tp", "two"],
        [*PLAN, "--what"],
        ["run", "m:f", "--batch", "4", "--steps", "0"],
    ],
)
def test_a_wrong_command_line_exits_with_1(capsys: Captured, arguments: list[str]) -> None:
    err = failed(capsys, arguments)
    assert "legal: meshwright" in err and "--help" in err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "meshwright: a command is missing; legal: plan | show | "),
        (["plan"], "meshwright plan: model and --batch are missing; legal: model (module:"),
        (["plan", "m:f"], "meshwright plan: --batch is missing; legal: --batch BATCH (global"),
        (["diff", "a.json"], "meshwright diff: B is missing; legal: B (the same of another"),
        (["report", "a.json"], "meshwright report: -o/--output is missing; legal: --output"),
    ],
)
def test_what_is_missing_is_told_in_a_line(
    capsys: Captured, arguments: list[str], says: str
) -> None:
    err = failed(capsys, arguments)
    assert says in err and "--help" in err
    assert len(err.splitlines()) == 1 and len(err) < 250


def test_an_unknown_flag_is_told_by_its_command(capsys: Captured) -> None:
    err = failed(capsys, [*PLAN, "--bacth", "4"])
    assert "meshwright plan: unrecognized arguments: --bacth 4 (nearest: --batch" in err
    assert "see `meshwright plan --help`" in err


def test_help_exits_with_0(capsys: Captured) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["plan", "--help"])
    assert caught.value.code == 0
    assert "--microbatch-size" in capsys.readouterr().out


# --- show ----------------------------------------------------------------------------------------


def test_show_prints_the_plan(capsys: Captured) -> None:
    main([*FOUR, "--pp", "2", "--tp", "2", "-o", "plan.json"])
    capsys.readouterr()
    assert main(["show", "plan.json"]) == 0
    out, err = capsys.readouterr()
    plan = Plan.load("plan.json")
    assert describe(plan) in out and plan.model in out and err == ""
    assert "stage 1: blocks block.1 on ranks 4-7, dp2×tp2" in out
    assert main(["show", "plan.json", "--json"]) == 0
    assert capsys.readouterr().out == plan.to_json()


@pytest.mark.parametrize(
    ("text", "says"),
    [(None, "No such file"), ("{", "line 1 is not JSON"), ('{"format": 99}', "is newer than")],
)
def test_show_names_what_is_wrong(capsys: Captured, text: str | None, says: str) -> None:
    if text is not None:
        Path("plan.json").write_text(text)
    err = failed(capsys, ["show", "plan.json"])
    assert "plan.json" in err and says in err


# --- run -----------------------------------------------------------------------------------------

RUN = ["run", "cli_targets:mlp", "--batch", "6", "--precision", "fp32", "--cluster", "local:1"]


def test_run_trains(capsys: Captured) -> None:
    assert main([*RUN, "--steps", "4", "--lr", "0.01", "--json"]) == 0
    out, err = capsys.readouterr()
    losses = json.loads(out)["losses"]
    assert len(losses) == 4 and losses[-1] < losses[0]
    assert "step 4/4: loss" in err


def test_run_takes_a_plan_and_speaks_plainly(capsys: Captured) -> None:
    plan = [*PLAN[:2], "--batch", "6", "--precision", "fp32", "--num-microbatches", "3"]
    assert main([*plan, "-o", "plan.json"]) == 0
    capsys.readouterr()
    assert main([*RUN, "--steps", "2", "--plan", "plan.json"]) == 0
    assert capsys.readouterr().out.startswith("loss ")
    err = failed(capsys, [*RUN, "--steps", "2", "--plan", "plan.json", "--batch", "8"])
    assert "global_batch_size=6, called with 8" in err


def test_run_takes_models_with_their_own_loss(capsys: Captured) -> None:
    arguments = ["run", "cli_targets:own", "--batch", "4", "--precision", "fp32", "--steps", "3"]
    assert main([*arguments, "--json"]) == 0
    losses = json.loads(capsys.readouterr().out)["losses"]
    assert losses[2] < losses[0]


def test_run_without_ranks_says_how_to_launch(capsys: Captured) -> None:
    err = failed(capsys, [*RUN[:-1], "dgx-a100", "--batch", "16"])
    assert "torchrun --nproc-per-node 8" in err and "-m meshwright.cli run" in err
