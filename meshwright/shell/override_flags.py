"""Overrides from the shell: one flag per decision, GLOB=VALUE where blocks may differ."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from meshwright.planner.decisions import DECISIONS, Decision, forbiddable
from meshwright.planner.overrides import Overrides
from meshwright.shell.named import CommandError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags for every override; what is not given stays free."""
    flags = parser.add_argument_group(
        "overrides",
        "What is not given is searched. GLOB is a block name, a range (layers.0-11) or a pattern "
        "over block names (* within one component, ** across dots).",
    )
    for decision in DECISIONS.values():
        flags.add_argument(f"--{decision.name.replace('_', '-')}", **_flag(decision))
    flags.add_argument(
        "--stage",
        action="append",
        metavar="BLOCKS",
        help="blocks of one stage, e.g. 'embed,layers.0-5'; once per stage, in order",
    )
    flags.add_argument(
        "--sharding",
        action="append",
        default=[],
        metavar="GLOB=DECISION",
        help="over modules, operators and parameters, e.g. 'layers.*.mlp.up_proj=colwise'",
    )
    flags.add_argument(
        "--forbid",
        action="append",
        default=[],
        metavar="NAME",
        help=f"what must not be used: {', '.join(forbiddable())}; repeatable",
    )


def overrides_of(args: argparse.Namespace) -> Overrides:
    """The overrides that the flags give. Raises ValueError."""
    decided: dict[str, Any] = {}
    for name, decision in DECISIONS.items():
        value = getattr(args, name)
        if decision.parts and value:
            value = dict(value)
        decided[name] = _merged(name, value) if decision.by_block else value
    return Overrides(
        **decided,
        stages=args.stage and [[name.strip() for name in s.split(",")] for s in args.stage],
        shardings=dict(map(_sharding, args.sharding)),
        forbid=tuple(args.forbid),
    )


def _flag(decision: Decision) -> dict[str, Any]:
    """Options of a decision's flag."""
    if decision.is_flag:
        return {"action": "store_true", "default": None, "help": decision.what}
    if decision.parts:
        text = f"{decision.what}, of {', '.join(decision.parts)}"
        return {"action": "append", "type": _part, "metavar": "WHAT=PART", "help": text}
    if decision.sizes:
        each = decision.sizes.removesuffix("s").upper()
        read = partial(_sizes, decision.sizes)
        return {"type": read, "metavar": f"COUNT|{each},..", "help": decision.what}
    kind = str if decision.legal and isinstance(next(iter(decision.legal)), str) else int
    legal = decision.values if decision.legal else f"an integer from {decision.least}"
    text = f"{decision.what}: {legal}"
    if not decision.by_block:
        return {"type": kind, "help": text}
    text += "; repeatable with GLOB=VALUE"
    return {"action": "append", "type": _by_block(kind), "metavar": "[GLOB=]VALUE", "help": text}


def _sizes(words: str, text: str) -> int | tuple[int, ...]:
    """Reader of a count, or of several after commas, which the words name."""
    try:
        sizes = tuple(map(int, text.split(",")))
    except ValueError:
        legal = f"a number, or {words} after commas, e.g. 4,2,2"
        raise argparse.ArgumentTypeError(f"{text!r}; legal: {legal}") from None
    return sizes if "," in text else sizes[0]


def _part(text: str) -> tuple[str, float]:
    """Reader of WHAT=PART."""
    name, _, part = text.partition("=")
    try:
        return name, float(part)
    except ValueError:
        legal = "WHAT=PART, e.g. optimizer=0.5"
        raise argparse.ArgumentTypeError(f"{text!r}; legal: {legal}") from None


def _by_block(kind: Callable[[str], Any]) -> Callable[[str], tuple[str, Any]]:
    """Reader of VALUE or GLOB=VALUE as (glob, value), the glob "" for all blocks."""

    def read(text: str) -> tuple[str, Any]:
        pattern, equals, value = text.rpartition("=")
        try:
            if bool(equals) == bool(pattern):
                return pattern, kind(value)
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r}; legal: VALUE or GLOB=VALUE")

    return read


def _merged(name: str, pairs: Sequence[tuple[str, Any]] | None) -> Any:
    """One value, or glob -> value."""
    if not pairs:
        return None
    globs = [pattern for pattern, _ in pairs]
    if globs == [""]:
        return pairs[0][1]
    if "" in globs or len(set(globs)) < len(globs):
        texts = ", ".join(f"{pattern}={value}".lstrip("=") for pattern, value in pairs)
        raise CommandError(
            "",
            place=f"--{name.replace('_', '-')} {texts}",
            legal="one VALUE for all blocks, or GLOB=VALUE once per glob",
        )
    return dict(pairs)


def _sharding(text: str) -> tuple[str, str]:
    pattern, equals, decision = text.rpartition("=")
    if not (equals and pattern and decision):
        raise CommandError(
            "no decision",
            place=f"--sharding {text!r}",
            legal="GLOB=DECISION, e.g. 'layers.*.mlp.up_proj=colwise'",
        )
    return pattern, decision
