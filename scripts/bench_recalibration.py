"""Predicted against measured steps of held-out plans, before and after `result.recalibrate()`.

    python -m scripts.bench_recalibration [--ranks 1 2 4] [--models gpt2 llama] [--profile]

Per number of gloo ranks: several plans of small transformers models are trained on this machine.
Then in turns each part of the plans is recalibrated on, and the others are planned anew, by what
the cache says then: their error is that of plans that no factor has seen. A plan's error is
|log(predicted / measured)| of its `train_step`, printed as the factor by which it is off, the
geometric mean over the plans. `--models` of which each is held out whole, where there are several:
what one model's steps say of another's. Only ratios are printed: seconds depend on what else runs.
`--profile` measures the machine's operators and collectives first (`meshwright profile`).
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
import transformers

from meshwright import Cluster, Overrides, ParallelModel, auto_parallelize, distributed
from meshwright.executor.ranks import launch
from meshwright.profiles.store import Store
from meshwright.shell.profile_command import Effort, profile_model
from scripts.ranks.measure import KEEPS_FREED, run_ranks
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


def off(rows: Sequence[HeldOut], predicted: Callable[[HeldOut], float]) -> float:
    """The factor by which predictions are off, in the geometric mean."""
    logs = [abs(math.log(predicted(row) / row.measured_s)) for row in rows]
    return math.exp(statistics.fmean(logs))


# --- on ranks -------------------------------------------------------------------------------------


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
        found = [{key: getattr(row, key) for key in HeldOut.__annotations__} for row in rows]
        out.write_text(json.dumps(found))


def folds(wanted: Sequence[tuple[str, str]]) -> list[tuple[str, list[tuple[str, str]]]]:
    """Parts of the plans to hold out: half of each model's; then each model, if there are more."""
    found = [(f"half {k + 1}", list(wanted[k::2])) for k in range(2)]
    models = list(dict.fromkeys(model for model, _ in wanted))
    if len(models) > 1:
        found += [(f"all of {m}", [each for each in wanted if each[0] == m]) for m in models]
    return found


def predicted_by_others(
    fold: tuple[str, Sequence[tuple[str, str]]], trained: dict[tuple[str, str], ParallelModel]
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


# --- the launches ---------------------------------------------------------------------------------


def compare(ranks: int, args: argparse.Namespace) -> None:
    with tempfile.TemporaryDirectory() as folder:
        os.environ["MESHWRIGHT_CACHE"] = folder
        if args.profile:
            for name in args.models:
                case = CASES[name]
                profile_model(
                    case.model(), case.batch(2), case.loss_fn, cluster(ranks),
                    batch=BATCH, precision="fp32", effort=Effort(budget_s=args.budget),
                )  # fmt: skip
        out, log = Path(folder, "rows.json"), Path(folder, "log")
        command = ["-m", "scripts.bench_recalibration", "--worker", str(out), *args.models]
        run_ranks(command, ranks=ranks, log=log, timeout_s=args.limit, environment=KEEPS_FREED)
        said = [line for line in log.read_text().splitlines() if " held out: " in line]
        print("\n".join(said))
        rows = [HeldOut(**row) for row in json.loads(out.read_text())]
    for fold in dict.fromkeys(row.fold for row in rows):
        own = [row for row in rows if row.fold == fold]
        for row in own:
            before, after = (x / row.measured_s for x in (row.before_s, row.after_s))
            print(f"  {row.plan:30} predicted/measured {before:6.2f} before, {after:6.2f} after")
        before, after = off(own, lambda r: r.before_s), off(own, lambda r: r.after_s)
        print(
            f"{ranks} ranks, {fold} held out: {len(own)} plans off by × {before:.2f} before, "
            f"× {after:.2f} after",
            flush=True,
        )


def main() -> None:
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    if sys.argv[1:2] == ["--worker"]:
        with distributed("gloo"):
            run_plans(sys.argv[3:], Path(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4], choices=sorted(PLANS))
    parser.add_argument("--models", nargs="+", choices=sorted(CASES), default=["gpt2", "llama"])
    parser.add_argument("--profile", action="store_true", help="measure the machine first")
    parser.add_argument("--budget", type=float, default=60.0, help="seconds to profile a model")
    parser.add_argument("--limit", type=float, default=1800.0, help="seconds of a launch, at most")
    args = parser.parse_args()
    print(f"load average before: {os.getloadavg()[0]:.2f} of {os.cpu_count()} cores")
    for ranks in args.ranks:
        compare(ranks, args)


if __name__ == "__main__":
    main()
