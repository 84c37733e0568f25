"""Nodes of a graph that the backward runs again: the same gradients, with less kept. What a forward
gathered is gathered again once, as early as it can be. Weight gradients that are put off equal
autograd's, and I computes none of them."""

import gc
import itertools
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from torch.nn import functional as F
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from meshwright.executor.backward.deferred import DeferredProduct, WeightGradientQueue, accumulate
from meshwright.executor.backward.repeated import repeated
from tests.costmodel.memory.saved_tensors import ledger

B, S, H = 2, 8, 4


class Attention(nn.Module):
    """Attention written out in operators, once or twice in a row."""

    def __init__(self, times: int) -> None:
        super().__init__()
        self.times = times

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        for _ in range(self.times):
            scores = torch.matmul(q, k)
            weights = torch.softmax(scores, -1)
            q = torch.matmul(weights, v)
        return torch.tanh(q)


class Mixed(nn.Module):
    """A norm, views, several results, a value that leaves and is kept."""

    def forward(
        self, x: torch.Tensor, w: torch.Tensor, g: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        y = torch.layer_norm(x, (H,), g)
        a, b = torch.chunk(y @ w, 2, -1)
        h = torch.exp(a) * torch.relu(b)
        h = h.transpose(1, 2).reshape(B, -1)
        top, _ = torch.topk(h, 3, -1)
        left = torch.sin(h)
        return left, torch.cos(left).sum() + (top * top).sum()


def _leaves(*shapes: tuple[int, ...]) -> list[nn.Parameter]:
    torch.manual_seed(0)
    return [nn.Parameter(torch.randn(*shape, dtype=torch.float64)) for shape in shapes]


def _inputs() -> list[nn.Parameter]:
    return _leaves((B, S, H), (B, H, S), (B, S, H))


def _mixed_inputs() -> list[nn.Parameter]:
    return _leaves((B, S, H), (H, 2 * H), (H,))


def _core_again(times: int) -> nn.Module:
    graph = fx.symbolic_trace(Attention(times))
    return repeated(graph, _cores(graph))


def _cores(graph: fx.GraphModule) -> list[fx.Node]:
    """Both products and the softmax between them, of every attention."""
    return [n for n in graph.graph.nodes if n.target in (torch.matmul, torch.softmax)]


def _kept_bytes(module: nn.Module) -> int:
    inputs = _inputs()
    with ledger() as kept:
        module(*inputs)
    return kept.nbytes(inputs)


def test_any_nodes_may_be_repeated() -> None:
    """Pairs of operators beside each other and apart, and all at once: the gradients of the plain
    graph."""
    plain = fx.symbolic_trace(Mixed())
    theirs = _mixed_inputs()
    sum(y.sum() for y in plain(*theirs)).backward()
    calls = [n for n in plain.graph.nodes if n.op not in ("placeholder", "output")]
    pairs = itertools.combinations(range(len(calls)), 2)
    for chosen in (*(pair for pair in pairs if pair[1] - pair[0] in (1, 2, 5)), range(len(calls))):
        own = fx.symbolic_trace(Mixed())
        nodes = [n for n in own.graph.nodes if n.op not in ("placeholder", "output")]
        mine = _mixed_inputs()
        sum(y.sum() for y in repeated(own, [nodes[k] for k in chosen])(*mine)).backward()
        for a, b in zip(mine, theirs, strict=True):
            assert a.grad is not None and torch.equal(a.grad, b.grad)


@pytest.mark.parametrize("times", [1, 2])
def test_what_grows_with_the_square_of_the_sequence_is_not_kept(times: int) -> None:
    again = fx.symbolic_trace(Attention(times))
    again = repeated(again, [n for n in _cores(again) if n.target is torch.softmax])
    plain = fx.symbolic_trace(Attention(times))
    # softmax reads the scores: one square for the other, unless those are made again, too
    assert _kept_bytes(again) == _kept_bytes(plain) == times * (B * S * S + B * S * H) * 8
    assert _kept_bytes(_core_again(times)) == B * S * H * 8


def test_the_reader_of_what_is_repeated_is_not_run_again() -> None:
    out = _core_again(1)(*_inputs()).sum()
    product = 2 * B * S * S * H
    with FlopCounterMode(display=False) as counter:
        out.backward()
    # two gradients of each of two products, and the first product again
    assert counter.get_total_flops() == 5 * product


def test_without_gradients_nothing_is_noted() -> None:
    with torch.no_grad():
        assert torch.equal(_core_again(1)(*_inputs()), Attention(1)(*_inputs()))


def test_what_was_repeated_is_let_go_after_the_backward() -> None:
    """Also what is saved of a result, whose graph holds it: nothing is left to a collection."""
    inputs = _inputs()
    graph = fx.symbolic_trace(Attention(2))
    module = repeated(graph, {n for n in graph.graph.nodes if n.op in ("call_function",)})
    made: list[weakref.ref[torch.UntypedStorage]] = []

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            result = func(*args, **(kwargs or {}))
            if isinstance(result, torch.Tensor):
                made.append(weakref.ref(result.untyped_storage()))
            return result

    collects = gc.isenabled()
    gc.disable()
    try:
        with Seen():
            module(*inputs).sum().backward()
        gradients = {x.grad.untyped_storage()._cdata for x in inputs if x.grad is not None}
        left = [s for s in (ref() for ref in made) if s is not None]
        assert len(gradients) == 3
        assert {s._cdata for s in left} <= gradients | {x.untyped_storage()._cdata for x in inputs}
    finally:
        if collects:
            gc.enable()


# --- gathered again -------------------------------------------------------------------------------


ROWS, WIDTH, BYTES = 6, 4, 8


class _Twice(torch.autograd.Function):
    """Both ranks' parts, where both are alike."""

    @staticmethod
    def forward(ctx: object, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, x])

    @staticmethod
    def backward(ctx: object, *grads: torch.Tensor) -> torch.Tensor:
        a, b = grads[0].chunk(2)
        return a + b


