"""What frameworks keep in memory, each habit by the bytes it saves on a small published row."""

from dataclasses import replace
from typing import Any

import pytest

from meshwright.costmodel.rules import recomputable
from scripts.experts import alpa
from scripts.published.predict import evaluate, traced
from scripts.published.rows import read_row
from scripts.published.setup import Setup, of_layers
from tests.helpers.tiers import second_tier

LAYERS, HIDDEN, LENGTH, VOCAB, FFN = 4, 1024, 1024, 51200, 4096
ROW = {
    "model": "GPT", "layers": str(LAYERS), "hidden": str(HIDDEN), "heads": "16", "kv_heads": "16",
    "ffn": str(FFN), "vocab": str(VOCAB), "seq_len": str(LENGTH), "gpu": "H100-80GB-SXM",
    "gpus_per_node": "8", "num_gpus": "2", "precision": "bf16", "tp": "2", "pp": "1", "dp": "1",
    "micro_batch": "1", "global_batch": "1", "zero_stage_fsdp": "0", "recompute": "none",
    "framework": "Megatron-Core",
}  # fmt: skip


def setup(**changes: str) -> Setup:
    return read_row({**ROW, **changes})


def peak(of: Setup, **habits: Any) -> int:
    """Peak bytes with the framework's habits changed."""
    target = replace(of.framework.target, **habits)
    found = evaluate(replace(of, framework=replace(of.framework, target=target))).prediction
    return found.peak_memory_bytes[0]


def test_parts_of_gathered_activations_are_kept() -> None:
    """Two products of a layer read what both ranks hold half of."""
    whole = LENGTH * HIDDEN * 2
    saved = peak(setup(), gathers_again=False) - peak(setup(), gathers_again=True)
    assert saved == pytest.approx(2 * LAYERS * whole / 2, rel=0.01)


def test_the_gradient_of_logits_lies_over_the_softmax() -> None:
    """Of the cast to single precision the 16-bit gradient is left, of 6 bytes per logit."""
    saved = peak(setup(), loss_in_place=False) - peak(setup(), loss_in_place=True)
    assert saved == pytest.approx(4 * LENGTH * VOCAB / 2, rel=0.1)


@second_tier("habits of the loss and of gathers stay")
def test_zero_3_holds_what_it_gathers_at_once() -> None:
    """Two blocks' weights and one's gradients, or as many parameters': the feed-forward's matrix of
    a layer's four, without biases; the head's is alone either way."""
    of = setup(num_gpus="2", tp="1", dp="2", global_batch="2", zero_stage_fsdp="3", vocab="1024")
    saved = peak(of, unit="block") - peak(of, unit="parameter")
    numels = [4 * HIDDEN**2, 2 * HIDDEN * FFN]
    layer, largest = sum(numels), HIDDEN * FFN
    per_element = 2 * 2 + of.framework.target.gradient_bytes
    assert saved == pytest.approx((layer - largest) * per_element, rel=0.05)


def test_sixteen_bit_gradients_are_half_as_wide() -> None:
    wide, narrow = (setup(precision=p) for p in ("bf16", "bf16, bf16 grad accum"))
    assert (wide.framework.target.gradient_bytes, narrow.framework.target.gradient_bytes) == (4, 2)


@second_tier("it is about Alpa's programs alone")
def test_only_pure_programs_run_batch_norms_again() -> None:
    graph, _ = alpa.traced(alpa.wide_resnet(groups=(1, 1, 1, 1), channels=8, width=1), "fp32")
    norms = [block for block in graph.blocks if block.name.startswith("layers.")]
    assert norms
    assert not any(recomputable(block) for block in norms)
    assert all(recomputable(block, pure=True) for block in norms)


def test_layers_alone_are_recomputed() -> None:
    assert of_layers("full", ["layers.0", "layers.1"]) == "full"
    assert of_layers("full", ["embed", "layers.0"]) == {"full": ("layers.0",)}
    assert of_layers("none", ["embed", "layers.0"]) == "none"
    graph, _ = traced(setup().dims, "bf16")
    assert {"embed", "head"} <= {block.name for block in graph.blocks}
