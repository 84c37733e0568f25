"""Plans as files: the round trip, what a person reads, what is wrong with a malformed one."""

from __future__ import annotations

import dataclasses
import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.costmodel.sharding import ALL_GATHER, CONTEXT_KINDS
from meshwright.planner.plan.plan import (
    OFFLOADS,
    Plan,
    PlanError,
    StagePlan,
    compress_names,
    compress_ranks,
    expand_names,
    expand_ranks,
)
from tests.helpers.refusals import assert_says, refusals
from tests.helpers.tiny import cut, net, plan_for, with_stage

few = settings(max_examples=25)

PARTS = st.sampled_from(["embed", "h", "layer_norm", "0", "1", "9", "10", "11", "007", "x y", "é"])
NAMES = st.lists(PARTS, min_size=1, max_size=4).map(".".join)
RANKS = st.lists(st.integers(0, 40), min_size=1, max_size=12, unique=True).map(tuple)
DECISIONS = st.sampled_from(["colwise", "rowwise", "-> S(1)", "heads -> R", "S(0)@tp", "follow"])

STAGES = st.builds(
    StagePlan,
    blocks=st.lists(NAMES, min_size=1, max_size=6).map(tuple),
    ranks=RANKS,
    dp=st.integers(1, 64),
    tp=st.integers(1, 64),
    cp=st.integers(1, 4),
    cp_kind=st.sampled_from(CONTEXT_KINDS),
    ep=st.integers(1, 4),
    zero=st.integers(0, 3),
    dp_shard=st.none() | st.integers(1, 64),
    hpz=st.none() | st.integers(2, 64),
    quantized=st.sampled_from(["none", "both"]),
    segments=st.integers(1, 3),
    recompute=st.sampled_from(["none", "full"]) | st.just({"full": ("h.0", "h.1", "embed")}),
    offload=st.dictionaries(st.sampled_from(OFFLOADS), st.sampled_from([0.0, 0.1, 1.0])),
    shardings=st.dictionaries(NAMES | st.just('odd "{\n"dp": 1}'), DECISIONS, max_size=3),
).map(lambda stage: stage if stage.cp > 1 else dataclasses.replace(stage, cp_kind=ALL_GATHER))
PLANS = st.builds(
    Plan,
    model=st.text(max_size=20),
    global_batch_size=st.integers(1, 10**6),
    num_microbatches=st.integers(1, 10**4),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
    precision=st.sampled_from(["fp32", "bf16"]),
    stages=st.lists(STAGES, min_size=1, max_size=3).map(tuple),
    post_validation=st.booleans(),
)


@cache
def example() -> Plan:
    return plan_for(cut(net())[0])


# --- the file ------------------------------------------------------------------------------------


@few
@given(PLANS)
def test_json_round_trip(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


def test_the_file_is_short_enough_to_read() -> None:
    plan = Plan(
        model="0123",
        global_batch_size=64,
        num_microbatches=8,
        schedule="1f1b",
        precision="bf16",
        stages=(
            StagePlan(
                blocks=("embed", *(f"h.{i}" for i in range(12))),
                ranks=tuple(range(4)),
                dp=2,
                tp=2,
                shardings={"h.*.up": "colwise", "embed": "vocab"},
            ),
        ),
    )
    assert plan.to_json() == (
        """{
  "format": 1,
  "model": "0123",
  "global_batch_size": 64,
  "num_microbatches": 8,
  "schedule": "1f1b",
  "precision": "bf16",
  "stages": [
    {
      "blocks": [
        "embed",
        "h.0-11"
      ],
      "ranks": "0-3",
      "mesh": {"dp": 2, "tp": 2},
      "zero": 0,
      "recompute": "none",
      "shardings": {
        "embed": "vocab",
        "h.*.up": "colwise"
      }
    }
  ]
}
"""
    )


def test_save_and_load(tmp_path: Path) -> None:
    plan = with_stage(example(), shardings={"couches.é": "colwise"})
    plan.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == plan
    assert Plan.load(str(tmp_path / "plan.json")) == plan


@pytest.mark.parametrize("make", [lambda p: None, Path.mkdir, lambda p: p.write_bytes(b"\xff\xfe")])
def test_unreadable_file_is_named(tmp_path: Path, make: Any) -> None:
    path = tmp_path / "plan.json"
    make(path)
    with pytest.raises(PlanError, match=r"plan\.json"):
        Plan.load(path)


def malformed(key: str, value: Any) -> str:
    data = json.loads(example().to_json())
    stage = data["stages"][0]
    if key == "stage 0":
        data["stages"][0] = value
    elif key in ("dp", "tp", "cp", "cp_kind", "ep", "dp_shard", "hpz"):
        stage["mesh"][key] = value
    else:
        (data if key in data or key == "post_validation" else stage)[key] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("given", "says"), refusals(Path(__file__).with_name("refused.txt"), "file")
)
def test_wrong_value_is_named_with_its_place(given: tuple[str, Any], says: str) -> None:
    with pytest.raises(PlanError) as caught:
        Plan.from_json(malformed(*given), name="my.json")
    assert_says(caught.value, says)


