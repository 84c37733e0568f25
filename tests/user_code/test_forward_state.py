"""What a forward reads and leaves beside tensors: followed as plain PyTorch runs it, or refused
with the line."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import Cluster, Overrides, auto_parallelize
from meshwright.planner.tracing.trace import TraceError, trace
from tests.helpers.tiers import tiered
from tests.helpers.traced import WIDTH, agree, rows, with_forward
from tests.user_code.user_parts import holding

Forward = Callable[..., torch.Tensor]


# --- what is followed -----------------------------------------------------------------------------


def keeps_mask(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.mask is None:
        self.mask = torch.ones(WIDTH, WIDTH).tril()
    return (self.l(x) @ self.mask).sum()


def keeps_output(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen = self.l(x)
    self.losses = [self.seen.mean()]
    return self.seen.sum() + sum(self.losses)


def clears_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.losses.clear()
    y = self.l(x)
    self.losses.append(y.mean())
    return y.sum() + sum(self.losses)


def keeps_length(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.config.length = max(self.config.length, x.shape[1])
    return self.l(x).sum() / self.config.length


def reads_data(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    return (y - y.data * 0.5 + x.data).square().sum()


FOLLOWED: dict[str, tuple[Forward, Callable[[nn.Module], object] | None]] = {
    "mask made once": (keeps_mask, holding(mask=None)),
    "output kept to look at": (keeps_output, holding(seen=None)),
    "list cleared before": (clears_list, holding(losses=[])),
    "length kept": (keeps_length, holding(config=SimpleNamespace(length=0))),
    "data read": (reads_data, None),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_followed(name: str) -> None:
    forward, prepare = FOLLOWED[name]
    model = with_forward(forward, prepare)
    trace(model, (rows(WIDTH),))
    agree(model, (rows(WIDTH),))


# --- what is refused ------------------------------------------------------------------------------


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x).sum()
    self.n += 1
    return y * self.n


def counts_in_config(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x).sum()
    self.config.n += 1
    return y * self.config.n


def counts_in_class(self: Any, x: torch.Tensor) -> torch.Tensor:
    type(self).__bases__[0].n += 1
    return self.l(x).sum() * self.n


def warms_up(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x).sum()
    if self.cold:
        self.cold = False
        return 2 * y
    return y


def collects(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    self.kept.append(y.detach())
    return y.sum() + torch.stack(self.kept).mean()


def last_of_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    loss = (y - self.kept[0]).sum()
    self.kept[0] = y.detach()
    return loss


def first_batch(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.mean is None:
        self.mean = x.mean(0)
    return self.l(x - self.mean).sum()


def carries_gradient(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x).mean(0)
    loss = (y * self.last).sum()
    self.last = y
    return loss


def rebinds(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    self.l.weight = nn.Parameter(self.l.weight * 0.9)
    return y.sum()


def decays_data(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    self.l.weight.data.mul_(0.9)
    return y.sum()


def assigns_data(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    self.l.weight.data = self.l.weight * 0.9
    return y.sum()


def draws_numpy(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    mask = torch.from_numpy(np.random.rand(WIDTH) < 0.5)
    return (y * mask).sum()


def draws_python(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    drawn = random.random()
    return y.sum() * drawn


_imported = random.random


def draws_imported(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.l(x).sum() * _imported()


def draws_own(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x).sum()
    return y * self.generator.random()


def draws_new(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x).sum()
    return y * np.random.default_rng().random()


def draws_new_seed_none(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x).sum()
    return y * np.random.default_rng(seed=None).random()


def batch_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.state = self.l(x).detach()
    return (self.l(x) + self.state).sum()


def differentiates(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    u = torch.tanh(self.l(x)).sum()
    (slope,) = torch.autograd.grad(u, x, create_graph=True)
    return slope.square().mean()


def skips(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    if torch.rand(()) < 0.1:
        y = x
    return y.sum()


# forward, preparation, the line that is named (0: none), the way out
REFUSED: dict[str, tuple[Forward, Callable[[nn.Module], object] | None, int, str]] = {
    "counter": (counts, holding(n=0), 2, "'model.n'.*register_buffer"),
    "counter in a config": (
        counts_in_config, holding(config=SimpleNamespace(n=0)), 2, "config.n.*between steps",
    ),
    "first call": (warms_up, holding(cold=True), 3, "'model.cold'.*another course"),
    "list of activations": (collects, holding(kept=[]), 2, "'model.kept'.*register_buffer"),
    "last one in a list": (
        last_of_list, holding(kept=[torch.zeros(1, WIDTH)]), 2, "'model.kept'.*read by the next",
    ),
    "statistics of the first batch": (
        first_batch, holding(mean=None), 2, "'model.mean'.*read by the next one",
    ),
    "history": (
        carries_gradient, holding(last=torch.zeros(WIDTH)), 3, r"carries a gradient: detach\(\)",
    ),
    "parameter rebound": (rebinds, None, 2, "replaces 'model.l.weight'.*between steps"),
    "data edited": (decays_data, None, 2, r"in place through .data.*between steps"),
    "data assigned": (assigns_data, None, 2, "assigns .data"),
    "numpy mask": (draws_numpy, None, 2, "numpy.random.rand.*one outcome.*torch.rand"),
    "python number": (draws_python, None, 2, "random.random.*one outcome"),
    "imported draw": (draws_imported, None, 0, "random or numpy.random.*one outcome"),
    "generator of its own": (
        draws_own, holding(generator=random.Random(0)), 2, "'model.generator'.*another after",
    ),
    "numpy generator of its own": (
        draws_own, holding(generator=np.random.default_rng(0)), 2, "'model.generator'.*another",
    ),
    "new generator": (draws_new, None, 2, "default_rng.*one outcome"),
    "new generator, seed=None": (draws_new_seed_none, None, 2, "default_rng.*one outcome"),
    "derivative in the loss": (
        differentiates, None, 3, "calls autograd.*module of its own.*meshwright.leaf",
    ),
    "layer dropped at random": (skips, None, 2, "torch.rand.* < 0.1.*depends on tensor values"),
    "buffer with rows": (
        batch_buffer, lambda m: m.register_buffer("state", torch.zeros(9, WIDTH)), 0,
        "buffer 'state', of .9, 8..*rows of a batch",
    ),
}  # fmt: skip


LIKE_OTHERS = (
    "counter in a config", "first call", "last one in a list", "history", "data edited",
    "python number", "numpy generator of its own", "new generator", "new generator, seed=None",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", tiered(REFUSED, lambda n: n not in LIKE_OTHERS, "one of each kind of state stays")
)
def test_refused_with_line_and_way_out(name: str) -> None:
    forward, prepare, line, message = REFUSED[name]
    with pytest.raises(TraceError, match=f"(?s){message}") as raised:
        trace(with_forward(forward, prepare), (rows(WIDTH),))
    if line:
        assert f"{__file__}:{inspect.getsourcelines(forward)[1] + line}" in str(raised.value)


class Counting(nn.Module):
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.calls += 1
        return self.l(x).sum() * self.calls


def test_a_counter_of_the_class_is_refused_and_not_moved() -> None:
    with pytest.raises(TraceError, match=r"'Counting.calls'"):
        trace(Counting(), (rows(WIDTH),))


def test_what_a_trace_reads_is_left_alone() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.table.mul_(0.5)
        self.seen.append(1)
        self.seen.pop()
        return (self.l(x) * self.table).sum()

    model = with_forward(forward, holding(table=torch.ones(WIDTH), seen=[]))
    graph = trace(model, (rows(WIDTH),))
    assert torch.equal(model.table, torch.ones(WIDTH))
    assert list(graph.buffers.values()) == ["table"] and len(graph.updates) == 1


def test_a_buffer_with_the_rows_of_the_example_is_named_at_other_rows() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return (self.l(x) + self.state).sum()

    model = with_forward(forward, lambda m: m.register_buffer("state", torch.zeros(3, WIDTH)))
    trace(model, (rows(WIDTH),))
    with pytest.raises(TraceError, match=r"micro-batch of 2 rows.*must not have the rows"):
        trace(model, (rows(WIDTH),), batch_size=2)


class Ctc(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, 10)

    def forward(self, x: torch.Tensor, y: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        scores = self.l(x).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(x),), x.shape[1])
        return F.ctc_loss(scores, y, lengths, sizes)


@pytest.mark.parametrize("parts", [1, 2])
def test_ctc_in_a_wrapped_model(parts: int) -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 9, WIDTH), torch.randint(1, 10, (4, 4)), torch.tensor([4, 3, 4, 2])
    model = Ctc()
    wanted = model(*batch)
    wanted.backward()
    result = auto_parallelize(
        torch.compile(nn.DataParallel(model)),
        Cluster.local(1, measure=False),
        example_inputs=batch,
        global_batch_size=4,
        precision="fp32",
        overrides=Overrides(num_microbatches=parts),
    )
    torch.testing.assert_close(result.train_step(batch), wanted.detach())
    found = dict(result.named_parameters())
    assert found.keys() == {"l.weight", "l.bias"}
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name].grad, p.grad)
