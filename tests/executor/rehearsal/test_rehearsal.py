"""Rehearsals of real plans, and the same plans on real ranks: one log, operation by operation."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.executor.rehearsal import Kind, rehearse
from tests.executor.rehearsal.rehearsal_runs import checked, does_what_was_rehearsed, rehearsal
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier, tiered
from tests.models.models import adamw
from tests.parity.parity_cells import Cell

FIRST = (
    "gpt2_tied pp2xdp2 1f1b m4 zero3",
    "gpt2_tied tp2 gpipe m2 mixed sequence",
    "mlp pp2xdp2 dualpipe_v m4 zero2",
)
REAL = (
    *FIRST,
    "gpt2_tied dp2xtp2 gpipe m4 mixed sequence",
    "gpt2_tied dp4 gpipe m4 zero2 shard2 mixed bf16",
    "gpt2_tied pp2xdp2 zb_h1 m4 zero1 pointwise front spread",
    "gpt2_tied pp2xtp2 interleaved_1f1b m4 v2 full bare",
    "gpt2_tied 1|dp2|1 1f1b m8 zero2 full front",
    "gpt2_untied dp4 1f1b m4 zero3",
    "llama pp2xdp2 1f1b m4 zero3 full",
    "llama pp2xtp2 zb_v m4",
    "llama tp2 1f1b m2",
    "gpt2_untied pp2 zb_h1 m4 front",
    "gpt2_untied pp2xdp2xtp2 1f1b m4 zero1 sequence",
    "gpt2_tied dp8 1f1b m2 zero3 shard4",
)
KINDS = (
    "mlp pp2xdp4 1f1b m4 zero1",
    "gpt2_untied dp4 1f1b m2 zero1",
    "gpt2_untied pp2xdp2 gpipe m4 zero1",
    "gpt2_untied pp2xdp2 eager_1f1b m4 zero2",
    "gpt2_untied pp2xtp2 zb_h2 m4",
    "llama dp2xtp2 1f1b m2 zero3 full",
    "llama pp4 1f1b m8 full",
    "bert tp4 1f1b m2",
    "t5 pp2xdp2 1f1b m4 zero1",
)
MORE = "the change tier has ZeRO, tensor parallel and pipelined ranks, recompute, and tied weights"


@pytest.mark.parametrize("line", tiered(REAL, FIRST.__contains__, MORE))
def test_real_ranks_do_what_was_rehearsed(line: str) -> None:
    found = rehearsal(line)
    assert found.mismatches == ()
    world = Cell.parse(line).world
    assert sorted(found.logs) == [*range(world)]
    assert all(log.peak_bytes > 0 and log.flops for log in found.logs.values())
    on_ranks(world, does_what_was_rehearsed, line, dict(found.logs))


@pytest.mark.parametrize("line", tiered(KINDS, KINDS[:1].__contains__, MORE))
def test_kinds_do_what_all_ranks_do(line: str) -> None:
    """A rank of a kind has the peak, the work and the number of messages of the one rehearsed."""
    every, kinds = rehearsal(line), rehearsal(line, every=False)
    assert every.mismatches == kinds.mismatches == ()
    assert len(kinds.logs) < len(every.logs) == Cell.parse(line).world
    assert kinds.peak_bytes == every.peak_bytes
    for rank, stands in kinds.kind_of.items():
        own, other = every.logs[rank], kinds.logs[stands]
        assert (own.peak_bytes, own.flops) == (other.peak_bytes, other.flops)
        assert own.sent_bytes == other.sent_bytes
        assert [e.payload for e in own.events] == [e.payload for e in other.events]


def test_the_model_is_left_as_it_is() -> None:
    of = checked(KINDS[0])
    model = of.case.model()
    before = {name: x.clone() for name, x in model.state_dict().items()}
    held = {name: id(x) for name, x in model.named_parameters()}
    rehearse(of.checked, model, of.batch, adamw)
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
    def make(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
        return _Reads(parameters, lr=0.1)

    of = checked(KINDS[0])
    with pytest.raises(ValueError, match="reads the value of a tensor"):
        rehearse(of.checked, of.case.model(), of.batch, make)
    assert not torch.distributed.is_initialized()


def test_messages_are_recorded() -> None:
    """A pipeline of two stages sends each micro-batch's activations on, and gradients back."""
    logs = rehearsal("mlp pp2 1f1b m4").logs
    for rank, way in ((0, "forward"), (1, "backward")):
        sent = [e for e in logs[rank].events if e.kind is Kind.SEND]
        # a training step, and, of activations, an evaluation
        assert len(sent) == 4 * (2 if way == "forward" else 1)
        assert {e.group[0] for e in sent} == {way}
        assert {e.peer for e in sent} == {1 - rank}


POLICIES = ("", "pointwise", "full", "mixed")


@pytest.mark.parametrize("policy", tiered(POLICIES, {"mixed"}.__contains__, MORE))
def test_memory_is_that_of_a_real_step(policy: str) -> None:
    """To the byte, by kind, and the FLOPs: with and without recompute, on one device."""
    of = checked(f"gpt2_tied 1 1f1b m2 {policy}")
    real, found = of.real_log(evaluates=False), of.rank_log(0, evaluates=False)
    assert real.peak_bytes == found.peak_bytes
    assert real.peak_by_kind == found.peak_by_kind
    assert real.flops == found.flops


@second_tier("which ranks of rows and tokens are alike is compared by hand in the change tier")
@pytest.mark.parametrize("kind", ["ring", "all_gather"])
def test_the_ranks_of_a_row_stand_for_those_of_others(kind: str) -> None:
    """Who sends tokens to whom is among ranks that are rehearsed."""
    assert rehearsal(f"llama dp4xcp2 {kind} m2 zero1", every=False).mismatches == ()
