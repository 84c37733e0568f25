"""What a target may say, and the named ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from meshwright.costmodel.target import ALONE_BYTES, BUCKET_BYTES, Target
from meshwright.costmodel.targets import COMPILED, EAGER, MEGATRON, TARGETS, target_named
from meshwright.planner.overrides.values import FORBIDDABLE


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"fusion": "some"}, "fusion='some'; legal: none, pointwise, full"),
        ({"unit": "layer"}, "unit='layer'; legal: bucket, parameter, block"),
        ({"gathered_unit": "layer"}, "gathered_unit='layer'; legal: bucket, parameter, block"),
        ({"dispatch": "per_rank"}, "dispatch='per_rank'; legal: per_expert, per_node"),
        ({"hidden_zero3": 1.5}, "hidden_zero3=1.5; legal: 0 to 1"),
        ({"overlap_tensor": ("sum",)}, r"overlap_tensor=\('sum',\); legal: of all_gather, reduce_"),
        ({"overlap_experts": -0.1}, "overlap_experts=-0.1; legal: 0 to 1"),
        ({"host_scale": -1.0}, "host_scale=-1.0; legal: 0 or more"),
        ({"bucket_bytes": -1}, "bucket_bytes=-1; legal: 0 or more"),
    ],
    ids=str,
)
def test_what_no_framework_does_is_refused(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=f"target 'odd': {says}"):
        Target(name="odd", **given)


def test_targets_are_found_by_their_names() -> None:
    assert [target_named(name) for name in TARGETS] == list(TARGETS.values())
    assert all(target.name == name for name, target in TARGETS.items())
    with pytest.raises(ValueError, match="target='jit'; legal: eager, compiled, megatron, "):
        target_named("jit")
    with pytest.raises(ValueError, match=r"target=\['eager'\]; legal"):
        target_named(["eager"])  # type: ignore[arg-type]


def test_eager_is_what_the_executor_does() -> None:
    """Each claim is held against its source where that can be read off."""
    assert (EAGER.fusion, EAGER.host_scale) == ("none", 1.0)
    assert EAGER.overlap_gradients and EAGER.overlap_parameters
    assert (EAGER.overlap_tensor, EAGER.overlap_experts) == ((), 0)
    assert not EAGER.overlap_passes
    assert (EAGER.bucket_bytes, EAGER.alone_bytes) == (BUCKET_BYTES, ALONE_BYTES)
    assert not EAGER.excludes
    same = {"name", "fusion", "host_scale", "defers_weights", "regathers"}  # but for these
    for field in dataclasses.fields(EAGER):
        if field.name not in same:
            assert getattr(COMPILED, field.name) == getattr(EAGER, field.name)


def test_what_a_target_can_not_run_can_be_forbidden() -> None:
    for target in TARGETS.values():
        assert set(target.excludes) <= set(FORBIDDABLE)
        assert 0 in target.zeros_with_pipeline  # one data rank has no ZeRO


@pytest.mark.parametrize(
    ("name", "zero", "tp", "pp", "runs"),
    [
        ("megatron", 3, 1, 1, True),
        ("megatron", 3, 2, 1, False),
        ("megatron", 1, 8, 8, True),
        ("megatron", 2, 1, 2, False),
        ("torchtitan", 3, 8, 4, True),
        ("deepspeed", 3, 4, 1, True),
        ("deepspeed", 3, 1, 2, False),
        ("eager", 3, 4, 4, True),
    ],
)
def test_what_a_target_combines(name: str, zero: int, tp: int, pp: int, runs: bool) -> None:
    assert target_named(name).combines(zero, tp=tp, pp=pp) == runs


def test_named_targets_differ_where_their_names_say() -> None:
    for target in (COMPILED, MEGATRON):
        assert target.fusion == "full"
        assert target.host_scale < EAGER.host_scale
        assert target.overlap_gradients
