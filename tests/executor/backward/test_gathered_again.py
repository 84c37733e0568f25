"""What a forward gathered is gathered again by its backward, once, as early as it can be."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import fx, nn
from torch.nn import functional as F

from meshwright.executor.backward.deferred import DeferredProduct, WeightGradientQueue, accumulate
from meshwright.executor.backward.repeated import repeated
from tests.costmodel.memory.saved_tensors import ledger

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


def _leaves() -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((ROWS, WIDTH), *(((WIDTH, WIDTH),) * 3))
    return [nn.Parameter(torch.randn(*s, dtype=torch.float64)) for s in shapes]


def _again(graph: fx.GraphModule) -> nn.Module:
    return repeated(graph, [n for n in graph.graph.nodes if n.target == "gather"])


def _gradients(leaves: list[torch.Tensor]) -> list[torch.Tensor]:
    return [x.grad for x in leaves if x.grad is not None]


def test_it_starts_with_the_backward_and_is_kept_as_a_part() -> None:
    log: list[str] = []
    plain, again = _leaves(), _leaves()
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
    plain, again, queue = _leaves(), _leaves(), WeightGradientQueue()
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
