"""`meshwright rehearse` and `plan --rehearse`: what is printed where, and the exit code."""

from __future__ import annotations

import json
import sys
from functools import cache
from pathlib import Path

import pytest

from meshwright.cli import main
from meshwright.executor.rehearsal import Mismatch, Rehearsal, rehearse
from tests.helpers.tiers import second_tier
from tests.meshwright.commands import FOUR, Captured, failed, in_a_folder


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_folder(tmp_path, monkeypatch)


def test_rehearse_speaks_for_ranks_that_are_not_there(capsys: Captured) -> None:
    flags = ["--pp", "2", "--tp", "2", "--dp", "2", "--num-microbatches", "2"]
    assert main([*FOUR, *flags, "-o", "plan.json"]) == 0
    capsys.readouterr()
    command = ["rehearse", *FOUR[1:], "--plan", "plan.json"]
    assert main(command) == 0
    assert "kinds of 8 ranks, no mismatch, peak" in capsys.readouterr().out
    assert main([*command, "--every", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["mismatches"] == [] and len(found["ranks"]) == 8
    assert all(rank["peak_bytes"] > 0 for rank in found["ranks"].values())


def test_plan_and_rehearse(capsys: Captured) -> None:
    flags = ["--pp", "2", "--num-microbatches", "2", "--rehearse"]
    assert main([*FOUR, *flags, "--json"]) == 0
    out, err = capsys.readouterr()
    data = json.loads(out)
    assert "rehearsing" not in out + err
    assert data["rehearsal"]["mismatches"] == [] and data["rehearsal"]["ranks"]
    assert data["summary"]["memory_verdict_by"] == "rehearsal"


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
    assert main(["rehearse", *FOUR[1:], "--plan", "plan.json"]) == 1
    assert str(unmet) in capsys.readouterr().out


def test_a_plan_that_does_not_fit_when_rehearsed_exits_with_2(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Rehearsal, "peak_bytes", [2**40])
    assert main([*FOUR, "--tp", "8", "--rehearse"]) == 2
    out, err = capsys.readouterr()
    assert "rehearsed 1,024 GiB of tensors" in out and ": does not fit" in out
    assert "infeasible: the plan was rehearsed, and does not fit" in err


@cache
def plan_of_eight() -> str:
    """The text of a plan's file."""
    assert main([*FOUR, "--tp", "8", "-o", "eight.json"]) == 0
    return Path("eight.json").read_text()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (["cli_targets:own", "--batch", "16"], "made for model"),
        (["--batch", "32"], "made for global_batch_size=16, called with 32"),
        (["--precision", "bf16"], "made for precision='fp32', called with 'bf16'"),
        (["--cluster", "dgx-a100:2"], "made for 8 ranks, but the cluster has 16 devices"),
        (["--plan", "ranks.json"], "ranks"),
        *(
            pytest.param(["--plan", file], says, marks=second_tier("as files of plans"))
            for file, says in (
                ("none.json", "plan file: none.json: No such file"),
                ("cut.json", "cut.json"),
                ("list.json", "list.json"),
                ("less.json", "less.json"),
                ("blocks.json", "block"),
            )
        ),
    ],
)
def test_a_plan_that_is_no_plan_for_this_is_one_clear_error(
    capsys: Captured, changes: list[str], says: str
) -> None:
    text = plan_of_eight()
    capsys.readouterr()
    plan = json.loads(text)
    Path("plan.json").write_text(text)
    Path("cut.json").write_text(text[: len(text) // 2])
    Path("list.json").write_text("[1, 2]")
    Path("less.json").write_text(json.dumps({k: x for k, x in plan.items() if k != "stages"}))
    (stage,) = plan["stages"]
    for name, change in (("ranks", {"ranks": [0, 1, 2, 9]}), ("blocks", {"blocks": ["none"]})):
        Path(f"{name}.json").write_text(json.dumps({**plan, "stages": [stage | change]}))
    arguments = ["rehearse", *FOUR[1:], "--plan", "plan.json", *changes]
    if changes[0].startswith("cli_targets"):
        arguments.remove("cli_targets:mlp")
    err = failed(capsys, arguments)
    assert err.startswith("error: ") and err.count("\n") == 1 and says in err


def test_the_report_is_printed_where_the_plan_can_not_be_rehearsed(capsys: Captured) -> None:
    assert main([*FOUR, "--dp", "8", "--rehearse", "--optimizer", "lion"]) == 1
    out, err = capsys.readouterr()
    assert "Chosen: dp8" in out and "ehearsed" not in out
    assert "error: rehearse: torch has no optimizer 'lion'" in err
