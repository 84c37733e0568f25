"""Rehearsals of real plans, and the same plans on real ranks: one log, operation by operation. Work
that is saved: repetitions of micro-batches are what running them would have recorded, and ranks are
shared out over processes."""

import os
import sys
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from meshwright.executor.rehearsal import RankLog, rank_log, rehearse, steps
from meshwright.executor.rehearsal.rehearse import logs_of
from meshwright.executor.rehearsal.steps import Repeats
from meshwright.executor.stages import PipelineRun
from tests.executor.rehearsal.rehearsal_runs import checked, does_what_was_rehearsed, rehearsal
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import tiered
from tests.models.models import adamw
from tests.parity.parity_cells import Cell

MODULE = sys.modules["meshwright.executor.rehearsal.rehearse"]  # has the name of a function
FIRST = ("gpt2_tied pp2xdp2 1f1b m4 zero3",)
REAL = (
    *FIRST, "gpt2_tied tp2 gpipe m2 mixed sequence", "mlp pp2xdp2 dualpipe_v m4 zero2",
    "gpt2_tied dp4 gpipe m4 zero2 shard2 mixed bf16",
    "gpt2_tied pp2xdp2 zb_h1 m4 zero1 pointwise front spread",
    "gpt2_tied pp2xtp2 interleaved_1f1b m4 v2 full bare",
    "gpt2_tied 1|dp2|1 1f1b m8 zero2 full front",
    "llama pp2xdp2 1f1b m4 zero3 full", "llama pp2xtp2 zb_v m4",
    "llama_lora dp2 1f1b m2 zero3 bf16", "llama pp2xdp2 1f1b m2 zero1 slices7+5+4 pointwise",
    "gpt2_untied pp2xdp2xtp2 1f1b m4 zero1 sequence", "gpt2_tied dp8 1f1b m2 zero3 shard4",
)  # fmt: skip
KINDS = (
    "mlp pp2xdp4 1f1b m4 zero1", "gpt2_untied pp2xdp2 eager_1f1b m4 zero2",
    "gpt2_untied pp2xtp2 zb_h2 m4", "llama dp2xtp2 1f1b m2 zero3 full", "bert tp4 1f1b m2",
    "t5 pp2xdp2 1f1b m4 zero1", "llama dp4xcp2 ring m2 zero1",
)  # fmt: skip
MORE = "a pipeline with ZeRO-3 and tied weights is kept"
ALIKE = "ranks of one pipeline, each like one of its kind, are kept"
POLICY = "recompute of some blocks, beside blocks without, is kept"


@pytest.mark.parametrize("line", tiered(REAL, FIRST.__contains__, MORE))
def test_real_ranks_do_what_was_rehearsed(line: str) -> None:
    found = rehearsal(line)
    assert found.mismatches == ()
    world = Cell.parse(line).world
    assert sorted(found.logs) == [*range(world)]
    assert all(log.peak_bytes > 0 and log.flops for log in found.logs.values())
    on_ranks(world, does_what_was_rehearsed, line, dict(found.logs))


@pytest.mark.parametrize("line", tiered(KINDS, KINDS[:1].__contains__, ALIKE))
def test_kinds_do_what_all_ranks_do(line: str) -> None:
    """A rank of a kind has the peak, the work and the number of messages of the one rehearsed."""
    every, kinds = rehearsal(line), rehearsal(line, every=False)
    assert every.mismatches == kinds.mismatches == ()
    assert len(kinds.logs) <= len(every.logs) == Cell.parse(line).world
    assert len(kinds.logs) < len(every.logs) or line != KINDS[0]
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
        p = self.param_groups[0]["params"][0]
        if float(p.grad.sum().to_local() if hasattr(p, "to_local") else p.grad.sum()) > 0:
            return super().step(closure)
        return None


def test_an_optimizer_that_reads_values_is_refused() -> None:
    of = checked(KINDS[0])
    with pytest.raises(ValueError, match="reads the value of a tensor"):
        rehearse(of.checked, of.case.model(), of.batch, partial(_Reads, lr=0.1))
    assert not torch.distributed.is_initialized()


POLICIES = ("", "pointwise", "full", "mixed")


@pytest.mark.parametrize("policy", tiered(POLICIES, {"mixed"}.__contains__, POLICY))
def test_memory_is_that_of_a_real_step(policy: str) -> None:
    """To the byte, by kind, and the FLOPs: with and without recompute, on one device."""
    of = checked(f"gpt2_tied 1 1f1b m2 {policy}")
    real, found = of.real_log(evaluates=False), of.rank_log(0, evaluates=False)
    assert real.peak_bytes == found.peak_bytes
    assert real.peak_by_kind == found.peak_by_kind
    assert real.flops == found.flops


