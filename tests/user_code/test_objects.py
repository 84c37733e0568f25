"""What users do with their own model, optimizer and batches around the step: right, or refused."""

from __future__ import annotations

import copy
import dataclasses
import logging
import random
import re
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwright import Overrides
from meshwright.executor.ranks import launch
from meshwright.model import ParallelModel
from tests.helpers import tiny
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier, tiered
from tests.user_code.user_models import CLASSES, WIDTH, Stack
from tests.user_code.user_runs import LAYOUTS, RANKS, ROWS, SHARDED, free_links

SEED, EXACT = 3, 2e-6


def made(build: Callable[[], nn.Module], seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return build()


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=draw)
    return x, torch.randint(CLASSES, (ROWS,), generator=draw)


def planned(model: nn.Module, layout: str | None = None, **given: Any) -> ParallelModel:
    """On all ranks by a layout, or on one device."""
    overrides = overrides_of(layout) if layout else Overrides(num_microbatches=1)
    on = {"cluster": free_links(RANKS)} if layout else {}
    options = {"example_inputs": batch(), "loss_fn": F.cross_entropy, "overrides": overrides}
    return tiny.planned(model, **on, **options, **given)


def overrides_of(layout: str) -> Overrides:
    found, shardings = LAYOUTS[layout], {f"**.{k}": v for k, v in SHARDED.items()}
    return dataclasses.replace(found, shardings=shardings) if found.tp == 2 else found


def steps(result: ParallelModel | Plain, optimizer: torch.optim.Optimizer, *ks: int) -> list[float]:
    losses = []
    for k in ks:
        optimizer.zero_grad()
        losses.append(float(result.train_step(batch(k))))
        optimizer.step()
    return losses


# --- four ranks -----------------------------------------------------------------------------------


