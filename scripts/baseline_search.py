"""The search against those of the founding literature, over the same prices.

    python -m scripts.baseline_search [--cases 20] [--seed 0] [--first 0] [--times 100]
                                      [--record FILE]

Each case (`scripts/drawn/cases.py`) is searched under `fastest`; then Metropolis sampling, hill
climbing with random restarts and a policy learned by REINFORCE (`scripts/baselines/`) get so many
times the CPU seconds of that search each, the trace left out, on the same memory. Printed is the
best plan of each as a ratio to the search's step: above 1 it is slower. After one time, a tenth and
all of the seconds, the last with how many plans were tried. A ratio below 1 - `TOLERANCE` is a
defect of the search; the plan is printed as JSON. Cases of which no plan fits are left out. With
`--record` cases are appended to a file of JSON lines, those that it has are not run again. Exit
status 1 where there is a defect.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import transformers

from meshwright import api
from meshwright.arguments import MEMORY_MARGIN
from meshwright.costmodel.operators import Problem
from meshwright.planner.overrides import Overrides
from meshwright.planner.plan import InfeasibleError, describe, seconds
from meshwright.planner.search import Search
from scripts.baselines.methods import METHODS, Run
from scripts.baselines.space import PlanSpace
from scripts.drawn.cases import drawn
from scripts.drawn.records import asked_for, resumed
from scripts.recording.cases import Case

TOLERANCE = 0.005


@dataclass(slots=True, kw_only=True)
class Found:
    """What a method found in `limit_s` CPU seconds, of `tried` plans: (seconds, ratio to the
    search's step) whenever it improved; the last plan, and as JSON where it is a defect."""

    method: str
    limit_s: float
    tried: int
    ratios: list[tuple[float, float]]
    plan: str = ""
    defect: str = ""

    def ratio(self, part: float = 1.0) -> float:
        """The best ratio by then; inf where no plan was found."""
        return min((r for s, r in self.ratios if s <= part * self.limit_s), default=math.inf)


@dataclass(slots=True, kw_only=True)
class Compared:
    """A case, what the search found in so many CPU seconds, and what each method did."""

    number: int
    name: str
    plan: str = ""
    step_s: float = math.inf
    search_s: float = 0.0
    found: list[Found] = field(default_factory=list)


def problem_of(case: Case) -> Problem:
    """What is searched of a case."""
    with torch.device("meta"):
        model, batch, loss = case.model()
    given = {"example_inputs": batch, "loss_fn": loss, "global_batch_size": case.batch}
    asked = api.Arguments(profile=False, **given, **dict(case.options))
    return api.asked(model, case.cluster(), asked).problem


def compared(seed: int, number: int, times: float) -> Compared:
    """A case by the search, then by every method."""
    own = drawn(seed, number)
    out = Compared(number=number, name=own.name)
    problem, batch = problem_of(own.case), own.case.batch
    search = Search(problem, batch, Overrides(), memory_margin=MEMORY_MARGIN)
    began = time.process_time()
    try:
        best = search.run().best
    except InfeasibleError:
        return out
    out.search_s = time.process_time() - began
    out.plan, out.step_s = describe(best.plan), best.step_time_s
    space = PlanSpace(problem, batch, search.space.memory_bytes)
    for name in METHODS:
        rng = np.random.default_rng((seed, number))
        run = Run(space, rng, out.search_s * times)
        out.found.append(by_method(name, space, out, run))
    return out


def by_method(name: str, space: PlanSpace, out: Compared, run: Run) -> Found:
    """What a method finds, whose prices begin anew."""
    space.forget()
    METHODS[name](run)
    ratios = [(spent_s, cost_s / out.step_s) for spent_s, cost_s, _ in run.found]
    found = Found(method=name, limit_s=run.limit_s, tried=len(space.priced), ratios=ratios)
    if run.found:
        plan = space.plan(run.found[-1][2])
        assert plan is not None
        found.plan = describe(plan)
        if found.ratio() < 1 - TOLERANCE:
            found.defect = plan.to_json()
    return found


# --- command --------------------------------------------------------------------------------------


def read(data: Mapping[str, Any]) -> Compared:
    """A case of a record."""
    return Compared(**{**data, "found": [Found(**own) for own in data["found"]]})


def table(found: Sequence[Compared], times: float) -> str:
    """Of each case its ratios by method, at the end; over all cases, against time."""
    parts = {f"{times * part:g} ×": part for part in (1 / times, 0.1, 1.0)}
    heads = [f"{name}, {at}" for name in METHODS for at in parts]
    lines = [
        "| " + " | ".join(["case", "search, CPU-s", "its step", *heads, "plans tried"]) + " |",
        "|---|" + "--:|" * (len(heads) + 3),
    ]
    for out in found:
        ratios = [_ratio(own.ratio(part)) for own in out.found for part in parts.values()]
        tried = " / ".join(f"{own.tried:,}" for own in out.found)
        cells = [f"{out.number}: {out.name}", f"{out.search_s:.2f}", seconds(out.step_s), *ratios]
        lines.append("| " + " | ".join([*cells, tried]) + " |")
    medians = [
        statistics.median([out.found[k].ratio(part) for out in found])
        for k in range(len(METHODS))
        for part in parts.values()
    ]
    lines.append("| " + " | ".join(["median", "", "", *map(_ratio, medians), ""]) + " |")
    return "\n".join(lines)


def _ratio(value: float) -> str:
    return f"{value:.3f}" if math.isfinite(value) else "–"


def main() -> int:
    parser = asked_for(__doc__, cases=20)
    parser.add_argument("--times", type=float, default=100, help="the search's (%(default)s)")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    found, defects, numbers = [], 0, itertools.count(args.first)
    every = resumed(numbers, args.record, read, lambda n: compared(args.seed, n, args.times))
    for out in itertools.islice((own for own in every if own.found), args.cases):
        found.append(out)
        print(f"{out.number}: {out.name}\n  {seconds(out.step_s)}: {out.plan}")
        for own in out.found:
            print(f"  {own.method}: {_ratio(own.ratio())}, {own.plan}\n{own.defect}", flush=True)
            defects += bool(own.defect)
    print(table(found, args.times))
    return 1 if defects else 0


if __name__ == "__main__":
    raise SystemExit(main())
