"""Nodes of a graph that the backward runs again: the same gradients, with less kept."""

from __future__ import annotations

import gc
import itertools
import weakref

import pytest
import torch
from torch import fx, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

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


def _inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((B, S, H), (B, H, S), (B, S, H))
    return [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes]


def _mixed_inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((B, S, H), (H, 2 * H), (H,))
    return [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes]


def _cores(graph: fx.GraphModule) -> list[fx.Node]:
    """Both products and the softmax between them, of every attention."""
    return [n for n in graph.graph.nodes if n.target in (torch.matmul, torch.softmax)]


def _kept_bytes(module: nn.Module, inputs: list[torch.Tensor]) -> int:
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
    assert _kept_bytes(again, _inputs()) == _kept_bytes(plain, _inputs())
    whole = fx.symbolic_trace(Attention(times))
    squares = times * B * S * S * 8
    results = times * B * S * H * 8
    assert _kept_bytes(repeated(whole, _cores(whole)), _inputs()) == B * S * H * 8
    assert _kept_bytes(plain, _inputs()) == squares + results


def test_the_reader_of_what_is_repeated_is_not_run_again() -> None:
    again = fx.symbolic_trace(Attention(1))
    again = repeated(again, _cores(again))
    out = again(*_inputs()).sum()
    product = 2 * B * S * S * H
    with FlopCounterMode(display=False) as counter:
        out.backward()
    # two gradients of each of two products, and the first product again
    assert counter.get_total_flops() == 5 * product


def test_without_gradients_nothing_is_noted() -> None:
    again = fx.symbolic_trace(Attention(1))
    again = repeated(again, _cores(again))
    with torch.no_grad():
        assert torch.equal(again(*_inputs()), Attention(1)(*_inputs()))


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
