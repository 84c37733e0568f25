"""Replicas that train apart in everything but their steps: checkpoints, evaluation, other weights,
steps that are skipped, replicas at steps of their own, and what is refused."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import torch

from meshwright import Ema, Overrides, ParallelModel, fit
from meshwright.executor.errors import NotThereError, StateError
from meshwright.executor.ranks import launch
from meshwright.planner.overrides import OverrideError
from meshwright.planner.plan import PlanError
from meshwright.training.kept import FitError
from tests.executor.runtime.outer_loops import ROWS, Alone, all_names, nearly, planned
from tests.helpers import tiny
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier

EVERY, SAVED, STEPS = 3, 4, 7
TWO = {"replicas": 2, "sync_every": EVERY}


def result_of(world: int, tied: bool = False, **overrides: Any) -> Any:
    return planned(world, overrides=Overrides(**overrides), tied=tied)


def train(result: ParallelModel, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for step in steps:
        result.train_step(tiny.batch(ROWS, step), optimizer=optimizer)


def held(result: Any) -> dict[str, torch.Tensor]:
    """The weights of this replica as they are."""
    with result.meetings.world.inside():
        return {n: x.clone() for n, x in result.runtime.full_state_dict().items()}


# --- checkpoints ----------------------------------------------------------------------------------


def resumes(world: int, folder: str, inner: dict[str, Any], other: dict[str, Any]) -> None:
    """Saved between two meetings, and gone on with: as many replicas end as the run that did not
    stop; others start from the last meeting's weights."""
    path = Path(folder) / "saved"
    whole = result_of(world, **TWO, **inner)
    optimizer = torch.optim.AdamW(whole.parameters(), lr=1e-2)
    train(whole, optimizer, range(SAVED))
    whole.save_checkpoint(path, optimizer)
    met = whole.full_state_dict()
    momentum = [share.momentum.clone() for share in whole.meetings.shares]
    train(whole, optimizer, range(SAVED, STEPS))
    whole.meetings.meet_if_due()

    again = result_of(world, **TWO, **inner)
    optimizer = torch.optim.AdamW(again.parameters(), lr=1e-2)
    again.load_checkpoint(path, optimizer)
    for share, before in zip(again.meetings.shares, momentum, strict=True):
        assert torch.equal(share.momentum, before) and share.momentum.abs().max() > 0
    train(again, optimizer, range(SAVED, STEPS))
    again.meetings.meet_if_due()
    nearly(held(again), held(whole))
    nearly(again.full_state_dict(), whole.full_state_dict())

    alone = result_of(world, **other)
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    alone.load_checkpoint(path, optimizer)
    nearly(alone.full_state_dict(), met)
    assert alone.runtime.steps == SAVED
    train(alone, optimizer, range(SAVED, SAVED + 1))

    with pytest.raises(NotThereError, match="there is none"):
        again.load_checkpoint(Path(folder) / "none", None)


@pytest.mark.parametrize(
    ("world", "inner", "other"),
    [
        (2, {"fragments": 3}, {"dp": 2}),
        pytest.param(
            4, {"dp": 2, "zero": 1}, {"replicas": 4}, marks=second_tier("another layout of ranks")
        ),
    ],
)
def test_a_checkpoint_goes_on(
    world: int, inner: dict[str, Any], other: dict[str, Any], tmp_path: Path
) -> None:
    on_ranks(world, resumes, world, str(tmp_path), inner, other)


# --- beside steps ---------------------------------------------------------------------------------


def evaluates_and_skips(folder: str) -> None:
    """A replica that skips an optimizer's step, one that is late, and what is read in between."""
    result = result_of(2, **TWO)
    number = result.meetings.world.number
    optimizer = torch.optim.AdamW(result.parameters(), lr=1e-2)
    alone = Alone(
        replicas=2, every=EVERY, fragments=[all_names()], skips=frozenset({(1, 1), (0, 3)})
    )
    for step in range(4):
        batch = tiny.batch(ROWS, step)
        optimizer.zero_grad()
        result.train_step(batch)
        time.sleep(0.3 * (number == 0 and step == 1))
        if (number, step) not in alone.skips:
            optimizer.step()
        alone.step(batch)
    nearly(held(result), alone.weights(number))
    nearly(result.state_dict(), alone.outer)
    assert (launch.rank(), launch.world_size()) == (result.meetings.world.rank, 2)

    batches = [tiny.batch(ROWS, 8), tiny.batch(ROWS, 9)]
    losses = [
        float(tiny.loss(model(x.chunk(2)[r]), y.chunk(2)[r]))
        for x, y in batches
        for r, model in enumerate(alone.models)
    ]
    found = result.evaluate(batches)
    assert found.rows == 2 * ROWS and found.loss == pytest.approx(sum(losses) / 4, abs=1e-5)
    assert float(result.eval_step(batches[0])) == pytest.approx(sum(losses[:2]) / 2, abs=1e-5)

    result.save_pretrained(Path(folder) / "weights")
    share = result.data_parallel
    assert (share.rank, share.size) == (number, 2)
    assert [*share.rows] == [*range(4 * number, 4 * number + 4)] == [*share.rows_of(ROWS)]
    local = tuple(x[list(share.rows)] for x in tiny.batch(ROWS, 4))
    result.train_step(local, local=True, optimizer=optimizer)
    result.meet()
    alone.step(tiny.batch(ROWS, 4))
    alone.meet(0)
    nearly(held(result), alone.outer)
    before = held(result)
    result.meet()  # nothing was trained since
    assert all(torch.equal(x, before[n]) for n, x in held(result).items())


