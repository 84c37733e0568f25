"""`meshwright selftest`: whether plans are right on this machine, and their prices near."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from meshwright.shell.commands import flags
from meshwright.shell.terminal import Answer, say


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--ranks",
        type=flags.positive,
        metavar="N",
        help="GPUs of this machine, or CPU ranks where it has fewer (default: all GPUs, or cores)",
    )
    parser.add_argument(
        "--budget", type=float, default=60.0, metavar="S", help="seconds to profile (default 60)"
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write all of it as JSON, to be sent"
    )


def run(args: argparse.Namespace) -> Answer:
    """Exit 0 where every plan's losses are one device's, else 1."""
    from meshwright.selftest import selftest

    found = selftest(args.ranks, budget_s=args.budget)
    if args.output:
        Path(args.output).write_text(json.dumps(found.to_dict(), indent=2), encoding="utf-8")
        say(f"wrote {args.output}")
    return Answer(data=found.to_dict, text=found.document, code=0 if found.ok else 1)
