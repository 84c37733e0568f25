"""`meshwright rehearse`: run a plan's steps for ranks that are not there."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from meshwright.shell.commands import flags
from meshwright.shell.commands.parallelized import parallelized
from meshwright.shell.terminal import Answer, say

if TYPE_CHECKING:
    from meshwright.executor.rehearsal import Rehearsal
    from meshwright.planner.report import Report


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model(parser)
    parser.add_argument("--plan", required=True, help="plan file")
    parser.add_argument("--every", action="store_true", help="every rank, not one of each kind")


def run(args: argparse.Namespace) -> Answer:
    from meshwright import rehearsing

    result, _ = parallelized(args)
    rehearsal = result.rehearse(every=args.every)
    return Answer(
        data=lambda: rehearsing.as_data(rehearsal),
        text=lambda: str(rehearsal),
        code=exit_code(rehearsal, result.report),
    )


def exit_code(rehearsal: Rehearsal, report: Report) -> int:
    """The exit status of a rehearsal, with the reason on stderr."""
    from meshwright import rehearsing

    for mismatch in rehearsal.mismatches:
        say(f"mismatch: {mismatch}")
    code = rehearsing.exit_code(rehearsal, report)
    if code == 2:
        say(f"infeasible: the plan was rehearsed, and does not fit: {report.memory}")
    return code
