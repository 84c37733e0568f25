"""Where nothing fits: each way out, followed, gives a plan; against searches of what is relaxed."""

import pickle
import re
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from meshwright.planner.alternatives import what_if
from meshwright.planner.alternatives.ways_out import MOST, with_adapters, with_ways_out
from meshwright.planner.overrides.overrides import Overrides, each_dropped
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.search.search import Search
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import (
    SUMMED,
    Traced,
    cluster,
    cut,
    linears,
    llama,
    problem_of,
    token_batch,
)
from tests.helpers.tiers import tiered

BATCH = 8
GIB = 2**30
AS_SAID = 1.03  # what who follows finds over what was said: a search may miss a plan by as much


def wide() -> Traced:
    """Mostly weights."""
    return linears(512, 4, BATCH)


def states_bytes() -> int:
    return 18 * wide().graph.num_parameters()


def limited(memory_bytes: float, *, nodes: int = 1, devices: int = 2) -> Cluster:
    return cluster(devices, nodes=nodes, memory_bytes=memory_bytes)


def searching(on: Cluster, of: Traced, **given: Any) -> Search:
    overrides = Overrides(**given)
    return Search(problem_of(of, on, target=SUMMED), BATCH, overrides)


def refused(search: Search) -> InfeasibleError:
    with pytest.raises(InfeasibleError) as caught:
        search.run()
    assert caught.value.relaxations == ()  # found when they are asked for
    return with_ways_out(search, caught.value)


def failing(on: Cluster, of: Traced, **given: Any) -> InfeasibleError:
    return refused(searching(on, of, **given))


def decoder(words: int = 32000, length: int = 64) -> Traced:
    return llama(512, 1024, 8, 8, words=words, length=length)


def training(
    of: Traced,
    memory_bytes: float,
    optimizer: str = "adamw_fused",
    margin: float = 0.0,
    **given: Any,
) -> Search:
    on = cluster(1, memory_bytes=memory_bytes)
    problem = problem_of(of, on, optimizer=optimizer)
    return Search(problem, 2, Overrides(**given), memory_margin=margin)


