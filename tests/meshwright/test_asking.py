"""The commands that ask: diff, explain, compare, fit and catalog."""

import io
import json
from collections.abc import Mapping
from contextlib import redirect_stdout
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import meshwright
from meshwright.cli import main
from meshwright.planner.plan import Plan, describe
from meshwright.planner.plan.words import seconds
from meshwright.planner.search import Search
from meshwright.profiles.hardware.catalog_reader import catalog_names, read_entry
from meshwright.shell.commands import fit as fitting
from meshwright.shell.commands.compare import compared
from meshwright.shell.commands.fit import _largest
from meshwright.shell.commands.plan import cost_text
from tests.helpers.tiers import second_tier
from tests.meshwright.commands import FOUR, PLAN, Captured, failed, printed

pytestmark = pytest.mark.usefixtures("in_a_folder")
MODEL = PLAN[1:]
ASKED: Mapping[str, tuple[str, ...]] = {
    "a": ("cli_targets:mlp", "--tp", "1", "--pp", "1"),
    "b": ("cli_targets:mlp", "--tp", "2", "--pp", "2"),
    "split": ("cli_targets:mlp", "--tp", "2", "--pp", "1", "--sharding", "0=colwise"),
    "own": ("cli_targets:own", "--tp", "1", "--pp", "1"),
}


@cache
def planned(name: str) -> tuple[str, str]:
    """The texts of a plan's file and of its report."""
    target, *flags = ASKED[name]
    with redirect_stdout(io.StringIO()) as report:
        assert main(["plan", target, *FOUR[2:], *flags, "--json", "-o", f"{name}.json"]) == 0
    return Path(f"{name}.json").read_text(), report.getvalue()


def written(*names: str) -> list[Any]:
    """The reports, written beside the plans."""
    for name in names:
        plan, report = planned(name)
        Path(f"{name}.json").write_text(plan)
        Path(f"report_{name}.json").write_text(report)
    return [json.loads(planned(name)[1]) for name in names]


def test_small_costs_keep_their_digits() -> None:
    cost = {
        "device_hours_per_step": 2e-5, "price_per_step": 5e-5, "tokens": 1e9, "steps": 122_070,
        "days": 0.0066, "device_hours": 2.526, "price": 6.315, "price_per_million_tokens": 0.0063,
    }  # fmt: skip
    assert "0.0066 days, 2.53 device-hours, 6.32 (0.0063 per" in cost_text(cost)
    large = cost_text(cost | {"days": 1_234.5, "device_hours": 12_345.6, "price": 30_864.0})
    assert "1,234 days, 12,346 device-hours, 30,864 (" in large


@second_tier("one decision, and another model, are told apart by the same comparison")
def test_diff_tells_decisions_and_what_they_cost(capsys: Captured) -> None:
    reports = written("a", "b")
    for one, other in (("a", "a"), ("report_a", "report_a"), ("a", "report_a")):
        *both, said = printed(capsys, "diff", f"{one}.json", f"{other}.json").splitlines()
        assert said == "no difference"
        # date and versions of both, and no difference
        assert [line[:3] for line in both] == ["A: ", "B: "]
        assert all(f"by meshwright {meshwright.__version__}, torch " in line for line in both)

    plans = printed(capsys, "diff", "a.json", "b.json", code=4)
    assert "mesh of block.0-1: dp8 -> dp2×tp2" in plans
    assert "stages: 1 -> 2" in plans and "a plan file has no prices" in plans

    data = json.loads(printed(capsys, "diff", "report_a.json", "report_b.json", "--json", code=4))
    prices = {row["what"]: row for row in data["prices"]}
    a, b = (report["summary"]["step_time_s"] for report in reports)
    assert prices["step"]["more"] == pytest.approx(b - a)
    parts = [row["more"] for what, row in prices.items() if what in reports[0]["components_s"]]
    assert sum(parts) == pytest.approx(b - a)
    assert {"what": "stages", "a": "1", "b": "2"} in data["changes"]
    assert data["made"]["a"] == {name: reports[0]["made"][name] for name in data["made"]["a"]}


