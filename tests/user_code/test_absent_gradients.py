"""Parameters that user code doesn't read in a step have no gradient, as on one device: momentum and
weight decay leave them alone under every plan."""

from __future__ import annotations

import copy
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from meshwright import Cluster, Overrides, auto_parallelize, leaf
from meshwright.planner.overrides.overrides import OverrideError
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier, tiered
from tests.user_code.two_ranks import PLANS

ROWS, WIDTH, CLASSES = 8, 8, 4
SIGNS = (1.0, 1.0, -1.0, 1.0, -1.0)  # of each step's rows, where a batch is of one sign


class Experts(nn.Module):
    """Each row goes through the expert of its sign."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x[:, 0] > 0).long()
        out = torch.zeros_like(x)
        for k, expert in enumerate(self.experts):
            rows = (chosen == k).nonzero()[:, 0]
            if rows.numel():
                out = out.index_add(0, rows, expert(x[rows]))
        return out


class Branching(nn.Module):
    """The whole batch takes one of two ways."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.one(x) if x[:, 0].sum() > 0 else self.two(x)


class Skipping(nn.Module):
    """Reads what was made for it, or doesn't."""

    def forward(self, x: torch.Tensor, made: torch.Tensor) -> torch.Tensor:
        return x + made if x[:, 0].sum() > 0 else 2 * x


class Model(nn.Module):
    """User code between two layers, and a layer that it alone reads."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.beside = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        declared = leaf(rule="b _, _ _, _, _ _, _, _ _, _ -> b _")
        self.middle = {"experts": Experts, "branch": Branching, "upstream": Skipping}[kind]()
        if kind == "experts":
            self.middle = declared(self.middle)
        self.last = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = x + 0.1 * F.relu(self.first(x))
        if isinstance(self.middle, Skipping):
            return self.last(F.relu(self.middle(hidden, self.beside(hidden))))
        return self.last(F.relu(self.middle(hidden)))


KINDS = ["experts", "branch", "upstream"]


def made(kind: str) -> nn.Module:
    torch.manual_seed(0)
    return Model(kind)


def batch(kind: str, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of one sign; in the first step half of them of each."""
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=draw)
    sign = torch.full((ROWS,), SIGNS[step])
    if step == 0 and kind == "experts":
        sign[ROWS // 2 :] = -0.5
    x[:, 0] = 3.0 * sign
    return x, torch.randint(0, CLASSES, (ROWS,), generator=draw)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, weight_decay=0.1)


# of each step, whether each parameter of this rank has no gradient; the weights at the end
Trained = tuple[list[dict[str, bool]], dict[str, torch.Tensor]]


def absent(parameters: Iterable[tuple[str, torch.Tensor]]) -> dict[str, bool]:
    return {name: p.grad is None for name, p in parameters}


