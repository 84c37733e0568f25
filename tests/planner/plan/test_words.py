"""Numbers and plans in words."""

import itertools
import re
from collections.abc import Callable
from typing import Any

import pytest

from meshwright.planner.plan import words
from meshwright.planner.plan.plan import Plan, StagePlan

GIB = 2.0**30


@pytest.mark.parametrize(
    ("say", "cases"),
    [
        (words.seconds, {0: "0 µs", 2e-6: "2 µs", 999.7e-6: "1 ms", 0.0456: "45.6 ms",
                         0.9999: "1 s", 75.3: "75.3 s", 1e-10: "0 µs", 12_345.6: "12,346 s"}),
        (words.counted, {808: "808", 1_234: "1.23 k", 999_999: "1 M", 124_439_808: "124 M",
                         7e9: "7 B"}),
        (words.sized, {808 * 2**10: "808 KiB", 12.3 * 2**20: "12.3 MiB", 75.6 * GIB: "75.6 GiB",
                       1023.9 * 2**20: "1 GiB", 1024 * GIB: "1,024 GiB"}),
        (words.slower, {0.123: "+12.3%", -0.045: "-4.5%", 1.0: "+100.0%", 1.5: "2.5 times"}),
    ],
)  # fmt: skip
def test_numbers(say: Callable[[float], str], cases: dict[float, str]) -> None:
    assert {value: say(value) for value in cases} == cases


def test_a_margin_that_leaves_room_is_rounded_down() -> None:
    assert words.margin_beside(60.0, 80.0) == 0.25
    assert words.margin_beside(2.0, 3.0) == 0.333


def plan(*stages: dict[str, Any], **whole: Any) -> Plan:
    """Two blocks on two ranks to each stage, which is a device group of its own unless said."""
    base: dict[str, Any] = {"dp": 2, "tp": 1}
    made = [
        StagePlan(**{**base, "ranks": (k, k + 1), "blocks": (f"b.{k}", f"b.{k + 1}")} | stage)
        for k, stage in zip(range(0, 99, 2), stages, strict=False)
    ]
    given: dict[str, Any] = {"num_microbatches": 2, "schedule": "1f1b", "global_batch_size": 8}
    return Plan(model="", precision="bf16", stages=tuple(made), **given | whole)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (plan({}), "dp2, 2 micro-batches of 4 rows"),
        (plan({}, num_microbatches=1), "dp2, 1 micro-batch of 8 rows"),
        (plan({}, {"dp": 1, "tp": 2}, schedule="gpipe"),
         "pp2 × dp2 | tp2, gpipe, 2 micro-batches of 4 rows"),
        (plan(*({"dp": n} for n in range(1, 6))),
         "pp5 × one device | dp2 | dp3 | dp4 ..., 1f1b, 2 micro-batches of 4 rows"),
        (plan({}, {}, {"ranks": (0, 1)}, {"ranks": (2, 3)}, schedule="interleaved_1f1b",
              post_validation=True),
         "pp2 × dp2, interleaved_1f1b with 2 stages on each, validated afterwards, "
         "2 micro-batches of 4 rows"),
        (plan({"cp": 2, "ep": 2, "cp_kind": "ring"}),
         "dp2 (ep2)×cp2 (ring), 2 micro-batches of 4 rows"),
        (plan({"dp": 1, "cp": 2, "tp": 2, "ep": 4}),
         "cp2 (all_gather)×tp2 (ep4), 2 micro-batches of 4 rows"),
        (plan({"dp": 1}, {"dp": 1}), "pp2, 1f1b, 2 micro-batches of 4 rows"),
        (plan({"dp": 1}), "one device, 2 micro-batches of 4 rows"),
        (plan({"recompute": "full"}, {"zero": 1, "recompute": "full"}, num_microbatches=8),
         "pp2 × dp2, 1f1b, 8 micro-batches of 1 row, ZeRO-1 on some stages, full recompute"),
        (plan({"zero": 3, "dp_shard": 8, "hpz": 4, "quantized": "weights"}),
         "dp2, 2 micro-batches of 4 rows, ZeRO-3 within 8 ranks (secondary shards among 4) "
         "with quantised weights"),
        (plan({"zero": 3, "quantized": "both"}, {"zero": 2}),
         "pp2 × dp2, 1f1b, 2 micro-batches of 4 rows, ZeRO-2/3 with quantised weights and "
         "gradients"),
        (plan({"recompute": {"full": ("b.0",), "none": ("b.1",)}, "segments": 2}),
         "dp2, 2 micro-batches of 4 rows, full recompute of some blocks, segments of 2 "
         "blocks"),
        (plan({"offload": {"optimizer": 1.0, "weights": 0.62, "nvme": 0.1}}),
         "dp2, 2 micro-batches of 4 rows, all optimizer states and 62% of the weights in "
         "host memory, 10% of the states in files on flash instead"),
        (plan({"offload": {"activations": 0.5}}, {"offload": {"activations": 0.25}}),
         "pp2 × dp2, 1f1b, 2 micro-batches of 4 rows, activations of 50% of the blocks in "
         "host memory"),
        (plan({"offload": {"activations": 1.0, "optimizer": 0.25}}),
         "dp2, 2 micro-batches of 4 rows, 25% of the optimizer states and activations of all "
         "blocks in host memory"),
    ],
)  # fmt: skip
def test_a_plan_in_a_line(made: Plan, text: str) -> None:
    assert words.describe(made) == text


