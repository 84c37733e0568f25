"""The commands that ask: diff, explain, compare, fit, catalog; what a report's flags print."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.cli import main
from meshwright.planner.plan.words import seconds
from meshwright.planner.search import Search
from meshwright.profiles.hardware.catalog_reader import catalog_names, read_entry
from meshwright.shell import fitting
from meshwright.shell.asking import cost_text
from meshwright.shell.comparing import compared
from meshwright.shell.fitting import _largest
from tests.meshwright.commands import FOUR, PLAN, Captured, failed, in_a_folder

MODEL = [*PLAN[1:]]


@pytest.fixture(autouse=True)
def _in_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    in_a_folder(tmp_path, monkeypatch)


# --- a report's flags ----------------------------------------------------------------------------


def test_a_price_gives_costs_and_full_gives_the_rest(capsys: Captured) -> None:
    assert main([*FOUR, "--full", "--json", "--price", "2.5"]) == 0
    data = json.loads(capsys.readouterr().out)
    hours = data["summary"]["step_time_s"] * 8 / 3600
    assert data["cost"]["price_per_step"] == pytest.approx(2.5 * hours)
    assert "energy_kwh_per_step" not in data["cost"]  # no power is ever assumed
    assert main([*FOUR, "--full", "--watts", "700", "--price", "2.5"]) == 0
    full = capsys.readouterr().out
    assert "device-hours a step" in full and "at the price given" in full
    assert f"{0.7 * hours:.4g} kWh at 700 W a device as given" in full
    assert "the best found of each family" in full
    assert main([*FOUR, "--tokens", "1e9"]) == 1
    assert "no sequence" in capsys.readouterr().err


def test_small_costs_keep_their_digits() -> None:
    cost = {
        "device_hours_per_step": 2e-5, "price_per_step": 5e-5, "tokens": 1e9, "steps": 122_070,
        "days": 0.0066, "device_hours": 2.526, "price": 6.315, "price_per_million_tokens": 0.0063,
    }  # fmt: skip
    assert "0.0066 days, 2.53 device-hours, 6.32 (0.0063 per" in cost_text(cost)
    large = cost_text(cost | {"days": 1_234.5, "device_hours": 12_345.6, "price": 30_864.0})
    assert "1,234 days, 12,346 device-hours, 30,864 (" in large


# --- diff ----------------------------------------------------------------------------------------


def test_diff_tells_decisions_and_what_they_cost(capsys: Captured) -> None:
    reports = []
    for name, flags in (("a", ["--tp", "1", "--pp", "1"]), ("b", ["--tp", "2", "--pp", "2"])):
        assert main([*FOUR, *flags, "--json", "-o", f"{name}.json"]) == 0
        reports.append(json.loads(capsys.readouterr().out))
        Path(f"report_{name}.json").write_text(json.dumps(reports[-1]))
    assert main(["diff", "a.json", "a.json"]) == 0
    assert main(["diff", "report_a.json", "report_a.json"]) == 0
    assert main(["diff", "a.json", "report_a.json"]) == 0
    assert capsys.readouterr().out == "no difference\n" * 3

    assert main(["diff", "a.json", "b.json"]) == 4
    plans = capsys.readouterr().out
    assert "mesh of block.0-1: dp8×tp1 -> dp2×tp2" in plans
    assert "stages: 1 -> 2" in plans and "a plan file has no prices" in plans

    assert main(["diff", "report_a.json", "report_b.json", "--json"]) == 4
    data = json.loads(capsys.readouterr().out)
    prices = {row["what"]: row for row in data["prices"]}
    steps = [report["summary"]["step_time_s"] for report in reports]
    assert prices["step"]["more"] == pytest.approx(steps[1] - steps[0])
    parts = [row["more"] for what, row in prices.items() if what in reports[0]["components_s"]]
    assert sum(parts) == pytest.approx(steps[1] - steps[0])
    assert {"what": "stages", "a": "1", "b": "2"} in data["changes"]


def test_one_decision_is_one_line(capsys: Captured) -> None:
    main([*FOUR, "-o", "a.json"])
    data = json.loads(Path("a.json").read_text())
    data["num_microbatches"] *= 2
    Path("b.json").write_text(json.dumps(data))
    capsys.readouterr()
    assert main(["diff", "a.json", "b.json", "--json"]) == 4
    (change,) = json.loads(capsys.readouterr().out)["changes"]
    assert change["what"] == "num_microbatches"


def test_another_model_is_told_in_words(capsys: Captured) -> None:
    """Parameters, blocks and the plans as a whole, not decision by decision."""
    for name, of in (("a", "mlp"), ("b", "own")):
        asked = ["plan", f"cli_targets:{of}", *FOUR[2:], "--tp", "1"]
        assert main([*asked, "--json", "-o", f"{name}.json"]) == 0
        Path(f"report_{name}.json").write_text(capsys.readouterr().out)
    assert main(["diff", "report_a.json", "report_b.json", "--json"]) == 4
    changes = {row["what"]: row for row in json.loads(capsys.readouterr().out)["changes"]}
    model, only = changes["another model"], changes["blocks that the other lacks"]
    assert model["a"].startswith("808 parameters, ") and model["b"].startswith("68 parameters, ")
    assert " blocks (fingerprint " in model["a"] and only["a"] != only["b"]
    assert not any("not there" in row[side] for row in changes.values() for side in "ab")
    assert main(["diff", "a.json", "b.json"]) == 4
    out = capsys.readouterr().out
    assert "another model: " in out and "parameters, " not in out


@pytest.mark.parametrize("text", ["{", "[1]", '{"plan": 3}'])
def test_diff_names_a_file_that_is_no_plan(capsys: Captured, text: str) -> None:
    Path("x.json").write_text(text)
    assert "x.json" in failed(capsys, ["diff", "x.json", "x.json"])


# --- explain -------------------------------------------------------------------------------------


def test_explain_prices_the_other_ways(capsys: Captured) -> None:
    split = ["--tp", "2", "--pp", "1", "--sharding", "0=colwise"]
    assert main([*FOUR, *split, "-o", "plan.json"]) == 0
    capsys.readouterr()
    asked = ["explain", *MODEL, "0", "--cluster", "dgx-a100", "--plan", "plan.json"]
    assert main([*asked, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["tp"] == 2 and row["operator"].startswith("0")
    assert row["chosen"]["strategy"] == "colwise"
    others = {way["strategy"]: way for way in row["others"]}
    assert {"rowwise", "replicate"} <= set(others)
    more = others["replicate"]["seconds"] - row["chosen"]["seconds"]
    assert more > 0  # between states that it was chosen for
    assert main(asked) == 0
    out = capsys.readouterr().out
    assert "chosen colwise: block" in out and f"replicate: +{seconds(more)}" in out
    next_best = row["others"][0]
    saved = seconds(next_best["seconds"] - row["chosen"]["seconds"])
    assert f"saves {saved} a step against the next best, {next_best['strategy']}" in out
    assert row["chosen"]["states"].endswith("-> S(1)") and row["chosen"]["states"] in out
    for word in ("R replicated", "S(d) split", "P partial", "colwise and rowwise", "block: "):
        assert word in out.partition("How to read it")[2]
    assert "names no module" in failed(capsys, ["9" if word == "0" else word for word in asked])


def test_explain_says_where_nothing_is_split(capsys: Captured) -> None:
    asked = ["explain", *MODEL, "0", "--cluster", "local:1"]
    assert main(asked) == 0
    assert "no tensor axis" in capsys.readouterr().out


# --- compare -------------------------------------------------------------------------------------


def report_of(step_s: float, devices: int) -> Any:
    """What a comparison reads of a report."""

    def cost(price_per_hour: float | None, **_: object) -> dict[str, float]:
        hours = step_s * devices / 3600
        return {"price_per_step": price_per_hour * hours} if price_per_hour else {}

    summary = {
        "step_time_s": step_s, "step_interval_s": (step_s, 2 * step_s), "rows_per_s": 1 / step_s,
        "tokens_per_s": None, "mfu": 0.5, "memory_verdict": "fits", "chosen": "dp8",
    }  # fmt: skip
    plan = SimpleNamespace(num_ranks=devices)
    return SimpleNamespace(summary=summary, plan=plan, cost=cost)


@pytest.mark.parametrize(
    ("prices", "by", "how", "chosen"),
    [
        ([], None, "time", "fast"),
        ([3.0], None, "cost", "small"),  # 2 s of 8 devices, 4 s of 2
        ([2.0, 3.0], None, "cost", "small"),
        ([1.0, 9.0], None, "cost", "fast"),
        ([3.0], "time", "time", "fast"),
    ],
)
def test_the_least_time_or_cost_is_chosen(
    prices: list[float], by: str | None, how: str, chosen: str
) -> None:
    planned = {"fast": lambda: report_of(2.0, 8), "small": lambda: report_of(4.0, 2)}
    found = compared(planned, prices=prices, tokens=None, by=by)
    assert (found.by, found.chosen) == (how, chosen)
    (line,) = [x for x in str(found).splitlines() if f"CHOSEN by {how}" in x]
    assert line.split()[0] == chosen
    if prices:
        each = [row["price_per_step"] for row in found.rows]
        first, last = prices[0], prices[-1]
        assert each == pytest.approx([first * 16 / 3600, last * 8 / 3600])


def test_compare_plans_for_each_cluster(capsys: Captured) -> None:
    asked = ["compare", *MODEL, "--cluster", "dgx-a100", "--cluster", "l4"]
    assert main([*asked, "--price", "2", "--by", "time"]) == 0
    out = capsys.readouterr().out
    assert out.count("CHOSEN by time") == 1 and "price/step" in out
    assert "dgx-a100" in out and "l4" in out


def test_a_cluster_that_is_too_small_is_a_row(capsys: Captured) -> None:
    asked = ["compare", *MODEL, "--cluster", "tiny.toml", "--json"]
    assert main(asked) == 2
    data = json.loads(capsys.readouterr().out)
    assert data["chosen"] is None and "does not fit" in data["rows"][0]["why"]
    assert main(asked[:-1]) == 2
    assert "tiny.toml" in capsys.readouterr().out


def test_prices_are_for_all_or_for_each() -> None:
    planned = dict.fromkeys(["a", "b", "c"], lambda: pytest.fail("planned"))
    with pytest.raises(ValueError, match="--price was given 2 times for 3 clusters"):
        compared(planned, prices=[1.0, 2.0], tokens=None, by=None)
    with pytest.raises(ValueError, match="--by cost: no price was given"):
        compared(planned, prices=[], tokens=None, by="cost")


# --- fit -----------------------------------------------------------------------------------------


def test_fit_finds_the_largest_batch(capsys: Captured) -> None:
    asked = ["fit", *MODEL, "--cluster", "dgx-a100"]
    assert main([*asked, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    assert data["verdict"] == "fits" and data["sequence"] is None
    low, high = data["interval_bytes"]
    assert low < data["peak_bytes"] <= data["memory_bytes"] and high > low
    assert data["batch_at_once"] > 16 and data["batch_at_once"] % 16 == 0
    assert main(asked) == 0
    assert f"as one micro-batch: {data['batch_at_once']:,} rows" in capsys.readouterr().out


def test_fit_searches_batches_and_sequences(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where 1,000 tokens fit: of 16 rows of 6 tokens 10 times as many."""

    def fits(search: Search) -> bool:
        graph = search.problem.graph
        length = graph.values[next(iter(graph.inputs))].shape[1]
        return search.global_batch_size * length <= 1000

    monkeypatch.setattr(fitting, "some_plan_fits", fits)
    asked = ["fit", "cli_targets:texts", *PLAN[2:], "--cluster", "dgx-a100"]
    assert main([*asked, "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    found = [data[name] for name in ("batch_at_once", "sequence_now", "sequence")]
    assert found == [160, 6, 60]
    assert main(asked) == 0
    assert "longest sequence that fits: 60 tokens (planned: 6)" in capsys.readouterr().out


def test_fit_says_what_would_help(capsys: Captured) -> None:
    assert main(["fit", *MODEL, "--cluster", "tiny.toml"]) == 2
    out = capsys.readouterr().out
    assert (
        out.startswith("does not fit: ")
        and "shortfall by stage" in out
        and "one micro-batch: none" in out
    )


@pytest.mark.parametrize(
    ("most", "found"),
    [(0.0, 0.0), (0.3, 0.25), (1.0, 1.0), (1.4, 1.25), (100, 96), (113, 112), (9e9, 4096 * 1.75)],
)
def test_the_largest_factor_is_found_within_a_quarter(most: float, found: float) -> None:
    assert _largest(lambda factor: factor <= most) == found


# --- catalog -------------------------------------------------------------------------------------


def test_catalog_lists_every_entry(capsys: Captured) -> None:
    assert main(["catalog"]) == 0
    out = capsys.readouterr().out
    assert all(f"  {name} " in out for name in catalog_names())
    assert main(["catalog", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    for name, row in rows.items():
        assert sum(row["numbers"].values()) == len(read_entry(name).quantities)


def test_catalog_tells_where_each_number_is_from(capsys: Captured) -> None:
    assert main(["catalog", "h100-sxm"]) == 0
    out = capsys.readouterr().out
    for key, quantity in read_entry("h100-sxm").quantities.items():
        assert f"{key} = {quantity.text}" in out and quantity.source in out
    assert "did you mean" in failed(capsys, ["catalog", "h100-smx"])


# --- stdout --------------------------------------------------------------------------------------


def test_what_libraries_print_is_not_in_the_result(tmp_path: Path) -> None:
    """A solver's banner, written to the process' stdout, goes to stderr."""
    code = (
        "import os, sys\n"
        "from meshwright.shell.terminal import show, stdout_is_the_result\n"
        "with stdout_is_the_result():\n"
        "    os.write(1, b'banner\\n')\n"
        "    show('result')\n"
        "show('after')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout == "result\nafter\n" and done.stderr == "banner\n"


def test_colour_is_for_terminals(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    from meshwright.shell.terminal import show

    show("Chosen: tight")
    assert capsys.readouterr().out == "Chosen: tight\n"
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    show("Chosen: tight")
    coloured = capsys.readouterr().out
    assert "\x1b[" in coloured and "Chosen" in coloured
    monkeypatch.setenv("NO_COLOR", "1")
    show("Chosen: tight")
    assert capsys.readouterr().out == "Chosen: tight\n"


def on_a_terminal(capsys: Captured, monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    pytest.importorskip("rich")
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)


@pytest.mark.parametrize("columns", [80, 160])
def test_tables_are_drawn_on_terminals(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    on_a_terminal(capsys, monkeypatch, columns)
    for arguments in (["catalog"], FOUR):
        assert main(arguments) == 0
        drawn = re.sub(r"\x1b\[[0-9;]*m", "", capsys.readouterr().out)
        rules = [line for line in drawn.splitlines() if set(line.strip()) == {"\u2500"}]
        assert len(rules) >= 2 and all(len(line) <= columns for line in rules)
        assert "\n\n\n" not in drawn
    assert "Where the step goes" in drawn and "\u2588" in drawn
    monkeypatch.setenv("NO_COLOR", "1")
    assert main(["catalog"]) == 0
    assert "\u2500" not in capsys.readouterr().out


# --- progress ------------------------------------------------------------------------------------


def test_tracing_and_searching_are_shown_on_terminals_alone(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert main(FOUR) == 0
    assert "searching" not in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    assert main(FOUR) == 0
    out, err = capsys.readouterr()
    assert "tracing the model" in err and "plans priced" in err and "gap " in err
    assert "searching" not in out and err.endswith("\n")
    assert "report: " not in err  # the short text defers nothing to look for
    assert main([*FOUR, "--json"]) == 0
    out, err = capsys.readouterr()
    for what in ("a closer bound", "the best plan of each family", "advice"):
        assert f"report: {what}" in err and f"report: {what}" not in out
    monkeypatch.setenv("RANK", "1")
    assert main(FOUR) == 0
    assert "searching" not in capsys.readouterr().err
    watched = logging.getLogger("meshwright.progress")
    assert not watched.handlers and watched.propagate and not watched.isEnabledFor(logging.DEBUG)
