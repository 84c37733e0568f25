"""The legal values of each override, as data, and the check of one value by itself."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from meshwright.costmodel.blocks import RECOMPUTE
from meshwright.costmodel.quantized import QUANTIZED
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.costmodel.sharding import CONTEXT_KINDS
from meshwright.planner.plan import PLACEMENTS, ZERO, check_offload
from meshwright.profiles.inputs import MeshwrightError, shown
from meshwright.profiles.inputs.limits import MAX_ROWS, MAX_TEXT

MESH = ("tp", "dp", "cp", "ep")
# a value, or glob over block names -> value
BY_BLOCK = (*MESH, "zero", "dp_shard", "hpz", "quantized", "segments", "recompute")
COUNTS = ("pp", "virtual_stages", "microbatch_size", "num_microbatches")

CHOICES: Mapping[str, Collection[Any]] = MappingProxyType(
    {"zero": ZERO, "recompute": RECOMPUTE, "schedule": SCHEDULES.keys(), "placement": PLACEMENTS}
    | {"quantized": QUANTIZED}
    | {"cp_kind": CONTEXT_KINDS}
)


def _without(name: str, value: Any) -> tuple[str, tuple[Any, ...]]:
    return name, tuple(v for v in CHOICES[name] if v != value)


# A name that may be forbidden -> the override it is of, and the values that are left. A part of the
# data axis (dp_shard, hpz) has no value that does without; `unequal_meshes` is about all stages.
FORBIDS: Mapping[str, tuple[str, tuple[Any, ...]]] = MappingProxyType(
    {name: (name, (1,)) for name in ("tp", "dp", "pp", "cp", "ep", "virtual_stages", "segments")}
    | {"zero": ("zero", (0,)), "recompute": ("recompute", ("none",))}
    | {"placement": ("placement", PLACEMENTS[:1]), "dp_shard": ("dp_shard", ())}
    | {"hpz": ("hpz", ()), "quantized": ("quantized", ("none",))}
    | {f"zero-{stage}": _without("zero", stage) for stage in ZERO if stage}
    | {policy: _without("recompute", policy) for policy in RECOMPUTE if policy != "none"}
    | {schedule: _without("schedule", schedule) for schedule in SCHEDULES}
)
FORBIDDABLE = (*FORBIDS, "unequal_meshes", "offload")
# what changes a training's numbers, or wants its steps made by `train_step(..., optimizer=)`: left
# out unless the user allows it by this name
ALLOWABLE = ("quantized", "post_validation")


class OverrideError(MeshwrightError):
    """An override that can't hold: names the value, the place, the legal values and the way out."""

    PLACE = "overrides"
    LEGAL = "values that the cluster, the batch and the model allow together"
    WAY_OUT = "drop one of them, or give another value"


def contradiction(said: str, other: str, legal: object) -> OverrideError:
    """The error of an override that another one rules out."""
    return OverrideError(
        f" contradicts {other}",
        place=f"override {said}",
        legal=legal,
        way_out="drop one of the two",
    )


def check_value(name: str, value: Any) -> None:
    """Raise `OverrideError` unless this is a legal value, None, or where blocks may differ a
    mapping from globs to legal values."""
    if value is None:
        return
    choices, by_block = CHOICES.get(name), name in BY_BLOCK
    legal = ", ".join(map(str, choices)) if choices else "an integer from 1"
    legal += f" to {MAX_ROWS}" * (not choices)
    legal += ", {glob over block names: such a value}" * by_block + ", or None to leave it free"
    values = [value]
    if by_block and isinstance(value, Mapping):
        values = list(value.values())
        if not values or not all(
            isinstance(pattern, str) and 0 < len(pattern) <= MAX_TEXT for pattern in value
        ):
            raise OverrideError(f"={shown(value)}", place=f"override {name}", legal=legal)
    for one in values:
        right = not isinstance(one, bool) and (
            isinstance(one, type(next(iter(choices)))) and one in choices
            if choices
            else isinstance(one, int) and 1 <= one <= MAX_ROWS
        )
        if not right:
            raise OverrideError(f"={shown(value)}", place=f"override {name}", legal=legal)


def check_forbid(forbid: Any) -> None:
    if isinstance(forbid, str) or not isinstance(forbid, Collection):
        legal = f"a list of names, e.g. forbid=[{shown(forbid)}]"
        raise OverrideError(f"={shown(forbid)}", place="override forbid", legal=legal)
    for name in forbid:
        if not isinstance(name, str) or name not in FORBIDDABLE:
            text = name[:MAX_TEXT] if isinstance(name, str) else ""
            near = difflib.get_close_matches(text, FORBIDDABLE, n=1)
            raise OverrideError(
                f"={shown(name)}",
                place="override forbid",
                legal=FORBIDDABLE,
                way_out=f"did you mean {near[0]!r}?" if near else "",
            )


def check_offloads(offload: Any) -> None:
    if offload is None:
        return
    if not isinstance(offload, Mapping) or not offload:
        raise OverrideError(
            f"={shown(offload)}",
            place="override offload",
            legal='parts from 0 to 1, e.g. {"optimizer": 0.5}, or None to leave it free',
        )
    check_offload(offload, "override offload", OverrideError)


def check_stages(stages: Any) -> None:
    if stages is None:
        return
    legal = 'a list of block names per stage, e.g. [["embed", "layers.0-5"], ["layers.6-11"]]'
    if not _is_list(stages) or not stages:
        raise OverrideError(f"={shown(stages)}", place="override stages", legal=legal)
    for k, stage in enumerate(stages):
        if not _is_list(stage) or not stage or not all(isinstance(n, str) for n in stage):
            raise OverrideError(f"={shown(stage)}", place=f"override stages[{k}]", legal=legal)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def check_shardings(shardings: Any) -> None:
    if not isinstance(shardings, Mapping) or not all(
        isinstance(text, str) and len(text) <= MAX_TEXT
        for item in shardings.items()
        for text in item
    ):
        raise OverrideError(
            f"={shown(shardings)}",
            place="override shardings",
            legal='a dict of glob: decision, e.g. {"layers.*.mlp.up_proj": "colwise"}, each of up '
            f"to {MAX_TEXT} characters",
        )


def check_allow(allow: Any) -> tuple[str, ...]:
    """The names of what may change numbers. Raises `OverrideError` for another."""
    named = _is_list(allow) or isinstance(allow, set | frozenset)
    if not named or not all(isinstance(name, str) and name in ALLOWABLE for name in allow):
        legal = f"a list of {', '.join(ALLOWABLE)}, e.g. allow=[{ALLOWABLE[0]!r}]"
        raise OverrideError(f"={shown(allow)}", place="allow", legal=legal)
    return tuple(dict.fromkeys(allow))
