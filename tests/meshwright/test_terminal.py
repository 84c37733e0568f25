"""What commands show on a terminal and elsewhere: the result, tables, progress, bytes moved."""

import logging
import os
import re
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshwright import progress_shown
from meshwright.cli import main
from meshwright.shell import progress
from meshwright.shell.progress import BAR, FIRST_S, Progress, StepProgress, bar
from meshwright.shell.terminal import show, stdout_is_the_result, wrapped
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import ROWS, batch, net, planned
from tests.meshwright.commands import FOUR, Captured, printed, terminal

RULE = "\u2500"


def lines(text: str) -> list[str]:
    """What was shown, one after another."""
    return [line for line in re.sub(r"\x1b\[K", "", text).split("\r") if line.strip()]


def on_a_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)


def check_tables(out: str, columns: int) -> str:
    drawn = re.sub(r"\x1b\[[0-9;]*m", "", out)
    rules = [line for line in drawn.splitlines() if set(line.strip()) == {RULE}]
    assert len(rules) >= 2 and not [line for line in drawn.splitlines() if len(line) > columns]
    assert "\n\n\n" not in drawn
    return drawn


def test_what_libraries_print_is_not_in_the_result(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A solver's banner, written to the process' stdout, goes to stderr."""
    monkeypatch.setattr(sys, "__stdout__", sys.stdout)
    with stdout_is_the_result():
        os.write(1, b"banner\n")
        show("result")
    show("after")
    assert capfd.readouterr() == ("result\nafter\n", "banner\n")


def test_colour_is_for_terminals(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    show("Chosen: tight")
    assert capsys.readouterr().out == "Chosen: tight\n"
    on_a_terminal(monkeypatch, 160)
    check_tables(printed(capsys, "catalog"), 160)
    show("Chosen: tight")
    coloured = capsys.readouterr().out
    assert "\x1b[" in coloured and "Chosen" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    show("Chosen: tight")
    assert capsys.readouterr().out == "Chosen: tight\n"
    assert RULE not in printed(capsys, "catalog")


@second_tier("tables and lines of progress are drawn on terminals without a search")
@pytest.mark.usefixtures("in_a_folder")
def test_tables_tracing_and_searching_are_shown_on_terminals_alone(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(FOUR) == 0
    assert "searching" not in capsys.readouterr().err
    on_a_terminal(monkeypatch, 80)
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(FOUR) == 0
    out, err = capsys.readouterr()
    drawn = check_tables(out, 80)
    check_tables(printed(capsys, "catalog"), 80)
    assert "Where the step goes" in drawn and "\u2588" in drawn
    assert "tracing the model" in err and "plans priced" in err and "gap " in err
    assert "searching" not in out and err.endswith("\n")
    assert "report: " not in err  # the short text defers nothing to look for
    assert main([*FOUR, "--json"]) == 0
    out, err = capsys.readouterr()
    for what in ("a closer bound", "the best plan of each family", "advice"):
        assert f"report: {what}" in err and f"report: {what}" not in out
    watched = logging.getLogger("meshwright.progress")
    assert not watched.handlers and watched.propagate and not watched.isEnabledFor(logging.DEBUG)


def test_text_is_broken_between_words_and_commands_are_not() -> None:
    assert wrapped("  - one two three", 11) == "  - one two\n    three"
    assert wrapped("run --a-long-flag \\\n\nx", 9) == "run --a-long-flag \\\n\nx"


def test_records_with_a_share_have_a_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    assert bar(None) == "" and bar(0.5) == f"[{'#' * (BAR // 2)}{' ' * (BAR // 2)}] "
    assert bar(-1.0).count("#") == 0 and bar(2.0).count("#") == BAR
    stream = terminal(monkeypatch)
    watched = logging.getLogger("meshwright.progress")
    with progress_shown():
        watched.debug("reading", extra={"share": 0.25})
        watched.debug("tracing")
    assert lines(stream.getvalue()) == [f"{bar(0.25)}reading", "tracing\n"]


def test_no_line_is_wider_than_the_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    monkeypatch.setattr(progress, "columns", lambda: 40)
    with Progress() as said:
        said("x" * 100, 1.0)
    (line,) = lines(stream.getvalue())
    assert len(line.rstrip("\n")) == 39


def test_elsewhere_lines_are_few_and_plain(capsys: Captured) -> None:
    now = [0.0]
    with Progress(clock=lambda: now[0]) as said:
        for _ in range(100):
            now[0] += FIRST_S / 10
            said("reading", 0.5)
    err = capsys.readouterr().err
    assert err.splitlines() == [f"reading, after {s:.0f} s" for s in (10, 20, 40, 80)]


def test_steps_of_a_run_are_a_bar_on_terminals_and_lines_everywhere(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    line = {"step": 12.0, "loss": 2.34567, "lr": 1e-3, "train_step_s": 3.0, "eval_loss": 2.0}
    for drawn in (False, True):
        monkeypatch.setattr(sys.stderr, "isatty", lambda drawn=drawn: drawn)
        shown = StepProgress(clock=lambda: now[0])
        for step in (11, 12):  # a run that was resumed after 10
            now[0] += 2.0
            shown.at(step, 20)
        shown(line)
        shown.end()
    plain, shown_over = capsys.readouterr().err.split("\r", 1)
    assert plain == "step 12/20: loss 2.346, lr 0.001, eval_loss 2\n"
    assert "] 12/20 steps, 0:04, 0:16 left" in shown_over
    assert "step 12/20: loss 2.346" in shown_over
    shown = StepProgress(clock=lambda: now[0])
    shown.at(3, None)
    assert capsys.readouterr().err.startswith("\r3 steps, 0:00")


def test_on_a_terminal_lines_take_the_place_of_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = terminal(monkeypatch)
    with Progress() as said:
        said("one of two")
        said("two")
    shown = stream.getvalue()
    assert (shown.count("\r"), shown.count("\n")) == (2, 1) and shown.endswith("\n")
    monkeypatch.setenv("RANK", "1")
    with Progress() as said:
        said("by another rank")
    assert stream.getvalue() == shown


def moved(text: str, what: str) -> list[tuple[str, str]]:
    """What was shown, as bytes moved of how many."""
    return re.findall(rf"\r(?:\[[# ]*\] )?{what}: (\S+ \S+) of (\S+ \S+)\x1b", text)


def test_reads_and_writes_of_checkpoints_are_shown_to_their_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stream, result = terminal(monkeypatch), planned(net())
    optimizer = torch.optim.AdamW(result.parameters())
    result.train_step(batch(ROWS))
    optimizer.step()
    result.save_checkpoint(tmp_path / "unseen", optimizer)
    with progress_shown():
        result.save_checkpoint(tmp_path / "a", optimizer)
        result.save_checkpoint(tmp_path / "b", optimizer, asynchronous=True).wait()
    weights = result.full_state_dict()
    parameters = sum(x.nbytes for x in weights.values())
    written = moved(stream.getvalue(), "writing a checkpoint")
    assert [done for done, total in written].count(written[-1][1]) == 2
    assert float(written[-1][1].split()[0]) == pytest.approx(3 * parameters / 1024, rel=0.01)
    torch.save(weights, tmp_path / "weights.pt")
    save_file(weights, tmp_path / "weights.safetensors")
    with progress_shown():
        for name in ("weights.pt", "weights.safetensors"):
            result.load_weights(tmp_path / name)
        result.load_checkpoint(tmp_path / "a", optimizer)
    read = moved(stream.getvalue(), "reading weights")
    assert [done for done, total in read].count(read[-1][1]) == 2
    done, total = moved(stream.getvalue(), "reading a checkpoint")[-1]
    assert done == total
    assert stream.getvalue().endswith("\n")
    assert not logging.getLogger("meshwright.progress").handlers
