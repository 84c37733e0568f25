"""Random plans of random models equal the single device (`scripts/fuzz_parity` runs more)."""

from random import Random

import pytest

from tests.helpers.tiers import second_tier, tiered
from tests.models.random_models import draw_spec
from tests.parity.fuzzing import draw, fuzz

PLANS, RANKS = 20, 4


@pytest.mark.parametrize("seed", tiered(range(PLANS), (2).__eq__, "one of many like it stays"))
def test_random_plans_equal_single_device(seed: int) -> None:
    failure = fuzz(seed, RANKS)
    assert failure is None, failure.reason


@second_tier("of draws, not of the product: a run of the script is made again by its seed")
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
