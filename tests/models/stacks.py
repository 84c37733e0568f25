"""Stacks of layers, and short traces of them against full ones."""

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.graph import Graph, map_refs
from meshwright.planner.plan.check import fingerprint
from meshwright.planner.tracing.trace import trace
from tests.helpers.traced import WIDTH

DEPTH = 6


# --- two graphs that are one up to the names of values -------------------------------------------


class Renaming(dict[str, str]):
    """A one-to-one map of names, found while two graphs are read side by side."""

    def meet(self, a: Any, b: Any) -> None:
        for x, y in zip(a, b, strict=True):
            assert self.setdefault(x, y) == y, f"{x} is {self[x]} and {y}"
        assert len(set(self.values())) == len(self)


def assert_same(short: Graph, full: Graph) -> None:
    names = Renaming()
    for kind in ("inputs", "parameters", "buffers"):
        a, b = getattr(short, kind), getattr(full, kind)
        assert list(a.values()) == list(b.values()), kind
        names.meet(a, b)
    for part in ("derived", "ops"):
        for a, b in zip(getattr(short, part), getattr(full, part), strict=True):
            same = ("target", "key", "module", "source")
            assert [getattr(a, x) for x in same] == [getattr(b, x) for x in same]
            names.meet(a.operands, b.operands)
            names.meet(a.results, b.results)
            blank = [repr(map_refs((op.args, op.kwargs), lambda _: None)) for op in (a, b)]
            assert blank[0] == blank[1]
    assert {names[v]: meta for v, meta in short.values.items()} == dict(full.values)
    assert {names[v] for v in short.constants} == set(full.constants)
    for v, tensor in short.constants.items():
        torch.testing.assert_close(tensor, full.constants[names[v]], rtol=0, atol=0)
    assert {names[v] for v in short.batched} == full.batched
    assert {names[a]: names[b] for a, b in short.updates.items()} == dict(full.updates)
    assert names[short.loss] == full.loss
    for field in ("aliases", "notes", "batch_size"):
        assert getattr(short, field) == getattr(full, field)
    assert fingerprint(short) == fingerprint(full)


class Refusals(logging.Handler):
    """Why short traces were given up."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.reasons: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        if record.exc_info and "in full" in record.getMessage():
            self.reasons.append(str(record.exc_info[1]))


def refusals(model: nn.Module, batch: Any, **options: Any) -> list[str]:
    """Check that a trace is the full one; why it was made in full, empty where it was not."""
    logger, handler = logging.getLogger("meshwright.planner.tracing.trace"), Refusals()
    level = logger.level
    logger.setLevel(logging.DEBUG)
    logger.addHandler(handler)
    try:
        short = trace(model, batch, **options)
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)
    assert_same(short, trace(model, batch, **options, repeats=False))
    return handler.reasons


# --- stacks --------------------------------------------------------------------------------------


class Layer(nn.Module):
    """A residual layer that knows its position and a few more things."""

    def __init__(self, index: int = 0) -> None:
        super().__init__()
        self.index = index
        self.l = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.l(x * self.scale))


class Stack(nn.Module):
    """Layers run by `run(self, x)`; by default one after the other."""

    def __init__(
        self,
        make: Callable[[int], nn.Module] = Layer,
        run: Callable[[Any, torch.Tensor], torch.Tensor] | None = None,
        depth: int = DEPTH,
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(make(k) for k in range(depth))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.run = run

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        if self.run is not None:
            return self.run(self, x).square().mean()
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def each(
    step: Callable[[Any, int, Any, torch.Tensor], torch.Tensor],
) -> Callable[[Any, torch.Tensor], torch.Tensor]:
    """A run of `step(stack, position, layer, x)`, one layer after the other."""

    def run(self: Stack, x: torch.Tensor) -> torch.Tensor:
        for k, layer in enumerate(self.layers):
            x = step(self, k, layer, x)
        return x

    return run


def with_layer(forward: Callable[[Any, Any], Any], **attributes: Any) -> Callable[[int], Layer]:
    """A maker of layers with another forward; `attributes` are called with the position."""
    kind = type("Other", (Layer,), {"forward": forward})

    def make(index: int) -> Layer:
        layer = kind(index)
        for name, value in attributes.items():
            setattr(layer, name, value(index))
        return layer

    return make


def nested(self: Any, pair: tuple[torch.Tensor, dict[str, Any]]) -> Any:
    x, more = pair
    x = x + F.gelu(self.l(x * self.scale)) * more["gain"] * more["times"]
    return x, more | {"extra": None}
