"""`meshwright price`: what a configuration of another software means, and ours beside it."""

from __future__ import annotations

import argparse
from dataclasses import replace
from typing import TYPE_CHECKING

from meshwright.planner.document import Document
from meshwright.planner.plan import InfeasibleError, seconds, without_ways_out
from meshwright.shell import override_flags
from meshwright.shell.commands import flags
from meshwright.shell.commands.diff import Difference, difference
from meshwright.shell.commands.parallelized import arguments_of, named_report
from meshwright.shell.named import CommandError, cluster_named
from meshwright.shell.progress import progress_shown
from meshwright.shell.terminal import Answer, listed, say

if TYPE_CHECKING:
    from meshwright.planner.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model(parser, source=True)
    flags.add_search(parser)
    override_flags.add_arguments(parser)
    parser.add_argument("-o", "--output", help="write the plan that the configuration means there")
    parser.add_argument("--full", action="store_true", help="print all of its report")


def run(args: argparse.Namespace) -> Answer:
    from meshwright.api import decided
    from meshwright.configurations import notes_of, question_of, without_pins

    if args.source is None:
        raise CommandError("no configuration", place="--from", legal="a file of another software")
    cluster = cluster_named(args.cluster)
    model, arguments = arguments_of(args)
    with progress_shown():
        script = override_flags.overrides_of(args).given()
        said, question = question_of(args.source, model, cluster, script, **arguments)
        try:
            theirs = decided(question)
        except InfeasibleError as error:
            if args.output:
                say(f"{args.output} is not written: there is no plan that fits")
            ours = named_report(args, decided(without_pins(question)))
            return _too_large(args, notes_of(said), error, ours)
        report = named_report(args, theirs)
        report = replace(report, notes=(*notes_of(said), *report.notes))
        ours = named_report(args, theirs.replan())
    if args.output:
        report.plan.save(args.output)
        say(f"plan written to {args.output}")
    data = {"theirs": report.to_dict(), "ours": ours.to_dict()}
    between = difference((report.plan, data["theirs"]), (ours.plan, data["ours"]))
    data["difference"] = between.as_dict()
    return Answer(
        data=lambda: data,
        text=lambda: _document(args.source, said.target, report, ours, between, args.full),
    )


def _too_large(
    args: argparse.Namespace, notes: list[str], error: InfeasibleError, ours: Report
) -> Answer:
    """The answer where what is given does not fit: why, what would help, and ours, which does."""
    short, helps = without_ways_out(str(error)), list(map(str, error.relaxations))
    lines = [f"{args.source}: {short}", *listed("What would help", helps)]
    data = {"theirs": None, "why": short, "helps": helps, "notes": notes, "ours": ours.to_dict()}
    ending = [*lines, f"Ours fits: {_chosen(ours)}."]
    parts = [*ours.document(full=args.full).parts]
    document = Document.of([*(f"note: {note}" for note in notes)], parts, ending)
    return Answer(data=lambda: data, text=lambda: document, code=2)


def _document(
    source: str, target: str, report: Report, ours: Report, between: Difference, full: bool
) -> Document:
    """The report of what is given, then ours against it."""
    given, best = (each.summary["step_time_s"] for each in (report, ours))
    if not between.changes:
        last = "Ours is the same."
    else:
        faster = given / best - 1
        how = f"{faster:.1%} faster" if faster > 0 else f"{-faster:.1%} slower, and simpler"
        if faster > 1:
            how = f"{1 + faster:.1f} times as fast"
        last = f"Ours is {how}: {_chosen(ours)}."
    return Document.of(
        [*report.document(full=full).parts],
        [f"From A, as given, to B, ours at the same prices ({target}):",
         *between.document().parts],
        [f"{source}: {_chosen(report)}.", last],
    )  # fmt: skip


def _chosen(report: Report) -> str:
    """A plan, its seconds, and whether it fits."""
    summary = report.summary
    fits = f"{summary['memory_verdict']}: {summary['memory_probability']:.0%}"
    return f"{summary['chosen']}; {seconds(summary['step_time_s'])} a step, {fits}"
