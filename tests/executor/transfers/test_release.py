"""Memory of what was sent: given back where nobody else has it, with the graph behind it whole."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from meshwright.executor.transfers import handed, release


def test_the_graph_behind_what_was_released_is_whole() -> None:
    x = torch.arange(6.0).reshape(2, 3).requires_grad_()
    out = handed((x * x).sum(dim=0, keepdim=True))
    assert release(out)
    assert (out.untyped_storage().nbytes(), out.shape) == (0, (1, 3))
    torch.autograd.backward([out], [torch.tensor([[1.0, 2.0, 3.0]])])
    assert x.grad is not None
    assert torch.equal(x.grad, 2 * x.detach() * torch.tensor([1.0, 2.0, 3.0]))


@pytest.mark.parametrize(
    "also",
    [
        lambda y: y,  # a name
        lambda y: y.detach(),  # a stage on the same rank
        lambda y: y[:1],  # a message
        lambda y: y.exp() * y,  # an operator that saves it
    ],
    ids=["name", "alias", "part", "saved"],
)
def test_what_somebody_has_stays(also: Callable[[torch.Tensor], torch.Tensor]) -> None:
    x = torch.ones(2, 3, requires_grad=True)
    made = x + 1
    out, other = handed(made), also(made)
    del made
    assert not release(out)
    assert torch.equal(out, torch.full((2, 3), 2.0))
    del other
    assert release(out)


def test_what_its_own_operator_saved_stays() -> None:
    x = torch.ones(2, requires_grad=True)
    out = handed(torch.tanh(x))
    assert not release(out)
    torch.autograd.backward([out], [torch.ones(2)])
    assert x.grad is not None
    assert torch.allclose(x.grad, 1 - torch.tanh(torch.ones(2)) ** 2)
