"""What a target may say, and the named ones; errors of prices by device and target, the slowest of
many nodes, quantiles of the most particular group that has rows enough."""

import dataclasses
from typing import Any

import pytest

from meshwright.costmodel.intervals import (
    ALL_GPUS,
    NODE_SCATTER,
    Quantiles,
    compute_error,
    memory_quantiles,
    slowest_of,
    step_quantiles,
)
from meshwright.costmodel.target import ALONE_BYTES, BUCKET_BYTES, Target
from meshwright.costmodel.targets import COMPILED, EAGER, TARGETS, target_named
from meshwright.planner.decisions import forbiddable
from meshwright.profiles.hardware.catalog_reader import catalog_names


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"unit": "layer"}, "unit='layer'; legal: bucket, parameter, block"),
        ({"dispatch": "per_rank"}, "dispatch='per_rank'; legal: per_expert, per_node"),
        ({"hidden_zero3": 1.5}, "hidden_zero3=1.5; legal: 0 to 1"),
        ({"overlap_tensor": ("sum",)}, r"overlap_tensor=\('sum',\); legal: of all_gather, reduce_"),
        ({"host_scale": -1.0}, "host_scale=-1.0; legal: 0 or more"),
        ({"bucket_bytes": -1}, "bucket_bytes=-1; legal: 0 or more"),
    ],
    ids=str,
)
def test_what_no_framework_does_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"target 'odd': {says}"):
        Target(name="odd", **given)


def test_targets_are_found_by_their_names_and_what_they_can_not_run_is_forbidden() -> None:
    assert [target_named(name) for name in TARGETS] == list(TARGETS.values())
    with pytest.raises(ValueError, match="target='jit'; legal: eager, compiled, megatron, "):
        target_named("jit")
    with pytest.raises(ValueError, match=r"target=\['eager'\]; legal"):
        target_named(["eager"])  # type: ignore[arg-type]
    for target in TARGETS.values():
        assert set(target.excludes) <= set(forbiddable())
        assert 0 in target.zeros_with_pipeline  # one data rank has no ZeRO


def test_eager_is_what_the_executor_does() -> None:
    assert (EAGER.fusion, EAGER.host_scale, EAGER.overlap_tensor) == ("none", 1.0, ())
    assert EAGER.overlap_gradients and EAGER.overlap_parameters
    assert not (EAGER.overlap_passes or EAGER.excludes or EAGER.overlap_experts)
    assert (EAGER.bucket_bytes, EAGER.alone_bytes) == (BUCKET_BYTES, ALONE_BYTES)
    same = {"name", "fusion", "host_scale", "defers_weights", "regathers"}  # but for these
    for field in dataclasses.fields(EAGER):
        if field.name not in same:
            assert getattr(COMPILED, field.name) == getattr(EAGER, field.name)


def test_what_a_target_combines() -> None:
    for name, zero, tp, pp, runs in (
        ("megatron", 3, 1, 1, True), ("megatron", 3, 2, 1, False), ("megatron", 1, 8, 8, True),
        ("megatron", 2, 1, 2, False), ("torchtitan", 3, 8, 4, True),
        ("deepspeed", 3, 1, 2, False), ("eager", 3, 4, 4, True),
    ):  # fmt: skip
        assert target_named(name).combines(zero, tp=tp, pp=pp) == runs


def width(found: Quantiles) -> float:
    return found.high / found.low


def test_less_evidence_never_makes_an_interval_narrower() -> None:
    """Of a GPU, of a framework, of both; and it is said where there is none of a GPU."""
    for experts in (False, True):
        found = {
            (gpu, target): step_quantiles(gpu, target, experts=experts)
            for gpu in ("a100-80gb", "h100-sxm", "rtx-4090", "l4", "mi300x")
            for target in ("megatron-lm", "fsdp", "megatron", "eager")
        }
        for (gpu, target), own in found.items():
            if gpu in ("a100-80gb", "h100-sxm"):
                strictly = 1.001 if gpu == "h100-sxm" else 1.0
                assert width(own) * strictly <= width(found["rtx-4090", target])
            else:
                assert own.of.endswith(f"none on {gpu}")
            assert width(own) <= width(found[gpu, "eager"]) * 1.001
        for device in (*catalog_names(), "local-cpu"):
            own = step_quantiles(device, "alpa", experts=experts)
            assert 0.3 < own.low < own.middle < own.high < 3


def test_memory_of_what_is_executed_is_off_by_less() -> None:
    own, other = (memory_quantiles("eager", executed=run) for run in (True, False))
    assert width(own) < 1.06 < width(other)
    assert own.below(1 / 0.95) > 0.9 > own.below(1.03) > 0.4  # a plan that leaves its margin fits
    assert other.below(other.low) == pytest.approx(0.1) != other.below(other.middle)
    assert other.below(other.high) == pytest.approx(0.9)


def test_errors_are_of_the_gpu_or_of_all() -> None:
    assert compute_error("a100-40gb") == compute_error("a100-80gb")
    assert compute_error("h100-sxm") != compute_error("a100-40gb")
    assert compute_error("rtx-4090") == ALL_GPUS.fraction


def test_the_slowest_of_many_nodes() -> None:
    """The larger of two normal variables is sqrt(1/pi) deviations above the mean."""
    assert slowest_of(1) == 1
    assert slowest_of(2) == pytest.approx(1 + NODE_SCATTER * 0.564, abs=0.001)
    steps = [slowest_of(4 * n) - slowest_of(n) for n in (1, 4, 16, 64)]
    assert all(step > 0 for step in steps)
    assert steps == sorted(steps, reverse=True)
