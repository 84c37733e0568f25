"""The page of a report as a file, and its rows before they are drawn: its numbers, charts, labels,
sizes; without a browser."""

import base64
import copy
import csv
import hashlib
import json
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import vl_convert

from meshwright.planner.page import cells, front, render_page
from meshwright.planner.page.page import _library, timeline
from meshwright.planner.page.specs import axes_in_use, charts, rank_rows
from meshwright.planner.page.tables import (
    compared,
    line,
    operator_words,
    strategy_words,
    without_plan,
)
from meshwright.planner.report import details
from tests.helpers.reports import rehearsed_report, report_of_axes
from tests.helpers.tiers import second_tier

MOST_BYTES = 1_300_000  # of a page of up to 64 devices
VIEWS = (
    "chosen", "fit", "run", "alternatives", "memory", "components", "timeline", "communication",
    "blocks", "ranks", "overrides", "sources", "left-out", "words",
)  # fmt: skip
TILES = ("step", "tokens a second", "MFU", "fits with", "peak memory", "bubble")
EVIL = "</script><script>alert(1)</script><b onclick='x'>&"


class Page(HTMLParser):
    """Elements with their attributes, scripts, and the numbers in each table and fact."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[str] = []
        self.numbers: dict[str, list[float]] = {}
        self._in = ""
        self._script = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        own = dict(attrs)
        self.elements.append((tag, own))
        self._script = tag == "script" and "type" not in own
        self._in = own.get("data-table") or own.get("data-fact") or self._in
        if tag == "data":
            self.numbers.setdefault(self._in, []).append(float(own["value"] or "nan"))

    def handle_data(self, data: str) -> None:
        if self._script:
            self.scripts.append(data)
            self._script = False

    def handle_endtag(self, tag: str) -> None:
        if tag in ("details", "dd"):
            self._in = ""

    def having(self, attribute: str) -> list[str]:
        return [own[attribute] or "" for _, own in self.elements if attribute in own]


@pytest.fixture(scope="module")
def data() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(report_of_axes().to_dict()))
    return found


def drawn(data: dict[str, Any]) -> dict[str, Any]:
    return charts({**data, "compared": compared(data)})


@pytest.fixture(scope="module")
def text(data: dict[str, Any]) -> str:
    return render_page(data)


@pytest.fixture(scope="module")
def page(text: str) -> Page:
    return Page(text)


def test_each_question_has_its_view_in_order(page: Page) -> None:
    sections = [own["id"] for tag, own in page.elements if tag == "section"]
    assert tuple(sections) == VIEWS
    ids = page.having("id")
    assert len(ids) == len(set(ids))
    assert set(page.having("aria-labelledby")) | set(page.having("aria-controls")) <= set(ids)
    links = [own["href"] or "" for tag, own in page.elements if tag == "a" and "title" in own]
    assert [link[1:] for link in links] == sections  # no link leads to what was left out
    tags = [tag for tag, _ in page.elements]
    assert tags.count("table") == tags.count("caption") > 8
    assert {own.get("scope") for tag, own in page.elements if tag == "th"} == {"col", "row"}


def test_numbers_are_those_of_the_data(page: Page, data: dict[str, Any]) -> None:
    found, summary = page.numbers, data["summary"]
    assert found["step"] == [summary["step_time_s"]]
    assert tuple(found)[: len(TILES)] == TILES
    assert found["MFU"] == [data["throughput"]["mfu"]]
    assert found["fits with"] == [summary["memory_probability"]]
    assert found["tokens a second"] == [data["throughput"]["tokens_per_s"]]
    assert found["peak memory"] == [max(summary["peak_memory_bytes"])]
    expected = []
    for row in data["memory"]:
        expected += [*row["parts"].values(), row["priced_bytes"], *row["interval_bytes"]]
    assert found["memory"] == expected
    parts = [value for row in data["device_groups"] for value in row["components_s"].values()]
    assert found["components"] == parts
    for row in data["communication"]:
        told = {row["sent_bytes"], row["seconds"], row["exposed_s"]}
        told |= {row["exposed_s"] / row["seconds"]} if row["seconds"] else {0.0}
        assert told <= set(found["communication"])


def test_a_rehearsal_stands_beside_the_price() -> None:
    data = rehearsed_report().to_dict()
    rehearsal, groups = data["rehearsal"], data["device_groups"]
    found = render_page(json.loads(json.dumps(data)))
    numbers = Page(found).numbers
    expected: list[float] = []
    for row in rehearsal["ranks"].values():
        group = groups[row["group"]]
        sent = sum(row["link_bytes"].values())
        assert sum(row["flops"].values()) == pytest.approx(group["flops"], rel=1e-6)
        # ranks compare their batches, too: some hundred bytes, which no price has
        assert sent == pytest.approx(sum(group["sent_bytes"].values()), abs=512)
        expected += [row["stands_for"], row["peak_bytes"], rehearsal["priced_bytes"][row["group"]]]
        expected += [sum(row["flops"].values()), group["flops"]]
        expected += [sent, sum(group["sent_bytes"].values())]
    width = len(numbers["rehearsal"]) // len(rehearsal["ranks"])
    rows = [numbers["rehearsal"][k : k + 7] for k in range(0, len(numbers["rehearsal"]), width)]
    assert [value for row in rows for value in row] == expected
    assert "by the rehearsal" in found and "it was not rehearsed" not in found
    wrong = {**rehearsal, "mismatches": ["rank 3 waits for ever"]}
    assert "1 do not match" in (text := render_page({**data, "rehearsal": wrong}))
    assert "rank 3 waits for ever" in text


def test_reports_of_before_have_a_page(data: dict[str, Any]) -> None:
    """Keys are added without another schema."""
    older = copy.deepcopy(data)
    del older["training"], older["made"], older["surely_fits"]
    del older["timeline"]["communication_s"]
    for key in [key for key in older["throughput"] if key.endswith("_interval")]:
        del older["throughput"][key]
    assert f"{data['plan']['global_batch_size']} rows of" in render_page(older)
    older = copy.deepcopy(rehearsed_report().to_dict())
    for row in (*older["rehearsal"]["ranks"].values(), *older["device_groups"]):
        for key in ("link_bytes", "sent_bytes", "flops"):
            if key != "flops" or "peak_bytes" not in row:
                row.pop(key, None)
    assert 'data-table="rehearsal"' in render_page(older)


def test_events_are_where_they_were(data: dict[str, Any]) -> None:
    (window,) = data["timeline"]["windows"]
    events = list(csv.DictReader(window["events_csv"].splitlines()))
    found = timeline(data)
    (drawn,), unit_s = found["windows"], (window["end_s"] - window["start_s"]) / 1e6
    assert len(drawn["boxes"]) == len(events) and drawn["first"] and drawn["last"]
    for box, event in zip(drawn["boxes"], events, strict=True):
        assert box[:2] == (int(event["group"]), int(event["stage"]))
        assert (found["kinds"][box[2]], str(box[3])) == (event["kind"], event["microbatch"])
        assert box[4] * unit_s == pytest.approx(float(event["start_s"]), abs=2 * unit_s)
        end_s = (box[4] + box[5]) * unit_s
        assert end_s == pytest.approx(float(event["end_s"]), abs=2 * unit_s)


def test_the_file_asks_for_nothing(text: str, page: Page) -> None:
    assert len(text.encode()) < MOST_BYTES
    sources = [own for tag, own in page.elements if tag in ("script", "img", "iframe")]
    assert not [own for own in sources if "src" in own]
    links = [own["href"] for tag, own in page.elements if tag == "link"]
    assert links == ["data:,"]
    policy = next(own["content"] or "" for _, own in page.elements if "http-equiv" in own)
    digests = {
        f"'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'"
        for script in page.scripts
    }
    assert len(digests) == 2
    assert set(re.findall(r"'sha256-[^']*'", policy)) == digests
    assert "unsafe-eval" not in policy and "default-src 'none'" in policy


@second_tier("data of charts stay: bars of memory, a diagram of a block")
def test_each_chart_has_marks_a_label_and_a_place(page: Page, data: dict[str, Any]) -> None:
    found = drawn(data)
    assert set(page.having("data-chart")) == set(found)
    for name, spec in found.items():
        svg = vl_convert.vegalite_to_svg(json.dumps({**spec, "width": 600}), vl_version="6.4")
        shapes = re.findall(r'<g class="mark-(?:rect|symbol|rule)[^"]*role-mark[^>]*>(<path)?', svg)
        assert "<path" in shapes, name
        assert spec["description"]


def test_a_blocks_diagram_has_all_that_takes_time(data: dict[str, Any]) -> None:
    found = drawn(data)
    for k, block in enumerate(data["blocks"]):
        whole = sum(
            step.get("seconds", 0.0) + step.get("forward_s", 0.0) + step.get("backward_s", 0.0)
            for step in block["steps"]
        )
        spec = found[f"block-{k}"]
        bars, ends = (spec["datasets"][layer["data"]["name"]] for layer in spec["layer"])
        assert sum(bar["value"] for bar in bars) == pytest.approx(whole)
        assert [end["line"] for end in ends] == sorted({bar["line"] for bar in bars})
        collectives = [step for step in block["steps"] if step["kind"] == "collective"]
        assert sum(bar["part"] == "communication" for bar in bars) == len(collectives)
    assert any(step["kind"] == "collective" for block in data["blocks"] for step in block["steps"])


@pytest.mark.parametrize(
    ("name", "said"),
    [("d1", "dim 1"), ("d2.0", "dim 2"), ("f2.0", "by dims"), ("colwise.0", "colwise"),
     ("heads", "heads")],
)  # fmt: skip
def test_strategies_are_said_in_words(name: str, said: str) -> None:
    assert strategy_words(name) == said


def test_operators_are_told_with_their_modules() -> None:
    words = operator_words({"key": "layers.0.mlp.up:linear#1", "operator": "linear"})
    assert words == ("up", "linear")
    assert operator_words({"key": "layers.0:add", "operator": "add"}) == ("", "add")


def test_bars_add_up_to_the_peak(data: dict[str, Any]) -> None:
    spec = drawn(data)["memory"]
    rows = spec["datasets"][spec["layer"][0]["data"]["name"]]
    for row in data["memory"]:
        own = sum(bar["value"] for bar in rows if bar["name"] == cells.stage_words(row["stages"]))
        assert own * 2**30 == pytest.approx(row["priced_bytes"])


def test_names_are_no_code(data: dict[str, Any]) -> None:
    evil = copy.deepcopy(data)
    evil["summary"]["chosen"] = evil["summary"]["cluster"] = evil["made"]["model"] = EVIL
    evil["made"]["module"] = EVIL
    evil["notes"], evil["assumptions"] = [EVIL], [EVIL]
    evil["blocks"][0]["blocks"] = [EVIL]
    evil["blocks"][0]["steps"][0]["value"] = EVIL
    evil["stages"][0]["blocks"] = [EVIL]
    evil["alternatives"][0]["family"] = EVIL
    found = Page(render_page(evil))
    assert len([tag for tag, _ in found.elements if tag == "script"]) == 4
    assert not found.having("onclick")
    embedded = re.search(r'id="charts">(.*?)</script>', render_page(evil), re.DOTALL)
    assert embedded and json.loads(embedded[1])


def test_left_out_is_said_and_asked_for_is_shown(text: str, data: dict[str, Any]) -> None:
    """By the command that adds it."""
    command = "meshwright plan MODULE:FUNCTION --cluster dgx-a100:1 --batch 32 --html plan.html"
    for flags in ("--sensitivity", "--rehearse", "--tokens 2e12 --price 2.5 --watts 700"):
        assert f"{command} {flags}" in text
    assert 'id="sensitivity"' not in text
    line = "meshwright plan my:model --cluster local:2 --batch 16 --dp 2 --html d.html"
    asked = render_page({**data, "made": {**data["made"], "command": line}})
    assert f"{line} --sensitivity" in asked and "plan.html --sensitivity" not in asked
    rows = [
        {"property": "memory", "factor": 0.5, "plan": "dp8"},
        {"property": "FLOP/s", "factor": None, "plan": None},
    ]
    cost = report_of_axes().cost(tokens=1e9, price_per_hour=2.0, power_watts=700.0)
    assert cost
    full = render_page({**data, "sensitivity": rows, "cost": cost})
    assert "--sensitivity" not in full and "no flip between 1/4 and 4" in full
    assert 'data-chart="sensitivity"' in full
    assert Page(full).numbers["price"] == [cost["price"]]
    assert Page(full).numbers["energy"] == [cost["energy_kwh"]]


def test_a_long_step_is_shown_in_windows(data: dict[str, Any]) -> None:
    (window,) = data["timeline"]["windows"]
    windows = [{**window, "window": name} for name in ("first", "steady", "last")]
    long = {"events": 30_000, "complete": False, "windows": windows}
    found = render_page({**data, "timeline": long}, trace="plan.trace.json")
    assert [f'data-timeline="{k}"' in found for k in range(4)] == [True, True, True, False]
    both = [(w["first"], w["last"]) for w in timeline({**data, "timeline": long})["windows"]]
    assert both == [(True, False), (False, False), (False, True)]
    assert 'href="plan.trace.json"' in found


def test_a_given_plan_has_a_page_too(data: dict[str, Any]) -> None:
    given = {**data, "alternatives": [], "runners_up": [], "solver": [], "overrides": []}
    given["summary"] = {k: v for k, v in data["summary"].items() if k != "complete"}
    found = render_page(given)
    assert "The plan was given, not searched" in found and 'data-chart="alternatives"' not in found


def test_report_writes_it(tmp_path: Path) -> None:
    report = report_of_axes()
    path = report.html(tmp_path / "plan.html")
    assert path and path.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert [file.name for file in tmp_path.iterdir()] == ["plan.html"]
    frame = Page(report._repr_html_() or "")
    assert [tag for tag, _ in frame.elements] == ["iframe"]
    assert frame.having("srcdoc")[0].startswith("<!doctype html>")


@second_tier("windows of a long step stay, with the link to all events")
def test_all_events_of_a_long_step_are_beside_the_page(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(details, "MAX_EVENTS", 20)
    monkeypatch.setattr(details, "MAX_OF_WINDOW", 6)
    report = report_of_axes()
    assert report.details
    anew = replace(report, details=replace(report.details))
    anew.html(tmp_path / "plan.html")
    assert 'href="plan.trace.json"' in (tmp_path / "plan.html").read_text(encoding="utf-8")
    assert json.loads((tmp_path / "plan.trace.json").read_text()) == report.timeline


def test_ranks_that_did_not_price_the_plan_write_nothing(tmp_path: Path) -> None:
    report = replace(report_of_axes(), details=None, deferred=None)
    assert report.html(tmp_path / "plan.html") is None and report._repr_html_() is None
    assert not list(tmp_path.iterdir())


def test_without_the_extra_one_error_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "altair", None)
    report = report_of_axes()
    with pytest.raises(ImportError, match=r"pip install altair vl-convert-python jinja2"):
        report.html(tmp_path / "plan.html")
    assert not list(tmp_path.iterdir())
    shown = report._repr_html_() or ""
    assert shown.startswith("<pre>") and "Chosen: " in shown


# --- what is made of the data before it is drawn --------------------------------------------------


def group(ranks: str, **degrees: int) -> dict[str, Any]:
    return {"ranks": ranks, "dp": 1, "cp": 1, "ep": 1, "tp": 1, "ep_stride": 1} | degrees


def test_every_rank_has_its_place() -> None:
    groups = [
        group("0-3,8-11", dp=2, cp=2, tp=2, ep=2, ep_stride=2),
        group("4-7,12-15", dp=4, tp=2),
    ]
    rows = rank_rows(groups, 8)
    assert [row[0] for row in rows] == list(range(16))
    by_rank = {row[0]: row[1:] for row in rows}
    assert by_rank[0] == (0, 0, 0, 0, 0, 0, 0)
    assert by_rank[3] == (0, 3, 0, 0, 1, 1, 1)
    assert by_rank[10] == (1, 2, 0, 1, 1, 1, 0)
    assert by_rank[13] == (1, 5, 1, 2, 0, 0, 1)
    for number in (0, 1):  # no two ranks of a group at one place of (dp, cp, tp)
        places = [(r[4], r[5], r[7]) for r in rows if r[3] == number]
        assert len(set(places)) == 8


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ([group("0")], ["group"]),
        ([group("0-1", dp=2)], ["dp"]),
        ([group("0-3", dp=2, tp=2), group("4-7", dp=4)], ["group", "dp", "tp"]),
    ],
)
def test_axes_on_which_ranks_differ(groups: list[dict[str, Any]], axes: list[str]) -> None:
    assert axes_in_use(groups) == axes


def test_a_plan_of_several_families_is_compared_once() -> None:
    other = {"plan": "b", "step_time_s": 1.5, "slower": 0.5, "why": "w", "peak_memory_bytes": 7}
    tied = other | {"plan": "c", "step_time_s": 0.99, "slower": -0.01, "tie": True}
    data = {
        "summary": {"chosen": "a", "step_time_s": 1.0, "peak_memory_bytes": [3, 5]},
        "alternatives": [
            other | {"family": "tp=2"}, other | {"family": "1f1b"},
            {"plan": None, "family": "zb_v", "why": "too large"},
            {"plan": None, "family": "zb_h1", "why": "too large"},
        ],
        "runners_up": [other, tied],
    }  # fmt: skip
    rows = compared(data)
    assert [(row["id"], row["name"], row["plan"]) for row in rows] == [
        ("plan-0", "runner-up", "c"), ("plan-1", "chosen", "a"), ("plan-2", "tp=2, 1f1b", "b")
    ]  # fmt: skip
    assert rows[1]["peak_memory_bytes"] == 5
    assert [row["tie"] for row in rows] == [True, False, False]
    assert [row["step"] for row in rows] == ["990 ms", "1 s", "1.5 s"]
    assert [row["family"] for row in without_plan(data)] == ["zb_v, zb_h1"]


@pytest.mark.parametrize(
    ("cell", "text"),
    [
        (cells.time(0.0023), "2.3 ms"),
        (cells.time(6.9e-17), "0"),
        (cells.more_time(-0.5), "−500 ms"),
        (cells.gib(3 * 2**30), "3.00 GiB"),
        (cells.gib(0.5 * 2**30), "0.50 GiB"),
        (cells.gib(3 * 2**20), "3 MiB"),
        (cells.sent(2.5e9), "2.5 GB"),
        (cells.scaled(264_000, "tokens/s"), "264 k tokens/s"),
        (cells.number(12345.0), "12,345"),
        (cells.number(86020.3), "86,020"),
        (cells.number(0.070617), "0.07062"),
        (cells.share(0.3456), "34.6%"),
    ],
)
def test_numbers_are_read_easily(cell: cells.Cell, text: str) -> None:
    assert cell.text == text


def test_a_collective_stands_in_its_pass() -> None:
    step = {"kind": "collective", "axis": "tensor", "collective": "all_reduce", "seconds": 0.5}
    forward, backward = (line({**step, "pass": name}) for name in ("forward", "backward"))
    assert forward.forward and forward.forward.value == 0.5 and forward.backward is None
    assert backward.backward and backward.backward.value == 0.5 and backward.forward is None


def test_what_draws_charts_is_bundled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And again where the kept file is another one than was written."""
    made: list[str] = []

    def bundle(snippet: str, version: str) -> str:
        made.append(version)
        return f"draw('</script>'); {snippet}"

    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("vl_convert.javascript_bundle", bundle)
    first, again = _library.__wrapped__(), _library.__wrapped__()
    assert first == again and "</script" not in first and len(made) == 1
    (kept,) = (tmp_path / "cache").iterdir()
    kept.write_text(kept.read_text() + " ")
    assert _library.__wrapped__() == first and len(made) == 2


