"""Rules of leaves are tried on numbers: those that hold pass, others are refused by name.

Oracle: what is known of each forward, which is written for its one fault.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn import functional as F

from meshwright import leaf
from meshwright.costmodel.graph import Graph
from meshwright.costmodel.rules.leaf import leaf_of
from meshwright.planner.tracing.leaves import trial as leaf_trial
from meshwright.planner.tracing.leaves.probe import LeafError
from tests.helpers.traced import ROWS, WIDTH, rows
from tests.models.leaf_models import INNER, Scan
from tests.planner.tracing.test_leaves import leaves_in, traced


class Cumulative(nn.Module):
    """Each row's sums of what was before, times weights."""

    def __init__(self, inner: torch.dtype | None = None) -> None:
        super().__init__()
        self.scale, self.inner = nn.Parameter(torch.rand(WIDTH)), inner

    def forward(self, x: Tensor) -> Tensor:
        x, w = (x.to(self.inner), self.scale.to(self.inner)) if self.inner else (x, self.scale)
        return x.cumsum(1) * w


class WrongBackward(torch.autograd.Function):
    """x², row by row; its gradient takes the rows' mean."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return 2 * grads[0] * x.mean(0, keepdim=True)


def projected(x: Tensor, w: Tensor, bias: Tensor) -> Tensor:
    return x @ w.T + bias


def _applied(function: type[torch.autograd.Function]) -> Callable[[Tensor], Any]:
    return lambda x: function.apply(x)


def _of_rows(made: Any) -> Graph:
    """A leaf on [rows, time, width]."""
    module = isinstance(made, nn.Module)

    def forward(self: Any, x: Tensor) -> Tensor:
        return (self.p0(self.l(x)) if module else made(self.l(x))).float().sum()

    return traced(forward, *[made] * module, inputs=(rows(6, WIDTH),))


def _of_weights(made: Any) -> Graph:
    return traced(lambda self, x: made(self.l(x), self.l.weight, self.l.bias).sum())


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda: _of_rows(leaf(Cumulative(), rule="b s d, d -> b s d")),
            r"two parts.*'s': result 0 is off by up to .*operand 1 is scale.*write _",
        ),
        (
            lambda: _of_rows(leaf(lambda x: x.flip(-1), rule="b s d -> b s d")),
            r"'d': result 0 is off",
        ),
        (
            lambda: _of_rows(leaf(lambda x: x / x.shape[-1], rule="b s d -> b s d")),
            r"'d': result 0 is off",
        ),
        (
            lambda: _of_weights(leaf(projected, rule="b i, o i, o -> b o", sums="i")),
            r"together, 'i': result 0 is off by up to .*\(a bias\) belongs outside",
        ),
        (
            lambda: _of_rows(_applied(leaf(WrongBackward, rule="b s d -> b s d"))),
            r"together, 'b': the gradient of operand 0 is off by up to .*Ways out",
        ),
    ],
)
def test_a_rule_that_does_not_hold_is_refused(make: Callable[[], Graph], says: str) -> None:
    with pytest.raises(LeafError, match=f"(?s)does not hold.*{says}") as caught:
        make()
    assert "'b':" not in str(caught.value) or "'b':" in says


@pytest.mark.parametrize("inner", [None, torch.float32, torch.bfloat16])
def test_a_rule_that_holds_is_not_taken_on_trust(inner: torch.dtype | None) -> None:
    """Also where the forward computes in less than it is given."""
    graph = _of_rows(leaf(Cumulative(inner), rule="b _ d, d -> b _ d"))
    assert "trust" not in graph.notes[0]
    graph = _of_weights(leaf(projected, rule="b _, o _, o -> b o"))
    assert "trust" not in graph.notes[0]


def test_meta_models_and_long_loops_are_tried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(leaf_trial, "MAX_KERNELS", 50)  # of fewer steps than the sample has

    def made(rule: str) -> Graph:
        with torch.device("meta"):
            part = leaf(Scan(), rule=rule)

        def forward(self: Any, x: Tensor) -> Tensor:
            return self.p0(x)["y"].sum() + self.l(x[..., :WIDTH]).sum()

        return traced(forward, part, inputs=(rows(12, INNER),))

    graph = made("b _ d, d, d _ -> b _ d")
    assert leaf_of(leaves_in(graph)[0]).work.kernels > 50
    assert "trust" not in graph.notes[0]
    with pytest.raises(LeafError, match="'s': result 0 is off"):
        made("b s d, d, d _ -> b s d")


def test_heads_of_a_fixed_size_are_not_cut_in_a_trial() -> None:
    def heads(x: Tensor) -> Tensor:
        return torch.cat([part.softmax(-1) for part in x.split(4, -1)], -1)

    assert "trust" not in _of_rows(leaf(heads, rule="b s d -> b s d")).notes[0]


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda x: F.dropout(x, 0.5), "draws random numbers"),
        (lambda x: x @ x.new_ones(x.shape[-1], 2**13) @ x.new_ones(2**13, 2**13), "at most"),
        (lambda x: (x - math.inf) * 0, "nothing finite"),
    ],
)
def test_what_can_not_be_tried_is_noted(made: Callable[..., Any], why: str) -> None:
    (note,) = _of_rows(leaf(made, rule="b s _ -> b s _")).notes
    assert "taken on trust" in note and why in note


def test_a_trial_refuses_what_writes_to_buffers_that_a_trace_can_not_see() -> None:
    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.seen += 1
            return 2 * x

    part = leaf(Counting(), rule="b _ -> b _", result=torch.empty_like)
    with pytest.raises(LeafError, match=r"writes to seen, .* with result=.*leave result= out"):
        traced(lambda self, x: self.p0(self.l(x)).sum(), part)


def test_a_rule_is_tried_once() -> None:
    runs: list[tuple[int, ...]] = []

    @leaf(rule="b s d -> b s d")
    def doubled(x: Tensor) -> Tensor:
        if not isinstance(x, FakeTensor):
            runs.append(tuple(x.shape))
        return 2 * x

    _of_rows(doubled)
    first = len(runs)
    assert first > 1 and max(map(math.prod, runs)) <= 4**3
    _of_rows(doubled)
    assert len(runs) == first


class Averaged(nn.Module):
    """A table read by indices, and a buffer of the rows' mean."""

    mean: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.rand(5, WIDTH))
        self.register_buffer("mean", torch.zeros(WIDTH))
        self.register_buffer("calls", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        y = x + self.table[chosen]
        self.mean = 0.9 * self.mean + 0.1 * y.mean((0, 1))
        self.calls += 1
        return y


def test_indices_and_buffers_are_tried() -> None:
    def made(rule: str) -> Graph:
        def forward(self: Any, x: Tensor, chosen: Tensor) -> Tensor:
            return self.p0(self.l(x), chosen % 5).sum()

        inputs = rows(6, WIDTH), torch.zeros(ROWS, 6, dtype=torch.long)
        return traced(forward, leaf(Averaged(), rule=rule), inputs=inputs)

    assert "trust" not in made("_ _ d, _ _, _ d, d -> _ _ d, d").notes[0]
    with pytest.raises(LeafError, match=r"'s': result 1 is off.*result 1 the new value of mean"):
        made("_ s d, _ s, _ d, d -> _ s d, d")


def test_kernels_that_fake_tensors_can_not_run_are_tried() -> None:
    def running(x: Tensor) -> Tensor:
        assert x.data_ptr()
        return x.cumsum(1)

    graph = _of_rows(leaf(running, rule="b _ d -> b _ d", result=torch.empty_like))
    assert "trust" not in graph.notes[0]
    with pytest.raises(LeafError, match="'s': result 0 is off"):
        _of_rows(leaf(running, rule="b s d -> b s d", result=torch.empty_like))


def test_regions_of_autocast_are_tried() -> None:
    said = leaf(lambda x, w: x @ w, rule="b s i, i o -> b s o", sums="i")

    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return said(self.l(x), self.l.weight).float().sum()

    assert "trust" not in traced(forward, inputs=(rows(6, WIDTH),)).notes[0]
