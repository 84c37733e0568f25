"""Ema and other states in `extra=`: averages under any plan are one device's, saved and loaded
under any other; states that differ between ranks are kept for each, or refused by name."""

import copy
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor
from torch.optim.swa_utils import AveragedModel

from meshwright import Ema, MeshwrightError, Overrides
from meshwright.executor.checkpoint.extra import Merged, RankLoad, RankStates
from meshwright.executor.errors import SavedError, StateError
from meshwright.model import ParallelModel
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.tiny import ROWS, batch, loss, net, planned

DECAY, RATE, STEPS = 0.8, 0.05, 3
PLANS: dict[str, dict[str, Any]] = {
    "zero3": {"dp": 2, "zero": 3},
    "zero1": {"dp": 2, "zero": 1},
    "pp2": {"pp": 2, "schedule": "1f1b", "num_microbatches": 2},
    "tp2": {"tp": 2},
}


def parallel(plan: str) -> ParallelModel:
    return planned(net(), 2, overrides=Overrides(**PLANS[plan]), profile=False)


def whole(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """All ranks' tensors, whole."""
    mine = {
        name: (x.full_tensor() if isinstance(x, DTensor) else x).detach().clone()
        for name, x in tensors.items()
    }
    ranks: list[dict[str, torch.Tensor]] = [{}, {}]
    dist.all_gather_object(ranks, mine)
    return ranks[0] | ranks[1]


def averages_of_one_device() -> tuple[float, dict[str, torch.Tensor]]:
    model = net()
    average = copy.deepcopy(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    for step in range(STEPS):
        optimizer.zero_grad()
        ids, targets = batch(ROWS, step)
        loss(model(ids), targets).backward()
        optimizer.step()
        with torch.no_grad():
            for a, p in zip(average.parameters(), model.parameters(), strict=True):
                a.lerp_(p, 1 - DECAY)
    ids, targets = batch(ROWS, 0)
    return float(loss(average(ids), targets).detach()), dict(average.named_parameters())


def averages(folder: Path, source: str) -> None:
    """Trained and saved under one plan, loaded and evaluated under all."""
    wanted, one = averages_of_one_device()
    model = parallel(source)
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    ema = Ema(model, DECAY)
    for step in range(STEPS):
        optimizer.zero_grad()
        model.train_step(batch(ROWS, step))
        optimizer.step()
        ema.update()
    before = model.full_state_dict()
    with ema.applied():
        assert float(model.eval_step(batch(ROWS, 0))) == pytest.approx(wanted, rel=1e-5)
        with pytest.raises(StateError, match=r"Ema.update.*inside"):
            ema.update()
        with pytest.raises(StateError, match=r"Ema.state_dict.*inside"):
            model.save_checkpoint(folder, optimizer, extra={"ema": ema})
    after = model.full_state_dict()
    assert all(torch.equal(before[name], x) for name, x in after.items())
    saved = whole(ema.state_dict())
    assert all(torch.allclose(saved[name], x, atol=1e-6) for name, x in one.items())
    model.save_checkpoint(folder, optimizer, extra={"ema": ema}, asynchronous=True)
    for target in PLANS:
        other = parallel(target)
        again = Ema(other, DECAY)
        other.load_checkpoint(folder, extra={"ema": again})
        loaded = whole(again.state_dict())
        assert loaded.keys() == saved.keys()
        assert all(torch.equal(loaded[name], x) for name, x in saved.items()), target
        with again.applied():
            assert float(other.eval_step(batch(ROWS, 0))) == pytest.approx(wanted, rel=1e-5)


@pytest.mark.parametrize(
    "source", tiered(PLANS, "tp2".__eq__, "what is saved under one plan is loaded under all")
)
def test_averages_are_one_device_s_and_go_to_any_plan(tmp_path: Path, source: str) -> None:
    on_ranks(2, averages, tmp_path / "at", source)


class Kept:
    def __init__(self, state: Any) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


def of_each_rank(folder: Path) -> None:
    """A generator, and a list of losses, of each rank; a count that all have."""
    model, rank = parallel("zero1"), dist.get_rank()
    generator = torch.Generator().manual_seed(rank)
    own = Kept({"rng": generator.get_state(), "losses": [rank, 0.5], "steps": 3})
    model.save_checkpoint(folder, extra={"own": own})
    back = Kept({})
    model.load_checkpoint(folder, extra={"own": back})
    assert torch.equal(back.state["rng"], own.state["rng"])
    assert back.state["losses"] == [rank, 0.5] and back.state["steps"] == 3
    sharded = Kept([rank, dict(parallel("zero3").named_parameters())])
    with pytest.raises(SavedError, match=r"'extra/mixed' is another on other ranks.*sharded"):
        model.save_checkpoint(folder, extra={"mixed": sharded})


@second_tier("trees of ranks are merged without ranks in a test below")
def test_what_differs_is_kept_for_each_rank_or_refused_by_name(tmp_path: Path) -> None:
    on_ranks(2, of_each_rank, tmp_path / "at")
    alone = planned(net(), 1, profile=False)
    refused = (
        r"'extra/own/(losses|rng)' is another on each of 2 ranks.*1; leave 'own' out of extra="
    )
    with pytest.raises(SavedError, match=refused):
        alone.load_checkpoint(tmp_path / "at", extra={"own": Kept({})})
    alone.load_checkpoint(tmp_path / "at")


def test_trees_of_ranks_are_merged() -> None:
    """Into what is equal, a union of names, and the rest by rank."""
    states: list[Any] = [
        {"a": torch.ones(2), "n": 1, "list": [1, (2,)]},
        {"b": torch.zeros(1), "n": 1, "list": [1, (3,)]},
    ]
    ranks = [RankStates.of({"x": state}, compared=True) for state in states]
    merged = Merged.of([of_rank.trees for of_rank in ranks])
    assert merged.writes == {0: {"extra/x/a": "extra/x/a"}, 1: {"extra/x/b": "extra/x/b"}}
    union = merged.trees["x"]
    assert union["!"] == "union" and list(union["of"]) == ["a", "n", "list", "b"]
    for rank, state in enumerate(states):
        load = RankLoad(rank=rank, world=2, stored={}, fqns=(), place="here")
        part, reads = load.state("x", union | {"of": {"list": union["of"]["list"]}}, {"list": 0})
        assert part == {"list": state["list"]} and reads == []
    assert Merged.of([ranks[0].trees] * 2).trees == ranks[0].trees


def test_an_averaged_model_of_torch_goes_on(tmp_path: Path) -> None:
    """Its names have a prefix."""
    model = planned(net(), 1, profile=False)
    mean = AveragedModel(net())
    mean.update_parameters(net())
    model.save_checkpoint(tmp_path / "at", extra={"mean": mean})
    again = AveragedModel(net())
    for p in again.parameters():
        torch.nn.init.zeros_(p)
    model.load_checkpoint(tmp_path / "at", extra={"mean": again})
    assert all(torch.equal(x, again.state_dict()[name]) for name, x in mean.state_dict().items())


@pytest.mark.parametrize(
    "decay",
    tiered(
        (1, -0.1, True, "0.9", float("nan")),
        lambda decay: decay in (1, "0.9") and decay is not True,
        "a number and a text out of range stay",
    ),
)
def test_a_decay_out_of_range_is_refused(decay: Any) -> None:
    model = planned(net(), 1, profile=False)
    with pytest.raises(MeshwrightError, match=r"Ema: decay=.*legal: a number from 0 to below 1"):
        Ema(model, decay)


def test_another_model_is_refused() -> None:
    model = planned(net(), 1, profile=False)
    ema = Ema(model)
    with pytest.raises(MeshwrightError, match=r"Ema: state has other names, e.g. \['embed.weight'"):
        ema.load_state_dict({})
    ema._model = planned(torch.nn.Sequential(net()), 1, profile=False)
    with pytest.raises(
        StateError, match=r"Ema: the model's parameters are others.*load_checkpoint"
    ):
        ema.update()
