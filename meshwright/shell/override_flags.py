"""Overrides from the shell: one flag per decision, GLOB=VALUE where blocks may differ."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from meshwright.planner.overrides import BY_BLOCK, CHOICES, COUNTS, FORBIDDABLE, Overrides
from meshwright.planner.plan import OFFLOADS, PLACEMENTS
from meshwright.profiles.inputs import MeshwrightError

_WHAT = {
    "tp": "tensor-parallel degree",
    "dp": "data-parallel degree",
    "cp": "context-parallel degree (ranks that split the sequence)",
    "ep": "expert-parallel degree",
    "pp": "device groups of the pipeline",
    "virtual_stages": "stages per device group",
    "microbatch_size": "rows per data-parallel rank and micro-batch",
    "num_microbatches": "micro-batches per step",
    "zero": "ZeRO stage",
    "dp_shard": "ranks among which ZeRO divides",
    "hpz": "ranks that keep a secondary shard of ZeRO-3's weights for the backward",
    "quantized": "what ZeRO-3 sends in blocks of few bits; needs --allow quantized",
    "recompute": "what the backward computes again",
    "segments": "blocks of which the first one's input alone is kept",
    "schedule": "pipeline schedule",
    "placement": "axes from the innermost; with tp,pp,dp the pipeline lies inside the node",
    "cp_kind": "how attention runs where cp splits its tokens",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Flags for every override; what is not given stays free."""
    flags = parser.add_argument_group(
        "overrides",
        "What is not given is searched. GLOB is a block name, a range (layers.0-11) or a pattern "
        "over block names (* within one component, ** across dots).",
    )
    for name, what in _WHAT.items():
        choices = CHOICES.get(name)
        legal = ", ".join(map(str, choices)) if choices else "an integer from 1"
        if name == "placement":
            legal = " or ".join(PLACEMENTS)
        kind = str if choices and isinstance(next(iter(choices)), str) else int
        more: dict[str, Any] = {"type": kind}
        if name in BY_BLOCK:
            more = {"type": _by_block(kind), "action": "append", "metavar": "[GLOB=]VALUE"}
            legal += "; repeatable with GLOB=VALUE"
        flags.add_argument(f"--{name.replace('_', '-')}", help=f"{what}: {legal}", **more)
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
        "--offload",
        action="append",
        type=_part,
        metavar="WHAT=PART",
        help=f"part of each stage in host memory, from 0 to 1, of {', '.join(OFFLOADS)}",
    )
    flags.add_argument(
        "--post-validation",
        action="store_true",
        default=None,
        help="stages step their optimizers without waiting for each other, and validate it later",
    )
    flags.add_argument(
        "--forbid",
        action="append",
        default=[],
        metavar="NAME",
        help=f"what must not be used: {', '.join(FORBIDDABLE)}; repeatable",
    )


def overrides_of(args: argparse.Namespace) -> Overrides:
    """The overrides that the flags give. Raises ValueError."""
    by_block = {name: _merged(name, getattr(args, name)) for name in BY_BLOCK}
    whole = {name: getattr(args, name) for name in (*COUNTS, "schedule", "placement", "cp_kind")}
    return Overrides(
        **by_block,
        **whole,
        stages=args.stage and [[name.strip() for name in s.split(",")] for s in args.stage],
        shardings=dict(map(_sharding, args.sharding)),
        offload=None if args.offload is None else dict(args.offload),
        post_validation=args.post_validation,
        forbid=tuple(args.forbid),
    )


def _part(text: str) -> tuple[str, float]:
    """Reads WHAT=PART."""
    what, _, part = text.partition("=")
    try:
        return what, float(part)
    except ValueError:
        legal = "WHAT=PART, e.g. optimizer=0.5"
        raise argparse.ArgumentTypeError(f"{text!r}; legal: {legal}") from None


def _by_block(kind: Callable[[str], Any]) -> Callable[[str], tuple[str, Any]]:
    """Reads VALUE or GLOB=VALUE as (glob, value), the glob "" for all blocks."""

    def read(text: str) -> tuple[str, Any]:
        pattern, equals, value = text.rpartition("=")
        try:
            if bool(equals) == bool(pattern):
                return pattern, kind(value)
        except ValueError:
            pass
        raise argparse.ArgumentTypeError(f"{text!r}; legal: VALUE or GLOB=VALUE")

    return read


def _merged(name: str, given: Sequence[tuple[str, Any]] | None) -> Any:
    """One value, or glob -> value."""
    if not given:
        return None
    globs = [pattern for pattern, _ in given]
    if globs == [""]:
        return given[0][1]
    if "" in globs or len(set(globs)) < len(globs):
        texts = ", ".join(f"{pattern}={value}".lstrip("=") for pattern, value in given)
        raise MeshwrightError(
            "",
            place=f"--{name.replace('_', '-')} {texts}",
            legal="one VALUE for all blocks, or GLOB=VALUE once per glob",
        )
    return dict(given)


def _sharding(text: str) -> tuple[str, str]:
    pattern, equals, decision = text.rpartition("=")
    if not (equals and pattern and decision):
        raise MeshwrightError(
            "no decision",
            place=f"--sharding {text!r}",
            legal="GLOB=DECISION, e.g. 'layers.*.mlp.up_proj=colwise'",
        )
    return pattern, decision
