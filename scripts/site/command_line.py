"""The reference of the command line, from its parsers."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from meshwright.cli import COMMANDS, parser_of
from scripts.site.markdown import cell, code, table


def text() -> str:
    """All commands, one section each."""
    parts = [
        "# Command line\n",
        "`meshwright COMMAND ...`: stdout carries the answer, stderr the progress; every command "
        "takes `--json`.\n",
        table(["exit code", "meaning"], CODES),
        table(
            ["command", "purpose"], [[f"[{n}](#command-{n})", cell(t)] for n, t in COMMANDS.items()]
        ),
    ]
    for name, purpose in COMMANDS.items():
        parts += [f"(command-{name})=\n## {name}\n", f"{cell(purpose)}.\n"]
        parts += described(_subparsers(parser_of([name]))[name])
    return "\n".join(parts)


CODES = (
    ("0", "done"),
    ("1", "an error, or ranks of a rehearsal that don't match"),
    ("2", "no plan fits, or the rehearsed one doesn't"),
    ("4", "`diff`: what it compares differs"),
)


def _subparsers(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    actions = (a for a in parser._actions if isinstance(a, argparse._SubParsersAction))
    return dict(next(actions, argparse._SubParsersAction([], "", None)).choices)  # type: ignore[arg-type]


def described(parser: argparse.ArgumentParser) -> Iterator[str]:
    """Usage and arguments of a parser, then of those inside it."""
    yield code(parser.format_usage())
    rows = [
        [f"`{_written(action)}`", cell(_help(parser, action))]
        for action in parser._actions
        if not isinstance(action, argparse._SubParsersAction | argparse._HelpAction)
    ]
    if rows:
        yield table(["argument", "meaning"], rows)
    for name, inner in _subparsers(parser).items():
        yield f"### {parser.prog.removeprefix('meshwright ')} {name}\n"
        if inner.description:
            yield f"{cell(inner.description)}\n"
        yield from described(inner)


def _written(action: argparse.Action) -> str:
    """An argument as it is typed."""
    value = action.metavar or (action.dest if not action.option_strings else action.dest.upper())
    value = " ".join(value) if isinstance(value, tuple) else value
    if not action.option_strings:
        return str(value)
    given = "" if action.nargs == 0 else f" {value}"
    return ", ".join(action.option_strings) + given


def _help(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    if not action.help or action.help == argparse.SUPPRESS:
        return ""
    text = parser._get_formatter()._expand_help(action)
    choices = [str(choice) for choice in action.choices or ()]
    named = f" ({', '.join(choices)})" if choices and len(choices) < 16 else ""
    return text + ("" if all(choice in text for choice in choices) else named)
