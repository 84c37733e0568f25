"""Random plans of random models equal the single device (`scripts/fuzz_parity` runs more)."""

from __future__ import annotations

from pathlib import Path
from random import Random

from tests.models.random_models import draw_spec
from tests.parity.fuzzing import draw, fuzz

PLANS, RANKS = 20, 4


def test_random_plans_equal_single_device(tmp_path: Path) -> None:
    failures = fuzz(tmp_path, range(PLANS), RANKS)
    assert not failures, "\n".join(f"seed {f.seed}: {f.reason}" for f in failures)


def test_a_seed_stands_for_one_model_and_plan() -> None:
    first, again = draw(3, RANKS), draw(3, RANKS)
    assert (first.spec, first.plan) == (again.spec, again.plan)
    assert first.plan != draw(4, RANKS).plan


def test_draws_hold_everything_they_may() -> None:
    specs = [draw_spec(Random(seed)) for seed in range(100)]
    layers = [layer for spec in specs for layer in spec.layers]
    assert {spec.family for spec in specs} == {"tokens", "vectors", "images"}
    assert {layer.kind for layer in layers} == {"mlp", "attention", "conv"}
    for knob in ("tied", "side", "batch_statistics"):
        assert {getattr(spec, knob) for spec in specs} == {False, True}
    assert any(layer.kv_heads < layer.heads for layer in layers)
    assert any(layer.skip > 1 for layer in layers)
