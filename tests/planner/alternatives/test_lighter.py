"""What to train otherwise where nothing fits: bytes by the formulas of states and logits."""

from __future__ import annotations

import re

import pytest

from meshwright.costmodel.memory.states import model_state_bytes
from meshwright.planner.alternatives.lighter import with_advice
from meshwright.planner.alternatives.what_if import (
    RANK,
    adapter_numel,
    with_adapters,
    with_chunked_loss,
    with_half_sequences,
)
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.search.search import Search
from tests.helpers.planning import Traced, cluster, linears, llama, problem_of

GIB = 2**30


def decoder(words: int = 32000, length: int = 64) -> Traced:
    return llama(512, 1024, 8, 8, words=words, length=length)


def message(of: Traced, memory_bytes: float, optimizer: str = "adamw", **given: int) -> str:
    problem = problem_of(of, cluster(1, memory_bytes=memory_bytes), optimizer=optimizer)
    search = Search(problem, 2, Overrides(**given, forbid=["offload"]))
    with pytest.raises(InfeasibleError) as caught:
        search.run()
    return str(with_advice(search, caught.value))


def saved(text: str, what: str) -> float:
    """GiB that a message says a change saves."""
    found = re.search(rf"{what}[^;]*? (\d[\d.,]*) ([GMK]iB) less", text)
    assert found, text
    return float(found[1].replace(",", "")) / {"GiB": 1, "MiB": 2**10, "KiB": 2**20}[found[2]]


@pytest.mark.parametrize("optimizer", ["sgd", "adamw8bit", "adamw_bf16"])
def test_states_save_what_their_formula_says(optimizer: str) -> None:
    of = decoder()
    numel = float(of.graph.num_parameters())
    bytes_of = {
        name: model_state_bytes(numel, precision="bf16", zero=0, dp=1, optimizer=name)
        for name in ("adamw", optimizer)
    }
    text = message(of, numel * 4)
    expected = (bytes_of["adamw"] - bytes_of[optimizer]) / GIB
    assert saved(text, f"optimizer='{optimizer}'") == pytest.approx(expected, rel=0.01)


def test_adapters_keep_no_states_of_matrices() -> None:
    """16 of 18 bytes a parameter, less 18 for each of the adapters', and gradients in fp32 are the
    accumulated ones."""
    of = decoder()
    problem = problem_of(of, cluster(1))
    matrices = sum(of.graph.values[v].numel for v in of.graph.parameters)
    expected = (16 * matrices - 18 * adapter_numel(problem)) / GIB
    assert saved(message(of, 4.0 * matrices), "LoRA") == pytest.approx(expected, rel=0.02)
    wide, ffn = 512, 1024
    each = 4 * 2 * wide + 3 * (wide + ffn)
    assert adapter_numel(problem) == RANK * (2 * each + wide + 32000)


def test_what_fits_is_said() -> None:
    of = decoder()
    matrices = of.graph.num_parameters()
    text = message(of, 14.5 * matrices)
    assert "optimizer='sgd') " in text and ", which fits" in text
    assert "Way out" in text or "Nothing was found" in text


def test_several_changes_fit_together_where_none_does_alone() -> None:
    text = message(decoder(length=4096), 0.9 * GIB, num_microbatches=1)
    assert "LoRA" in text and " fits, with " in text
    assert ", which fits" not in text


def test_logits_are_named_where_they_are_what_does_not_fit() -> None:
    assert "The logits and their gradients alone take" in message(decoder(length=4096), GIB)
    assert "logits and their" not in message(decoder(words=64), 8 * GIB / 1024)


def test_what_does_not_apply_is_not_offered() -> None:
    text = message(linears(512, 4, 8), 10**6, optimizer="sgd")
    assert not any(word in text for word in ("LoRA", "sgd", "chunked", "sequences"))


def test_smaller_problems_keep_their_weights() -> None:
    problem = problem_of(decoder(), cluster(1))
    for change in (with_chunked_loss, with_half_sequences, with_adapters):
        changed = change(problem)
        assert changed is not None
        for value in problem.graph.parameters:
            assert changed.graph.values[value].shape == problem.graph.values[value].shape
    halved = with_half_sequences(problem)
    assert halved is not None
    for op in problem.graph.ops:
        for value in op.results:
            shapes = problem.graph.values[value].shape, halved.graph.values[value].shape
            assert all(b in (a, a // 2) for a, b in zip(*shapes, strict=True))