class Gathering(nn.Module):
    gathers = True

    def __init__(self, log: list[str]) -> None:
        super().__init__()
        self.log = log

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = _Twice.apply(x)  # type: ignore[no-untyped-call]
        return made

    def start(self, x: torch.Tensor) -> Callable[[], torch.Tensor]:
        self.log.append("start")
        return lambda: self.log.append("wait") or torch.cat([x, x])  # type: ignore[func-returns-value]


class Model(nn.Module):
    """Two products read what is gathered, a third what they make."""

    def __init__(self, log: list[str], queue: WeightGradientQueue | None) -> None:
        super().__init__()
        self.gather = Gathering(log)
        self.products = nn.ModuleList(
            DeferredProduct("linear", queue, defer_bias=False) if queue else Plain()
            for _ in range(3)
        )

    def forward(self, x, a, b, c):  # type: ignore[no-untyped-def]
        y = self.gather(torch.sin(x))
        gate, up, down = self.products
        return down(torch.tanh(gate(y, a)) + up(y, b), c)


class Plain(nn.Module):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(x, weight)


class Leaves(fx.Tracer):
    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        return isinstance(m, Gathering | Plain | DeferredProduct)


def _graph(model: nn.Module) -> fx.GraphModule:
    return fx.GraphModule(model, Leaves().trace(model))


def _operands() -> list[nn.Parameter]:
    return _leaves((ROWS, WIDTH), *(((WIDTH, WIDTH),) * 3))


def _again(graph: fx.GraphModule) -> nn.Module:
    return repeated(graph, [n for n in graph.graph.nodes if n.target == "gather"])


def _gradients(leaves: list[nn.Parameter]) -> list[torch.Tensor]:
    return [x.grad for x in leaves if x.grad is not None]


def test_it_starts_with_the_backward_and_is_kept_as_a_part() -> None:
    log: list[str] = []
    plain, again = _operands(), _operands()
    whole, graph = _graph(Model([], None)), _again(_graph(Model(log, None)))
    with ledger() as kept:
        out = graph(*again)
    parts = kept.nbytes(again)
    with ledger() as kept:
        made = whole(*plain)
    assert kept.nbytes(plain) - parts == (2 - 1) * ROWS * WIDTH * BYTES
    made.square().sum().backward()
    assert log == []
    seen: list[list[str]] = []
    again[3].register_hook(lambda grad: seen.append([*log]))  # of the last product
    out.square().sum().backward()
    assert seen == [["start"]]
    assert log == ["start", "wait"]
    assert all(map(torch.equal, _gradients(again), _gradients(plain)))


