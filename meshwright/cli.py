"""`meshwright COMMAND ...`: the API from the shell; each command is a module of `shell/commands`.

stdout carries the answer, stderr the progress. Exit 0: done, 1: error, or ranks of a rehearsal that
don't match, 2: no plan fits, or the rehearsed one doesn't, 4: what `diff` compares differs.
"""

from __future__ import annotations

import argparse
import json
import logging
import shlex
import sys
import traceback
from collections.abc import Collection, Sequence
from dataclasses import asdict
from difflib import get_close_matches
from importlib import import_module
from types import MappingProxyType
from typing import Any

from meshwright import __version__
from meshwright.profiles.inputs import MeshwrightError, shown
from meshwright.shell.named import CommandError, Parser, UserCodeError, check_writable
from meshwright.shell.terminal import say, show, stdout_is_the_result

COMMANDS = MappingProxyType(
    {
        "plan": "search for a plan and print the report",
        "show": "print a plan file",
        "report": "write the report of a plan as a page (HTML, one file)",
        "run": "train for a few steps; launch it with torchrun",
        "rehearse": "run a plan's steps for ranks that are not there",
        "profile": "measure this machine for the plans of a model",
        "convert": "a checkpoint to files that transformers loads, or back",
        "price": "a configuration of another software: its plan's price, and ours beside it",
        "export": "a plan as a configuration of another software",
        "diff": "what differs between two plans, or reports: exit 0 or 4",
        "explain": "why operators are split as they are on the tensor axis",
        "compare": "plan for several clusters, and choose one",
        "fit": "whether a model fits, up to which batch and sequence",
        "catalog": "the hardware that is known, and where numbers are from",
        "cluster": "a cluster file: begin one, see what follows from it, convert it",
        "selftest": "plans of this machine against one device, and against time",
        "completion": "a script by which bash or zsh completes all of this",
    }
)


def perform(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Raises what goes wrong."""
    argv = sys.argv[1:] if argv is None else argv
    command = next((text for text in argv if text[:1] != "-"), None)
    if command is not None and command not in COMMANDS:
        near = get_close_matches(command, COMMANDS, n=1)
        raise CommandError(
            f"no command {shown(command)}",
            place="meshwright",
            legal=COMMANDS,
            way_out=f"nearest: {near[0]}" if near else "see `meshwright --help`",
        )
    args = parser_of([command]).parse_args(argv)
    args.line = shlex.join(["meshwright", *argv])
    logging.basicConfig(stream=sys.stderr, level=logging.INFO if args.verbose else logging.WARNING)
    for name in ("output", "trace", "timeline", "export"):
        check_writable(f"--{name}", getattr(args, name, None))
    try:
        answer = args.command.run(args)
    except MeshwrightError as error:
        if args.json and (shortfall := _infeasible(error)):
            show(json.dumps(shortfall, indent=2), colour=False)
        raise
    if answer is None:
        return 0
    answer.show(as_json=args.json)
    return int(answer.code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        with stdout_is_the_result():
            return perform(argv)
    except UserCodeError as error:
        traceback.print_exception(error.__cause__)
        say(f"error: {error.with_code()}")
    except MeshwrightError as error:
        if _infeasible(error):
            say(f"infeasible: {error.with_code()}")
            return 2
        say(f"error: {error.with_code()}")
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        say(f"error: {error}")
    return 1


def _infeasible(error: MeshwrightError) -> dict[str, Any] | None:
    """Data of the error that no plan fits; None of another one."""
    from meshwright.planner.plan import InfeasibleError

    if not isinstance(error, InfeasibleError):
        return None
    return {
        "infeasible": str(error),
        "code": error.CODE,
        "shortfall_bytes": list(error.shortfall_bytes),
        "relaxations": [asdict(relaxation) for relaxation in error.relaxations],
    }


def parser_of(whole: Collection[str | None]) -> argparse.ArgumentParser:
    """The parser, with the arguments of the commands that are `whole`."""
    parser = Parser(
        prog="meshwright",
        description="Decides how to train a PyTorch model on a cluster, says why, and runs it.",
    )
    said = f"meshwright {__version__}"
    parser.add_argument("--version", action="version", version=said, help="print it and exit")
    commands = parser.add_subparsers(required=True, metavar=" | ".join(COMMANDS))
    for name, text in COMMANDS.items():
        flags = commands.add_parser(name, help=text, description=text)
        if name in whole:
            flags.add_argument("--json", action="store_true", help="print JSON instead of text")
            flags.add_argument("--verbose", action="store_true", help="log progress to stderr")
            module = import_module(f"meshwright.shell.commands.{name}")
            module.add_arguments(flags)
            flags.set_defaults(command=module)
    return parser


if __name__ == "__main__":
    sys.exit(main())
