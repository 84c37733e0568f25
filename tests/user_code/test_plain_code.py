"""Loops that handle gradients and weights in plain torch: masks, slices, averages made before
planning. Weights after three steps are one device's under every plan."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from meshwright import Cluster, Overrides, auto_parallelize
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier, tiered

VOCAB, WIDTH, ROWS, STEPS = 12, 8, 8, 3
Named = Mapping[str, torch.Tensor]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.hidden = nn.Embedding(VOCAB, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last = nn.Linear(WIDTH, 4)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.last(F.relu(self.hidden(self.embed(ids).mean(1))))


def of(named: Named, name: str) -> torch.Tensor | None:
    """A parameter's gradient, where this rank holds it."""
    return named[name].grad if name in named else None


# what a loop does between the backward and the optimizer's step
def new_tokens_only(named: Named) -> None:
    if (gradient := of(named, "embed.weight")) is not None:
        gradient[:9] = 0


def by_mask(named: Named) -> None:
    if (gradient := of(named, "embed.weight")) is not None:
        gradient.mul_((torch.arange(VOCAB) >= 9).float()[:, None])


def by_ids(named: Named) -> None:
    if (gradient := of(named, "embed.weight")) is not None:
        gradient[torch.tensor([0, 3, 11])] *= 0.1


def a_view(named: Named) -> None:
    if (gradient := of(named, "hidden.weight")) is not None:
        gradient[1:5, 2:].zero_()


def clipped_rows(named: Named) -> None:
    for p in named.values():
        if p.grad is not None and p.dim() == 2:
            p.grad.renorm_(2, 0, 0.01)


def replaced(named: Named) -> None:
    for p in named.values():
        if p.grad is not None:
            p.grad = torch.sign(p.grad) * torch.full(p.shape, 0.01)


def weights_too(named: Named) -> None:
    with torch.no_grad():
        if "last.weight" in named:
            named["last.weight"][0].zero_()
            named["last.weight"][1:3].mul_(0.5)
            named["last.weight"].data[3] = torch.arange(WIDTH) / WIDTH
        if "hidden.bias" in named:
            named["hidden.bias"].clamp_(max=torch.full((WIDTH,), 0.1))


def assigned(named: Named) -> None:
    for p in named.values():
        if p.grad is not None:
            before = p.data
            p.data = p.data - 0.05 * p.grad
            p.data, p.grad = before + 0.5 * (p.data - before), p.grad * 0.5


BETWEEN: dict[str, Callable[[Named], None]] = {
    f.__name__: f
    for f in (
        new_tokens_only,
        by_mask,
        by_ids,
        a_view,
        clipped_rows,
        replaced,
        weights_too,
        assigned,
    )
}
PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "zero2": {"dp": 2, "zero": 2},
    "zero3": {"dp": 2, "zero": 3},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "schedule": "1f1b", "num_microbatches": 2},
}


def made() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    ids = torch.randint(0, VOCAB, (ROWS, 4), generator=draw)
    return ids, torch.randint(0, 4, (ROWS,), generator=draw)


def loop(
    named: Named, backward: Callable[[], Any], between: Callable[[Named], None],
    after: Callable[[], Any] = lambda: None,
) -> None:  # fmt: skip
    optimizer = torch.optim.SGD(named.values(), lr=0.1, momentum=0.9)
    for _ in range(STEPS):
        optimizer.zero_grad()
        backward()
        between(named)
        optimizer.step()
        after()


def planned(net: nn.Module, plan: dict[str, Any]) -> Any:
    return auto_parallelize(
        net,
        Cluster.local(2, "cpu", measure=False),
        example_inputs=batch(),
        global_batch_size=ROWS,
        loss_fn=F.cross_entropy,
        precision="fp32",
        overrides=Overrides(**plan),
    )


def trained(plan: str) -> dict[str, dict[str, torch.Tensor]]:
    states = {}
    for name, between in BETWEEN.items():
        result = planned(made(), PLANS[plan])
        loop(dict(result.named_parameters()), lambda: result.train_step(batch()), between)  # noqa: B023
        states[name] = copy.deepcopy(result.full_state_dict())
    return states


def of_one_device(between: Callable[[Named], None]) -> dict[str, torch.Tensor]:
    net, (ids, labels) = made(), batch()
    loop(
        dict(net.named_parameters()), lambda: F.cross_entropy(net(ids), labels).backward(), between
    )
    return net.state_dict()


@second_tier("each act on sharded tensors is tried for itself in test_whole_operands.py")
@pytest.mark.parametrize("plan", PLANS)
def test_loops_on_two_ranks(plan: str) -> None:
    for name, state in on_ranks(2, trained, plan).items():
        for fqn, x in of_one_device(BETWEEN[name]).items():
            torch.testing.assert_close(state[fqn], x, rtol=1e-5, atol=1e-6, msg=f"{name}: {fqn}")


# --- averages -------------------------------------------------------------------------------------

AVERAGES: Mapping[str, Any] = {"mean": None, "ema": get_ema_multi_avg_fn(0.5)}


def averages(plan: str) -> dict[str, Any]:
    """Averages made before planning; in place of one that is refused, why."""
    states: dict[str, Any] = {}
    for name, function in AVERAGES.items():
        net = made()
        average = AveragedModel(net, multi_avg_fn=function)
        result = planned(net, PLANS[plan])
        named = dict(result.named_parameters())

        def step() -> None:
            result.train_step(batch())  # noqa: B023

        def follow() -> None:
            average.update_parameters(net)  # noqa: B023

        try:
            loop(named, step, lambda _: None, follow)
            states[name] = average.state_dict()
        except RuntimeError as error:
            states[name] = str(error)
    return states


@pytest.mark.parametrize(
    "plan", tiered(["dp2", "zero3", "tp2"], ("zero3").__eq__, "averages of divided weights stay")
)
def test_averages_made_before_planning(plan: str) -> None:
    for name, state in on_ranks(2, averages, plan).items():
        net, (ids, labels) = made(), batch()
        average = AveragedModel(net, multi_avg_fn=AVERAGES[name])
        loop(
            dict(net.named_parameters()),
            lambda: F.cross_entropy(net(ids), labels).backward(),  # noqa: B023
            lambda _: None,
            lambda: average.update_parameters(net),  # noqa: B023
        )
        for fqn, x in average.state_dict().items():
            torch.testing.assert_close(state[fqn], x, rtol=1e-5, atol=1e-6, msg=f"{name}: {fqn}")


def test_weights_of_other_stages_are_refused_with_the_way_out() -> None:
    for state in on_ranks(2, averages, "pp2").values():
        assert "is on other pipeline stages" in state and "meshwright.Ema(result)" in state