def test_one_decision_is_one_line(capsys: Captured) -> None:
    written("a")
    data = json.loads(Path("a.json").read_text())
    data["num_microbatches"] *= 2
    Path("b.json").write_text(json.dumps(data))
    found = json.loads(printed(capsys, "diff", "a.json", "b.json", "--json", code=4))
    assert [change["what"] for change in found["changes"]] == ["num_microbatches"]
    data["num_microbatches"] //= 2
    for stage in data["stages"]:
        stage["compressed"] = "topk-1"
    Path("b.json").write_text(json.dumps(data))
    (change,) = json.loads(printed(capsys, "diff", "a.json", "b.json", "--json", code=4))["changes"]
    assert (change["a"], change["b"]) == ("none", "topk-1")


def test_another_model_is_told_in_words(capsys: Captured) -> None:
    """Parameters, blocks and the plans as a whole, not decision by decision."""
    written("a", "own")
    text = printed(capsys, "diff", "report_a.json", "report_own.json", "--json", code=4)
    changes = {row["what"]: row for row in json.loads(text)["changes"]}
    model, only = changes["another model"], changes["blocks that the other lacks"]
    assert model["a"].startswith("808 parameters, ") and model["b"].startswith("68 parameters, ")
    assert " blocks (fingerprint " in model["a"] and only["a"] != only["b"]
    assert not any("not there" in row[side] for row in changes.values() for side in "ab")
    out = printed(capsys, "diff", "a.json", "own.json", code=4)
    assert "another model: " in out and "parameters, " not in out


@pytest.mark.parametrize("text", ["{", "[1]", '{"plan": 3}'])
def test_diff_names_a_file_that_is_no_plan(capsys: Captured, text: str) -> None:
    Path("x.json").write_text(text)
    assert "x.json" in failed(capsys, ["diff", "x.json", "x.json"])


def test_explain_prices_the_other_ways(capsys: Captured) -> None:
    written("split")
    plan = ["--cluster", "dgx-a100", "--plan", "split.json"]
    (row,) = json.loads(printed(capsys, "explain", *MODEL, "0", *plan, "--json"))
    assert row["tp"] == 2 and row["operator"].startswith("0")
    assert row["chosen"]["strategy"] == "colwise"
    others = {way["strategy"]: way for way in row["others"]}
    assert {"rowwise", "replicate"} <= set(others)
    more = others["replicate"]["seconds"] - row["chosen"]["seconds"]
    assert more > 0  # between states that it was chosen for
    out = printed(capsys, "explain", *MODEL, "0", *plan)
    assert "chosen colwise: block" in out and f"replicate: +{seconds(more)}" in out
    next_best = row["others"][0]
    saved = seconds(next_best["seconds"] - row["chosen"]["seconds"])
    assert f"saves {saved} a step against the next best, {next_best['strategy']}" in out
    assert row["chosen"]["states"].endswith("-> S(1)") and row["chosen"]["states"] in out
    for word in ("R replicated", "S(d) split", "P partial", "colwise and rowwise", "block: "):
        assert word in out.partition("How to read it")[2]
    assert "names no module" in failed(capsys, ["explain", *MODEL, "9", *plan])


def test_explain_says_where_nothing_is_split(capsys: Captured) -> None:
    assert "no tensor axis" in printed(capsys, "explain", *MODEL, "0", "--cluster", "local:1")


def report_of(step_s: float, devices: int) -> Any:
    """What a comparison reads of a report."""

    def cost(price_per_hour: float | None, **_: object) -> dict[str, float]:
        return (
            {"price_per_step": price_per_hour * step_s * devices / 3600} if price_per_hour else {}
        )

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
        ([1.0, 9.0], None, "cost", "fast"),
        ([3.0], "time", "time", "fast"),
    ],
)
def test_the_least_time_or_cost_is_chosen(
    prices: list[float], by: str | None, how: str, chosen: str
) -> None:
    plans = {"fast": lambda: report_of(2.0, 8), "small": lambda: report_of(4.0, 2)}
    found = compared(plans, prices=prices, tokens=None, by=by)
    assert (found.by, found.chosen) == (how, chosen)
    (line,) = [x for x in str(found).splitlines() if f"CHOSEN by {how}" in x]
    assert line.split()[0] == chosen
    if prices:
        each = [row["price_per_step"] for row in found.rows]
        first, last = prices[0], prices[-1]
        assert each == pytest.approx([first * 16 / 3600, last * 8 / 3600])


def test_compare_plans_for_each_cluster(capsys: Captured) -> None:
    asked = ["compare", *MODEL, "--cluster", "dgx-a100", "--cluster", "l4"]
    out = printed(capsys, *asked, "--price", "2", "--by", "time")
    assert out.count("CHOSEN by time") == 1 and "price/step" in out
    assert "dgx-a100" in out and "l4" in out