def test_what_comes_between_steps(tmp_path: Path) -> None:
    on_ranks(2, evaluates_and_skips, str(tmp_path))


def averages_and_begins_alike() -> None:
    """With lr 1 and no momentum the mean of the weights: Local SGD. Replicas begin as the first
    does, in frozen parameters and buffers, too, or are compared."""
    model = tiny.net()
    model.layers[0].norm.weight.requires_grad_(False)
    with torch.no_grad():
        model.layers[0].norm.weight.add_(launch.rank())
        model.head.weight.mul_(1 + launch.rank())
    result = planned(2, overrides=Overrides(**TWO), model=model)
    result.meetings.lr, result.meetings.momentum = 1.0, 0.0
    trained = [n for n in all_names() if n != "layers.0.norm.weight"]
    alone = Alone(replicas=2, every=EVERY, fragments=[trained], lr=1.0, momentum=0.0)
    for one in alone.models:
        one.layers[0].norm.weight.requires_grad_(False)
    optimizer = torch.optim.AdamW((p for p in result.parameters() if p.requires_grad), lr=1e-2)
    for step in range(EVERY):
        result.train_step(tiny.batch(ROWS, step), optimizer=optimizer)
        alone.step(tiny.batch(ROWS, step))
    result.meet()
    nearly(result.full_state_dict(), alone.outer)
    nearly(held(result), alone.weights(0))

    other = tiny.net()
    with torch.no_grad():
        other.head.weight.mul_(1 + launch.rank())
    compared = planned(2, overrides=Overrides(**TWO), model=other, check_replicas=True)
    with pytest.raises(StateError, match=r"differ between replicas, e.g. \['head.weight'\]"):
        compared.train_step(tiny.batch(ROWS, 0))


def test_local_sgd_and_equal_beginnings() -> None:
    on_ranks(2, averages_and_begins_alike)


def refuses_on_ranks() -> None:
    with torch.device("meta"):
        nowhere = planned(2, overrides=Overrides(**TWO), model=tiny.Net())
    for read in (nowhere.state_dict, nowhere.full_state_dict):
        with pytest.raises(StateError, match=r"no weights in common.*init_weights"):
            read()
    nowhere.init_weights(3)
    assert nowhere.state_dict().keys() >= {*all_names()}
    result = result_of(2, **TWO)
    with pytest.raises(StateError, match="Ema: replicas that train apart have weights"):
        Ema(result)
    with pytest.raises(StateError, match="no weights pass to a new plan in memory"):
        result.train_step(tiny.batch(ROWS, 0))
        result.replan(Overrides())
    with pytest.raises(StateError, match="replicas that train apart have no step of all ranks"):
        result.timeline("x.json")
    with pytest.raises(StateError, match="steps of replicas that train apart"):
        result.recalibrate()
    with pytest.raises(StateError, match="are rehearsed one by one"):
        result.rehearse()
    if result.meetings.world.number:  # one has made a step more than the other
        result.train_step(tiny.batch(ROWS, 1))
    with pytest.raises(StateError, match=r"replica 0: step 1.*replica 1: step 2"):
        result.meet()


def test_what_does_not_run_is_refused() -> None:
    on_ranks(2, refuses_on_ranks)


# --- refusals of plans ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"replicas": 3}, "replicas=3 does not divide the cluster's 4 devices; legal: 2, 4"),
        ({"sync_every": 5}, "there are no replicas that would meet"),
        ({"replicas": 2, "dp": 4}, "dp=4"),
        ({"replicas": 2, "sync_every": 5, "fragments": 2}, "a divisor of sync_every"),
    ],
)
def test_replicas_that_cannot_be(overrides: dict[str, Any], said: str) -> None:
    with pytest.raises(OverrideError) as caught:
        result_of(4, **overrides)
    assert said in str(caught.value)


def test_a_given_plan_needs_consent_and_fit_refuses_it() -> None:
    plan = result_of(2, **TWO).plan
    assert plan == type(plan).from_json(plan.to_json())
    assert plan.of_one_replica.num_ranks == 1
    with pytest.raises(PlanError, match=r"numbers change with it.*allow=\[.replicas.\]"):
        planned(2, plan=plan)
    assert planned(2, plan=plan, allow=["replicas"]).plan == plan
    for asked in ({"plan": plan}, {"allow": ["replicas"]}, {"overrides": Overrides(replicas=2)}):
        with pytest.raises(FitError, match="fit: replicas"):
            fit(
                tiny.net(),
                [tiny.batch(ROWS)],
                planning={"global_batch_size": ROWS, **asked},
                optimizer=lambda result: torch.optim.SGD(result.parameters(), lr=0.1),
            )