class Net(Stack):
    """Two tied layers; buffers: one scales, the forward writes one, one is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].up = self.layers[0].up
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("shift", torch.full((CLASSES,), 0.25), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = 2 * self.layers[0].norm.weight.detach()  # of any micro-batch
        return super().forward(x * self.scale) + self.shift


def net(seed: int = SEED) -> Any:
    return made(Net, seed)


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


class Plain:
    """The same by plain PyTorch."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizer = adam(self.model.parameters())

    def train_step(self, given: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = F.cross_entropy(self.model(given[0]), given[1])
        loss.backward()
        return loss.detach()

    def steps(self, *ks: int) -> Any:
        """Losses, to rounding."""
        return pytest.approx(steps(self, self.optimizer, *ks), rel=0, abs=EXACT)


def far(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference of whole tensors; inf for other names."""
    if found.keys() != wanted.keys():
        return float("inf")
    return max(float((found[n].float() - x.float()).abs().max()) for n, x in wanted.items())


def evaluated(result: ParallelModel, plain: nn.Module) -> float:
    """How far the gathered output is from the plain model's."""
    with torch.no_grad():
        found = result.forward(batch(9)[0], gather=True) - plain.eval()(batch(9)[0])
    return float(found.abs().max())


def said(run: Callable[[], Any]) -> str:
    """What every rank raised, if all raised the same."""
    try:
        run()
        error = "nothing"
    except Exception as raised:  # noqa: BLE001 - whatever it is
        error = f"{type(raised).__name__}: {raised}"
    every: list[Any] = [None] * launch.world_size()
    dist.all_gather_object(every, error)
    error = every[0]
    return error if len({e.split(":")[0] for e in every}) == 1 else str(every)


LOSS_SCALE = logging.getLogger("meshwright.executor.parameters.loss_scale")


def train_objects(layout: str, other_layout: str) -> None:
    """The user's objects before and after planning, in the order in which people use them; another
    plan goes on from what was trained, with the optimizer."""
    plain, model = Plain(), net()
    before = adam(model.parameters())
    result = planned(model, layout)
    assert result.runtime.user.whole == (layout == "dp4")
    assert steps(result, before, 0, 1) == plain.steps(0, 1)
    assert far(result.full_state_dict(), plain.model.state_dict()) < EXACT
    assert model.state_dict().keys() == plain.model.state_dict().keys()
    here = {n: x for n, x in model.state_dict().items() if not x.is_meta}
    here |= {n: x.full_tensor() for n, x in here.items() if isinstance(x, DTensor)}
    assert far(here, {n: plain.model.state_dict()[n] for n in here}) < EXACT
    after = adam(model.parameters())
    plain.optimizer = adam(plain.model.parameters())
    assert steps(result, after, 2, 3) == plain.steps(2, 3)
    assert model.layers[0].up.weight is model.layers[3].up.weight
    model.eval()
    assert evaluated(result, plain.model) < EXACT
    called = said(lambda: model(batch(9)[0]))
    assert called == "nothing" if layout == "dp4" else "result.forward(...)" in called
    model.train()
    plain.model.train()
    for each in (model, plain.model):
        with torch.no_grad():
            for p in each.parameters():
                p.mul_(0.5)
            each.scale.fill_(0.75)
            each.shift.add_(1.0)
    assert steps(result, after, 4) == plain.steps(4)
    other = net(seed=SEED + 1)
    model.load_state_dict(other.state_dict())
    plain.model.load_state_dict(other.state_dict())
    assert steps(result, after, 5) == plain.steps(5)
    assert far(result.full_state_dict(), plain.model.state_dict()) < EXACT
    again = result.replan(overrides_of(other_layout), optimizer=after)
    assert steps(again, after, 6, 7) == plain.steps(6, 7)
    assert far(again.full_state_dict(), plain.model.state_dict()) < EXACT
    assert again.runtime.steps == 8
    assert "replaced by replan()" in said(lambda: result.train_step(batch()))


def refuse(layout: str) -> None:
    """What can't be seen by the step is refused, on every rank."""
    model, rank = net(), launch.rank()
    result = planned(model, layout)

    def refused(pattern: str, run: Callable[[], Any]) -> None:
        text = said(run)
        assert re.search(pattern, text), text

    def refused_step(pattern: str, given: Any = None) -> None:
        refused(pattern, lambda: result.train_step(given or batch()))

    name, first = next((n, p) for n, p in model.named_parameters() if not p.is_meta)
    first.requires_grad_(False)
    refused_step("requires_grad of .* was changed after planning.*before auto_parallelize")
    first.requires_grad_(True)
    parent, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    setattr(parent, leaf, nn.Parameter(torch.zeros(first.shape)))
    refused_step("was replaced after planning.*in place")
    setattr(parent, leaf, first)
    x, y = batch()
    refused_step(
        r"BatchError: batch: it is not as planned on ranks \[1\]", (x if rank != 1 else x[:3], y)
    )
    head, model.head = model.head, nn.Linear(WIDTH, CLASSES)
    refused_step("module 'head' was replaced after planning")
    model.head = head
    mixed = adam([*result.parameters(), *([nn.Parameter(torch.ones(3))] if rank == 2 else [])])
    refused(
        r"OptimizerError: optimizer: 1 of the \d+ .* are not the model's \(1 in group 0\)",
        lambda: result.replan(optimizer=mixed),
    )
    refused_step(
        r"BatchError: batch: it differs from rank 0's in '1' on ranks \[2\].*same whole batch",
        (x, y if rank != 2 else batch(1)[1]),
    )
    assert all(p.grad is None for p in result.parameters())
    loss = result.train_step(batch())
    refused("train_step has run the backward already", loss.backward)
    clip_by_torch(result, layout)
    with mock.patch.object(LOSS_SCALE, "handle") as handle:
        for _ in range(2):
            result.train_step((x * float("inf"), y))
    if not rank:
        ((warning,),) = (call.args for call in handle.call_args_list)
        assert "'head." in warning.getMessage()  # where the backward begins
    again = said(lambda: planned(model, layout))
    assert again == "nothing" if layout == "dp4" else "replan()" in again


def clip_by_torch(result: ParallelModel, layout: str) -> None:
    """torch's clipping is right where a rank has all gradients, and refused elsewhere."""
    clip, (x, y) = torch.nn.utils.clip_grad_norm_, batch()
    plain = net()
    F.cross_entropy(plain(x), y).backward()
    wanted = pytest.approx(float(clip(plain.parameters(), float("inf"))), rel=0, abs=1e-5)
    clipped = said(lambda: clip(result.parameters(), 0.1))
    if layout == "pp4":
        gradient: Any = next(p.grad for p in result.parameters() if p.grad is not None)
        by_hand = (lambda g: g.data.norm(2), lambda g: (2 * g.detach()).square().norm())
        refused = [clipped, *(said(partial(act, gradient)) for act in by_hand)]
        assert all("result.clip_grad_norm_" in message for message in refused)
        assert float(result.clip_grad_norm_(0.1)) == wanted
    else:
        assert "result.clip_grad_norm_" not in clipped
        for p in result.parameters():
            p.grad = None
        result.train_step(batch())
        assert float(clip(result.parameters(), float("inf"))) == wanted


def equalise(layout: str) -> None:
    """Every rank builds another model; rank 0's is trained. Each rank's own random state, Python's
    and torch's, stays."""
    model, rank = net(seed=SEED + launch.rank()), launch.rank()
    model.seen.fill_(float(rank))
    compared = said(lambda: planned(net(seed=SEED + rank // 2), layout, check_replicas=True))
    assert re.search(r"check_replicas: .*on ranks \[2, 3\]", compared), compared
    random.seed(rank)
    torch.manual_seed(rank)
    before = random.getstate(), torch.get_rng_state()
    found = planned(model, layout).full_state_dict()
    assert random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    assert far(found, net().state_dict()) == 0
    assert said(lambda: planned(net(), layout, check_replicas=True)) == "nothing"


OTHERS = "of layouts one stays that has most axes; one device holds the whole model"
STAGES = "stages, where torch's clipping is refused as well, stay"
FEW = ("dp4", "zero3", "dp2×tp2", "pp4")
AFTER = {"dp4": "pp4", "zero3": "dp4", "dp2×tp2": "dp4", "pp4": "dp2×tp2", "pp2×tp2": "zero3"}


@pytest.mark.parametrize("layout", tiered(LAYOUTS, lambda k: k == "pp2×tp2", OTHERS))
def test_the_users_objects_train(layout: str) -> None:
    on_ranks(RANKS, train_objects, layout, AFTER[layout])


@pytest.mark.parametrize("layout", tiered(FEW, lambda k: k == "pp4", STAGES))
def test_what_a_step_could_not_see_is_refused(layout: str) -> None:
    on_ranks(RANKS, refuse, layout)


@pytest.mark.parametrize("layout", tiered(FEW, lambda k: k == "dp2×tp2", OTHERS))
def test_ranks_start_from_rank_0s_model(layout: str) -> None:
    on_ranks(RANKS, equalise, layout)


# --- one device -----------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 32), nn.BatchNorm1d(32)
        self.frozen, self.head = nn.Linear(32, 32), nn.Linear(32, CLASSES)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.frozen(self.norm(self.up(x)))))


def test_the_model_is_trained_evaluated_and_copied_in_its_own_memory() -> None:
    """Parameters and buffers; running statistics are the model's, also those that it sets."""
    model, plain = made(Normed), made(Normed)
    before = {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()}
    result = planned(model)
    assert result.runtime.loaded
    for each in (result, model):
        assert {n: (id(p), p.data_ptr()) for n, p in each.named_parameters()} == before
    held = model.norm.running_mean
    steps(result, torch.optim.SGD(model.parameters(), lr=0.5), 0)
    plain(batch()[0])
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean)
    assert held is model.norm.running_mean
    model.norm.running_mean.fill_(3.0)
    model.norm.running_var = torch.full((32,), 2.0)
    plain.load_state_dict(model.state_dict())
    result.train_step(batch(1))
    plain(batch(1)[0])
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)
    model.eval()
    average = copy.deepcopy(model)
    assert torch.equal(model(batch(1)[0]), average(batch(1)[0]))
    assert torch.equal(result.forward(batch(1)[0]), model(batch(1)[0]))
    assert not result.forward(batch(1)[0]).requires_grad


def test_a_buffer_of_another_shape_and_a_cast_model_are_refused() -> None:
    model = made(Normed)
    result = planned(model)
    assert result.runtime
    held = model.norm.running_mean
    model.norm.running_mean = torch.zeros(3)
    with pytest.raises(ValueError, match=r"'norm.running_mean' was replaced by one of shape"):
        result.train_step(batch())
    model.norm.running_mean = held
    model.half()
    with pytest.raises(ValueError, match="do not move or cast the model after planning"):
        result.train_step(batch())


def test_frozen_weights_written_between_steps_are_seen_in_bf16() -> None:
    model, fresh = made(Normed), made(Normed)
    result = planned(model, precision="bf16")
    old = model.frozen.weight.detach().clone()
    fresh.frozen.weight.data = new = old * 5
    first = float(result.train_step(batch()))
    expected = float(planned(fresh, precision="bf16").train_step(batch()))
    assert expected != pytest.approx(first, rel=1e-3)

    def copied(x: torch.Tensor) -> None:
        with torch.no_grad():
            model.frozen.weight.copy_(x)

    def loaded(x: torch.Tensor) -> None:
        model.load_state_dict({**model.state_dict(), "frozen.weight": x})

    def assigned(x: torch.Tensor) -> None:
        model.frozen.weight.data = x

    def unseen(x: torch.Tensor) -> None:
        model.frozen.weight.data.copy_(x)

    for write, x in ((copied, new), (loaded, old), (assigned, new), (unseen, old)):
        write(x.clone())
        loss = first if x is old else expected
        assert float(result.train_step(batch())) == pytest.approx(loss, rel=1e-3)


def test_a_model_in_half_precision_trains_fp32_masters() -> None:
    model = made(lambda: Stack().bfloat16())
    first = next(model.parameters())
    result = planned(model, precision="bf16")
    steps(result, torch.optim.SGD(model.parameters(), lr=0.1), 0)
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert next(model.parameters()) is first


@second_tier("weights that ranks do not hold are loaded above, and refused in test_parity.py")
def test_a_model_on_meta_is_loaded_by_its_own_method() -> None:
    with torch.device("meta"):
        model = Stack()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    result = planned(model)
    with pytest.raises(ValueError, match=r"meta device.*load_state_dict or load_checkpoint"):
        result.train_step(batch())
    wanted = made(Stack)
    model.load_state_dict(wanted.state_dict())
    steps(result, early, 0)
    F.cross_entropy(wanted(batch()[0]), batch()[1]).backward()
    torch.optim.SGD(wanted.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.state_dict(), wanted.state_dict(), rtol=1e-5, atol=1e-6)
