"""Time of every planning phase for models of published size, without a weight or a GPU; our plans
against published ones.

    python scripts/bench_planner.py [CASE ...] [--report] [--replan] [--time-limit SECONDS]
                                    [--record]
    python scripts/bench_planner.py --experts [--case TEXT] [--same-recompute] [--pin]
                                    [--time-limit SECONDS]

CPU seconds of this process, trace included; the plan, its predicted step, MFU and the bound of the
search beside them. `--report` times the report's text as well. `--replan` times planning a second
time with one override, on what the first search has priced. `--experts` compares with the plans of
`experts/plans.py` whose names or sources contain TEXT, under our cost model, and exits with 1 where
ours is slower by more than 0.5 %; `--same-recompute` has ours recompute as theirs does; `--pin`
searches again with the published decisions as overrides and checks that theirs is found, or a
better one in what they leave open; `--time-limit` bounds each search. `--record` keeps the
table of cases for the documents.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import transformers

from meshwright import Cluster
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.sharding import analyse
from meshwright.planner.alternatives import Answers, explain_search
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.overrides import Overrides
from meshwright.planner.plan import describe, seconds
from meshwright.planner.report import Report
from meshwright.planner.search import Search, SearchResult
from meshwright.planner.tracing import trace
from scripts.experts.compare import compare, show, summary
from scripts.experts.plans import experts
from scripts.planning.cases import CASES
from scripts.recording.results import record

Row = dict[str, Any]


def bench(name: str, *, replan: bool, report: bool, time_limit_s: float | None) -> Row:
    """Plan once, or twice, and print the phases."""
    case = CASES[name]
    model, cluster = case.model(), case.cluster()
    started = time.process_time()
    graph = trace(model.module, model.batch, precision=case.precision)
    traced = time.process_time()
    table = analyse(graph)
    graph = cut_blocks(graph, table)
    cut = time.process_time()
    print(f"{name}: {graph.num_parameters() / 1e9:.3g} B parameters on {cluster.describe()}")
    problem = Problem(graph=graph, factors=table, cluster=cluster, precision=case.precision)
    search = Search(problem, case.batch, Overrides(), time_limit_s=time_limit_s)
    result = search.run()
    before = {"trace": traced - started, "factors, blocks": cut - traced}
    planning_s = time.process_time() - started
    show_phases(before, result, planning_s)
    started = time.process_time()
    equal_s = search.equal_bound_s(result)
    gap, spent_s = result.best.step_time_s / equal_s - 1, time.process_time() - started
    print(f"  none with equal stages than {seconds(equal_s)}: gap {gap:.1%} ({spent_s:.1f} CPU-s)")
    row = row_of(name, cluster, before["trace"], planning_s, result)
    if report:
        made = with_answers(search, result)
        for full in (False, True):
            started = time.process_time()
            text = made.text(full=full)
            spent_s = time.process_time() - started
            print(f"  text(full={full}), {len(text)} characters: {spent_s:.1f} CPU-s")
    if replan:
        override = Overrides(tp=result.best.plan.stages[0].tp)
        started = time.process_time()
        result = search.again(override)
        print(f"  again with tp={override.tp}:")
        show_phases({}, result, time.process_time() - started)
    return row


def row_of(
    name: str, cluster: Cluster, trace_s: float, planning_s: float, result: SearchResult
) -> Row:
    """A line of the documents' table."""
    prediction = result.best.evaluation.prediction
    return {
        "case": name,
        "devices": f"{cluster.num_devices} {cluster.device.name}",
        "trace, CPU-s": trace_s,
        "all, CPU-s": planning_s,
        "plan": describe(result.best.plan),
        "step, s": prediction.step_time_s,
        "MFU, %": 100 * prediction.mfu,
        "gap to the bound, %": 100 * result.gap,
    }


def with_answers(search: Search, result: SearchResult) -> Report:
    """The report that `auto_parallelize` gives."""
    report = explain_search(result, search.problem, {})
    return replace(report, deferred=Answers(search=search, result=result))


def show_phases(before: Mapping[str, float], result: SearchResult, total_s: float) -> None:
    phases = {**before, **result.phases_s}
    print("  " + ", ".join(f"{phase} {s:.1f}" for phase, s in phases.items()), end="")
    print(f"; in all {total_s:.1f} CPU-s")
    best = result.best
    mfu = best.evaluation.prediction.mfu
    print(f"  {describe(best.plan)}: {seconds(best.step_time_s)} a step, MFU {mfu:.1%}")
    print(f"  no plan of the space is faster than {seconds(result.bound_s)}: gap {result.gap:.1%}")


def bench_experts(text: str, *, pin: bool, like_theirs: bool, time_limit_s: float | None) -> bool:
    """Compare with published plans; whether all is well."""
    chosen = [e for e in experts() if text.lower() in f"{e.name} {e.source}".lower()]
    if not chosen:
        raise SystemExit(f"no published plan's name or source contains {text!r}")
    done = []
    for comparison in compare(chosen, pin=pin, like_theirs=like_theirs, time_limit_s=time_limit_s):
        done.append(comparison)
        print(show(comparison), flush=True)
    print(f"\n{summary(done)}")
    return not any(c.failed for c in done)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--replan", action="store_true", help="plan again with one override")
    parser.add_argument("--report", action="store_true", help="time the report's texts, too")
    parser.add_argument("--time-limit", type=float, metavar="SECONDS", help="of the search")
    parser.add_argument("--experts", action="store_true", help="compare with published plans")
    parser.add_argument("--case", default="", metavar="TEXT", help="only plans that contain TEXT")
    parser.add_argument("--same-recompute", action="store_true", help="recompute as they do")
    parser.add_argument("--pin", action="store_true", help="reproduce them by overrides")
    parser.add_argument("--record", action="store_true", help="keep the table for the documents")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if args.experts:
        well = bench_experts(
            args.case, pin=args.pin, like_theirs=args.same_recompute, time_limit_s=args.time_limit
        )
        raise SystemExit(0 if well else 1)
    rows = list[Row]()
    for name in args.cases or CASES:
        if name not in CASES:
            raise SystemExit(f"no case {name!r}; legal: {', '.join(CASES)}")
        rows.append(
            bench(name, replan=args.replan, report=args.report, time_limit_s=args.time_limit)
        )
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory of the planner {peak:.2f} GiB")
    if args.record:
        command = " ".join(["python -m scripts.bench_planner", *args.cases, "--record"])
        note = "CPU seconds of one process, of one search; more on a busy machine."
        record("planning", command, title="Planning time", note=note, rows=rows)


if __name__ == "__main__":
    main()
