"""Plans with parameter servers: found where they are asked for, or allowed and faster; refused in
one line where they can't be."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import Overrides, ParallelModel
from meshwright.planner.overrides.overrides import OverrideError
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.plan.plan import Plan, PlanError
from meshwright.planner.pricing.evaluate import Evaluator
from tests.helpers import tiny

ROWS = 24


def planned(devices: int = 3, model: nn.Module | None = None, **more: Any) -> ParallelModel:
    given: dict[str, Any] = {"global_batch_size": ROWS, "profile": False, **more}
    given.setdefault("cluster", tiny.slow_host(devices))
    return tiny.planned(model or tiny.net(), devices, **given)


def test_what_is_asked_for_is_planned_and_priced_as_the_plan_by_itself() -> None:
    result = planned(overrides=Overrides(servers=1, staleness=2), allow=["stale"])
    plan = result.plan
    assert (plan.servers, plan.staleness, plan.stages[0].dp, plan.num_ranks) == (1, 2, 2, 3)
    assert plan.stages[0].ranks == (1, 2)
    assert plan.global_batch_size == ROWS
    again = Evaluator(result._problem).price(Plan.from_json(plan.to_json())).prediction
    assert again.step_time_s == result.prediction.step_time_s
    text = str(result.report)
    assert "dp2, gradients 2 steps late, 1 parameter server" in text
    assert "1 of 3 ranks are parameter servers" in text
    assert "A ring of all ranks would take" in text
    assert "the training's numbers change with staleness=2" in text
    (row,) = [row for row in result.report.details.communication if row["axis"] == "data"]
    assert row["collective"] == "send"
    assert row["sent_bytes"] == 4 * sum(p.numel() for p in tiny.net().parameters())


def test_an_override_of_servers_changes_no_numbers_and_needs_no_word() -> None:
    assert planned(overrides=Overrides(servers=2)).plan.served_by(2, 1, 0).servers == 2
    assert planned(overrides=Overrides(servers=0, staleness=0)).plan.servers == 0


def test_servers_are_never_chosen_unless_allowed_and_then_where_they_are_faster() -> None:
    """Sums of few tokens over slow links hide behind nothing; late gradients do."""
    base = tiny.host(8)
    links = {"latency_s": 1e-6, "bandwidth": 1e6}
    slow = replace(
        base,
        num_nodes=8,
        devices_per_node=1,
        intra_link=replace(base.intra_link, **links),
        inter_link=replace(base.inter_link, **links),
        device=replace(
            base.device, peak_flops={"fp32": 1.5e7, "bf16": 1.5e7}, launch_overhead_s=1e-9
        ),
    )
    apart: dict[str, Any] = {"cluster": slow, "overrides": Overrides(pp=1, tp=1, zero=0)}
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)])
    batch = torch.zeros(4, 32), torch.zeros(4, 32)
    apart |= {"example_inputs": batch, "loss_fn": nn.functional.mse_loss, "model": model}
    plain, free = planned(8, **apart), planned(8, allow=["stale"], **apart)
    assert plain.plan.servers == 0
    assert not [note for note in plain.report.notes if "server" in note]
    (note,) = [note for note in free.report.notes if "parameter servers" in note]
    assert free.prediction.step_time_s <= plain.prediction.step_time_s
    assert free.plan.servers > 0, note
    assert "without parameter servers the best plan (dp8" in note


WRONG: tuple[tuple[dict[str, Any], type[ValueError], str], ...] = (
    ({"overrides": Overrides(servers=3)}, OverrideError,
     "override servers=3: of 3 devices they leave 0, no worker; legal: 0, 1, 2; "),
    ({"overrides": Overrides(servers=1), "global_batch_size": 9}, OverrideError,
     "2 workers don't share 9 rows out; legal: 0, 2; "),
    ({"overrides": Overrides(servers=1, dp=1)}, OverrideError,
     "override servers=1 with dp=1: the other 2 ranks are workers; legal: dp=2; "),
    ({"overrides": Overrides(servers=1), "optimizer": "muon"}, OverrideError,
     "override servers=1: muon steps matrices whole"),
    ({"overrides": Overrides(servers=1), "precision": "fp16"}, OverrideError,
     "servers=1 with fp16: its loss scale is one of all ranks"),
    ({"overrides": Overrides(servers=1), "target": "fsdp"}, OverrideError,
     "target 'fsdp' is not priced with it"),
)  # fmt: skip


@pytest.mark.parametrize(("given", "error", "says"), WRONG, ids=range(len(WRONG)))
def test_what_cannot_be_is_refused(
    given: dict[str, Any], error: type[ValueError], says: str
) -> None:
    with pytest.raises(error) as caught:
        planned(**given)
    assert says in str(caught.value)


def test_a_server_without_room_is_told_with_what_it_needs() -> None:
    """Its states beside all weights; a worker fits."""
    one: dict[str, Any] = {"overrides": Overrides(servers=1), "global_batch_size": 2}
    at = planned(**one)
    peak = max(at.prediction.peak_memory_bytes)
    assert at.prediction.server_bytes > peak
    room = (peak + at.prediction.server_bytes) // 2 - tiny.host(1).device.reserved_bytes
    small: dict[str, Any] = {"cluster": tiny.small_host(3, room), "memory_margin": 0.0}
    small["global_batch_size"] = 2
    with pytest.raises(InfeasibleError, match=r"a server needs .*Way out: more servers"):
        planned(overrides=Overrides(servers=1), **small)
    with pytest.raises(InfeasibleError, match=r"plan: a server needs .*Way out: more servers"):
        planned(plan=at.plan, **small)
    assert planned(overrides=Overrides(servers=2), **small).plan.servers == 2


def test_a_worker_without_room_is_told_as_one() -> None:
    """A server has no activations: with many rows a worker is fuller."""
    one: dict[str, Any] = {"overrides": Overrides(servers=1), "global_batch_size": 4096}
    at = planned(**one)
    peak = max(at.prediction.peak_memory_bytes)
    assert at.prediction.server_bytes < peak
    room = at.prediction.server_bytes - tiny.host(1).device.reserved_bytes
    small: dict[str, Any] = {"cluster": tiny.small_host(3, room), "memory_margin": 0.0}
    with pytest.raises(InfeasibleError, match=r"a worker beside parameter servers: ") as caught:
        planned(**(one | {"overrides": Overrides(servers=1, microbatch_size=2048)} | small))
    assert "a server" not in str(caught.value)
    pushed: dict[str, Any] = {"overrides": Overrides(servers=2), "optimizer": "sgd"}
    full = planned(4, global_batch_size=2, **pushed).prediction
    assert full.server_bytes < full.fullest_bytes
    room = full.fullest_bytes - 1 - tiny.host(1).device.reserved_bytes
    small = {"cluster": tiny.small_host(4, room), "memory_margin": 0.0, "global_batch_size": 2}
    with pytest.raises(InfeasibleError, match=r"a worker needs .*activations.*fewer rows"):
        planned(4, **(small | pushed))


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.body(x)
        return y


def test_models_whose_workers_would_have_to_meet_are_refused() -> None:
    batch = torch.zeros(4, 8), torch.zeros(4, 8)
    said = r"forward writes buffers.*body.1.num_batches_tracked"
    with pytest.raises(OverrideError, match=said):
        planned(
            model=Normed(), overrides=Overrides(servers=1), example_inputs=batch,
            loss_fn=nn.functional.mse_loss,
        )  # fmt: skip


def test_a_given_plan_with_staleness_needs_consent() -> None:
    plan = planned(overrides=Overrides(servers=1, staleness=2), allow=["stale"]).plan
    with pytest.raises(PlanError, match=r"staleness=2: numbers change.*legal: 0; give allow=\[\"s"):
        planned(plan=plan)
    together = replace(plan, staleness=0)
    assert planned(plan=together).plan == together


CALLS: tuple[tuple[str, Callable[[ParallelModel], Any]], ...] = (
    ("fit", lambda it: it.without_servers("fit")),
    ("forward", lambda it: it.forward(tiny.batch(ROWS))),
    ("evaluate", lambda it: it.evaluate([tiny.batch(ROWS)])),
    ("generate", lambda it: it.generate(tiny.batch(1)[0], 1)),
    ("timeline", lambda it: it.timeline("t.json", tiny.batch(ROWS))),
    ("clip_grad_norm_", lambda it: it.clip_grad_norm_(1.0)),
    ("replan", lambda it: it.replan()),
    ("rehearse", lambda it: it.rehearse()),
    ("recalibrate", lambda it: it.recalibrate()),
)


@pytest.mark.parametrize(("name", "call"), CALLS, ids=[name for name, _ in CALLS])
def test_calls_that_need_ranks_that_meet_are_refused(
    name: str, call: Callable[[ParallelModel], Any]
) -> None:
    result = planned(overrides=Overrides(servers=1))
    with pytest.raises(RuntimeError, match=rf"{name} needs ranks that meet.*plan without servers"):
        call(result)


@pytest.mark.parametrize("given", [{}, {"max_grad_norm": 1.0}])
def test_a_step_without_an_optimizer_or_with_clipping_is_refused(given: dict[str, Any]) -> None:
    result = planned(overrides=Overrides(servers=1))
    if given:
        given = {**given, "optimizer": torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)}
    with pytest.raises(ValueError, match=r"train_step: optimizer=.*the optimizers of parameter"):
        result.train_step(tiny.batch(ROWS), **given)
