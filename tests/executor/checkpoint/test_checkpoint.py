"""Checkpoints: saved under any plan, loaded under any other, complete or not there at all.

The oracle of training is a plain PyTorch loop.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from meshwright.planner.plan.plan import Plan
from tests.executor.checkpoint.checkpoint_runs import (
    AFTER,
    BEFORE,
    GPT2,
    TOLERANCE,
    History,
    cell_of,
    differing,
    distance,
    goes_on,
    history_of,
    mistakes,
    optimize,
    plan_of,
    resume,
    saves,
    saves_beside_training,
    start,
)
from tests.helpers.launching import launch
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import tiered
from tests.models.models import CASES, GLOBAL_BATCH

TIMEOUT_S = 300
WORKER = Path(__file__).with_name("checkpoint_worker.py")
FOUR = ("dp2tp2", "pp4", "tp4", "zero2", "zero3", "hybrid", "virtual", "uneven")
ROUND = (
    ("zero3", "virtual"), ("virtual", "uneven"), ("uneven", "hybrid"), ("hybrid", "dp2tp2"),
    ("zero3", "zero3"), ("hybrid", "tp4"), ("dp2", "pp2"), ("virtual", "alone"), ("alone", "zero2"),
)  # fmt: skip
ALIKE = ("zero3", "zero3"), ("hybrid", "tp4"), ("dp2", "pp2")  # one side of each stays
FIRST = (*((GPT2, *pair) for pair in ROUND if pair not in ALIKE), ("resnet", "dp2", "pp2"))
PAIRS = (
    *FIRST,
    *((GPT2, *pair) for pair in ALIKE),
    *((GPT2, plan, plan) for plan in FOUR if plan != "zero3"),
    *((GPT2, "dp2tp2", plan) for plan in (*FOUR[1:], "pp2dp2tp2")),
    *((GPT2, plan, other) for plan in FOUR[1:] for other in ("dp2tp2", "alone")
      if (plan, other) not in ROUND),
    *((GPT2, "dp2tp2", plan) for plan in ("dp2", "pp2")),
    ("resnet", "dp2tp2", "dp2tp2"), ("resnet", "dp2tp2", "virtual"), ("resnet", "dp2tp2", "alone"),
)  # fmt: skip
MORE = "the change tier saves plans of all kinds, and loads each kind under another"


def on_plan(plan: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """A function of the runs on the ranks of a plan, or here."""
    world = cell_of(GPT2, plan).world
    return on_ranks(world, function, *arguments) if world > 1 else function(*arguments)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Where a run of a case on a plan was saved, once."""
    folder = tmp_path_factory.mktemp("checkpoints")

    @cache
    def of(case: str, plan: str) -> Path:
        path = folder / f"{case}-{plan}"
        on_plan(plan, saves, path, case, plan)
        return path

    return of


@cache
def plain(case: str) -> History:
    """What PyTorch alone does on one device."""
    model = CASES[case].model()
    named = dict(model.named_parameters())
    optimizer, scheduler = optimize(case, named)
    losses, states = [], []
    for step in range(BEFORE + AFTER):
        optimizer.zero_grad()
        loss = CASES[case].loss(model, CASES[case].batch(GLOBAL_BATCH, step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        scheduler.step()
        if step in (BEFORE - 1, BEFORE + AFTER - 1):
            state = {n: x.detach().clone() for n, x in model.state_dict().items()}
            for name, p in named.items():
                state |= {f"{name}:{k}": x.clone() for k, x in optimizer.state[p].items()}
            states.append(state)
    return History(losses=losses, at_save=states[0], after=states[1])


SOURCES = tuple(dict.fromkeys(pair[:2] for pair in PAIRS if pair[1] != "alone"))
FIRST_SOURCES = tuple(dict.fromkeys(pair[:2] for pair in FIRST))


@pytest.mark.parametrize("pair", tiered(PAIRS, FIRST.__contains__, MORE, name="-".join))
def test_training_goes_on_under_any_plan(saved: Any, pair: tuple[str, str, str]) -> None:
    case, source, target = pair
    on_plan(target, goes_on, saved(case, source), case, target, source == target)


@pytest.mark.parametrize("of", tiered(SOURCES, FIRST_SOURCES.__contains__, MORE, name="-".join))
def test_a_checkpoint_is_of_a_plain_loop_and_read_without_meshwright(
    saved: Any, of: tuple[str, str]
) -> None:
    """By DCP alone, under the model's own names, a tied parameter under its first. Neither replicas
    nor tied copies are written twice: the boxes of a tensor have as many elements as it has."""
    case, plan = of
    path = saved(case, plan)
    history = history_of(path)
    if not CASES[case].batch_statistics:
        wanted = plain(case)
        assert history.losses == pytest.approx(wanted.losses, rel=TOLERANCE)
        assert distance(history.at_save, wanted.at_save) <= TOLERANCE
        assert distance(history.after, wanted.after) <= TOLERANCE
    model = CASES[case].model(seed=5)
    state = {"model": {name: p.detach() for name, p in model.named_parameters()}}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    assert differing(state["model"], {n: history.at_save[n] for n in state["model"]}) == []
    stored = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    tied = {"model.lm_head.weight", "model.transformer.wte.weight"}
    assert len(tied & stored.keys()) == (1 if case == GPT2 else 0)
    for name, x in stored.items():
        assert sum(torch.Size(c.sizes).numel() for c in x.chunks) == x.size.numel(), name
    assert Plan.load(path / "plan.json") == plan_of(case, plan)[0]


def test_an_asynchronous_save_holds_the_state_at_its_call(tmp_path: Path) -> None:
    on_ranks(2, saves_beside_training, tmp_path)


def test_a_mistake_is_told_alike_on_all_ranks(saved: Any, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("not a checkpoint")
    start("mlp", "alone").save(tmp_path / "mlp")
    says = {
        "missing": r"NotThereError: checkpoint '.*nowhere': there is none",
        "no checkpoint": r"\w+edError: .*has no 'training.pt'",
        "not replaced": r"\w+edError: .*no save wrote, \['file'\], so it is not replaced",
        "other model": r"\w+edError: .*is of another model \(fingerprint \w+, this one \w+\)",
        "other optimizer": r"\w+edError: .*are those of AdamW, which SGD can't take",
        "no such extra": r"\w+edError: .*holds no state of \['sampler'\]; saved .*\['scheduler'\]",
        "foreign state": r"\w+edError: .*of shape \(5,\) that is none of the model's",
        "full disk": r"UnwrittenError: .*not saved.*rank 1: .*No space left",
        "full disk, later": r"UnwrittenError: .*not saved.*rank 1: .*No space left",
    }
    said = on_ranks(2, mistakes, tmp_path, saved(GPT2, "zero3"), tmp_path / "mlp")
    assert said.keys() == says.keys()
    for name, heard in said.items():
        assert len(set(heard)) == 1, name
        assert re.search(says[name], heard[0], re.DOTALL), (name, heard[0])
    assert sorted(x.name for x in tmp_path.iterdir()) == ["afterwards", "mlp", "other"]


def test_a_save_that_nobody_waits_for_is_finished(tmp_path: Path) -> None:
    run = launch(WORKER, str(tmp_path), ranks=1, timeout_s=TIMEOUT_S)
    assert run.ok, run.tail()
    resume(GPT2, "alone", tmp_path / "unfinished")
