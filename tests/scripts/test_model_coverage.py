"""A part of `scripts/model_coverage`: what transformers, torch and users have is traced and ruled;
some of it, under plans of every kind, trains as plain PyTorch does. One launch of 4 ranks."""

from collections.abc import Mapping
from typing import Any

import pytest

from meshwright.planner.errors import TraceError
from scripts.model_coverage import EXACT, error_of, executed, traced
from scripts.zoo.models import SMALL, ZOO
from tests.helpers.tiers import second_tier, tiered

TIMEOUT_S = 600
FIRST = ("U-Net",)
ZOO_IS_LARGE = "a trace of every model of the zoo; one stays, and the models of all tests"
INSTALLED = tuple(name for name, e in ZOO.items() if e.library not in ("torchvision", "timm"))
# run in full on every rank: what depends on all that comes before it in the batch, and norms of
# kernels
WHOLE = {"aten.masked_scatter.default", "aten._weight_norm.default"}
# Two towers that meet in a contrastive loss, an image inside a text, relative positions, scans in
# chunks, sliding windows, fused projections, an encoder that all of a decoder reads, skips over
# stages. Experts, with sinks and latent attention, have tests of their own (test_hf_experts.py).
CELLS = (
    "CLIP/dp4", "LLaVA/pp4", "DeBERTa-v3/dp2×tp2", "Mamba-2/dp2×tp2", "Gemma 3/tp4",
    "Phi-3/dp2×tp2", "T5/tp4", "Whisper/pp2×tp2", "U-Net/pp2×tp2", "SegFormer/pp2×tp2",
)  # fmt: skip


@second_tier("models of the zoo; refusals of tracing stay beside their code")
@pytest.mark.parametrize("name", [name for name, entry in ZOO.items() if entry.refused])
def test_a_refusal_says_the_line_and_the_way_out(name: str) -> None:
    with pytest.raises(TraceError, match=ZOO[name].refused) as refusal:
        traced(name, SMALL)
    assert ".py:" in str(refusal.value) and "meshwright.leaf" in str(refusal.value)


@pytest.mark.parametrize(
    "name", tiered([n for n in INSTALLED if not ZOO[n].refused], FIRST.__contains__, ZOO_IS_LARGE)
)
def test_every_operator_has_a_rule(name: str) -> None:
    found = traced(name, SMALL)
    assert set(found.unruled) <= WHOLE
    assert found.blocks >= 1


Results = Mapping[str, Mapping[str, Any]]


@pytest.fixture(scope="module")
def results() -> Results:
    return executed(CELLS, TIMEOUT_S)


@second_tier("ten models on ranks; parity's cells stay")
@pytest.mark.parametrize("cell", CELLS)
def test_trains_as_on_one_device(results: Results, cell: str) -> None:
    found = results[cell]
    error = error_of(found)
    assert error is not None and error < EXACT, found


@second_tier("of the ten models above")
@pytest.mark.parametrize("cell", [cell for cell in CELLS if cell.endswith("tp4")])
def test_most_parameters_are_sharded_where_links_cost_nothing(results: Results, cell: str) -> None:
    assert results[cell]["held"] < 0.4
