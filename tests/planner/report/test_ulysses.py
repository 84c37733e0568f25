"""Ulysses is called by its name where attention moves from tokens to heads and back."""

from __future__ import annotations

from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.report.ulysses import ulysses_notes
from meshwright.planner.search.search import Search
from tests.helpers.planning import cluster, large_llama, problem_of

ATTENTION = "model.layers.*.self_attn"
TOKENS = {f"{ATTENTION}.*_proj:linear": "b0"}  # b0 is the sequence, beside the batch


def notes(**shardings: str) -> list[str]:
    of = large_llama()
    overrides = Overrides(tp=4, pp=1, num_microbatches=2, zero=0, shardings=shardings)
    best = Search(problem_of(of, cluster(4)), 8, overrides).run().best
    return ulysses_notes(best.plan, of.graph, of.table, best.assignments)


def test_attention_by_heads_between_projections_by_tokens_is_ulysses() -> None:
    (note,) = notes(**TOKENS, **{f"{ATTENTION}:scaled_dot_product_attention": "heads"})
    assert note.startswith("Ulysses") and "tp 4" in note and "in 2 of 2 blocks" in note


def test_projections_by_heads_are_not() -> None:
    heads = {f"{ATTENTION}.{name}_proj:linear": "colwise" for name in "qkv"}
    assert notes(**heads, **{f"{ATTENTION}.o_proj:linear": "rowwise"}) == []