# --- followed ------------------------------------------------------------------------------------


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank beside it."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Linear(layer.in_features, what_if.RANK, bias=False)
        self.up = nn.Linear(what_if.RANK, layer.out_features, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + self.up(self.down(x))


def adapted(words: int = 32000, length: int = 64) -> Traced:
    """`decoder()` as who takes the advice trains it."""
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=512, intermediate_size=1024, num_attention_heads=8,
        num_key_value_heads=8, vocab_size=words, max_position_embeddings=length,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
        for weight in model.parameters():
            weight.requires_grad_(weight.ndim == 1)
        own = model.model.layers.modules()  # as usual, not the head
        layers = [(module, *child) for module in own for child in module.named_children()]
        for module, name, layer in layers:
            if isinstance(layer, nn.Linear):
                setattr(module, name, Adapted(layer))
        return cut(model, token_batch(2, length))


def followed(search: Search, what: str) -> Search:
    """The search with the arguments that a way out names."""
    for one in each_dropped(search.overrides):
        if what == one.what:
            return search.like(overrides=one.left)
    problem = search.problem
    if found := re.search(r"optimizer='(\w+)'", what):
        problem = replace(problem, optimizer=found[1])
    if "LoRA" in what:
        of = adapted(length=search.problem.factors.sizes[search.problem.factors.sequence or 0])
        problem = replace(problem, graph=of.graph, factors=of.table)
    if "chunked" in what:
        changed = what_if.with_chunked_loss(problem)
        assert changed is not None
        problem = changed
    if problem is not search.problem:
        return search.like(problem=problem)
    if found := re.match(r"memory_margin=([\d.]+) instead of", what):
        return search.like(memory_margin=float(found[1]))
    if found := re.match(r"a batch of (\d+)$", what):
        return search.like(global_batch_size=int(found[1]))
    found = re.fullmatch(r"(\d+) nodes", what)
    assert found, what
    return search.on_nodes(int(found[1]))


def needs(room: float, **given: Any) -> Search:
    return training(decoder(), room * decoder().graph.num_parameters(), "adamw", **given)


CASES: dict[str, tuple[Callable[[], Search], set[str]]] = {
    "weights": (lambda: searching(limited(states_bytes() / 5), wide()), {"nodes"}),
    "overrides": (
        lambda: searching(limited(states_bytes() * 0.8), wide(), forbid=["zero"], tp=1, pp=1),
        {"leave tp free", "leave pp free", "allow zero"},
    ),
    "optimizer": (
        lambda: needs(21.5, forbid=["offload"]),
        {"one kernel", "'adamw_bf16'", "'adamw8bit'", "LoRA", "allow offload", "nodes"},
    ),
    "margin": (lambda: needs(22.4, margin=0.1, forbid=["offload"]), {"memory_margin="}),
    "micro-batches": (
        lambda: training(decoder(length=4096), 3.2 * GIB, num_microbatches=1, forbid=["offload"]),
        {"leave num_microbatches free", "a batch of 1", "chunked"},
    ),
    "much": (
        lambda: training(decoder(length=4096), 0.4 * GIB, num_microbatches=1, forbid=["offload"]),
        {"(logits in 8 parts) and sequences half as long and LoRA"},
    ),
}  # fmt: skip


@cache
def told(name: str) -> tuple[Search, InfeasibleError]:
    search = CASES[name][0]()
    return search, refused(search)


@pytest.mark.parametrize(
    "name",
    tiered(
        CASES,
        lambda name: name not in ("margin", "micro-batches"),
        "a smaller margin and fewer rows; other ways, alone and together, stay",
    ),
)
def test_a_way_out_that_is_followed_gives_a_plan_as_fast_as_it_says(name: str) -> None:
    (search, error), expected = told(name), CASES[name][1]
    said = [way.what for way in error.relaxations]
    for text in expected:
        assert any(text in what for what in said), (text, said)
    for way in error.relaxations:
        if "sequences" in way.what:
            assert way.step_time_s is None
            continue
        best = followed(search, way.what).run().best
        assert best.fits
        if "LoRA" not in way.what:  # whose adapters compute a little more
            assert way.step_time_s is not None
            assert best.step_time_s <= way.step_time_s * AS_SAID, way.what
        assert str(way) in str(error)


def test_host_memory_is_a_way_out() -> None:
    """Where an override forbids what needs less, host memory holds the rest."""
    search = needs(12.0, recompute="none", offload={"activations": 0.5})
    ways = {way.what: way for way in refused(search).relaxations}
    (own,) = [way for what, way in ways.items() if what == "leave offload free"]
    assert "optimizer states in host memory" in own.plan


# --- against searches of what is relaxed ----------------------------------------------------------


def test_the_fewest_nodes_are_found() -> None:
    search, error = told("weights")
    (wider,) = [r for r in error.relaxations if r.more_nodes]
    nodes = 1 + wider.more_nodes
    assert nodes > 2 and wider.what == f"{nodes} nodes"
    for fewer in range(2, nodes):
        with pytest.raises(InfeasibleError):
            search.on_nodes(fewer).run()


def test_every_override_that_helps_is_named_the_fastest_first() -> None:
    error = told("overrides")[1]
    dropped = [r for r in error.relaxations if re.match("leave|allow", r.what)]
    assert {r.what for r in dropped} == CASES["overrides"][1]
    steps = [r.step_time_s or 0.0 for r in dropped]
    assert steps == sorted(steps) and error.relaxations[:3] == tuple(dropped)
    assert f"Way out: {error.relaxations[0].what} (" in str(error)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.relaxations) == (str(error), error.relaxations)
    assert again.shortfall_bytes == error.shortfall_bytes


def test_recompute_is_a_way_out() -> None:
    of = linears(64, 4, BATCH, 512)
    given = {"recompute": "none", "forbid": ["tp", "pp"], "num_microbatches": 2}
    kept = searching(limited(2.0**40), of, **given).run().best
    peak_bytes = max(kept.evaluation.prediction.peak_memory_bytes)
    ways = {r.what for r in failing(limited(peak_bytes * 0.9), of, **given).relaxations}
    assert {"leave recompute free", "leave num_microbatches free"} <= ways


def test_nothing_helps_a_model_beyond_any_cluster() -> None:
    error = failing(limited(1000, devices=1), linears(512, 2, BATCH))
    assert error.relaxations == ()
    assert f"Nothing was found with up to {MOST} times as many nodes" in str(error)


def test_logits_are_named_where_they_are_what_does_not_fit() -> None:
    logits = "The logits and their gradients alone take"
    assert logits in str(told("much")[1])
    assert logits not in str(told("optimizer")[1])


def test_what_does_not_apply_is_not_offered() -> None:
    text = str(refused(training(linears(512, 4, 8), 10**6, optimizer="sgd")))
    assert not any(word in text for word in ("LoRA", "sgd", "chunked", "sequences"))


def test_adapters_are_as_large_as_their_matrices_say() -> None:
    """And what is reserved for them is their states, 18 bytes each with fp32 gradients."""
    problem = problem_of(decoder(), cluster(1))
    hidden, ffn = 512, 1024
    each = 4 * 2 * hidden + 3 * (hidden + ffn)
    numel = what_if.RANK * (2 * each + hidden + 32000)
    assert what_if.adapter_numel(problem) == numel
    head = what_if.RANK * (hidden + 32000)  # the only one that `adapted` has none beside
    assert adapted().graph.num_trained() == numel - head + 5 * hidden
    changed = with_adapters(problem, 2)
    assert changed is not None
    assert changed.cluster.device.reserved_bytes == 9 * numel


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