def of_one_device(kind: str) -> Trained:
    model, without = made(kind), []
    optimizer = optimizer_of(model.parameters())
    for step in range(len(SIGNS)):
        x, y = batch(kind, step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        without.append(absent(model.named_parameters()))
        optimizer.step()
    return without, model.state_dict()


def planned(kind: str, ranks: int, plan: dict[str, Any], **given: Any) -> Any:
    return auto_parallelize(
        made(kind),
        Cluster.local(ranks, "cpu", measure=False),
        example_inputs=batch(kind, 1),
        global_batch_size=ROWS,
        loss_fn=F.cross_entropy,
        precision="fp32",
        rows_meet="per_microbatch",
        overrides=Overrides(**plan),
        **given,
    )


def trained(kind: str, ranks: int, plan: dict[str, Any]) -> Trained:
    result, without = planned(kind, ranks, plan), []
    optimizer = optimizer_of(result.parameters())
    for step in range(len(SIGNS)):
        optimizer.zero_grad()
        result.train_step(batch(kind, step))
        without.append(absent(result.named_parameters()))
        optimizer.step()
    return without, copy.deepcopy(result.full_state_dict())


def trained_kinds(plan: dict[str, Any]) -> dict[str, Trained]:
    return {kind: trained(kind, 2, plan) for kind in KINDS}


def check(kind: str, without: list[dict[str, bool]], state: dict[str, torch.Tensor]) -> None:
    expected, weights = of_one_device(kind)
    for step, (here, there) in enumerate(zip(without, expected, strict=True)):
        assert here == {name: there[name] for name in here}, step
    for fqn, x in weights.items():
        torch.testing.assert_close(state[fqn], x, rtol=1e-5, atol=1e-6, msg=fqn)


@second_tier("all kinds are run in micro-batches on two ranks")
@pytest.mark.parametrize("microbatches", [1, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_on_one_device(kind: str, microbatches: int) -> None:
    check(kind, *trained(kind, 1, {"num_microbatches": microbatches}))


@pytest.mark.parametrize(
    "plan", tiered(PLANS, ("zero2", "pp2 zb").__contains__, "a sum over ranks, and stages, stay")
)
def test_on_two_ranks(plan: str) -> None:
    for kind, (without, state) in on_ranks(2, trained_kinds, PLANS[plan]).items():
        check(kind, without, state)


@pytest.mark.parametrize("kind", tiered(KINDS, ("experts").__eq__, "one leaf of three stays"))
def test_gradients_that_may_be_none_are_not_stepped_in_the_backward(kind: str) -> None:
    with pytest.raises(OverrideError, match=r"=True: the leaf .* may give no gradient"):
        planned(kind, 1, {"optimizer_in_backward": True})


def remembered(compressed: str) -> list[bool]:
    """Of the steps that give a matrix no gradient: whether what its compressed sum remembers, and
    there is something, is what it was."""
    plan = {"dp": 2, "num_microbatches": 1, "compressed": compressed}
    result, same = planned("upstream", 2, plan, allow=["compressed"]), []
    optimizer, memory = (
        optimizer_of(result.parameters()), result.runtime.memories.of["beside.weight"],
    )  # fmt: skip
    for step in range(len(SIGNS)):
        optimizer.zero_grad()
        before = memory.error.clone()
        result.train_step(batch("upstream", step))
        if dict(result.named_parameters())["beside.weight"].grad is None:
            same.append(bool(before.any()) and torch.equal(memory.error, before))
        optimizer.step()
    return same


@pytest.mark.parametrize(
    "compressed", tiered(["topk-10", "powersgd-1"], ("topk-10").__eq__, "one kind stays")
)
def test_errors_of_what_has_no_gradient_are_kept(compressed: str) -> None:
    assert on_ranks(2, remembered, compressed) == [True, True]


def resumed(folder: str) -> dict[str, torch.Tensor]:
    """Trains three steps with AdamW under ZeRO-2, saves, and goes on under ZeRO-3."""
    states = []
    for plan, steps in (("zero2", range(3)), ("zero3", range(3, 5))):
        result = planned("experts", 2, PLANS[plan])
        optimizer = torch.optim.AdamW(result.parameters(), lr=0.1)
        if states:
            result.load_checkpoint(folder, optimizer=optimizer)
        for step in steps:
            result.train_step(batch("experts", step), optimizer=optimizer)
        result.save_checkpoint(folder, optimizer=optimizer)
        states.append(copy.deepcopy(result.full_state_dict()))
    return states[-1]


def test_an_optimizer_without_states_of_some_is_resumed(tmp_path: Path) -> None:
    state, model = on_ranks(2, resumed, str(tmp_path / "kept")), made("experts")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(5):
        x, y = batch("experts", step)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for fqn, x in model.state_dict().items():
        torch.testing.assert_close(state[fqn], x, rtol=1e-4, atol=1e-5, msg=fqn)


def validated(kind: str) -> tuple[int, dict[str, torch.Tensor]]:
    """Steps made before the verdict on the one before was known, and the weights at the end."""
    plan = {"pp": 2, "schedule": "zb_h2", "num_microbatches": 4, "post_validation": True}
    result = planned(kind, 2, plan)
    optimizer = optimizer_of(result.parameters())
    for step in range(len(SIGNS)):
        result.train_step(batch(kind, step), optimizer=optimizer, max_grad_norm=100.0)
    state = copy.deepcopy(result.full_state_dict())
    return result.runtime.validation.undone_steps, state


def test_a_step_before_its_verdict_is_undone() -> None:
    undone, state = on_ranks(2, validated, "upstream")
    assert undone
    check("upstream", [{}] * len(SIGNS), state)
