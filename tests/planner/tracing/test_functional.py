"""Values of a traced program: writes into memory, assigned buffers and regions as plain values; the
batch in fake tensors, its numbers and documents; random draws."""

import copy
import dataclasses
import operator
import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import Cluster, MeshwrightError, ParallelModel, auto_parallelize
from meshwright.costmodel.graph import Block, Graph, argument, verify_graph
from meshwright.costmodel.rules import overload
from meshwright.planner.tracing.fake_batch import FakeBatch, Number, NumberNeeded, tensor_of
from meshwright.planner.tracing.trace import TraceError, trace
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.traced import (
    ROWS,
    SEQUENCE,
    WIDTH,
    agree,
    hugging_face,
    rows,
    run,
    shorts,
    with_forward,
)

FUNCTIONAL = "normal_functional"


def _residual(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    y += self.l(torch.relu_(self.l(x)))
    return y.square().sum()


def _rows_and_columns(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x).clone()
    y[:, 0] = 0
    y[..., 1:] = y[..., :-1].clone()
    y[0].mul_(2.0)
    y[1:, 2].fill_(3.0)
    return y.square().sum()


def _through_views(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x).clone()
    flat, turned = y.view(-1), y.t()
    flat.mul_(2.0)
    turned[1].add_(x[:, 1])
    y.permute(1, 0).unsqueeze(0).mul_(3.0)
    return (y * flat.view(y.shape) * turned.t()).sum()


def _masked(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x).clone()
    y[y > 0.1] = 1.0
    return y.masked_fill_(x > 0.5, 0.0).square().sum()


def _bits(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Python's operators on masks and bits."""
    mask, bits = x > 0.1, (x > 0).long()
    mask |= x < -1.0
    mask &= x < 1.0
    mask ^= x > 0.5
    mask |= True
    bits <<= 2
    bits >>= torch.ones_like(bits)
    bits |= 1
    return (self.l(x) * mask * bits).square().sum()


def _copied(self: Any, x: torch.Tensor) -> torch.Tensor:
    out = x.new_zeros(x.shape[0], 2 * WIDTH)
    out[:, :WIDTH] = self.l(x)
    out[:, WIDTH:].copy_(x.double())
    return out.square().sum()


def _policy(self: Any, x: torch.Tensor) -> torch.Tensor:
    """What `torch.distributions` do: scalars and vectors broadcast to each other, values checked
    where validation is on (the default)."""
    spread = self.l(torch.ones(WIDTH)).exp()
    normal = torch.distributions.Normal(self.l(x), spread)
    a, b = torch.broadcast_tensors(spread, self.l(x))
    return -normal.log_prob(x).mean() + (a * b.square()).sum() + a.sum()


def _drawn(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Arguments equal to a default, which export leaves out, and others."""
    draws = [torch.empty_like(x).bernoulli_(p) for p in (0.5, 0.25)]
    noise = [torch.empty_like(x).normal_(0.0, 1.0), torch.empty_like(x).normal_(std=2.0)]
    return (self.l(x) * sum(draws) + sum(noise)).square().sum()


def test_draws_in_place_keep_their_arguments() -> None:
    graph = trace(with_forward(_drawn), (rows(WIDTH),))
    drawn = [op for op in (*graph.derived, *graph.ops) if op.short in ("bernoulli", FUNCTIONAL)]
    chances = [argument(op, 1, "p", None) for op in drawn if op.short == "bernoulli"]
    assert chances == [0.5, 0.25]
    normal = [op for op in drawn if op.short == FUNCTIONAL]
    assert [argument(op, 1, "mean", None) for op in normal] == [0.0, 0.0]
    assert [argument(op, 2, "std", None) for op in normal] == [1.0, 2.0]


@pytest.mark.parametrize(
    "forward",
    tiered(
        [_residual, _rows_and_columns, _through_views, _masked, _bits, _copied, _policy],
        (_rows_and_columns, _through_views, _masked).__contains__,
        "other operators in place; writes to parts, through views and by masks stay",
        lambda forward: forward.__name__,
    ),
)
def test_writes_become_values(forward: Callable[..., torch.Tensor]) -> None:
    graph = agree(with_forward(forward), (rows(WIDTH),))
    assert not [op.target for op in graph.ops if overload(op.target)._schema.is_mutable]


def test_assigned_and_written_buffers_are_updates() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.l(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        self.steps.add_(1)
        return (y - self.mean).square().sum()

    model, batch = with_forward(forward, with_steps), (rows(WIDTH),)
    model.register_buffer("mean", torch.rand(WIDTH))
    graph = trace(model, batch)
    values = run(graph, model, batch)
    eager = copy.deepcopy(model)
    eager(*batch)
    updated = {graph.buffers[b]: values[new] for b, new in graph.updates.items()}
    assert updated.keys() == {"mean", "steps"}
    for name, buffer in eager.named_buffers():
        torch.testing.assert_close(updated[name], buffer)


def with_steps(model: nn.Module) -> None:
    model.register_buffer("steps", torch.zeros((), dtype=torch.long))


def test_no_grad_regions_are_opened() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            target = self.l(x)
            target.relu_()
            with torch.enable_grad():
                y = self.l(x)
        return (self.l(x) - target).square().sum() + y.sum()

    graph = agree(with_forward(forward), (rows(WIDTH),))
    flows = [graph.values[op.results[0]].requires_grad for op in graph.ops[:3]]
    assert flows == [False, False, True]


def test_autocast_regions_become_casts() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            y = torch.relu(self.l(x))
            with torch.autocast("cpu", enabled=False):
                y = self.l(y.float())
            return F.mse_loss(self.l(y), x)

    graph = agree(with_forward(forward), (rows(WIDTH),), atol=1e-2, rtol=1e-2)
    linears = [op for op in graph.ops if op.short == "linear"]
    dtypes = [graph.values[op.results[0]].dtype for op in linears]
    assert dtypes == [torch.bfloat16, torch.float32, torch.bfloat16]


@cache
def sample() -> Graph:
    """An unused product, a derived mask, a tie, a buffer update, one operator in place."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.l(x).square()
        mask = torch.ones(WIDTH, WIDTH).tril()
        self.steps.add_(1)
        y = self.l(x) @ mask
        y += self.l(x).split(4, -1)[0].sum()
        return y.sum()

    return trace(with_forward(forward, with_steps), (rows(WIDTH),))


def test_dead_operators_are_dropped_and_masks_are_derived() -> None:
    assert shorts(sample()) == ["linear", "matmul", "linear", "split", "sum", "add", "sum"]
    assert sorted(op.short for op in sample().derived) == ["add", "ones", "tril"]
    read = {name for op in (*sample().derived, *sample().ops) for name in op.operands}
    results = {name for op in sample().derived for name in op.results}
    assert results <= read | set(sample().updates.values())


def _swapped(graph: Graph) -> Graph:
    first, second, *rest = graph.ops
    return dataclasses.replace(graph, ops=(second, first, *rest))


def _derived_from_parameters(graph: Graph) -> Graph:
    return dataclasses.replace(graph, derived=(*graph.derived, graph.ops[0]), ops=graph.ops[1:])


def _twice(graph: Graph) -> Graph:
    again = dataclasses.replace(graph.ops[0], name="again", key="again")
    return dataclasses.replace(graph, ops=(*graph.ops, again))


def _same_key(graph: Graph) -> Graph:
    first, *rest = graph.ops
    return dataclasses.replace(graph, ops=(dataclasses.replace(first, key=rest[0].key), *rest))


def _block_missing(graph: Graph) -> Graph:
    nothing = dict.fromkeys(("inputs", "outputs", "derived", "parameters", "buffers"), ())
    block = Block(name="all", ops=graph.ops[1:], class_id="", **nothing)
    return dataclasses.replace(graph, blocks=(block,))


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        (_swapped, "before it is defined"),
        (_derived_from_parameters, "reads parameters"),
        (_twice, "defines linear"),
        (_same_key, "key is used twice"),
        (_block_missing, "partition"),
        (lambda g: dataclasses.replace(g, loss=g.ops[0].results[0]), "no scalar"),
        (lambda g: dataclasses.replace(g, loss="nothing"), "not defined"),
        (lambda g: dataclasses.replace(g, values={}), "no shape"),
        (lambda g: dataclasses.replace(g, batched=frozenset({"y"})), "no input"),
        (lambda g: dataclasses.replace(g, updates={g.loss: g.loss}), "no buffer"),
        (lambda g: dataclasses.replace(g, aliases={"a": "b", "b": "c"}), "aliases of aliases"),
        (lambda g: dataclasses.replace(g, buffers={**g.buffers, **g.parameters}), "two kinds"),
    ],
)
def test_verify_graph_finds(broken: Callable[[Graph], Graph], message: str) -> None:
    verify_graph(sample())
    with pytest.raises(AssertionError, match=message):
        verify_graph(broken(sample()))


SAMPLE = {"x": torch.rand(3, 5), "ids": torch.zeros(3, 7, dtype=torch.long), "scale": torch.rand(2)}


def test_tensors_have_the_rows_that_are_traced_and_are_not_rounded() -> None:
    sample = {**SAMPLE, "scale": SAMPLE["scale"].half(), "flag": True}
    batch = FakeBatch.of(sample, torch.bfloat16, 6)
    assert [(tuple(t.shape), t.dtype) for t in batch.tensors] == [
        ((6, 5), torch.float32),
        ((6, 7), torch.long),
        ((2,), torch.bfloat16),
    ]
    assert batch.inputs == [("x", True), ("ids", True), ("scale", False)]
    assert (batch.rows, batch.scale) == (6, 2.0)


def test_the_users_structure_is_filled_in_order() -> None:
    batch = FakeBatch.of({**SAMPLE, "flag": True}, torch.float32, None)
    filled = batch.filled([torch.tensor(k) for k in range(3)])
    assert {name: int(x) for name, x in filled.items()} == {"x": 0, "ids": 1, "scale": 2, "flag": 1}
    assert filled["flag"] is True


def test_less_than_one_row_is_refused() -> None:
    with pytest.raises(ValueError, match="batch_size=0; legal: an integer from 1"):
        FakeBatch.of(SAMPLE, torch.float32, 0)


def number(value: float) -> Number:
    return Number(torch.tensor(value), type(value), "n", set())


@pytest.mark.parametrize("value", [3, 2.5])
@pytest.mark.parametrize("other", [2, 0.5])
def test_arithmetic_is_pythons(value: float, other: float) -> None:
    for name in ("add", "sub", "mul", "truediv", "floordiv", "mod", "pow"):
        function = getattr(operator, name)
        for actual, wanted in (
            (function(number(value), other), function(value, other)),
            (function(other, number(value)), function(other, value)),
            (function(number(value), number(other)), function(value, other)),
        ):
            assert isinstance(actual, type(wanted)), name
            assert float(tensor_of(actual)) == pytest.approx(wanted), name
    for function in (operator.neg, operator.pos, abs):
        assert float(function(number(-value)).tensor) == function(-value)
    product = number(value) * torch.ones(2)
    assert isinstance(product, torch.Tensor) and product.tolist() == [value] * 2
    assert torch.add(torch.ones(()), number(value)).item() == 1 + value


@pytest.mark.parametrize("ask", [int, float, bool, hash, round, range, lambda n: n > 1])
def test_whatever_asks_for_the_value_is_told(ask: Callable[[Any], Any]) -> None:
    n = number(2)
    with pytest.raises(NumberNeeded, match="the forward needs the value of the number 'n'"):
        ask(n)
    assert n.asked == {"n"} and f"{n}" == "<number n>"


GENERATORS = second_tier("numpy's generator without a seed stays, and a hidden draw from random")


@pytest.mark.parametrize(
    ("draw", "name"),
    [
        pytest.param(lambda: random.random(), "random.random", marks=GENERATORS),
        pytest.param(lambda: np.random.rand(), "numpy.random.rand", marks=GENERATORS),
        (lambda: np.random.default_rng().random(), "numpy.random.default_rng"),
    ],
)
def test_draws_from_global_generators_are_refused(draw: Callable[[], float], name: str) -> None:
    forward = lambda self, x: self.l(x).sum() * draw()  # noqa: E731
    with pytest.raises(
        TraceError, match=rf"test_functional.py:\d+ the forward calls {name}: a plan"
    ):
        trace(with_forward(forward), (rows(WIDTH),))
    assert draw() != draw()  # outside of a trace


def test_draws_with_a_seed_are_taken_and_hidden_ones_found() -> None:
    seeded = lambda self, x: self.l(x).sum() * float(np.random.default_rng(3).random())  # noqa: E731
    trace(with_forward(seeded), (rows(WIDTH),))
    hidden = random.Random.random
    sneaky = lambda self, x: self.l(x).sum() * hidden(random._inst)  # noqa: E731
    with pytest.raises(TraceError, match="at an unknown place the forward draws from random or"):
        trace(with_forward(sneaky), (rows(WIDTH),))


WHOLE = torch.arange(SEQUENCE).repeat(ROWS, 1)
PACKED = torch.stack([WHOLE[0], WHOLE[0] % 3, WHOLE[0]])


def model() -> nn.Module:
    torch.manual_seed(0)
    return hugging_face("llama", 1)[0]


def batch(positions: torch.Tensor, **more: torch.Tensor) -> dict[str, torch.Tensor]:
    return {**hugging_face("llama", 1)[1], "position_ids": positions, **more}


def planned(example: dict[str, torch.Tensor]) -> ParallelModel:
    cluster = Cluster.local(1, "cpu", measure=False)
    return auto_parallelize(model(), cluster, example_inputs=example, global_batch_size=ROWS)


def test_positions_that_begin_anew_are_refused() -> None:
    says = "begin anew in row 1, and there is no attention_mask"
    with pytest.raises(MeshwrightError, match=says):
        planned(batch(PACKED))
    result = planned(batch(WHOLE))
    for step in (result.train_step, result.eval_step):
        with pytest.raises(MeshwrightError, match=says):
            step(batch(PACKED))


@second_tier("that positions are checked in each step stays, where consecutive ones pass")
def test_consecutive_positions_and_masks_train_as_the_model_does() -> None:
    mask = torch.ones(ROWS, SEQUENCE, dtype=torch.long)
    for entries in (batch(WHOLE + 3), batch(PACKED, attention_mask=mask)):
        expected = float(model()(**entries).loss.detach())
        assert float(planned(entries).eval_step(entries)) == pytest.approx(expected, rel=1e-5)
