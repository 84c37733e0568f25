"""Numbers and plans in words."""

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
        (plan({}), "dp2×tp1, 2 micro-batches of 4 rows"),
        (plan({}, num_microbatches=1), "dp2×tp1, 1 micro-batch of 8 rows"),
        (plan({}, {"dp": 1, "tp": 2}, schedule="gpipe"),
         "pp2 × dp2×tp1 | dp1×tp2, gpipe, 2 micro-batches of 4 rows"),
        (plan(*({"dp": n} for n in range(1, 6))),
         "pp5 × dp1×tp1 | dp2×tp1 | dp3×tp1 | dp4×tp1 ..., 1f1b, 2 micro-batches of 4 rows"),
        (plan({}, {}, {"ranks": (0, 1)}, {"ranks": (2, 3)}, schedule="interleaved_1f1b",
              post_validation=True),
         "pp2 × dp2×tp1, interleaved_1f1b with 2 stages on each, validated afterwards, "
         "2 micro-batches of 4 rows"),
        (plan({"cp": 2, "ep": 2, "cp_kind": "ring"}),
         "dp2×cp2(ring)×ep2×tp1, 2 micro-batches of 4 rows"),
        (plan({"recompute": "full"}, {"zero": 1, "recompute": "full"}, num_microbatches=8),
         "pp2 × dp2×tp1, 1f1b, 8 micro-batches of 1 row, ZeRO-1 on some stages, full recompute"),
        (plan({"zero": 3, "dp_shard": 8, "hpz": 4, "quantized": "weights"}),
         "dp2×tp1, 2 micro-batches of 4 rows, ZeRO-3 within 8 ranks (secondary shards among 4) "
         "with quantised weights"),
        (plan({"zero": 3, "quantized": "both"}, {"zero": 2}),
         "pp2 × dp2×tp1, 1f1b, 2 micro-batches of 4 rows, ZeRO-2/3 with quantised weights and "
         "gradients"),
        (plan({"recompute": {"full": ("b.0",), "none": ("b.1",)}, "segments": 2}),
         "dp2×tp1, 2 micro-batches of 4 rows, full recompute of some blocks, segments of 2 "
         "blocks"),
        (plan({"offload": {"optimizer": 1.0, "weights": 0.62, "nvme": 0.1}}),
         "dp2×tp1, 2 micro-batches of 4 rows, all optimizer states and 62% of the weights in "
         "host memory, 10% of the states in files on flash instead"),
        (plan({"offload": {"activations": 0.5}}, {"offload": {"activations": 0.25}}),
         "pp2 × dp2×tp1, 1f1b, 2 micro-batches of 4 rows, activations of 50% of the blocks in "
         "host memory"),
        (plan({"offload": {"activations": 1.0, "optimizer": 0.25}}),
         "dp2×tp1, 2 micro-batches of 4 rows, 25% of the optimizer states and activations of all "
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
