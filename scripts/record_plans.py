"""Plans of many models, clusters and overrides and what they are predicted to cost, in a file that
is committed; what a change of the code does to them.

    python -m scripts.record_plans record RECORD [--reports TEXT] [--only NAME]
    python -m scripts.record_plans compare BEFORE AFTER
    python -m scripts.record_plans reprice RECORD [AFTER]

`record` searches each case (with `--only` some anew, the others stay) and writes its plan, the
price of the plan (the numbers of the report that follow from the plan alone) and those of the
search: its bound, and of small cases the step of the best plan of each family. Reports as text,
which no test compares, go to a file of their own.

`reprice` gives the plans of a record as `plan=`, and compares their prices with the recorded ones,
or writes them to AFTER. So a change of price is told from a change of choice: where a plan changed
and its old one costs what it did, the search chose otherwise.

The test of a record (`tests/planner/search/test_recorded.py`) does both. Floats are compared with a
tolerance that other machines' rounding stays within.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import re
import sys
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import transformers as hf

from meshwright import Overrides, ParallelModel, auto_parallelize
from meshwright.planner.alternatives import answers
from meshwright.planner.plan.infeasible import InfeasibleError
from meshwright.planner.plan.plan import Plan
from scripts.recording.cases import Case, cases

RECORD = Path(__file__).with_name("recording") / "record.json"
REL, DIGITS = 1e-6, 9
MOST_LINES = 12  # of a change that are said
# parts of a report that follow from the plan, less what the search adds to them
PRICED = (
    "summary", "throughput", "uncertainty", "components_s", "stages", "memory", "communication",
    "device_groups",
)  # fmt: skip
OF_SEARCH = ("bound_s", "gap", "complete")
OF_PLAN = ("layout",)  # which has it, too

Entry = dict[str, Any]


def planned(case: Case, **given: Any) -> ParallelModel:
    with torch.device("meta"):
        model, batch, loss = case.model()
    return auto_parallelize(
        model,
        case.cluster(),
        example_inputs=batch,
        global_batch_size=case.batch,
        loss_fn=loss,
        profile=False,
        **case.options,
        **given,
    )


def recorded(name: str, case: Case) -> tuple[Entry, str]:
    """Plan, price and numbers of the search, or why there is none; the report. Families of plans
    are searched for small cases alone."""
    try:
        result = planned(case, overrides=Overrides(**case.overrides))
    except InfeasibleError as error:
        ways = {r.what: rounded(r.step_time_s) for r in error.relaxations}
        lacks = {"shortfall_bytes": rounded(error.shortfall_bytes)}
        return {"error": type(error).__name__, "price": lacks, "search": {"ways_out": ways}}, ""
    except ValueError as error:
        return {"error": f"{type(error).__name__}: {error}"}, ""
    if not name.startswith("small"):
        result.report.deferred.look_no_further()
    with mock.patch.object(answers, "ALL_S", math.inf):  # which no slow machine may end
        data = result.report.to_dict()
    families = {
        row["family"]: rounded(row["step_time_s"]) for row in data["alternatives"] if row["plan"]
    }
    search = {name: rounded(data["summary"][name]) for name in OF_SEARCH}
    entry = {
        "plan": json.loads(result.plan.to_json()),
        "price": price_of(data),
        "search": search | {"families": families},
    }
    return entry, without_times(result.report.text(full=True))


def repriced(case: Case, entry: Entry) -> Entry:
    """The price of the recorded plan."""
    plan = Plan.from_json(json.dumps(entry["plan"]))
    return price_of(planned(case, plan=plan).report.to_dict())


def price_of(report: Mapping[str, Any]) -> Entry:
    """The numbers of a report that follow from its plan."""
    parts = {name: report[name] for name in PRICED}
    others = (*OF_SEARCH, *OF_PLAN)
    parts["summary"] = {k: v for k, v in report["summary"].items() if k not in others}
    return rounded(parts)


def rounded(data: Any) -> Any:
    """JSON data with the digits that are recorded, without its text."""
    if isinstance(data, Mapping):
        kept = {str(k): rounded(v) for k, v in data.items()}
        return {k: v for k, v in kept.items() if v not in (None, {}, [])}
    if isinstance(data, list | tuple):
        return [v for v in map(rounded, data) if v not in (None, {}, [])]
    if isinstance(data, float):
        return float(f"{data:.{DIGITS}g}")
    return None if isinstance(data, str) else data


def without_times(report: str) -> str:
    """The report without the times of planner and solver."""
    kept = [line for line in report.splitlines() if not line.startswith("Planned in")]
    return "\n".join(re.sub(r"(HiGHS|CBC|elimination) in [\d.]+ s", r"\1", line) for line in kept)


# --- records -------------------------------------------------------------------------------------


def written(record: Mapping[str, Entry]) -> str:
    """JSON with a line for each plan, each price and each search."""

    def entry(of: Entry) -> str:
        lines = [f"  {json.dumps(name)}: {json.dumps(part)}" for name, part in of.items()]
        return ",\n".join(lines)

    return (
        "{\n"
        + ",\n".join(f" {json.dumps(name)}: {{\n{entry(of)}\n }}" for name, of in record.items())
        + "\n}\n"
    )


def read(path: Path) -> dict[str, Entry]:
    found: dict[str, Entry] = json.loads(path.read_text(encoding="utf-8"))
    return found


def differences(a: Any, b: Any, at: str = "") -> Iterator[str]:
    """Where two pieces of JSON data differ, with both values."""
    if isinstance(a, dict) and isinstance(b, dict):
        for key in sorted({*a, *b}):
            yield from differences(a.get(key), b.get(key), f"{at}/{key}" if at else key)
    elif isinstance(a, list) and isinstance(b, list) and len(a) == len(b):
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            yield from differences(x, y, f"{at}/{i}")
    elif not same(a, b):
        yield f"{at}: {a!r:.300} -> {b!r:.300}"


def same(a: Any, b: Any) -> bool:
    numbers = all(isinstance(x, float | int) for x in (a, b))
    return a == b or (numbers and math.isclose(a, b, rel_tol=REL, abs_tol=1e-15))


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """What changed of a case: its `choice` (the plan, or that there is one), the `price` of one
    plan, and numbers of the `search` alone."""

    name: str
    choice: tuple[str, ...] = ()
    price: tuple[str, ...] = ()
    search: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.choice or self.price or self.search)

    def __str__(self) -> str:
        lines = []
        for kind in ("choice", "price", "search"):
            if found := getattr(self, kind):
                more = [f"  and {len(found) - MOST_LINES} more"] * (len(found) > MOST_LINES)
                lines += [f"{self.name}: {kind} changed"]
                lines += [*(f"  {line}" for line in found[:MOST_LINES]), *more]
        return "\n".join(lines)


def change(name: str, before: Entry, after: Entry, repriced: Entry | None = None) -> Change:
    """What changed of a case; `repriced` is what its plan of before costs now."""
    chosen = tuple(
        line
        for part in ("plan", "error")
        for line in differences(before.get(part), after.get(part), part)
    )
    if chosen and {"plan"} <= before.keys() & after.keys():
        steps = [of["price"]["summary"]["step_time_s"] for of in (before, after)]
        chosen = (f"step_time_s of the two: {steps[0]} -> {steps[1]}", *chosen)
    old, new = before.get("price"), repriced if chosen else after.get("price")
    searches = () if chosen else differences(before.get("search"), after.get("search"))
    return Change(
        name=name,
        choice=chosen,
        price=tuple(differences(old, new)) if old and new else (),
        search=tuple(searches),
    )


# --- commands ------------------------------------------------------------------------------------


def named(only: str, among: Collection[str] | None = None) -> Iterator[tuple[str, Case]]:
    for name, case in cases():
        if only in name and (among is None or name in among):
            print(name, file=sys.stderr, flush=True)
            yield name, case


def record(path: Path, reports: Path | None, only: str) -> None:
    """Write all cases to a record, or some anew to the one there is."""
    found = read(path) if only and path.exists() else {}
    texts = []
    for name, case in named(only):
        found[name], report = recorded(name, case)
        texts += [f"=== {name}", report]
        order = [name for name, _ in cases() if name in found]
        path.write_text(written({name: found[name] for name in order}), encoding="utf-8")
    if reports is not None:
        reports.write_text("\n".join(texts), encoding="utf-8")


def compare(before: Path, after: Path) -> int:
    a, b = read(before), read(after)
    return told([change(name, a.get(name, {}), b.get(name, {})) for name in {**a, **b}])


def reprice(path: Path, after: Path | None, only: str) -> int:
    of = {name: entry for name, entry in read(path).items() if "plan" in entry}
    found = {name: of[name] | {"price": repriced(case, of[name])} for name, case in named(only, of)}
    if after is not None:
        after.write_text(written(found), encoding="utf-8")
        return 0
    return told([change(name, of[name], entry) for name, entry in found.items()])


def told(changes: list[Change]) -> int:
    said = [str(each) for each in changes if each]
    print("\n".join(said) or f"{len(changes)} cases, no difference")
    return 1 if said else 0


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["record", "compare", "reprice"])
    parser.add_argument("paths", nargs="+", type=Path)
    parser.add_argument("--reports", type=Path, metavar="TEXT", help="where reports go")
    parser.add_argument("--only", default="", metavar="NAME", help="cases whose names contain it")
    args = parser.parse_args()
    hf.logging.set_verbosity_error()
    first, second = args.paths[0], args.paths[1] if args.paths[1:] else None
    if args.what == "record":
        record(first, args.reports, args.only)
    elif args.what == "reprice":
        raise SystemExit(reprice(first, second, args.only))
    elif second is None:
        parser.error("compare takes two records")
    else:
        raise SystemExit(compare(first, second))


if __name__ == "__main__":
    main()
