"""Plans, prices and reports of many models, clusters and overrides, written to a file; two such
files compared.

    python -m scripts.record_plans record before.json [--only TEXT]
    python -m scripts.record_plans compare before.json after.json

For changes that must change nothing: record before, record after, compare. Everything a user can
see of a plan is in the file: the plan itself, every digit of its predicted step, memory, bubble and
MFU, the report as text and as data, the alternatives and what each override costs. Planning times
are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers as hf

from meshwright import Overrides, auto_parallelize
from scripts.recording.cases import Case, cases


def recorded(case: Case) -> dict[str, Any]:
    """What a user sees of one case."""
    with torch.device("meta"):
        model, batch, loss = case.model()
    try:
        result = auto_parallelize(
            model,
            case.cluster(),
            example_inputs=batch,
            global_batch_size=case.batch,
            loss_fn=loss,
            overrides=Overrides(**case.overrides),
            profile=False,
            **case.options,
        )
    except ValueError as error:
        return {"error": f"{type(error).__name__}: {error}"}
    prediction = result.prediction
    return {
        "plan": json.loads(result.plan.to_json()),
        "step_time_s": repr(prediction.step_time_s),
        "peak_memory_bytes": [repr(x) for x in prediction.peak_memory_bytes],
        "bubble_fraction": repr(prediction.bubble_fraction),
        "mfu": repr(prediction.mfu),
        "report": without_times(result.report.text(full=True)),
        "data": numbers_kept(result.report.to_dict()),
    }


def without_times(report: str) -> list[str]:
    """The report's lines without the times of planner and solver."""
    kept = [line for line in report.splitlines() if not line.startswith("Planned in")]
    return [re.sub(r"(HiGHS|CBC|elimination) in [\d.]+ s", r"\1", line) for line in kept]


def numbers_kept(data: Any) -> Any:
    """JSON data with every digit of its floats, less the planner's own times."""
    if isinstance(data, Mapping):
        return {
            str(k): numbers_kept(v) for k, v in data.items() if k not in ("planning_s", "time_s")
        }
    if isinstance(data, list | tuple):
        return [numbers_kept(v) for v in data]
    return repr(data) if isinstance(data, float) else data


def record(path: Path, only: str) -> None:
    found = {}
    for name, case in cases():
        if only in name:
            print(name, file=sys.stderr, flush=True)
            found[name] = recorded(case)
    path.write_text(json.dumps(found, indent=1, default=str), encoding="utf-8")


def differences(a: Any, b: Any, at: str = "") -> Iterator[str]:
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}):
            yield from differences(a.get(key), b.get(key), f"{at}/{key}")
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(x, y, f"{at}/{i}")
    elif a != b:
        yield f"{at}: {a!r:.300} -> {b!r:.300}"


def compare(before: Path, after: Path) -> int:
    a, b = (json.loads(path.read_text(encoding="utf-8")) for path in (before, after))
    found = list(differences(a, b))
    print("\n".join(found) or f"{len(a)} cases, no difference")
    return 1 if found else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["record", "compare"])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--only", default="", metavar="TEXT", help="cases whose names contain TEXT")
    args = parser.parse_args()
    hf.logging.set_verbosity_error()
    if args.what == "record":
        record(args.paths[0], args.only)
    else:
        raise SystemExit(compare(*args.paths))


if __name__ == "__main__":
    main()
