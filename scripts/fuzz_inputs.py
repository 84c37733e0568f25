"""Malformed inputs: each is refused by an error with a place, legal values and a way out.

    scripts/fuzz_inputs [--cases 5000] [--processes 2] [--seed 0] [--family plan ...]
    scripts/fuzz_inputs --family plan --only 17      # one case again, with its traceback

Printed: cases by family and outcome, and of every kind of fault the first cases. The exit status
is 1 where there is any.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path

from scripts.fuzzing import calls, files, ground, running, saved, training
from scripts.fuzzing.pool import GOOD, Family, Outcome, rng_of, run_cases

FAMILIES = (
    Family(name="plan", make=files.plan, share=28),
    Family(name="overrides", make=calls.overrides, share=22, limit_s=20.0),
    Family(name="cluster", make=files.cluster, share=14),
    Family(name="catalog", make=files.catalog, share=12),
    Family(name="import", make=files.imported, share=14),
    Family(name="command", make=calls.command, share=5, refuse_s=8.0, limit_s=30.0),
    Family(name="checkpoint", make=saved.checkpoint, share=14),
    Family(name="weights", make=saved.weights, share=8),
    Family(name="cache", make=saved.cache_file, share=10),
    Family(name="environment", make=saved.environment, share=6, refuse_s=3.0, limit_s=4.0),
    Family(name="loader", make=training.loader, share=9, refuse_s=3.0, limit_s=10.0),
    Family(name="packing", make=training.packing, share=6),
    Family(name="fit", make=training.fitting, share=9, refuse_s=5.0, limit_s=30.0),
    Family(name="trainer", make=training.trainer, share=5, refuse_s=10.0, limit_s=60.0),
    Family(name="asked", make=running.asked, share=10, refuse_s=5.0, limit_s=20.0),
    Family(name="export", make=running.export, share=9, refuse_s=3.0, limit_s=10.0),
    Family(name="reported", make=running.reported, share=9, limit_s=10.0),
    Family(name="model", make=calls.model, share=5, refuse_s=10.0, limit_s=60.0),
)
SAID_EVERY = 500  # cases
SHOWN = 3  # cases of each kind of fault


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=5000, help="of all families (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="at once (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--family", choices=[f.name for f in FAMILIES], action="append")
    parser.add_argument("--only", type=int, help="this case alone, in this process")
    options = parser.parse_args()
    chosen = [f for f in FAMILIES if options.family is None or f.name in options.family]
    if options.only is not None:
        return _again(chosen[0], options.only, options.seed)
    began = time.monotonic()
    found = fuzz(chosen, options.cases, seed=options.seed, processes=options.processes)
    print(table(found), f"\n{len(found)} cases in {time.monotonic() - began:.0f} s", sep="")
    print(faults_text(found, options.seed), end="")
    return 1 if faults(found) else 0


def fuzz(
    families: tuple[Family, ...] | list[Family], cases: int, *, seed: int, processes: int
) -> list[Outcome]:
    """The outcomes of so many cases, shared out among the families."""
    ground.plans(), ground.problem(), saved.saved(), saved.cached()  # made before the forks
    running.exported(), running.report(), training.loaded()
    whole = sum(f.share for f in families)
    wanted = [
        (family, number)
        for family in families
        for number in range(max(1, cases * family.share // whole))
    ]
    found = []
    for outcome in run_cases(wanted, seed=seed, processes=processes):
        found.append(outcome)
        if len(found) % SAID_EVERY == 0:
            print(
                f"{len(found)} of {len(wanted)} cases, {len(faults(found))} faults", file=sys.stderr
            )
    return found


def faults(found: list[Outcome]) -> list[Outcome]:
    return [outcome for outcome in found if outcome.kind not in GOOD]


def table(found: list[Outcome]) -> str:
    """Cases by family and outcome."""
    lines = []
    for family in dict.fromkeys(outcome.family for outcome in found):
        own = [outcome for outcome in found if outcome.family == family]
        counts = Counter(o.kind if o.kind in GOOD else "fault" for o in own)
        words = ", ".join(f"{counts[kind]} {kind}" for kind in (*GOOD, "fault"))
        lines.append(f"{family:10} {len(own):5}: {words}; CPU s at most "
                     f"{max(o.cpu_s for o in own):.2f}")  # fmt: skip
    return "\n".join(lines)


def faults_text(found: list[Outcome], seed: int) -> str:
    """The first cases of every kind of fault, the commonest kind first."""
    kinds: dict[tuple[str, str], list[Outcome]] = defaultdict(list)
    for outcome in faults(found):
        kinds[outcome.family, outcome.kind].append(outcome)
    lines = []
    for (family, kind), own in sorted(kinds.items(), key=lambda item: -len(item[1])):
        lines.append(f"\n{len(own)} x {family}: {kind}")
        lines += [
            f"  --family {family} --only {o.number} --seed {seed} ({o.cpu_s:.2f} s): {o.said}"
            for o in own[:SHOWN]
        ]
    return "".join(f"{line}\n" for line in lines)


def _again(family: Family, number: int, seed: int) -> int:
    with tempfile.TemporaryDirectory() as folder:
        said, run = family.make(rng_of(family.name, number, seed), Path(folder))
        print(said)
        run()
    return 0


if __name__ == "__main__":
    sys.exit(main())
