"""Checkpoints: saved under any plan, loaded under any other, complete or not there at all.

Three launches of `checkpoint_worker.py` give results that the tests read: four ranks, which save
and load; then two and eight, which load what the four saved, the two until one is killed in a
save. The oracle of training is a plain PyTorch loop.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

from meshwright.planner.plan.plan import Plan
from tests.executor.checkpoint.checkpoint_worker import (
    AFTER,
    BEFORE,
    FOUR,
    PAIRS,
    differing,
    optimize,
    plan_of,
    resume,
)
from tests.helpers.launching import Launch, launch
from tests.models.models import CASES, GLOBAL_BATCH

TOLERANCE = 1e-5
TIMEOUT_S = 900
GRACE_S = 60.0
WORKER = Path(__file__).with_name("checkpoint_worker.py")
GPT2 = "gpt2_tied"


@dataclass(frozen=True, slots=True, kw_only=True)
class Launched:
    """Results of the launches, and the folder that they wrote to."""

    folder: Path
    results: dict[str, Any]
    runs: dict[int, Launch]

    def __getitem__(self, name: str) -> Any:
        if name not in self.results:
            told = "\n".join(run.tail() for run in self.runs.values())
            pytest.fail(f"{name}: its launch ended before its result\n{told}")
        return self.results[name]


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> Launched:
    folder = tmp_path_factory.mktemp("checkpoints")
    results: dict[str, Any] = {}
    runs = {}
    for ranks in (4, 2, 8):
        runs[ranks] = launch(WORKER, str(folder), ranks=ranks, timeout_s=TIMEOUT_S, grace_s=GRACE_S)
        written = folder / f"results{ranks}.json"
        results |= json.loads(written.read_text()) if written.exists() else {}
    return Launched(folder=folder, results=results, runs=runs)


def expected(launched: Launched, name: str) -> tuple[dict[str, torch.Tensor], Any, Any]:
    """The state at a save, the losses after it, and the state after those."""
    return torch.load(launched.folder / f"{name}.expected")


def test_every_launch_ends_in_order(launched: Launched) -> None:
    for ranks in (4, 8):
        assert launched.runs[ranks].ok, launched.runs[ranks].tail()
    for run in launched.runs.values():
        assert not any(rank.killed or rank.children_left for rank in run.ranks)


@pytest.mark.parametrize(("case", "source", "target"), PAIRS)
def test_training_goes_on_under_any_plan(
    launched: Launched, case: str, source: str, target: str
) -> None:
    result = launched[f"{case}-{source}-{target}"]
    assert result["loaded"] == [], "not loaded bit for bit"
    assert len(result["losses"]) == AFTER
    if source == target:
        assert result["losses"] == result["expected"]
        assert result["changed"] == []
    assert result["losses"] == pytest.approx(result["expected"], rel=TOLERANCE)
    assert result["distance"] <= TOLERANCE


@pytest.mark.parametrize("target", ["dp2", "pp2", "pp2dp2tp2"])
def test_training_goes_on_with_another_number_of_ranks(launched: Launched, target: str) -> None:
    result = launched[f"{GPT2}-dp2tp2-{target}"]
    assert result["loaded"] == []
    assert result["losses"] == pytest.approx(result["expected"], rel=TOLERANCE)
    assert result["distance"] <= TOLERANCE


@pytest.mark.parametrize(
    ("case", "source"), [*((GPT2, plan) for plan in FOUR), ("resnet", "dp2tp2")]
)
def test_one_device_goes_on(launched: Launched, case: str, source: str) -> None:
    at_save, losses, after = expected(launched, f"{case}-{source}")
    run = resume(case, "alone", launched.folder / f"{case}-{source}")
    assert differing(run.state(), at_save) == []
    assert run.steps(BEFORE, AFTER) == pytest.approx(losses, rel=TOLERANCE)
    assert set(run.state()) == set(after)


def test_it_is_the_training_of_a_plain_loop(launched: Launched) -> None:
    """Both halves, saved and loaded under different plans, make the run that PyTorch makes."""
    case = CASES[GPT2]
    model = case.model()
    optimizer, scheduler = optimize(GPT2, dict(model.named_parameters()))
    losses = []
    for step in range(BEFORE + AFTER):
        optimizer.zero_grad()
        loss = case.loss(model, case.batch(GLOBAL_BATCH, step))
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
        scheduler.step()
    for pair in (("dp2tp2", "pp4"), ("zero3", "virtual")):
        result = launched[f"{GPT2}-{'-'.join(pair)}"]
        assert result["losses"] == pytest.approx(losses[BEFORE:], rel=TOLERANCE)


@pytest.mark.parametrize("source", FOUR)
def test_weights_are_read_without_meshwright(launched: Launched, source: str) -> None:
    """DCP alone, under the model's own names, a tied parameter under its first."""
    at_save, _, _ = expected(launched, f"{GPT2}-{source}")
    model = CASES[GPT2].model(seed=5)
    state = {"model": {name: p.detach() for name, p in model.named_parameters()}}
    dcp.load(state, checkpoint_id=launched.folder / f"{GPT2}-{source}", no_dist=True)
    assert differing(dict(model.named_parameters()), {n: at_save[n] for n in state["model"]}) == []


