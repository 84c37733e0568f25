"""Code for whole tensors on sharded ones: results, and what was written, are as on plain ones."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import _StridedShard

from meshwright.executor.parameters import whole_of
from meshwright.executor.parameters.partial_dtensors import read_strided_parts
from meshwright.executor.parameters.whole_operands import act_as_whole
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import tiered

Act = Callable[[torch.Tensor], Any]
LAYOUTS: Mapping[str, tuple[Any, Any]] = {
    "rows": (Shard(0), Replicate()),
    "replicas": (Replicate(), Replicate()),
    "rows and columns": (Shard(0), Shard(1)),
    "strided": (_StridedShard(0, split_factor=2), Shard(0)),
    "columns": (Replicate(), Shard(1)),
}
FIRST = {"replicas", "columns", "strided"}
KINDS = "copies, columns, and rows that two axes split are kept"
ROWS = torch.arange(12) >= 9
MASK = ROWS.float()[:, None]
PLAIN = torch.arange(24.0).reshape(12, 2) + 0.5
IDS = torch.tensor([1, 11, 4])


def put(*index: Any, value: Any = 0.0) -> Act:
    """Writes to elements."""

    def act(x: torch.Tensor) -> None:
        x[index if len(index) != 1 else index[0]] = value

    return act


def changed(view: Act) -> Act:
    """Multiplies what `view` gives in place."""
    return lambda x: view(x).mul_(2.5)


BESIDE: Mapping[str, Act] = {
    "mul_": lambda x: x.mul_(MASK),
    "mask first": lambda x: MASK * x,
    "where": lambda x: torch.where(MASK > 0, x, 0.0),
    "minus": lambda x: x - PLAIN,
    "copy_": lambda x: x.copy_(PLAIN),
    "lerp_": lambda x: x.lerp_(PLAIN, 0.1),
    "addcmul_": lambda x: x.addcmul_(PLAIN, MASK),
    "clamp_": lambda x: x.clamp_(max=4 * MASK),
    "foreach": lambda x: torch._foreach_mul_([x], [MASK]),
    "power": lambda x: x**2 * MASK,
    "masked_fill_": lambda x: x.masked_fill_(MASK.expand(12, 2) > 0, 3.0),
    "data": lambda x: x.data.mul_(MASK),
    "into a plain one": lambda x: PLAIN.clone().mul_(x),
    "added to a plain one": lambda x: PLAIN.clone().add_(x, alpha=2),
    "copied to a plain one": lambda x: torch.ones(12, 2).copy_(x),
    "plain averages": lambda x: torch._foreach_lerp_([torch.ones(12, 2)], [x], 0.1),
    "a plain total": lambda x: torch.zeros(()).add_(x.pow(2).sum()),
    "product": lambda x: torch.ones(3, 12) @ x,
    "product first": lambda x: x @ torch.ones(2, 3),
    "einsum": lambda x: torch.einsum("ab,ab->a", x, PLAIN),
    "cat": lambda x: torch.cat([x, PLAIN]),
    "dot": lambda x: torch.dot(x.flatten(), PLAIN.flatten()),
    "allclose": lambda x: torch.allclose(x, PLAIN),
    "equal": lambda x: torch.equal(x, PLAIN),
    "gathered rows": lambda x: x[IDS],
    "index_select": lambda x: x.index_select(0, IDS),
    "vector": lambda x: nn.utils.parameters_to_vector([x]),
    "data set": lambda x: setattr(x, "data", PLAIN.clone()),
    "gradient set": lambda x: (setattr(x, "grad", PLAIN.clone()), x.grad)[1],
}
WITHOUT_A_RULE: Mapping[str, Act] = {
    "quantile": lambda x: torch.quantile(x, 0.5),
    "topk": lambda x: x.flatten().topk(3).values,
    "median": lambda x: x.median(),
    "histogram": lambda x: torch.histc(x, 4),
    "index_fill_": lambda x: x.index_fill_(0, IDS, 0.0),
    "index_copy_": lambda x: x.index_copy_(0, IDS, PLAIN[:3]),
    "index_add_": lambda x: x.index_add_(0, IDS, PLAIN[:3]),
    "index_put_": lambda x: x.index_put_((IDS,), torch.tensor(5.0)),
    "scatter_": lambda x: x.scatter_(0, IDS[:, None].expand(3, 2), PLAIN[:3]),
    "renorm_": lambda x: x.renorm_(2, 0, 1.0),
    "tril_": lambda x: x.tril_(),
    "roll": lambda x: x.roll(1, 0),
}
WRITES: Mapping[str, Act] = {
    "first rows": put(slice(0, 9)),
    "values": put(slice(3, 9), value=PLAIN[:6]),
    "a stride": put(slice(1, None, 3), 1, value=PLAIN[:4, 0]),
    "a column": put(..., 0, value=7.0),
    "a row": put(5, value=PLAIN[0]),
    "the last row": put(-1),
    "no row": put(slice(4, 4), value=PLAIN[:0]),
    "a new dim": put(None, slice(2, 4)),
    "ids": put(IDS),
    "ids of values": put(IDS, value=PLAIN[:3]),
    "pairs": put(IDS, torch.tensor([0, 1, 1]), value=3.0),
    "rows of a mask": put(ROWS),
    "a mask": put(PLAIN > 3),
    "a mask of values": put(PLAIN > 3, value=PLAIN[PLAIN > 3]),
    "a mask of its own": lambda x: x.__setitem__(x > 3, 0.0),
    "through data": lambda x: x.data.__setitem__(slice(2, 10), PLAIN[:8]),
}


def swapped(x: torch.Tensor) -> torch.Tensor:
    """Other data, and the old again."""
    old = x.data
    x.data = x.data * 0.5
    half = x.data.clone()
    x.data = torch.zeros(x.shape)
    x.data = old
    return half


def pruned(x: torch.Tensor) -> torch.Tensor:
    """Zeros the smallest, as torch's pruning does."""
    mask = torch.ones_like(x)
    mask.view(-1)[torch.topk(x.abs().view(-1), k=5, largest=False).indices] = 0
    return mask * x


