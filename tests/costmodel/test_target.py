"""What a target may say, and the named ones."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from meshwright.costmodel.target import COMPILED, EAGER, MEGATRON, TARGETS, Target, target_named


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"fusion": "some"}, "fusion='some'; legal: none, pointwise, full"),
        ({"unit": "layer"}, "unit='layer'; legal: bucket, parameter, block"),
        ({"dispatch": "per_rank"}, "dispatch='per_rank'; legal: per_expert, per_node"),
        ({"overlap_tensor": 1.5}, "overlap_tensor=1.5; legal: 0 to 1"),
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
    with pytest.raises(ValueError, match="target='jit'; legal: eager, compiled, megatron"):
        target_named("jit")
    with pytest.raises(ValueError, match=r"target=\['eager'\]; legal"):
        target_named(["eager"])  # type: ignore[arg-type]


def test_eager_hides_nothing_and_fuses_nothing() -> None:
    assert (EAGER.fusion, EAGER.host_scale) == ("none", 1.0)
    assert not EAGER.overlap_gradients
    assert not EAGER.overlap_parameters
    assert EAGER.overlap_tensor == EAGER.overlap_experts == 0


def test_named_targets_differ_where_their_names_say() -> None:
    assert COMPILED.fusion == "full"
    assert COMPILED.host_scale < EAGER.host_scale
    assert MEGATRON.fusion == "full"
    assert MEGATRON.host_scale < EAGER.host_scale
    assert MEGATRON.overlap_gradients


def test_targets_are_values() -> None:
    assert dataclasses.replace(EAGER) == EAGER
    assert len({EAGER, dataclasses.replace(EAGER), COMPILED}) == 2
