"""Parts of a graph that the backward runs again: the same results, with less kept."""

from __future__ import annotations

from typing import Any

import torch
from torch import fx, nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.executor.lowering.regions import Repeated, repeat

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


def _inputs() -> list[torch.Tensor]:
    torch.manual_seed(0)
    shapes = ((B, S, H), (B, H, S), (B, S, H))
    return [torch.randn(*s, dtype=torch.float64, requires_grad=True) for s in shapes]


def _cores(graph: fx.GraphModule) -> list[fx.Node]:
    """Both products and the softmax between them, of every attention."""
    return [n for n in graph.graph.nodes if n.target in (torch.matmul, torch.softmax)]


def _kept(module: nn.Module, inputs: list[torch.Tensor]) -> tuple[Any, set[tuple[int, ...]]]:
    """The result, and shapes of what autograd keeps besides the inputs."""
    kept: list[torch.Tensor] = []
    own = {x.data_ptr() for x in inputs}

    def pack(x: torch.Tensor) -> torch.Tensor:
        if x.data_ptr() not in own:
            kept.append(x)
        return x

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda x: x):
        out = module(*inputs)
    return out, {tuple(x.shape) for x in kept}


def test_results_and_gradients_are_the_same() -> None:
    for times in (1, 2):
        plain, again = fx.symbolic_trace(Attention(times)), fx.symbolic_trace(Attention(times))
        again = repeat(again, _cores(again))
        parts = [m for m in again.children() if isinstance(m, Repeated)]
        assert len(parts) == 1  # two in a row are connected
        mine, theirs = _inputs(), _inputs()
        again(*mine).sum().backward()
        plain(*theirs).sum().backward()
        for a, b in zip(mine, theirs, strict=True):
            torch.testing.assert_close(a.grad, b.grad)


def test_what_grows_with_the_square_of_the_sequence_is_not_kept() -> None:
    plain, again = fx.symbolic_trace(Attention(1)), fx.symbolic_trace(Attention(1))
    again = repeat(again, _cores(again))
    assert (B, S, S) in _kept(plain, _inputs())[1]
    assert (B, S, S) not in _kept(again, _inputs())[1]


def test_the_reader_of_what_is_repeated_is_not_run_again() -> None:
    again = fx.symbolic_trace(Attention(1))
    again = repeat(again, _cores(again))
    out = again(*_inputs()).sum()
    product = 2 * B * S * S * H
    with FlopCounterMode(display=False) as counter:
        out.backward()
    # two gradients of each of two products, and the first product again
    assert counter.get_total_flops() == 5 * product


def test_what_lies_between_two_parts_of_a_group_is_taken_in() -> None:
    def forward(x: torch.Tensor) -> torch.Tensor:
        a = torch.sin(x)
        return torch.cos(a) * torch.exp(torch.tanh(a))

    again = fx.symbolic_trace(forward)
    ends = [n for n in again.graph.nodes if n.target in (torch.sin, torch.exp, torch.cos)]
    mul = next(n for n in again.graph.nodes if "mul" in str(n.target))
    again = repeat(again, [*ends, mul])
    (part,) = (m for m in again.children() if isinstance(m, Repeated))
    assert any(n.target is torch.tanh for n in part.part.graph.nodes)
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    torch.testing.assert_close(again(x), forward(x))
