"""Predicted against measured step time of many plans on this machine's CPU ranks.

    python -m scripts.predicted_vs_measured [--ranks 2] [--models gpt2 llama ...] [--budget 90]
                                            [--gbit 1] [--regret]

Per model: profile what its plans may run, plan under each of a list of overrides, price the plan on
the profile, then run all plans in one launch, their steps taken in turns so that whatever else the
machine does hits all of them alike. A step is forward, backward, gradient reduction and optimizer;
its time is the median over the turns of the slowest rank's. Memory that is freed is kept by the C
library: a virtual machine's pages take longer to come than a step to compute. Printed: both times,
the error, the mean error, Spearman's rank correlation.

`--budget 0` profiles nothing: prices rest on the machine's rates alone. `--gbit` puts every rank on
an emulated host on such links (`scripts/emulated_cluster`; root).
`--regret` runs the plan that the search chooses, the five predicted best of other decisions, drawn
at random, and five more of these, and prints the choice's measured time over the best measured.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import os
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers

from meshwright import Cluster, ParallelModel, auto_parallelize, distributed
from meshwright.executor.ranks import launch
from meshwright.planner.overrides import OverrideError, Overrides
from meshwright.planner.plan import InfeasibleError, Plan, describe
from meshwright.profiles.profile import cores_busy
from meshwright.profiles.store import DeviceId, Measurements, Store
from meshwright.profiles.timings import CollectiveTiming
from meshwright.shell.profile_command import Effort, profile_model
from scripts.ranks.measure import KEEPS_FREED, run_ranks
from scripts.ranks.rank_correlation import spearman
from scripts.ranks.small_models import CASES, Case

BATCH = 16
TURNS, WARM_UP = 7, 2
HEAP_BYTES = 8 * 2**30  # of each rank, more than the plans together take
DRAWN, COMPARED = 16, 5  # decisions drawn for a regret; how many of the best, and of the rest, run
LAUNCH_TIMEOUT_S = 500.0


# --- plans ----------------------------------------------------------------------------------------


def wanted(ranks: int) -> list[Overrides]:
    """Plans that differ in everything the planner decides: one axis of all ranks, then two."""

    def plans(dp: int, tp: int, pp: int, **more: Any) -> Iterator[Overrides]:
        for m, zero in itertools.product(more.pop("rows", (1, 2, 4)), more.pop("zero", (0,))):
            one = {"recompute": "none", **more}
            yield Overrides(dp=dp, tp=tp, pp=pp, num_microbatches=m, zero=zero, **one)

    half = ranks // 2
    found = [
        *plans(ranks, 1, 1, zero=(0, 1, 2, 3)),
        *plans(ranks, 1, 1, rows=(1,), zero=(0, 3), recompute="full"),
        *plans(1, ranks, 1),
        *plans(1, ranks, 1, rows=(1,), recompute="full"),
        *plans(1, 1, ranks, rows=(4,), schedule="gpipe"),
        *plans(1, 1, ranks, rows=(4, 8), schedule="1f1b"),
        *plans(1, 1, ranks, rows=(4,), schedule="1f1b", recompute="full"),
        *plans(1, 1, ranks, rows=(4,), schedule="zb_h1"),
    ]
    if ranks == 2:
        found += plans(1, 1, 2, rows=(4, 8), schedule="interleaved_1f1b", virtual_stages=2)
    else:
        found += plans(half, 2, 1, rows=(1, 4), zero=(0, 1, 2))
        found += plans(half, 1, 2, rows=(4,), zero=(0, 1, 2), schedule="1f1b")
        found += plans(1, half, 2, rows=(4,), schedule="1f1b")
    return found


def drawn(ranks: int, count: int) -> list[Overrides]:
    """So many different decisions at random, every time the same; not all of them are legal."""
    draw = random.Random(0)
    powers = [2**k for k in range(ranks.bit_length()) if ranks % 2**k == 0]
    found: dict[str, Overrides] = {}
    while len(found) < count:
        dp, tp = draw.choice(powers), draw.choice(powers)
        if ranks % (dp * tp):
            continue
        one = Overrides(
            dp=dp,
            tp=tp,
            pp=ranks // (dp * tp),
            num_microbatches=draw.choice([1, 2, 4, 8]),
            zero=draw.choice([0, 1, 2, 3]) if dp > 1 else 0,
            recompute=draw.choice(["none", "none", "full"]),
        )
        found[repr(one)] = one
    return list(found.values())


# --- the launch -----------------------------------------------------------------------------------


def run_plans(name: str, folder: Path) -> None:
    """On every rank: build all plans of the folder, take their steps in turns, write the times."""
    case = CASES[name]
    batch = case.batch(BATCH)
    touched = [torch.ones(2**20) for _ in range(HEAP_BYTES // 2**22)]
    del touched  # the C library has the memory from now on
    running: dict[str, tuple[ParallelModel, torch.optim.Optimizer]] = {}
    for path in sorted(folder.glob("*.plan.json")):
        made = auto_parallelize(
            case.model(),
            Cluster.detect(),
            example_inputs=case.batch(2),
            global_batch_size=BATCH,
            loss_fn=case.loss_fn,
            precision="fp32",
            plan=path,
        )
        running[path.name] = made, _optimizer(made)
    times: dict[str, list[float]] = {plan: [] for plan in running}
    for _ in range(WARM_UP + TURNS):
        for plan, (model, optimizer) in running.items():
            launch.agree_on(lambda: None)  # all ranks begin together
            started = time.perf_counter()
            optimizer.zero_grad()
            model.train_step(batch)
            optimizer.step()
            times[plan].append(time.perf_counter() - started)
    (folder / f"{launch.rank()}.times.json").write_text(json.dumps(times))


def _optimizer(model: ParallelModel) -> torch.optim.Optimizer:
    """One pass over the states; torch's loop on a CPU makes several."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def measured(name: str, folder: Path, ranks: int, gbit: float | None) -> dict[str, float]:
    """Seconds of a step of each plan in the folder: median over the turns, of the slowest rank."""
    run_ranks(
        ["-m", "scripts.predicted_vs_measured", "--worker", name, str(folder)],
        ranks=ranks,
        log=folder / "log",
        timeout_s=LAUNCH_TIMEOUT_S,
        link_gbit=gbit,
        environment=KEEPS_FREED,
    )
    every = [json.loads((folder / f"{rank}.times.json").read_text()) for rank in range(ranks)]
    slowest = {
        plan: [max(turn) for turn in zip(*(times[plan] for times in every), strict=True)]
        for plan in every[0]
    }
    return {plan: statistics.median(times[WARM_UP:]) for plan, times in slowest.items()}