def test_a_part_is_stored_once(launched: Launched) -> None:
    """Neither replicas nor tied copies are written twice: the boxes of each tensor have as many
    elements as it has."""
    for source in FOUR:
        metadata = dcp.FileSystemReader(launched.folder / f"{GPT2}-{source}").read_metadata()
        names = [name for name in metadata.state_dict_metadata if name.startswith("model.")]
        assert not {"model.lm_head.weight", "model.transformer.wte.weight"} <= set(names)
        for name, stored in metadata.state_dict_metadata.items():
            volume = sum(torch.Size(chunk.sizes).numel() for chunk in stored.chunks)
            assert volume == stored.size.numel(), name


def test_the_plan_is_beside_it(launched: Launched) -> None:
    plan, _ = plan_of(GPT2, "dp2tp2")
    assert Plan.load(launched.folder / f"{GPT2}-dp2tp2" / "plan.json") == plan


def test_an_asynchronous_save_holds_the_state_at_its_call(launched: Launched) -> None:
    result = launched["asynchronously"]
    assert result["first"] == []
    assert result["second"] == []
    assert result["losses"] == result["expected"]


def test_a_save_that_nobody_waits_for_is_finished(launched: Launched) -> None:
    resume(GPT2, "alone", launched.folder / "unfinished")


def test_a_mistake_is_told_alike_on_all_ranks(launched: Launched) -> None:
    result = launched["errors"]
    says = {
        "missing": r"NotThereError: checkpoint '.*nowhere': there is none",
        "no checkpoint": r"\w+edError: .*has no 'training.pt'",
        "not replaced": r"\w+edError: .*no save wrote, \['file'\], so it is not replaced",
        "other model": r"\w+edError: .*is of another model \(fingerprint \w+, this one \w+\)",
        "other optimizer": r"\w+edError: .*are those of AdamW, which SGD can't take",
        "no such extra": r"\w+edError: .*holds no state of \['sampler'\]; saved .*\['scheduler'\]",
        "foreign state on rank 2": r"\w+edError: .*of shape \(5,\) that is none of the model's",
        "full disk on rank 1": r"UnwrittenError: .*not saved.*rank 1: .*No space left",
        "full disk on rank 1, later": r"UnwrittenError: .*not saved.*rank 1: .*No space left",
    }
    assert set(result["said"]) == set(says)
    for name, heard in result["said"].items():
        assert len(set(heard)) == 1, name
        assert re.search(says[name], heard[0], re.DOTALL), (name, heard[0])
    assert not result["exists"], "a save that failed was published"


def test_a_killed_save_leaves_the_last_one(launched: Launched, tmp_path: Path) -> None:
    ranks = launched.runs[2].ranks
    assert ranks[1].returncode == -9
    assert ranks[0].returncode not in (0, None) and not ranks[0].killed
    path = launched.folder / "precious"
    assert [*launched.folder.glob(".precious.*.saving")], "it was killed before it wrote"
    wanted = torch.load(launched.folder / "precious.expected")
    run = resume(GPT2, "alone", path)
    assert differing(run.state(), wanted) == []
    run.save(path)
    assert not [*launched.folder.glob(".precious*")]
    assert differing(resume(GPT2, "alone", path).state(), run.state()) == []
