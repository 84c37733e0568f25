"""The legal values of each override, as data, and the check of one value by itself."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from meshwright.planner.decisions import ALLOWABLE, FORBIDDABLE, Decision
from meshwright.planner.plan import check_offload
from meshwright.profiles.inputs import MeshwrightError, shown
from meshwright.profiles.inputs.limits import MAX_TEXT


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


def check_value(own: Decision, value: Any) -> None:
    """Raise `OverrideError` unless this is a value of a decision, None, or where blocks may differ
    a mapping from globs to values."""
    if value is None:
        return
    if own.parts:
        if not isinstance(value, Mapping) or not value:
            legal = f'parts from 0 to 1, e.g. {{"{own.parts[0]}": 0.5}}, or None to leave it free'
            raise OverrideError(f"={shown(value)}", place=f"override {own.name}", legal=legal)
        check_offload(value, f"override {own.name}", OverrideError)
        return
    legal = "True, False" if own.is_flag else own.values
    legal += ", {glob over block names: such a value}" * own.by_block + ", or None to leave it free"
    by_glob = value if own.by_block and isinstance(value, Mapping) else {"*": value}
    named = all(isinstance(glob, str) and 0 < len(glob) <= MAX_TEXT for glob in by_glob)
    if not (by_glob and named and all(map(own.accepts, by_glob.values()))):
        raise OverrideError(f"={shown(value)}", place=f"override {own.name}", legal=legal)


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