# --- prediction -----------------------------------------------------------------------------------


def described(ranks: int, gbit: float | None) -> Cluster:
    """This machine's ranks, or as many hosts of one rank each."""
    local = Cluster.local(ranks, "cpu")
    if gbit is None:
        return local
    return dataclasses.replace(local, num_nodes=ranks, devices_per_node=1)


def profile(case: Case, settings: argparse.Namespace) -> None:
    """Measure what plans may run, into the `usual` cache; for emulated hosts into another one, too,
    this machine's operators, whose cores they share, beside the links' collectives."""
    ranks, gbit, usual = settings.ranks, settings.gbit, settings.usual
    if not settings.budget:
        return
    local = Cluster.local(ranks, "cpu")
    summary = profile_model(
        case.model(),
        case.batch(2),
        case.loss_fn,
        local,
        batch=BATCH,
        precision="fp32",
        effort=Effort(budget_s=settings.budget, collectives=gbit is None),
        store=usual,
    )
    sys.stderr.write(f"{summary}\n")
    if gbit is None:
        return
    share = max(1.0, ranks / (os.cpu_count() or 1))
    operators = usual.read(DeviceId.here("cpu", cores_busy(local))).operators
    links = Store()
    output = links.path.with_name("collectives.json")
    module = "meshwright.profiles.measure.collectives"
    run_ranks(
        ["-m", module, "--output", str(output), "--budget", str(settings.budget)],
        ranks=ranks,
        log=output.with_suffix(".log"),
        timeout_s=LAUNCH_TIMEOUT_S,
        link_gbit=gbit,
    )
    links.add(
        Measurements(
            device=DeviceId.here("cpu", cores_busy(described(ranks, gbit))),
            operators={
                text: dataclasses.replace(
                    t, forward_s=t.forward_s * share, backward_s=t.backward_s * share
                )
                for text, t in operators.items()
            },
            collectives=tuple(CollectiveTiming(**row) for row in json.loads(output.read_text())),
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan, what it was predicted to take, and what it took."""

    plan: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def compare(name: str, settings: argparse.Namespace) -> list[Row]:
    """Profile, predict, run; for a regret the search's choice first, then plans that it left."""
    ranks, gbit = settings.ranks, settings.gbit
    case = CASES[name]
    profile(case, settings)
    asked = [Overrides(), *drawn(ranks, DRAWN)] if settings.regret else wanted(ranks)
    plans = list(_planned(name, described(ranks, gbit), asked))
    if settings.regret:
        ours, *rest = plans
        rest = [each for each in rest if each[0] != ours[0]]
        best = sorted(rest, key=lambda each: each[1])[:COMPARED]
        others = [each for each in rest if each not in best]
        plans = [ours, *best, *random.Random(0).sample(others, min(COMPARED, len(others)))]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for k, (plan, _) in enumerate(plans):
            plan.save(folder / f"{k:02d}.plan.json")
        took = measured(name, folder, ranks, gbit)
    return [
        Row(plan=describe(plan), predicted_s=seconds, measured_s=took[f"{k:02d}.plan.json"])
        for k, (plan, seconds) in enumerate(plans)
    ]


def _planned(
    name: str, cluster: Cluster, asked: Sequence[Overrides]
) -> Iterator[tuple[Plan, float]]:
    """A plan for each of the overrides that has one, with its predicted seconds."""
    case = CASES[name]
    for overrides in asked:
        try:
            result = auto_parallelize(
                case.model(),
                cluster,
                example_inputs=case.batch(2),
                global_batch_size=BATCH,
                loss_fn=case.loss_fn,
                precision="fp32",
                optimizer="adamw_fused",
                overrides=overrides,
            )
        except (InfeasibleError, OverrideError) as error:
            sys.stderr.write(f"{name}: {overrides.given()}: {error}\n")
            continue
        yield result.plan, result.prediction.step_time_s


def show(name: str, rows: Sequence[Row]) -> None:
    print(f"{name}")
    for row in rows:
        print(
            f"  {row.plan:<60} predicted {row.predicted_s * 1e3:8.1f} ms  "
            f"measured {row.measured_s * 1e3:8.1f} ms  {row.error:+7.1%}"
        )
    mean = statistics.fmean(abs(row.error) for row in rows)
    order = spearman([row.predicted_s for row in rows], [row.measured_s for row in rows])
    bias = statistics.fmean(row.error for row in rows)
    print(
        f"  {len(rows)} plans: mean error {mean:.1%}, bias {bias:+.1%}, Spearman {order:.3f}",
        flush=True,
    )


def show_regret(rows: Sequence[Row]) -> float:
    """How much slower the choice, first of the rows, is than the best that was run."""
    best = min(rows, key=lambda row: row.measured_s)
    regret = rows[0].measured_s / best.measured_s - 1
    print(f"  the choice is {regret:.1%} slower than the best measured: {best.plan}", flush=True)
    return regret


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        torch.set_num_threads(1)
        with distributed("gloo"):
            run_plans(sys.argv[2], Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--models", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--budget", type=float, default=90.0, help="of a profile; 0: none")
    parser.add_argument("--gbit", type=float, help="each rank on an emulated host on such links")
    parser.add_argument("--regret", action="store_true", help="the choice against what it left")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"load average before: {os.getloadavg()[0]:.2f} (a step waits for whatever else runs)")
    transformers.logging.set_verbosity_error()
    args.usual = Store()
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as cache:
        if args.gbit:  # prices rest on the links' profile from here on
            os.environ["MESHWRIGHT_CACHE"] = cache
        for name in args.models:
            rows = compare(name, args)
            show(name, rows)
            if args.regret:
                show_regret(rows)
            found += rows
    mean = statistics.fmean(abs(row.error) for row in found)
    links = f", hosts on links of {args.gbit:g} Gb/s" if args.gbit else ""
    print(f"{len(found)} plans on {args.ranks} ranks{links}: mean error {mean:.1%}")


if __name__ == "__main__":
    main()