def test_recompute_of_a_stage() -> None:
    by_block = {"blocks": ("a", "b", "c"), "recompute": {"full": ("a", "c"), "none": ("b",)}}
    made = plan(by_block, {"recompute": "full", "segments": 4})
    said = [words.decision_words(stage)["recompute"] for stage in made.stages]
    assert said == ["2 full 1 none", "full, in 4s"]


def test_three_operators_in_which_rows_meet_are_named() -> None:
    assert words.meeting_words(["a", "b", "c"]) == "a, b, c"  # type: ignore[list-item]
    assert words.meeting_words([*"abcde"]) == "a, b, c and 2 more"  # type: ignore[list-item]
    says = words.kept_together(["a"])  # type: ignore[list-item]
    assert says.startswith("rows of the batch meet in a, ") and '"per_microbatch" consents' in says


# --- layouts -------------------------------------------------------------------------------------


def pipeline(sizes: list[list[str]], groups: int, **given: Any) -> Plan:
    """Stages of these blocks, stage k on device group k mod `groups`."""
    stages = [{"blocks": tuple(own), "ranks": (k % groups,)} for k, own in enumerate(sizes)]
    return plan(*({"dp": 1} | own for own in stages), schedule="interleaved_1f1b", **given)


def spelled(text: str) -> list[str]:
    """The stages of Megatron's notation: commas say nothing, (..)*n and x*n repeat."""
    text = text.replace(",", "")
    for pattern in (r"\(([^)]+)\)\*(\d+)", r"(.)\*(\d+)"):
        text = re.sub(pattern, lambda found: found[1] * int(found[2]), text)
    return text.split("|")


@pytest.mark.parametrize(
    ("layers", "groups", "text"),
    [
        ([3, 2, 2, 1], 2, "Ettt|(tt|)*2tL"),
        ([2, 2, 2, 2], 4, "Ett|(tt|)*2ttL"),
        ([4, 12, 12, 12, 4, 0], 3, "Et*4|(t*12|)*3t*4|L"),
        ([0, 1], 2, "E|tL"),
        ([1, 1, 2, 2, 1], 5, "Et|t|(tt|)*2tL"),
    ],
)
def test_layouts_as_megatron_has_them(layers: list[int], groups: int, text: str) -> None:
    ends = list(itertools.accumulate(layers, initial=0))
    sizes = [[f"layers.{n}" for n in range(i, j)] for i, j in itertools.pairwise(ends)]
    sizes[0], sizes[-1] = ["embed", *sizes[0]], [*sizes[-1], "head"]
    own = pipeline(sizes, groups)
    assert words.megatron_layout(own) == text
    assert [stage.count("t") for stage in spelled(text)] == layers
    assert spelled(text)[0][0] == "E" and spelled(text)[-1][-1] == "L"


@pytest.mark.parametrize(
    ("sizes", "groups"),
    [
        ([["embed", "enc.0"], ["dec.0", "head"]], 2),  # of two stacks
        ([["embed", "h.0"], ["h.1"]], 2),  # without a loss
        ([["embed", "h.0", "norm"], ["head"]], 2),
    ],
)
def test_what_has_no_layout_in_megatron(sizes: list[list[str]], groups: int) -> None:
    assert words.megatron_layout(pipeline(sizes, groups)) is None


def test_stages_placed_otherwise_have_no_layout_in_megatron() -> None:
    sizes, groups = [["embed"], ["h.0"], ["h.1"], ["head"]], (0, 1, 1, 0)
    stages = [{"blocks": (*x,), "ranks": (g,)} for x, g in zip(sizes, groups, strict=True)]
    own = plan(*({"dp": 1} | stage for stage in stages), schedule="zb_v")
    assert words.megatron_layout(own) is None
    assert words.layout_words(own) == "0-1: 1+1"


def test_blocks_by_device_group() -> None:
    sizes = [
        ["embed", "h.0", "h.1"],
        ["h.2"],
        ["h.3"],
        ["h.4"],
        ["h.5"],
        ["h.6"],
        ["h.7"],
        ["head"],
    ]
    assert words.layout_words(pipeline(sizes, 4)) == "0: 3+1, 1-3: 1+1"
    assert words.stage_layout(pipeline(sizes, 4)) == [[3, 1], [1, 1], [1, 1], [1, 1]]
