"""Models, batches and losses of users, most of them with something wrong."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from scripts.fuzzing.mutations import cyclic, deep
from scripts.fuzzing.pool import UserBug

WIDTH, CLASSES, ROWS = 8, 4, 4
Forward = Callable[[nn.Module, torch.Tensor], Any]


class Net(nn.Module):
    """Two layers; `forward` is what a case makes of their result."""

    def __init__(self, then: Forward | None = None) -> None:
        super().__init__()
        self.up, self.head, self.then = nn.Linear(WIDTH, 16), nn.Linear(16, CLASSES), then

    def forward(self, x: torch.Tensor) -> Any:
        y = self.head(F.relu(self.up(x)))
        return self.then(self, y) if self.then else y


def _raises(*_: Any) -> Any:
    raise UserBug("the user's own")


def _cyclic(_: nn.Module, y: torch.Tensor) -> Any:
    return [*cyclic(), y]


def _divides(_: nn.Module, y: torch.Tensor) -> Any:
    return y * (1 // (y.dim() - 2))


def _no_parameters() -> nn.Module:
    return nn.Sequential(nn.ReLU())


def _frozen() -> nn.Module:
    return Net().requires_grad_(False)


def _complex() -> nn.Module:
    return nn.Linear(WIDTH, CLASSES, dtype=torch.complex64)


def _halves() -> nn.Module:
    return Net().half()


def _recursive() -> nn.Module:
    model = Net()
    model.itself = model
    return model


def _shared() -> nn.Module:
    model = Net()
    model.up.weight = nn.Parameter(torch.zeros(16, WIDTH))
    model.twice = model.up
    return model


def _sparse() -> nn.Module:
    return nn.Sequential(nn.Embedding(9, CLASSES, sparse=True))


def _lazy() -> nn.Module:
    return nn.Sequential(nn.LazyLinear(CLASSES))


class BrokenState(Net):
    """A model whose parameters can't be listed."""

    def named_parameters(self, *_: Any, **__: Any) -> Any:
        raise UserBug("the user's own")


class OwnProduct(torch.autograd.Function):
    """A function of the user's that raises."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        raise UserBug("the user's own")


MODELS: dict[str, Callable[[], Any]] = {
    "net": Net,
    "raises": lambda: Net(_raises),
    "raises in a function": lambda: Net(lambda _, y: OwnProduct.apply(y)),
    "broken state": BrokenState,
    "none": lambda: Net(lambda _, y: None),
    "text": lambda: Net(lambda _, y: "text"),
    "cyclic": lambda: Net(_cyclic),
    "deep": lambda: Net(lambda _, y: deep(3000, y)),
    "divides by zero": lambda: Net(_divides),
    "branches on values": lambda: Net(lambda _, y: y if y.sum() > 0 else -y),
    "item": lambda: Net(lambda _, y: y * y.sum().item()),
    "recursion": lambda: Net(lambda m, y: m(y)),
    "wrong shape": lambda: Net(lambda m, y: m.up(y)),
    "complex result": lambda: Net(lambda _, y: y * 1j),
    "integer result": lambda: Net(lambda _, y: y.argmax(-1)),
    "sparse result": lambda: Net(lambda _, y: y.to_sparse()),
    "detached": lambda: Net(lambda _, y: y.detach()),
    "key error": lambda: Net(lambda _, y: {}["k"]),
    "asserts": lambda: Net(lambda _, y: y / _false()),
    "no parameters": _no_parameters,
    "frozen": _frozen,
    "complex": _complex,
    "halves": _halves,
    "recursive module": _recursive,
    "shared": _shared,
    "sparse": _sparse,
    "lazy": _lazy,
    "meta": lambda: Net().to("meta"),
    "class": lambda: Net,
    "function": lambda: _raises,
    "empty": nn.Module,
}


def _false() -> int:
    assert not torch.is_grad_enabled(), "the user's own"
    return 1


def _pair() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.zeros(ROWS, WIDTH), torch.zeros(ROWS, dtype=torch.long)


X, Y = (lambda: _pair()[0]), (lambda: _pair()[1])
BATCHES: dict[str, Callable[[], Any]] = {
    "pair": _pair,
    "none": lambda: None,
    "text": lambda: "batch",
    "number": lambda: 3,
    "empty": tuple,
    "empty dict": dict,
    "one": lambda: (X(),),
    "three": lambda: (X(), X(), Y()),
    "no rows": lambda: (torch.zeros(0, WIDTH), torch.zeros(0, dtype=torch.long)),
    "scalars": lambda: (torch.tensor(1.0), torch.tensor(1)),
    "other rows": lambda: (X(), torch.zeros(3, dtype=torch.long)),
    "other width": lambda: (torch.zeros(ROWS, WIDTH + 1), Y()),
    "integers": lambda: (X().long(), Y()),
    "complex": lambda: (X().to(torch.complex64), Y()),
    "sparse": lambda: (X().to_sparse(), Y()),
    "nested": lambda: (torch.nested.nested_tensor([torch.zeros(2, WIDTH)]), Y()),
    "quantized": lambda: (torch.quantize_per_tensor(X(), 0.1, 0, torch.qint8), Y()),
    "double": lambda: (X().double(), Y()),
    "lists": lambda: ([[0.0] * WIDTH] * ROWS, [0] * ROWS),
    "array": lambda: (X().numpy(), Y().numpy()),
    "huge": lambda: (
        torch.empty(2**40, WIDTH, device="meta"),
        torch.empty(2**40, dtype=torch.long, device="meta"),
    ),
    "cyclic": lambda: (X(), cyclic(), Y()),
    "deep": lambda: (X(), deep(3000), Y()),
    "grad": lambda: (X().requires_grad_(), Y()),
    "unknown name": lambda: {"z": X(), "targets": Y()},
    "no targets": lambda: {"x": X()},
    "number keys": lambda: {1: X(), "targets": Y()},
    "mixed keys": lambda: {1: X(), "x": X(), "targets": Y()},
    "dict": lambda: {"x": X(), "targets": Y()},
    "wrong targets": lambda: (X(), X()),
    "object": lambda: (object(), Y()),
    "model": lambda: (Net(), Y()),
}


def _undefined(output: Any, targets: Any) -> Any:
    return output.no_such_attribute


LOSSES: dict[str, Any] = {
    "cross_entropy": F.cross_entropy,
    "raises": _raises,
    "none": lambda output, targets: None,
    "vector": lambda output, targets: output.sum(-1),
    "integer": lambda output, targets: output.argmax(),
    "complex": lambda output, targets: (output * 1j).sum(),
    "constant": lambda output, targets: torch.tensor(1.0),
    "float": lambda output, targets: 1.0,
    "item": lambda output, targets: output.sum().item(),
    "attribute": _undefined,
    "three": lambda a, b, c: a.sum(),
    "nothing": lambda: torch.tensor(1.0),
    "no function": 3,
    "text": "mse",
    "pair": lambda output, targets: (output.sum(), 0),
    "triple": lambda output, targets: (output.sum(), 1, 2),
    "empty": lambda output, targets: (),
    "module": nn.CrossEntropyLoss(),
    "missing": None,
}
