"""Plans as files: the round trip, what a person reads, what is wrong with a malformed one; what a
plan puts into host memory, whole blocks from the last one on."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.costmodel.compressed import COMPRESSED
from meshwright.costmodel.mesh import ALL_GATHER, CONTEXT_KINDS
from meshwright.planner.decisions import OFFLOADS
from meshwright.planner.plan import away_blocks, moved_parts, moved_sizes, off_device
from meshwright.planner.plan.check import check_plan
from meshwright.planner.plan.offload import first_moved
from meshwright.planner.plan.plan import Plan, PlanError, StagePlan
from tests.helpers.refusals import refusals, refused
from tests.helpers.tiers import second_tier
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
    compressed=st.sampled_from(COMPRESSED),
    segments=st.integers(1, 3),
    recompute=st.sampled_from(["none", "full"]) | st.just({"full": ("h.0", "h.1", "embed")}),
    offload=st.dictionaries(st.sampled_from(OFFLOADS), st.sampled_from([0.0, 0.1, 1.0])),
    shardings=st.dictionaries(NAMES | st.just('odd "{\n"dp": 1}'), DECISIONS, max_size=3),
).map(lambda stage: stage if stage.cp > 1 else replace(stage, cp_kind=ALL_GATHER))
PLANS = st.builds(
    Plan,
    model=st.text(max_size=20),
    global_batch_size=st.integers(1, 10**6),
    num_microbatches=st.integers(1, 10**4),
    schedule=st.sampled_from(["1f1b", "gpipe"]),
    precision=st.sampled_from(["fp32", "bf16"]),
    stages=st.lists(STAGES, min_size=1, max_size=3).map(tuple),
    post_validation=st.booleans(),
    optimizer_in_backward=st.booleans(),
    servers=st.integers(0, 4),
    staleness=st.integers(0, 2**31),
)


@cache
def example() -> Plan:
    return plan_for(cut(net())[0])


@few
@given(PLANS)
def test_json_round_trip(plan: Plan) -> None:
    assert Plan.from_json(plan.to_json()) == plan


def test_the_file_is_short_enough_to_read() -> None:
    stage = StagePlan(
        blocks=("embed", *(f"h.{i}" for i in range(12))), ranks=tuple(range(4)), dp=2, tp=2,
        shardings={"h.*.up": "colwise", "embed": "vocab"},
    )  # fmt: skip
    plan = Plan(
        model="0123", global_batch_size=64, num_microbatches=8, schedule="1f1b", precision="bf16",
        stages=(stage,),
    )  # fmt: skip
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
    path = tmp_path / "plan.json"
    plan.save(path)
    assert Plan.load(path) == Plan.load(str(path)) == plan


def test_a_file_carries_what_made_it_and_one_without_loads(tmp_path: Path) -> None:
    """Plans with other dates are the same plan, of one text."""
    plan, made, path = example(), {"model": "Net", "date": "2026-11-29"}, tmp_path / "plan.json"
    dated = replace(plan, made=made)
    assert dated == plan and dated.to_json() == plan.to_json()
    dated.save(path)
    assert Plan.load(path).made == json.loads(path.read_text())["made"] == made
    assert Plan.from_json(plan.to_json()).made == {}
    with pytest.raises(PlanError, match=r"my\.json: made=3.*an object of texts"):
        Plan.from_json(json.dumps(json.loads(plan.to_json()) | {"made": 3}), name="my.json")


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
    with refused(PlanError, says):
        Plan.from_json(malformed(*given), name="my.json")


@pytest.mark.parametrize(
    ("texts", "says"),
    [
        (["", "{", "nonsense", '{"format": 1,}'], "line 1 is not JSON"),
        (["[]", "3", "null", "{}", '{"stages": []}'], "is no Meshwright plan"),
    ],
)
def test_what_is_no_plan_is_named(texts: list[str], says: str) -> None:
    for text in texts:
        with pytest.raises(PlanError, match=rf"my\.json: {says}"):
            Plan.from_json(text, name="my.json")


@pytest.mark.parametrize("in_stage", [False, True])
def test_missing_and_unknown_keys_are_both_named(in_stage: bool) -> None:
    data = json.loads(example().to_json())
    whole = data["stages"][0] if in_stage else data
    place, more = "my.json", "branches, chunked_loss, made, optimizer_in_backward, outer_loop"
    more += ", post_validation, servers, slices, staleness"
    if in_stage:
        place, more = "my.json: stage 0", "compressed, offload, quantized, segments"
    legal = ", ".join(sorted([*whole, *more.split(", ")]))
    for key in whole.keys() - {"format"}:
        other = {("shedule" if k == key else k): v for k, v in whole.items()}
        text = json.dumps(data | {"stages": [other]} if in_stage else other)
        says = f"{place}: missing ['{key}'], unknown ['shedule']; legal: the keys {legal}"
        with refused(PlanError, says):
            Plan.from_json(text, name="my.json")


def test_a_smaller_batch_goes_in_as_many_microbatches_as_share_it_out() -> None:
    """On two and on three data ranks: six rows at a time."""
    plan = plan_for(cut(net())[0], stages=2)
    for k, dp in enumerate((2, 3)):
        plan = with_stage(plan, k, dp=dp)
    plan = replace(plan, global_batch_size=48, num_microbatches=4)
    assert (plan.microbatch_rows, plan.data_ranks) == (12, 6)
    assert [plan.microbatches_of(rows) for rows in (6, 12, 18, 24, 36, 48)] == [1, 2, 3, 4, 3, 4]


SIZES = st.lists(st.integers(0, 1000).map(float), min_size=1, max_size=12).filter(any)


@given(SIZES, st.floats(0, 1))
def test_the_last_blocks_make_the_part(sizes: list[float], part: float) -> None:
    first = first_moved(sizes, part)
    total = sum(sizes)
    assert sum(sizes[first:]) >= part * total * (1 - 1e-8)
    assert first == len(sizes) or sum(sizes[first + 1 :]) < part * total


@given(SIZES)
def test_each_part_that_there_is_names_its_blocks(sizes: list[float]) -> None:
    found = moved_parts(sizes)
    assert found[0] == 0
    assert found[-1] == pytest.approx(1)
    assert found == sorted(set(found))
    for part in found:
        assert sum(sizes[first_moved(sizes, part) :]) == pytest.approx(part * sum(sizes))


def test_parameters_that_an_earlier_block_reads_stay_with_it() -> None:
    graph, _ = cut(net(tied=True))
    stage = plan_for(graph).stages[0]
    sizes = moved_sizes(stage, graph)
    assert sizes[-1] == 0  # the head's weight is the embedding's
    assert sum(sizes) == graph.num_parameters()
    assert off_device(stage, graph).states == frozenset()
    everything = off_device(replace(stage, offload={"optimizer": 1.0}), graph).states
    assert everything == frozenset(graph.parameters)
    # weights that two blocks read stay on the devices
    weights = off_device(replace(stage, offload={"weights": 1.0}), graph).weights
    assert {graph.parameters[v] for v in everything - weights} == {"embed.weight"}
    some = off_device(replace(stage, offload={"optimizer": 0.1}), graph).states
    names = {graph.parameters[v] for v in some}
    assert names
    assert all(name.startswith("layers.2.") for name in names)


def test_a_file_says_what_is_offloaded_and_nothing_where_nothing_is() -> None:
    graph, table = cut(net())
    plain = plan_for(graph, dp=2, tp=1)
    assert '"offload"' not in plain.to_json()
    for offload in ({"optimizer": 0.25}, {"optimizer": 1.0, "nvme": 0.1}):
        plan = with_stage(plain, offload=offload)
        again = Plan.from_json(plan.to_json())
        assert again == plan
        assert check_plan(again, graph, table)
        assert json.loads(plan.to_json())["stages"][0]["offload"] == offload
    some = off_device(plan.stages[0], graph).files
    assert some == off_device(replace(plan.stages[0], offload={"optimizer": 0.1}), graph).states
    assert 0 < len(some) < len(graph.parameters)


@given(st.integers(1, 40), st.integers(0, 40))
def test_a_part_of_the_blocks_sends_from_the_first_one_on(blocks: int, count: int) -> None:
    names = tuple(f"layers.{k}" for k in range(blocks))
    stage = StagePlan(
        blocks=names, ranks=(0,), dp=1, tp=1, offload={"activations": min(1.0, count / blocks)}
    )
    assert away_blocks(stage) == min(count, blocks)


@second_tier("one combination of decisions; what is offloaded is checked above")
def test_activations_there_are_no_matter_of_how_weights_are_gathered() -> None:
    graph, table = cut(net())
    offload = {"activations": 1.0}
    plan = with_stage(plan_for(graph, dp=2, tp=1), zero=3, quantized="both", offload=offload)
    assert check_plan(plan, graph, table)
    assert off_device(plan.stages[0], graph).states == frozenset()