def clipped(x: torch.Tensor) -> torch.Tensor:
    """Rows clipped by their own norms."""
    norms = x.norm(dim=1, keepdim=True).clamp_(min=1e-3)
    return torch.where(norms > 10, x / norms, x)


def fused(x: torch.Tensor) -> None:
    """A fused step with momentum."""
    moved = [torch.zeros_like(x)]
    torch._fused_sgd_(
        [x], [x * 0.5], moved, weight_decay=0.0, momentum=0.9, lr=0.1, dampening=0.0,
        nesterov=False, maximize=False, is_first_step=True,
    )  # fmt: skip


def drawn(draw: Act) -> Act:
    """Draws from a seed."""

    def act(x: torch.Tensor) -> Any:
        torch.manual_seed(3)
        return draw(x)

    return act


OTHERS: Mapping[str, Act] = {
    "swapped": swapped,
    "pruned": pruned,
    "clipped rows": clipped,
    "fused step": fused,
    "normal_": drawn(lambda x: nn.init.normal_(x)),
    "xavier": drawn(nn.init.xavier_uniform_),
    "truncated": drawn(nn.init.trunc_normal_),
    "orthogonal": drawn(nn.init.orthogonal_),
    "noise": drawn(lambda x: x.add_(torch.randn_like(x))),
    "dropout": drawn(lambda x: nn.functional.dropout(x, 0.5)),
}
VIEWS: Mapping[str, Act] = {
    "slice": changed(lambda x: x[2:7]),
    "slices of a slice": changed(lambda x: x[2:9][:, 1:]),
    "narrow": changed(lambda x: x.narrow(0, 3, 5)),
    "select": changed(lambda x: x.select(0, 7)),
    "transposed": changed(lambda x: x.t()[:, 3:8]),
    "chunk": changed(lambda x: x.chunk(3)[1]),
    "split": changed(lambda x: torch.split(x, 5)[1]),
    "unbind": changed(lambda x: torch.unbind(x)[2]),
    "rows in turn": lambda x: [row.mul_(k) for k, row in enumerate(x)][-1] * 1,
    "diagonal": changed(torch.diagonal),
    "view": changed(lambda x: x.view(-1)[5:11]),
    "flatten": changed(lambda x: x.flatten()[5:11]),
    "unsqueeze": changed(lambda x: x.unsqueeze(0)[0, :4]),
    "set in a slice": lambda x: x[2:9].__setitem__((slice(0, 2), 1), 4.0),
    "several": lambda x: torch._foreach_zero_([x[:3], x[5:7]]),
    "a copy": changed(lambda x: x[:3].clone()),
    "flags of its own": changed(lambda x: x[x > 3]),
    "a list of rows": changed(lambda x: x[[0, 3]]),
}
ACTS = {**BESIDE, **WITHOUT_A_RULE, **WRITES, **OTHERS, **VIEWS}


def start() -> torch.Tensor:
    return torch.arange(24.0).reshape(12, 2)


def after(act: Act, x: torch.Tensor) -> tuple[Any, torch.Tensor]:
    """What an act returns, and its tensor then, both whole."""
    result = act(x)
    results = result if isinstance(result, list | tuple) else [result]
    return [whole_of(r) if isinstance(r, torch.Tensor) else r for r in results], whole_of(x)


@torch.no_grad()
def acted(layout: str) -> dict[str, tuple[Any, torch.Tensor, bool]]:
    """What each act leaves of a sharded tensor, and whether its layout stayed."""
    read_strided_parts()
    act_as_whole()
    mesh, placements = init_device_mesh("cpu", (2, 2)), LAYOUTS[layout]
    left = {}
    for name, act in ACTS.items():
        whole = DTensor.from_local(start(), mesh, [Replicate(), Replicate()])
        x = nn.Parameter(whole.redistribute(placements=placements))
        left[name] = (*after(act, x.detach()), x.placements == placements)
    return left


@pytest.mark.parametrize("layout", tiered(LAYOUTS, FIRST.__contains__, KINDS))
def test_acts_on_sharded_tensors(layout: str) -> None:
    for name, (results, x, stayed) in on_ranks(4, acted, layout).items():
        expected, plain = after(ACTS[name], start())
        assert len(results) == len(expected), name
        for one, other in zip(results, expected, strict=True):
            same = torch.allclose(one, other) if isinstance(other, torch.Tensor) else one == other
            assert same, name
        assert stayed and torch.allclose(x, plain), name


def refused() -> str:
    act_as_whole()
    mesh = init_device_mesh("cpu", (2,))
    whole = DTensor.from_local(start(), mesh, [Replicate()])
    x = nn.Parameter(whole.redistribute(placements=[Shard(0)]))
    with pytest.raises(RuntimeError) as error:
        x[:3] = 0.0
    return str(error.value)


def test_a_write_that_autograd_would_miss_is_an_error() -> None:
    with pytest.raises(RuntimeError):
        nn.Parameter(start())[:3] = 0.0
    assert "no_grad" in on_ranks(2, refused)
