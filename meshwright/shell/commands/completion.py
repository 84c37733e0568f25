"""`meshwright completion`: a script by which a shell completes commands and flags (shtab)."""

from __future__ import annotations

import argparse

from meshwright.profiles.inputs.errors import NotInstalledError
from meshwright.shell.terminal import Answer

SHELLS = ("bash", "zsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("shell", choices=SHELLS, help="whose script is printed")


def run(args: argparse.Namespace) -> Answer:
    from meshwright.cli import COMMANDS, parser_of

    try:
        import shtab
    except ImportError:
        raise NotInstalledError(
            " needs shtab", place="meshwright completion", way_out="`pip install shtab` installs it"
        ) from None
    script: str = shtab.complete(parser_of(COMMANDS), shell=args.shell)
    return Answer(data=lambda: {"script": script}, text=lambda: script.rstrip("\n"))