# --- front ---------------------------------------------------------------------------------------


def planned_by(groups: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    """As much of a report as a sentence reads; a stage of each group, ZeRO-1."""
    cluster = {"device": "h100-sxm", "num_nodes": 8, "devices_per_node": 8}
    summary = {
        "parameters": 70_553_706_496, "step_time_s": 24.1, "mfu": 0.388, "memory_verdict": "fits",
        "memory_probability": 0.971, "memory_bytes": 80 * 2**30,
    }  # fmt: skip
    groups = [row | {"stages": [k]} for k, row in enumerate(groups)]
    stages = [
        {"zero": 0, "recompute": "none", "blocks": [f"layers.{k}"]} for k in range(len(groups))
    ]
    made = {"model": "Llama-3-70B"}
    found = {"made": made, "cluster": cluster, "summary": summary, "stages": stages}
    return {**found, "device_groups": groups, **more}


FOUR = [group(f"{16 * k}-{16 * k + 15}", dp=4, tp=4) for k in range(4)]


def test_the_plan_is_a_sentence() -> None:
    assert front.sentence(planned_by(FOUR)) == (
        "Llama-3-70B on 64 H100: 4 pipeline stages of 16 GPUs; in each, 4-way tensor parallelism "
        "and 4 replicas; 24.1 s a step, 39 % MFU, fits with 97 %"
    )


@pytest.mark.parametrize(
    ("groups", "says"),
    [
        ([group("0-63", dp=64, ep=8)], ": 64 replicas that share out the experts 8 ways; "),
        ([group("0-63", dp=4, cp=2, tp=8)],
         ": 8-way tensor parallelism, 2-way context parallelism and 4 replicas; "),
        ([group("0-15", dp=16), group("16-63", dp=48)],
         "2 pipeline stages of 16 to 48 GPUs; in each, meshes that differ; "),
        ([group("0"), group("1")], "2 pipeline stages of 1 GPU; 24.1 s"),
        ([group("0")], ": the whole model on one GPU; "),
    ],
)  # fmt: skip
def test_layouts_are_said_in_words(groups: list[dict[str, Any]], says: str) -> None:
    assert says in front.sentence(planned_by(groups))


def test_a_stage_beside_another_one_is_said() -> None:
    data = planned_by([group("0"), group("1")])
    data["device_groups"][1]["stages"] = [1, 2]
    data["stages"].append(data["stages"][1] | {"blocks": ["head"]})
    said = ": 3 pipeline stages, 1 to 2 on each of 2 groups of 1 GPU; "
    assert said in front.sentence(data)


def test_unknown_names_and_other_devices_are_said() -> None:
    cluster = {"device": "local-cpu", "num_nodes": 1, "devices_per_node": 2}
    data = planned_by([group("0-1", dp=2)], made={}, cluster=cluster)
    data["stages"][0] |= {"zero": 3, "recompute": "6 full 2 none"}
    data["summary"] |= {"memory_verdict": "does not fit", "memory_probability": 0.004}
    assert front.sentence(data) == (
        "A model of 70.6 B parameters on 2 CPU processes: 2 replicas that share out weights, "
        "gradients and the optimizer's states, full recompute of some blocks; 24.1 s a step, "
        "39 % MFU, does not fit: room is enough with 0 %"
    )
    data["made"] = {"model": "Net"}
    assert front.sentence(data).startswith("Net (70.6 B parameters) on")


def test_the_cluster_is_drawn_by_stages_nodes_and_replicas() -> None:
    first, *_, last = front.picture(planned_by(FOUR))
    assert [node.name for node in last.nodes] == ["node 6", "node 7"]
    assert [*last.nodes[0].replicas] == [[48, 49, 50, 51], [52, 53, 54, 55]]
    assert (first.title, first.blocks, first.more) == ("stage 0", "layers.0", "")
    assert first.colour != last.colour
    cluster = {"device": "h100-sxm", "num_nodes": 32, "devices_per_node": 8}
    (large,) = front.picture(planned_by([group("0-255", dp=256)], cluster=cluster))
    assert len(large.nodes) == 1 and large.more == "and 31 nodes alike"


def test_the_plan_that_surely_fits_is_said_with_its_cost(data: dict[str, Any]) -> None:
    said = dict(front.fit_answers(data))
    assert "there is nothing to pay for" in said["Surely fits"]
    fullest = max(data["memory"], key=lambda row: row["priced_bytes"])
    assert said["What decides"].partition(":")[0] == max(fullest["parts"], key=fullest["parts"].get)
    tight = copy.deepcopy(data)
    tight["summary"] |= {"memory_probability": 0.6, "memory_verdict": "tight"}
    assert "the plan was given" in dict(front.fit_answers(tight))["Surely fits"]
    sure = {
        "memory_margin": 0.12, "memory_probability": 0.93, "plan": "dp8", "step_time_s": 1.2,
        "slower": 0.2,
    }  # fmt: skip
    tight["surely_fits"] = sure
    assert dict(front.fit_answers(tight))["Surely fits"] == (
        "dp8 fits with 93 % and takes 1.2 s a step (+20.0%); `--memory-margin 0.12` chooses it."
    )
    tight["surely_fits"] = {"memory_margin": 0.12, "plan": None}
    assert "no plan fits with 90 %" in dict(front.fit_answers(tight))["Surely fits"]


def test_lines_to_paste_name_model_rendezvous_and_node(data: dict[str, Any]) -> None:
    made = {**data["made"], "module": "models:llama", "cluster": "mine.toml"}
    several = {**data, "made": made, "cluster": {**data["cluster"], "num_nodes": 2}}
    lines = dict(front.commands(several))
    plain = {about: " ".join(text.replace("\\\n", " ").split()) for about, text in lines.items()}
    run = "run models:llama --cluster mine.toml --batch 32 --precision bf16 --plan plan.json"
    assert plain["train by it, on each of 2 nodes"].endswith(
        "torchrun --nnodes 2 --node-rank $NODE --master-addr $HOST --master-port 29500 "
        f"--nproc-per-node 8 -m meshwright {run}"
    )
    assert plain["train by it, under Slurm"].endswith(
        f'--rdzv-id "$SLURM_JOB_ID" -m meshwright {run}'
    )
    assert "--node-rank" not in dict(front.commands(data))["train by it"]
