"""Rehearsals of real plans, and the same plans on real ranks: one log, operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from meshwright.executor.rehearsal import Kind, Recorder, Rehearsal, rank_log, rehearse, run_steps
from meshwright.executor.runtime import RunOptions, Runtime
from meshwright.executor.stages import CheckedPlan
from tests.executor.rehearsal.rehearsal_worker import CELLS, events_of
from tests.helpers.launching import Results, results_of
from tests.models.models import CASES, adamw
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_reference import store

TIMEOUT_S = 400
MORE = tuple(
    Cell.parse(line)
    for line in (
        "gpt2_untied  pp2xdp2          gpipe m4 zero1",
        "gpt2_untied  pp2xdp2          eager_1f1b m4 zero2",
        "gpt2_untied  pp2xtp2          zb_h2 m4",
        "llama        dp2xtp2          1f1b m2 zero3 full",
        "llama        pp4              1f1b m8 full",
        "bert         tp4              1f1b m2",
        "t5           pp2xdp2          1f1b m4 zero1",
    )
)


@cache
def rehearsal(cell: Cell, every: bool = True) -> Rehearsal:
    case = CASES[cell.case]
    plan, of = plan_of(cell)
    example = case.batch(cell.rows, 0)
    return rehearse(
        CheckedPlan.of(plan, of.graph, of.table),
        case.model(),
        lambda: pytree.tree_map(torch.empty_like, example),
        adamw,
        every=every,
    )


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Cell], Any]:
    """What each rank of a plan did: events, peak bytes, what it would save."""
    folder = tmp_path_factory.mktemp("rehearsal")
    store(folder, CELLS)
    worker = Path(__file__).with_name("rehearsal_worker.py")

    @cache
    def results(ranks: int) -> Results:
        name = f"-rehearsal-{ranks}"
        return results_of(worker, folder, ranks=ranks, timeout_s=TIMEOUT_S, name=name)

    return lambda cell: results(cell.world)[cell.name]["ranks"]


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_the_log_of_real_ranks_is_the_rehearsed(real: Callable[[Cell], Any], cell: Cell) -> None:
    ranks = real(cell)
    logs = rehearsal(cell).logs
    assert len(ranks) == len(logs) == cell.world
    for rank, (found, _, _) in enumerate(ranks):
        expected = events_of(logs[rank].events)
        assert found
        for k, (a, b) in enumerate(zip(found, expected, strict=False)):
            assert a == b, f"rank {rank}, event {k}"
        assert len(found) == len(expected)


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_the_memory_of_real_ranks_is_the_rehearsed(real: Callable[[Cell], Any], cell: Cell) -> None:
    """But for messages that a peer has not taken yet: in a rehearsal they leave at once."""
    logs = rehearsal(cell).logs
    for rank, (_, peak_bytes, _) in enumerate(real(cell)):
        sent = sum(e.nbytes for e in logs[rank].events if e.kind is Kind.SEND)
        rehearsed = logs[rank].peak_bytes
        assert 0.99 * rehearsed <= peak_bytes <= 1.01 * rehearsed + sent


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: cell.name)
def test_real_ranks_would_save_what_the_rehearsed_would(
    real: Callable[[Cell], Any], cell: Cell
) -> None:
    logs = rehearsal(cell).logs
    for rank, (_, _, saved) in enumerate(real(cell)):
        assert saved == [str(x) for x in logs[rank].saved]
        assert any("boxes=((" in x for x in saved)


@pytest.mark.parametrize("cell", (*CELLS, *MORE), ids=lambda cell: cell.name)
def test_plans_match(cell: Cell) -> None:
    found = rehearsal(cell)
    assert found.mismatches == ()
    assert all(log.peak_bytes > 0 for log in found.logs.values())
    assert any(log.flops for log in found.logs.values())


@pytest.mark.parametrize("cell", MORE, ids=lambda cell: cell.name)
def test_kinds_do_what_all_ranks_do(cell: Cell) -> None:
    """A rank of a kind has the peak, the work and the number of messages of the one rehearsed."""
    every, kinds = rehearsal(cell), rehearsal(cell, every=False)
    assert kinds.mismatches == ()
    assert kinds.peak_bytes == every.peak_bytes
    for rank, stands in kinds.kind_of.items():
        own, other = every.logs[rank], kinds.logs[stands]
        assert (own.peak_bytes, own.flops) == (other.peak_bytes, other.flops)
        assert own.sent_bytes == other.sent_bytes
        assert [e.payload for e in own.events] == [e.payload for e in other.events]


def test_the_model_is_left_as_it_is() -> None:
    cell = MORE[0]
    case, (plan, of) = CASES[cell.case], plan_of(cell)
    model, example = case.model(), case.batch(cell.rows, 0)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    held = {name: id(x) for name, x in model.named_parameters()}
    checked = CheckedPlan.of(plan, of.graph, of.table)
    rehearse(checked, model, lambda: pytree.tree_map(torch.empty_like, example), adamw)
    assert not torch.distributed.is_initialized()
    assert {name: id(x) for name, x in model.named_parameters()} == held
    for name, x in model.state_dict().items():
        assert type(x) is torch.Tensor
        assert torch.equal(x, before[name])


class _Reads(torch.optim.SGD):
    """An optimizer that steps as a value tells it to."""

    def step(self, closure: Callable[[], float] | None = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                if float(p.grad.sum().to_local() if hasattr(p, "to_local") else p.grad.sum()) > 0:
                    return super().step(closure)
        return None


def test_an_optimizer_that_reads_values_is_refused() -> None:
    cell = MORE[0]
    case, (plan, of) = CASES[cell.case], plan_of(cell)
    example = case.batch(cell.rows, 0)

    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return _Reads(parameters, lr=0.1)

    with pytest.raises(ValueError, match="reads the value of a tensor"):
        rehearse(
            CheckedPlan.of(plan, of.graph, of.table),
            case.model(),
            lambda: pytree.tree_map(torch.empty_like, example),
            make,
        )
    assert not torch.distributed.is_initialized()


def test_messages_are_recorded() -> None:
    """A pipeline of two stages sends each micro-batch's activations on, and gradients back."""
    cell = Cell.parse("mlp pp2 1f1b m4")
    logs = rehearsal(cell).logs
    for rank, way in ((0, "forward"), (1, "backward")):
        sent = [e for e in logs[rank].events if e.kind is Kind.SEND]
        # a training step, and, of activations, an evaluation
        assert len(sent) == 4 * (2 if way == "forward" else 1)
        assert {e.group[0] for e in sent} == {way}
        assert {e.peer for e in sent} == {1 - rank}