@pytest.mark.parametrize("text", ["", "{", "nonsense", '{"format": 1,}'])
def test_what_is_not_json_is_named_with_its_line(text: str) -> None:
    with pytest.raises(PlanError, match=r"my\.json: line 1 is not JSON"):
        Plan.from_json(text, name="my.json")


@pytest.mark.parametrize("text", ["[]", "3", "null", "{}", '{"stages": []}'])
def test_other_json_is_no_plan(text: str) -> None:
    with pytest.raises(PlanError, match=r"my\.json: is no Meshwright plan"):
        Plan.from_json(text, name="my.json")


@pytest.mark.parametrize("in_stage", [False, True])
def test_missing_and_unknown_keys_are_both_named(in_stage: bool) -> None:
    data = json.loads(example().to_json())
    whole = data["stages"][0] if in_stage else data
    place, more = ("my.json: stage 0", "offload, quantized, segments") if in_stage else (
        "my.json", "post_validation",
    )  # fmt: skip
    legal = ", ".join(sorted([*whole, *more.split(", ")]))
    for key in whole.keys() - {"format"}:
        other = {("shedule" if k == key else k): v for k, v in whole.items()}
        text = json.dumps(data | {"stages": [other]} if in_stage else other)
        with pytest.raises(PlanError) as caught:
            Plan.from_json(text, name="my.json")
        says = f"{place}: missing ['{key}'], unknown ['shedule']; legal: the keys {legal}"
        assert_says(caught.value, says)


# --- names and ranks -----------------------------------------------------------------------------


def test_a_smaller_batch_goes_in_as_many_microbatches_as_share_it_out() -> None:
    """On two and on three data ranks: six rows at a time."""
    plan = plan_for(cut(net())[0], stages=2)
    for k, dp in enumerate((2, 3)):
        plan = with_stage(plan, k, dp=dp)
    plan = dataclasses.replace(plan, global_batch_size=48, num_microbatches=4)
    assert (plan.microbatch_rows, plan.data_ranks) == (12, 6)
    assert [plan.microbatches_of(rows) for rows in (6, 12, 18, 24, 36, 48)] == [1, 2, 3, 4, 3, 4]


@few
@given(st.lists(NAMES, max_size=10))
def test_names_round_trip(names: list[str]) -> None:
    assert list(expand_names(compress_names(names))) == names


def test_names_are_written_as_ranges() -> None:
    names = ["embed", "h.0", "h.1", "h.2", "g.3", "g.5", "head"]
    assert compress_names(names) == ["embed", "h.0-2", "g.3", "g.5", "head"]
    assert expand_names(["h.3-1"]) == ("h.3-1",)  # descending: a name, for the check to refuse


@few
@given(RANKS)
def test_ranks_round_trip_in_order(ranks: tuple[int, ...]) -> None:
    assert expand_ranks(compress_ranks(ranks)) == ranks


@pytest.mark.parametrize(
    ("ranks", "text"),
    [((0, 1, 2, 3), "0-3"), ((5,), "5"), ((0, 2, 4), "0,2,4"), ((0, 1, 8, 9), "0-1,8-9")],
)
def test_ranks_are_written_as_ranges(ranks: tuple[int, ...], text: str) -> None:
    assert compress_ranks(ranks) == text
