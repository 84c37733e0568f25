"""`meshwright plan`: search for a plan, and print its report."""

from __future__ import annotations

import argparse
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from meshwright.planner.document import Document, Part
from meshwright.planner.page import check_installed, launch_line
from meshwright.shell import override_flags
from meshwright.shell.commands import flags
from meshwright.shell.commands.parallelized import named_report, parallelized
from meshwright.shell.commands.rehearse import exit_code
from meshwright.shell.commands.served import check_training, serving
from meshwright.shell.named import cluster_named
from meshwright.shell.progress import progress_shown
from meshwright.shell.terminal import Answer, say

if TYPE_CHECKING:
    from meshwright.executor.rehearsal import Rehearsal
    from meshwright.model import ParallelModel
    from meshwright.planner.overrides import Overrides
    from meshwright.planner.report import Report
    from meshwright.profiles.cluster import Cluster

COLUMNS = 80  # of a terminal
MORE_SEARCHES = 3  # for a plan that fits by its rehearsal


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model(parser, serves=True)
    parser.add_argument("-o", "--output", help="write the plan to this file")
    parser.add_argument("--trace", help="write the simulated step as a Chrome trace")
    parser.add_argument("--html", metavar="FILE", help="write the report as a page")
    parser.add_argument(
        "--sensitivity",
        action="store_true",
        help="say which change of the cluster would flip the decision",
    )
    flags.add_report(parser)
    parser.add_argument(
        "--rehearse",
        action="store_true",
        help="run the chosen plan's steps for ranks that are not there, and say what doesn't match",
    )
    flags.add_serving(parser, "--serve", "plan how to serve the model in place of training it")
    flags.add_search(parser)
    override_flags.add_arguments(parser)


def run(args: argparse.Namespace) -> Answer:
    if args.serves:
        return _served(args)
    check_training(args)
    overrides = override_flags.overrides_of(args)
    if args.html:
        check_installed()  # before a search that may take long
    cluster = cluster_named(args.cluster)
    result, _ = parallelized(args, cluster, overrides=overrides)
    if not args.rehearse:
        return _answer(args, result)
    try:
        result, rehearsal = _rehearsed(args, result, overrides, cluster)
    except ValueError:
        _answer(args, result).show(as_json=args.json)
        raise
    return _answer(args, result, rehearsal.line, exit_code(rehearsal, result.report))


def _served(args: argparse.Namespace) -> Answer:
    found = serving(args, "--serve")
    lines = [str(found)]
    if args.price:
        lines.append(f"{found.price_per_million(args.price):,.2f} for a million new tokens")
    return Answer(data=found.as_dict, text=lambda: "\n".join(lines))


def _answer(
    args: argparse.Namespace, result: ParallelModel, last: str = "", code: int = 0
) -> Answer:
    """The report, with costs and sensitivity; files of the plan are written."""
    report = named_report(args, result)
    if args.output:
        result.plan.save(args.output)
        say(f"plan written to {args.output}")
    if args.trace:
        report.trace(args.trace)
    if args.html:
        costs = flags.asked_costs(args)
        with progress_shown():
            report.html(args.html, sensitivity=args.sensitivity, **costs)
        say(f"page written to {args.html}")
    return Answer(
        data=lambda: _data(args, report), text=lambda: _document(args, report, last), code=code
    )


def _data(args: argparse.Namespace, report: Report) -> dict[str, Any]:
    with progress_shown():  # what was deferred takes seconds
        data = report.to_dict()
        if costs := flags.asked_costs(args):
            data["cost"] = dict(report.cost(**costs) or {})
        if args.sensitivity:
            data["sensitivity"] = [dict(row) for row in report.sensitivity()]
    return data


def _document(args: argparse.Namespace, report: Report, last: str) -> Document:
    from meshwright.planner.report import sensitivity_parts

    with progress_shown():
        parts: list[list[Part]] = [[*report.document(full=args.full).parts]]
        if costs := flags.asked_costs(args):
            parts.append([cost_text(report.cost(**costs) or {})])
        if args.sensitivity:
            parts.append(sensitivity_parts(report.sensitivity()))
    return Document.of(*parts, [*_closing(args, report), *[last] * bool(last)])


