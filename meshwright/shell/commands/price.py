"""`meshwright price`: what a configuration of another software means, and ours beside it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from meshwright.planner.document import Document
from meshwright.planner.plan import seconds
from meshwright.shell import override_flags
from meshwright.shell.commands import flags
from meshwright.shell.commands.diff import Difference, difference
from meshwright.shell.commands.parallelized import arguments_of, named_report
from meshwright.shell.named import CommandError, cluster_named
from meshwright.shell.progress import progress_shown
from meshwright.shell.terminal import Answer, say

if TYPE_CHECKING:
    from meshwright.planner.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model(parser, source=True)
    flags.add_search(parser)
    override_flags.add_arguments(parser)
    parser.add_argument("-o", "--output", help="write the plan that the configuration means there")
    parser.add_argument("--full", action="store_true", help="print all of its report")


def run(args: argparse.Namespace) -> Answer:
    from meshwright.configurations import configured

    if args.source is None:
        raise CommandError("no configuration", place="--from", legal="a file of another software")
    cluster = cluster_named(args.cluster)
    model, arguments = arguments_of(args)
    with progress_shown():
        script = override_flags.overrides_of(args).given()
        found = configured(args.source, model, cluster, script=script, **arguments)
        report = named_report(args, found.result)
        report = replace(report, notes=(*found.notes, *report.notes))
        ours = named_report(args, found.result.replan())
    if args.output:
        report.plan.save(args.output)
        say(f"plan written to {args.output}")
    between = difference((report.plan, report.to_dict()), (ours.plan, ours.to_dict()))
    return Answer(
        data=lambda: _data(report, ours, between),
        text=lambda: _document(args, report, ours, between),
    )


def _data(report: Report, ours: Report, between: Difference) -> dict[str, Any]:
    return {"theirs": report.to_dict(), "ours": ours.to_dict(), "difference": between.as_dict()}


def _document(
    args: argparse.Namespace, report: Report, ours: Report, between: Difference
) -> Document:
    """The report of what is given, then ours against it."""
    given, best = (each.summary["step_time_s"] for each in (report, ours))
    told = f"{report.summary['chosen']}; {seconds(given)} a step"
    fits = f"{report.summary['memory_verdict']}: {report.summary['memory_probability']:.0%}"
    if not between.changes:
        last = "Ours is the same."
    else:
        faster = given / best - 1
        how = f"{faster:.1%} faster" if faster > 0 else f"{-faster:.1%} slower, and simpler"
        if faster > 1:
            how = f"{1 + faster:.1f} times as fast"
        last = f"Ours is {how}: {ours.summary['chosen']}; {seconds(best)} a step."
    return Document.of(
        [*report.document(full=args.full).parts],
        ["From A, as given, to B, ours for the same software:", *between.document().parts],
        [f"{args.source}: {told}, {fits}.", last],
    )
