"""Advice with the numbers that it rests on: other batches, sizes and losses; and what to train
otherwise where nothing fits, its bytes by the formulas of states and logits."""

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.memory.states import model_states
from meshwright.planner.alternatives import advice as module
from meshwright.planner.alternatives import what_if
from meshwright.planner.alternatives.advice import BETTER, advice, next_batches
from meshwright.planner.alternatives.lighter import with_advice
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.search.search import Search
from tests.helpers.planning import Traced, cluster, cut, gpt2, linears, llama, problem_of

GIB = 2**30


@pytest.mark.parametrize(
    ("batch", "devices", "offered"),
    [
        (100, 64, [128, 64, 96]),
        (128, 64, []),
        (3, 4, [4, 2]),
        (100, 24, [96, 120, 108]),
        (5, 1, []),
        (8, 16, []),  # shares out as far as eight rows can
    ],
)
def test_batches_that_share_out_over_more_devices(
    batch: int, devices: int, offered: list[int]
) -> None:
    assert next_batches(batch, devices) == offered
    assert all(math.gcd(n, devices) > math.gcd(batch, devices) for n in offered)


def rows(of: Traced, batch: int, devices: int = 8, **given: Any) -> list[dict[str, Any]]:
    search = Search(problem_of(of, cluster(devices)), batch, Overrides(**given))
    return advice(search, search.run())


def test_a_batch_that_does_not_divide_is_told_a_better_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Six rows on four devices: two of them at most have rows of their own."""
    monkeypatch.setattr(module, "SEARCH_S", 60.0)
    of = linears(512, 4, 8)
    found = [row for row in rows(of, 6, 4) if row["kind"] == "batch"]
    best = found[0]
    assert best["global_batch_size"] == 8
    ours = Search(problem_of(of, cluster(4)), 6, Overrides()).run().best
    equal = Overrides(forbid=["unequal_meshes"])
    theirs = Search(problem_of(of, cluster(4)), 8, equal).run().best
    assert best["rows_per_s"] == pytest.approx(8 / theirs.step_time_s)
    assert all(row["rows_per_s"] > (1 + BETTER) * 6 / ours.step_time_s for row in found)
    assert f"batch 8: {8 / theirs.step_time_s:.4g} rows/s" in best["advice"]
    assert rows(of, 8, 4) == []


def test_sizes_that_do_not_divide_are_told_the_next_that_do() -> None:
    told = rows(gpt2(2, 320, 5, 50257, 64), 8, 4, tp=4)
    found = {row["factor"]: row for row in told if row["kind"] == "size"}
    (heads,) = [row for name, row in found.items() if "heads" in name]
    assert heads["next_sizes"] == [4, 8] and "4 or 8" in heads["advice"]
    words = found["transformer.wte.weight"]
    assert (words["size"], words["next_sizes"]) == (50257, [50304])
    even = rows(gpt2(2, 320, 8, 50304, 64), 8, 4, tp=4)
    assert not [row for row in even if row["kind"] == "size"]


def test_a_vocabulary_is_padded_to_what_kernels_and_the_tensor_axis_divide() -> None:
    """Three ranks and 64: the next multiple of 192. Full precision takes any vocabulary."""
    of = gpt2(2, 320, 8, 50001, 64)
    search = Search(problem_of(of, cluster(1)), 2, Overrides())
    stages = [SimpleNamespace(tp=3)]
    result: Any = SimpleNamespace(best=SimpleNamespace(plan=SimpleNamespace(stages=stages)))
    (row,) = module._words(search, result)
    assert (row["size"], row["next_sizes"]) == (50001, [50112])
    search = Search(problem_of(of, cluster(1), precision="fp32"), 2, Overrides())
    assert not [row for row in advice(search, search.run()) if row["kind"] == "size"]


class Classifier(nn.Module):
    def __init__(self, classes: int) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(64, 64), nn.Linear(64, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.relu(self.body(x)))


@pytest.mark.parametrize(("classes", "named"), [(4096, True), (16, False)])
def test_logits_that_fill_the_memory_are_named(classes: int, named: bool) -> None:
    """They are kept in bf16 and as probabilities, and their gradients are held: 4 bytes at least
    and no more than 12 an element, but for what else passes at the peak."""
    tokens = 4096
    with torch.device("meta"):
        batch = (torch.empty(tokens, 64), torch.empty(tokens, dtype=torch.long))
        of = cut(Classifier(classes), batch, F.cross_entropy)
    search = Search(problem_of(of, cluster(1)), tokens, Overrides(num_microbatches=1))
    result = search.run()
    (peak,) = result.best.evaluation.prediction.peak_memory_bytes
    found = [row for row in advice(search, result) if row["kind"] == "logits"]
    assert bool(found) == named
    for row in found:
        assert 4 <= row["logits_bytes"] / (tokens * classes) <= 12.5
        left = peak - row["logits_bytes"] * (1 - 1 / what_if.CHUNKS)
        assert row["peak_bytes_without"] == pytest.approx(left)
        assert "chunked" in row["advice"]


# --- where nothing fits --------------------------------------------------------------------------


def decoder(words: int = 32000, length: int = 64) -> Traced:
    return llama(512, 1024, 8, 8, words=words, length=length)


def message(of: Traced, memory_bytes: float, optimizer: str = "adamw_fused", **given: int) -> str:
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


def test_states_and_adapters_save_what_their_formulas_say() -> None:
    """Adapters keep no states of matrices: 16 of 18 bytes a parameter less, 18 more for each of
    the adapters'; and gradients in fp32 are the accumulated ones."""
    of = decoder()
    numel = float(of.graph.num_parameters())

    def states(optimizer: str) -> float:
        return model_states(numel, precision="bf16", zero=0, dp=1, optimizer=optimizer).nbytes

    text = message(of, numel * 4)
    for optimizer in ("sgd", "adamw8bit", "adamw_bf16"):
        less = (states("adamw") - states(optimizer)) / GIB
        assert saved(text, f"optimizer='{optimizer}'") == pytest.approx(less, rel=0.01)
    problem = problem_of(of, cluster(1))
    less = (16 * numel - 18 * what_if.adapter_numel(problem)) / GIB
    assert saved(text, "LoRA") == pytest.approx(less, rel=0.05)
    wide, ffn = 512, 1024
    each = 4 * 2 * wide + 3 * (wide + ffn)
    assert what_if.adapter_numel(problem) == what_if.RANK * (2 * each + wide + 32000)


def test_what_fits_is_said() -> None:
    of = decoder()
    text = message(of, 14.5 * of.graph.num_parameters())
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
    for change in (what_if.with_chunked_loss, what_if.with_half_sequences, what_if.with_adapters):
        changed = change(problem)
        assert changed is not None
        for value in problem.graph.parameters:
            assert changed.graph.values[value].shape == problem.graph.values[value].shape
    halved = what_if.with_half_sequences(problem)
    assert halved is not None
    for op in problem.graph.ops:
        for value in op.results:
            shapes = problem.graph.values[value].shape, halved.graph.values[value].shape
            assert all(b in (a, a // 2) for a, b in zip(*shapes, strict=True))