# --- repetitions ----------------------------------------------------------------------------------


# rows enough for eight or more micro-batches; the first or the last rank
STEADY = (("mlp pp2xdp2 dualpipe_v m8 zero2", 3), ("mlp pp2xdp2 1f1b m8 zero3 full", 0))
REPEATED = (
    *STEADY, ("gpt2_tied dp2xtp2 gpipe m8 mixed sequence", 0), ("gpt2_untied pp2xtp2 zb_h1 m8", 3),
    ("llama pp2xtp2 interleaved_1f1b m8 v2 full bare", 3), ("t5 pp4 1f1b m16", 0),
)  # fmt: skip
SCHEDULES = "a schedule of split backwards in two directions is kept"


@pytest.mark.parametrize(
    "of", tiered(REPEATED, STEADY[:1].__contains__, SCHEDULES, lambda of: of[0])
)
def test_repetitions_are_what_would_have_run(
    of: tuple[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    line, rank = of
    repeated: list[int] = []
    again = Repeats.again
    monkeypatch.setattr(Repeats, "again", lambda *a: repeated.append(1) or again(*a))
    short = checked(line).rank_log(rank)
    assert repeated
    repeated.clear()
    assert checked(line).rank_log(rank, repeats=False) == short
    assert not repeated


def test_what_is_not_steady_is_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Micro-batches that differ are run, all of them; and where it is the backwards alone, the rank
    is rehearsed again without repetitions."""
    of = checked(STEADY[0][0])
    whole = of.rank_log(0, repeats=False)
    monkeypatch.setattr(steps._Record, "like", lambda *_: False)
    assert of.rank_log(0) == whole
    forwards = steps.FORWARD
    monkeypatch.setattr(
        Repeats, "known", lambda self, what: self.first[what] if what[1] in forwards else None
    )
    raised: list[object] = []
    error = type("Raised", (steps.NotSteadyError,), {"__init__": raised.append})
    monkeypatch.setattr(steps, "NotSteadyError", error)
    assert of.rank_log(0) == whole
    assert raised


def test_an_evaluation_keeps_no_micro_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PipelineRun] = []

    class Kept(PipelineRun):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(sys.modules[rank_log.__module__], "PipelineRun", Kept)
    for rank in (0, 2):
        checked("mlp pp2xdp2 1f1b m4").rank_log(rank, repeats=False)
    training, evaluation, *_ = made
    assert len(training.stream) > len(evaluation.stream)
    assert [run.passes for run in made] == [{}] * 4


# --- processes ------------------------------------------------------------------------------------


RANKS = (0, 1, 4, 5)


def log_of(rank: int) -> RankLog:
    """A log that says which process made it."""
    return RankLog(rank=rank, events=(), peak_bytes=os.getpid())


def shared(run: Callable[[int], RankLog], monkeypatch: pytest.MonkeyPatch) -> dict[int, RankLog]:
    monkeypatch.setattr(MODULE, "WORTH_S", 0.0)
    monkeypatch.setattr(MODULE, "_workers", lambda: 2)
    return dict(logs_of(RANKS, run))


def test_the_first_is_run_here_and_the_others_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """But small work, all of which is done here."""
    found = dict(logs_of(RANKS, log_of))
    assert [*found] == [*RANKS]
    assert {log.peak_bytes for log in found.values()} == {os.getpid()}
    found = shared(log_of, monkeypatch)
    assert sorted(found) == [*RANKS]
    assert found[0].peak_bytes == os.getpid()
    assert os.getpid() not in {found[rank].peak_bytes for rank in RANKS[1:]}


def test_an_error_is_that_of_the_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int) -> RankLog:
        if rank == 5:
            raise ValueError("rehearse: what is wrong with rank 5")
        return log_of(rank)

    with pytest.raises(ValueError, match="what is wrong with rank 5"):
        shared(run, monkeypatch)


def test_what_cannot_be_forked_is_run_here(monkeypatch: pytest.MonkeyPatch) -> None:
    here = os.getpid()
    says = "Unable to handle autograd's threading in combination with fork-based multiprocessing."

    def run(rank: int) -> RankLog:
        if os.getpid() != here:
            raise RuntimeError(says)
        return log_of(rank)

    found = shared(run, monkeypatch)
    assert sorted(found) == [*RANKS]
    assert {log.peak_bytes for log in found.values()} == {here}
