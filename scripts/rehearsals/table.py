"""Peak memory as it is priced and as it is rehearsed, of 126 small plans.

    python -m scripts.rehearsals.table [--only TEXT ...] [--limit 300] [--json FILE]

Models of seven families on meta (`scripts/rehearsals/models.py`) are planned with every decision
given (`scripts/rehearsals/plans.py`) for CPU ranks, then rehearsed, each plan in a process of its
own, one after the other, for at most `--limit` seconds. Shown are MiB of each device group: the
price without what the catalog reserves for a process, which a rehearsal doesn't have, the rehearsed
peak, and the price over it; then the largest and the mean deviation. `--only` takes plans whose
name has all the words of one of the TEXTs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import transformers

from meshwright import Cluster, Overrides, auto_parallelize
from scripts.rehearsals.models import FAMILIES, batch_of
from scripts.rehearsals.plans import CASES, Case

MIB = 2**20
NEAR = 0.02


def rehearsed(case: Case) -> dict[str, Any]:
    """A plan's priced and rehearsed peaks in bytes, by device group; by kind of the fullest."""
    started = time.monotonic()
    cluster = Cluster.local(case.ranks, "cpu", measure=False)
    result = _planned(case, cluster, case.overrides)
    if case.cut:
        blocks = [name for stage in result.plan.stages for name in stage.blocks]
        ends = [sum(case.cut[: k + 1]) for k in range(len(case.cut))]
        if ends[-1] != len(blocks):
            raise ValueError(f"{case.name}: the model has {len(blocks)} blocks: {blocks}")
        stages = [blocks[end - n : end] for end, n in zip(ends, case.cut, strict=True)]
        result = _planned(case, cluster, case.overrides | {"stages": stages})
    found = result.rehearse()
    fullest = max(found.logs.values(), key=lambda log: log.peak_bytes)
    return {
        "name": case.name,
        "priced": list(found.priced_bytes),
        "rehearsed": found.peak_bytes,
        "kinds": dict(fullest.peak_by_kind),
        "mismatches": [str(m) for m in found.mismatches],
        "seconds": time.monotonic() - started,
    }


def _planned(case: Case, cluster: Cluster, overrides: dict[str, Any]) -> Any:
    return auto_parallelize(
        FAMILIES[case.family].model(),
        cluster,
        example_inputs=batch_of(case.family),
        global_batch_size=case.rows,
        precision=case.precision,
        overrides=Overrides(**overrides),
        target="eager",
        profile=False,
    )


def deviations(found: dict[str, Any]) -> list[float]:
    """The price over the rehearsed peak, less one, of each device group."""
    return [a / b - 1 for a, b in zip(found["priced"], found["rehearsed"], strict=True)]


def line_of(found: dict[str, Any]) -> str:
    """A row of a Markdown table."""
    if "error" in found:
        return f"| {found['name']} | - | - | {found['error']} |"
    sizes = [", ".join(f"{x / MIB:.0f}" for x in found[name]) for name in ("priced", "rehearsed")]
    over = ", ".join(f"{100 * x:+.1f}" for x in deviations(found))
    more = f" {len(found['mismatches'])} mismatches" if found["mismatches"] else ""
    return f"| {found['name']} | {' | '.join(sizes)} | {over} %{more} |"


def summary(rows: Sequence[dict[str, Any]]) -> str:
    """How far prices are off, over all device groups of all plans."""
    off = [abs(x) for found in rows if "error" not in found for x in deviations(found)]
    if not off:
        return "no plan was rehearsed"
    plans = [found for found in rows if "error" not in found]
    near = sum(max(map(abs, deviations(found))) <= NEAR for found in plans)
    return (
        f"{len(plans)} of {len(rows)} plans rehearsed, {near} within {NEAR:.0%}; of "
        f"{len(off)} device groups the largest deviation is {max(off):.1%}, the mean "
        f"{statistics.mean(off):.2%}"
    )


def in_process(case: Case, limit_s: float) -> dict[str, Any]:
    """`rehearsed` in a process of its own."""
    command = [sys.executable, "-m", "scripts.rehearsals.table", "--one", case.name]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=limit_s, check=False)
    except subprocess.TimeoutExpired:
        return {"name": case.name, "error": f"more than {limit_s:.0f} s"}
    if done.returncode:
        said = done.stderr.strip().splitlines() or ["nothing said"]
        return {"name": case.name, "error": said[-1][:200]}
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="plans with all words of a TEXT")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of each plan")
    parser.add_argument("--json", type=Path, help="write what was found to this file")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if args.one:
        case = next(case for case in CASES if case.name == args.one)
        sys.stdout.write(json.dumps(rehearsed(case)) + "\n")
        return
    texts = [text.split() for text in args.only or [""]]
    rows = []
    for case in CASES:
        if any(all(word in case.name.split() for word in words) for words in texts):
            rows.append(in_process(case, args.limit))
            sys.stdout.write(line_of(rows[-1]) + "\n")
            sys.stdout.flush()
    sys.stdout.write(summary(rows) + "\n")
    if args.json:
        args.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