@pytest.mark.parametrize("policy", ["", "pointwise", "full", "mixed"])
def test_memory_is_that_of_a_real_step(policy: str) -> None:
    """To the byte, by kind, and the FLOPs: with and without recompute, on one device."""
    cell = Cell.parse(f"gpt2_deep 1 1f1b m2 {policy} rows16")
    case, (plan, of) = CASES[cell.case], plan_of(cell)
    checked = CheckedPlan.of(plan, of.graph, of.table)
    example = case.batch(cell.rows, 0)
    recorder = Recorder()
    with recorder.following_resizes(), recorder:
        runtime = Runtime(checked, case.model(), options=RunOptions(device=torch.device("cpu")))
        run_steps(runtime, lambda: example, adamw, recorder, evaluates=False)
    real = recorder.log(0)
    found = rank_log(
        checked,
        case.model(),
        lambda: pytree.tree_map(torch.empty_like, example),
        adamw,
        rank=0,
        evaluates=False,
    )
    assert real.peak_bytes == found.peak_bytes
    assert real.peak_by_kind == found.peak_by_kind
    assert real.flops == found.flops


@pytest.mark.parametrize("kind", ["ring", "all_gather"])
def test_the_ranks_of_a_row_stand_for_those_of_others(kind: str) -> None:
    """Who sends tokens to whom is among ranks that are rehearsed."""
    found = rehearsal(Cell.parse(f"llama dp4xcp2 {kind} m2 zero1"), every=False)
    assert found.mismatches == ()