@second_tier("a model that is too large is refused by plan; compare has clusters with room")
def test_a_cluster_that_is_too_small_is_a_row(capsys: Captured) -> None:
    asked = ["compare", *MODEL, "--cluster", "tiny.toml"]
    data = json.loads(printed(capsys, *asked, "--json", code=2))
    assert data["chosen"] is None and "does not fit" in data["rows"][0]["why"]
    assert "tiny.toml" in printed(capsys, *asked, code=2)


def test_prices_are_for_all_or_for_each() -> None:
    plans = dict.fromkeys(["a", "b", "c"], lambda: pytest.fail("planned"))
    with pytest.raises(ValueError, match="--price was given 2 times for 3 clusters"):
        compared(plans, prices=[1.0, 2.0], tokens=None, by=None)
    with pytest.raises(ValueError, match="--by cost: no price was given"):
        compared(plans, prices=[], tokens=None, by="cost")


def test_fit_finds_the_largest_batch(capsys: Captured) -> None:
    data = json.loads(printed(capsys, "fit", *MODEL, "--cluster", "dgx-a100", "--json"))
    assert data["verdict"] == "fits" and data["sequence"] is None
    low, high = data["interval_bytes"]
    assert data["peak_bytes"] < high <= data["memory_bytes"] and low < high
    assert data["probability"] > 0.9
    assert data["batch_at_once"] > 16 and data["batch_at_once"] % 16 == 0


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
    data = json.loads(printed(capsys, *asked, "--json"))
    found = [data[name] for name in ("batch_at_once", "sequence_now", "sequence")]
    assert found == [160, 6, 60]
    out = printed(capsys, *asked)
    assert "as one micro-batch: 160 rows" in out
    assert "longest sequence that fits: 60 tokens (planned: 6)" in out


@second_tier("what does not fit is said by plan, with the shortfall of each stage")
def test_fit_says_what_would_help(capsys: Captured) -> None:
    out = printed(capsys, "fit", *MODEL, "--cluster", "tiny.toml", code=2)
    assert out.startswith("does not fit: ")
    assert "shortfall by stage" in out and "one micro-batch: none" in out


@pytest.mark.parametrize(
    ("most", "found"),
    [(0.0, 0.0), (0.3, 0.25), (1.0, 1.0), (1.4, 1.25), (100, 96), (113, 112), (9e9, 4096 * 1.75)],
)
def test_the_largest_factor_is_found_within_a_quarter(most: float, found: float) -> None:
    assert _largest(lambda factor: factor <= most) == found


@second_tier("overrides are flags of every command alike (test_cli)")
def test_fit_and_compare_take_overrides_and_plans(capsys: Captured) -> None:
    assert main([*FOUR, "--pp=2", "--num-microbatches=4", "-o", "plan.json"]) == 0
    chosen = describe(Plan.load("plan.json"))
    asked = [*PLAN[1:], "--cluster", "dgx-a100", "--json"]
    by_flags = json.loads(printed(capsys, "fit", *asked, "--pp=2", "--num-microbatches=4"))
    by_plan = json.loads(printed(capsys, "fit", *asked, "--plan", "plan.json"))
    assert by_flags["plan"] == by_plan["plan"] == chosen
    rows = json.loads(printed(capsys, "compare", *asked, "--plan", "plan.json"))["rows"]
    assert [row["plan"] for row in rows] == [chosen]
    both = failed(capsys, ["fit", *asked, "--plan", "plan.json", "--pp=2"])
    assert "legal: one of the two" in both


def test_catalog_lists_every_entry(capsys: Captured) -> None:
    out = printed(capsys, "catalog")
    assert all(f"  {name} " in out for name in catalog_names())
    rows = {row["name"]: row for row in json.loads(printed(capsys, "catalog", "--json"))}
    for name, row in rows.items():
        assert sum(row["numbers"].values()) == len(read_entry(name).quantities)


def test_catalog_tells_where_each_number_is_from(capsys: Captured) -> None:
    out = printed(capsys, "catalog", "h100-sxm")
    for key, quantity in read_entry("h100-sxm").quantities.items():
        assert f"{key} = {quantity.text}" in out and quantity.source in out
    assert "did you mean" in failed(capsys, ["catalog", "h100-smx"])