def test_gradients_of_weights_that_are_put_off_gather_for_themselves() -> None:
    log: list[str] = []
    plain, again, queue = _operands(), _operands(), WeightGradientQueue()
    _graph(Model([], None))(*plain).square().sum().backward()
    _again(_graph(Model(log, queue)))(*again).square().sum().backward()
    items = queue.take()
    assert log == [] and len(items) == 3
    seen: list[list[str]] = []
    accumulate(items, lambda leaf: seen.append([*log]))
    # beside the product before the two that read it
    assert seen == [["start"], ["start", "wait"], ["start", "wait"]]
    for own, other in zip(again, plain, strict=True):
        torch.testing.assert_close(own.grad, other.grad)


# --- put off --------------------------------------------------------------------------------------


TOKENS, IN, OUT = 6, 5, 4


def _leaf(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(*shape, dtype=torch.float64))


def _of_product(operator: str, bias: bool, lead: tuple[int, ...]) -> list[Any]:
    x = torch.randn(*lead, IN, dtype=torch.float64, requires_grad=True)
    weight = _leaf(OUT, IN) if operator == "linear" else _leaf(IN, OUT)
    if operator == "addmm":
        return [_leaf(OUT), x, weight]
    return [x, weight, *([_leaf(OUT)] if bias else [])]


def _twins(operands: list[Any]) -> list[Any]:
    return [x.detach().clone().requires_grad_() for x in operands]


PLAIN = {
    "linear": torch.nn.functional.linear, "addmm": torch.addmm, "mm": torch.mm,
    "matmul": torch.matmul,
}  # fmt: skip
CALLS = [
    ("linear", True, (2, TOKENS)), ("linear", False, (TOKENS,)), ("addmm", True, (TOKENS,)),
    ("mm", False, (TOKENS,)), ("matmul", False, (2, 3, TOKENS)),
]  # fmt: skip


@pytest.mark.parametrize(("operator", "bias", "lead"), CALLS)
@pytest.mark.parametrize("bias_too", [True, False])
def test_gradients_equal_autograds(
    operator: str, bias: bool, lead: tuple[int, ...], bias_too: bool
) -> None:
    torch.manual_seed(0)
    operands = _of_product(operator, bias, lead)
    twins = _twins(operands)
    queue = WeightGradientQueue()
    product = DeferredProduct(operator, queue, defer_bias=bias_too and bias)
    for _ in range(2):  # micro-batches add up
        made: list[int] = []
        product(*operands).square().sum().backward()
        PLAIN[operator](*twins).square().sum().backward()
        items = queue.take()
        assert len(items) == 1 + (bias and bias_too) and not queue.items
        accumulate(items, lambda leaf, made=made: made.append(id(leaf)))
        assert len(made) == len(set(made)) == 1 + (bias and bias_too)
        for own, other in zip(operands, twins, strict=True):
            torch.testing.assert_close(own.grad, other.grad)


def test_nothing_is_computed_twice_and_weights_come_last() -> None:
    queue = WeightGradientQueue()
    x, weight = _of_product("linear", False, (TOKENS,))
    product = DeferredProduct("linear", queue, defer_bias=False)
    each = 2 * TOKENS * IN * OUT
    with FlopCounterMode(display=False) as forward:
        y = product(x, weight).sum()
    with FlopCounterMode(display=False) as of_input:
        y.backward()
    assert weight.grad is None and x.grad is not None
    with FlopCounterMode(display=False) as of_weight:
        accumulate(queue.take(), lambda leaf: None)
    counts = [c.get_total_flops() for c in (forward, of_input, of_weight)]
    assert counts == [each, each, each]


def test_what_is_put_off_holds_no_graph() -> None:
    queue = WeightGradientQueue()
    x, weight = _of_product("linear", False, (TOKENS,))
    received = weakref.ref(x)
    DeferredProduct("linear", queue, defer_bias=False)(2 * x, weight).sum().backward()
    del x
    assert queue.items and received() is None


def test_a_weight_that_is_not_trained_is_not_put_off() -> None:
    queue = WeightGradientQueue()
    x, weight = _of_product("linear", False, (TOKENS,))
    DeferredProduct("linear", queue, defer_bias=False)(
        x, weight.requires_grad_(False)
    ).sum().backward()
    assert not queue.items and x.grad is not None
