"""Plans that are trained on CPU ranks, and predicted by the steps of others: what
`recalibration` runs in each process of a launch."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

from meshwright import Cluster, Overrides, ParallelModel, auto_parallelize
from meshwright.executor.ranks import launch
from meshwright.profiles.store import Store
from scripts.ranks.small_models import CASES

BATCH, STEPS = 8, 12
PLANS: dict[int, dict[str, Overrides]] = {
    1: {
        "1 micro-batch": Overrides(num_microbatches=1, recompute="none"),
        "2 micro-batches": Overrides(num_microbatches=2, recompute="none"),
        "4, full recompute": Overrides(num_microbatches=4, recompute="full"),
        "1, full recompute": Overrides(num_microbatches=1, recompute="full"),
    },
    2: {
        "dp2": Overrides(dp=2, zero=0, num_microbatches=1),
        "dp2 ZeRO-3": Overrides(dp=2, zero=3, num_microbatches=1),
        "tp2": Overrides(tp=2, num_microbatches=1),
        "pp2": Overrides(pp=2, num_microbatches=4),
        "dp2 ZeRO-1": Overrides(dp=2, zero=1, num_microbatches=2),
        "tp2, 2 micro-batches": Overrides(tp=2, num_microbatches=2),
        "pp2, 2 micro-batches": Overrides(pp=2, num_microbatches=2),
    },
    4: {
        "dp4": Overrides(dp=4, zero=0, num_microbatches=1),
        "dp2 tp2": Overrides(dp=2, tp=2, num_microbatches=1),
        "pp2 dp2": Overrides(pp=2, dp=2, num_microbatches=4),
        "dp4 ZeRO-1": Overrides(dp=4, zero=1, num_microbatches=1),
        "tp4": Overrides(tp=4, num_microbatches=1),
        "pp2 tp2": Overrides(pp=2, tp=2, num_microbatches=2),
    },
}


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """A plan that was trained, and seconds of its step: measured, predicted without corrections,
    and with those of other plans."""

    plan: str
    fold: str
    measured_s: float
    before_s: float
    after_s: float


@cache
def cluster(ranks: int) -> Cluster:
    """This machine, its cores measured once."""
    return Cluster.local(ranks, "cpu")


def planned(name: str, **changes: Any) -> ParallelModel:
    case = CASES[name]
    return auto_parallelize(
        case.model(),
        cluster(launch.world_size()),
        example_inputs=case.batch(2),
        loss_fn=case.loss_fn,
        global_batch_size=BATCH,
        precision="fp32",
        **changes,
    )


def run_plans(models: Sequence[str], out: Path) -> None:
    """Train every plan, then predict each part by the steps of the others."""
    wanted = [(m, name) for m in models for name in PLANS[launch.world_size()]]
    trained = {}
    for model, name in wanted:
        result = planned(model, overrides=PLANS[launch.world_size()][name])
        batch = CASES[model].batch(BATCH)
        for _ in range(STEPS):
            result.train_step(batch)
            for parameter in result.parameters():
                parameter.grad = None
        trained[model, name] = result
    rows = [row for fold in folds(wanted) for row in predicted_by_others(fold, trained)]
    if launch.rank() == 0:
        out.write_text(json.dumps([asdict(row) for row in rows]))


def folds(wanted: Sequence[tuple[str, str]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Parts of the plans to hold out: half of each model's; then each model, if there are more."""
    found = [(f"half {k + 1}", list(wanted[k::2])) for k in range(2)]
    models = list(dict.fromkeys(model for model, _ in wanted))
    if len(models) > 1:
        found += [(f"all of {m}", [each for each in wanted if each[0] == m]) for m in models]
    return found


def predicted_by_others(
    fold: tuple[str, Sequence[tuple[str, str]]], trained: Mapping[tuple[str, str], ParallelModel]
) -> list[HeldOut]:
    """The held-out plans, planned anew after all the others were recalibrated on."""
    kind, held_out = fold
    launch.agree_on(lambda: Store().forget_steps(lambda _: True))
    for key, result in trained.items():
        if key not in held_out:
            found = result.recalibrate()
    if launch.rank() == 0:
        print(f"  {kind} held out: " + "; ".join(found.corrections.lines()), flush=True)
    rows = []
    for model, name in held_out:
        result = trained[model, name]
        again = planned(model, plan=result.plan)
        _, measured = result.monitor.medians()
        row = HeldOut(
            plan=f"{model} {name}",
            fold=kind,
            measured_s=measured["train_step_s"],
            before_s=result.monitor.predicted.train_step_s,
            after_s=again.monitor.predicted.train_step_s,
        )
        rows.append(row)
    return rows
