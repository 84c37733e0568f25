"""Predicted against measured steps of held-out plans, before and after `result.recalibrate()`.

    python -m scripts.ranks.recalibration [--ranks 1 2 4] [--models gpt2 llama] [--profile]

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
from pathlib import Path

import torch
import transformers

from meshwright import distributed
from meshwright.shell.profile_command import Effort, profile_model
from scripts.ranks.held_out import BATCH, PLANS, HeldOut, cluster, run_plans
from scripts.ranks.measure import KEEPS_FREED, run_ranks
from scripts.ranks.small_models import CASES


def off(rows: Sequence[HeldOut], predicted: Callable[[HeldOut], float]) -> float:
    """The factor by which predictions are off, in the geometric mean."""
    logs = [abs(math.log(predicted(row) / row.measured_s)) for row in rows]
    return math.exp(statistics.fmean(logs))


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
        command = ["-m", "scripts.ranks.recalibration", "--worker", str(out), *args.models]
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