def _closing(args: argparse.Namespace, report: Report) -> list[str]:
    """The choice, whether it fits and how fast it is, and the command that runs it, on lines that a
    terminal holds and a shell takes."""
    from meshwright.planner.plan import seconds

    s, plan = report.summary, report.plan
    fits = f"{s['memory_verdict']}: {s['memory_probability']:.0%}"
    said = f"Plan: {s['chosen']}; {seconds(s['step_time_s'])} a step, {s['mfu']:.0%} MFU, {fits}."
    lines = textwrap.wrap(said, COLUMNS, subsequent_indent="  ")
    if not args.output:
        return [*lines, "Keep it with -o plan.json: the command that runs it is printed then."]
    cluster = report.details.cluster if report.details else {}
    nodes, each = cluster.get("num_nodes", 1), cluster.get("devices_per_node", plan.num_ranks)
    command = launch_line(
        args.model, args.cluster, nodes, each, plan.global_batch_size, plan.precision, args.output
    )
    if args.optimizer:
        command += f" --optimizer {args.optimizer}"
    command += "".join(f" --allow {word}" for word in args.allow or ())
    wrapped = textwrap.wrap(
        command, COLUMNS - 2, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )
    where = "Run it:"
    if nodes > 1:
        where = f"Run it on each of {nodes} nodes (HOST: the first one, NODE: this one's number):"
    return [*lines, where, *(f"{line} \\" for line in wrapped[:-1]), wrapped[-1]]


def _rehearsed(
    args: argparse.Namespace, result: ParallelModel, overrides: Overrides, cluster: Cluster
) -> tuple[ParallelModel, Rehearsal]:
    """The plan with its rehearsal. Where that does not fit, the next best one that does: with as
    much memory free as the rehearsal took more than the price; the first one where none does."""
    from meshwright import rehearsing
    from meshwright.arguments import margin_of
    from meshwright.planner.plan import describe, slower

    margin = margin_of(args.memory_margin)
    first, first_rehearsal = result, result.rehearse()
    rehearsal = first_rehearsal
    for _ in range(MORE_SEARCHES):
        if rehearsing.exit_code(rehearsal, result.report) != 2:
            break
        margin = rehearsing.margin_needed(result.prediction, margin, cluster)
        say(
            f"rehearsed, and does not fit: {result.report.memory}; "
            f"searching again with memory_margin={margin:.3f}"
        )
        try:
            with progress_shown():
                result = result.replan(
                    overrides, memory_margin=margin, time_limit_s=args.time_limit_s
                )
        except ValueError:  # none fits any more
            break
        rehearsal = result.rehearse()
    if rehearsing.exit_code(rehearsal, result.report) == 2:
        return first, first_rehearsal
    if result is not first:
        more = result.prediction.step_time_s / first.prediction.step_time_s - 1
        say(
            f"the plan chosen first, {describe(first.plan)}, does not fit by its rehearsal; "
            f"this one does: {slower(more)} a step"
        )
    return result, rehearsal


def _counted(x: float) -> str:
    """A number of at least three digits that count, without an exponent where it has more."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def cost_text(cost: Mapping[str, Any]) -> str:
    """Costs of a run, as `Report.cost` has them."""
    from meshwright.planner.plan import counted

    lines = [f"  {cost['device_hours_per_step']:.4g} device-hours a step"]
    if "price_per_step" in cost:
        lines[0] += f", {cost['price_per_step']:.4g} at the price given"
    if "energy_kwh_per_step" in cost:
        power = f"{_counted(cost['power_watts'])} W a device as given"
        lines[0] += f", {cost['energy_kwh_per_step']:.4g} kWh at {power}"
    if "tokens" in cost:
        lines.append(
            f"  {counted(cost['tokens'])} tokens: {cost['steps']:,.0f} steps, "
            f"{_counted(cost['days'])} days, {_counted(cost['device_hours'])} device-hours"
        )
    if "price" in cost:
        per_million = cost["price_per_million_tokens"]
        lines[-1] += f", {_counted(cost['price'])} ({per_million:.3g} per million tokens)"
    if "energy_kwh" in cost:
        per_million = cost["energy_kwh_per_million_tokens"]
        lines[-1] += f", {_counted(cost['energy_kwh'])} kWh ({per_million:.3g} per million tokens)"
    return "\n".join(["Cost (of steps that take what is predicted)", *lines])
