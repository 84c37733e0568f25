"""Matching of a file's tensor names with the model's FQNs, up to one prefix.

A training loop's checkpoint may say `model.` before every name; a base model's lacks the name under
which the model with a head holds it (`transformer.`). One prefix is dropped from stored names, or
added to them, where that finds tensors that are else missing.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from meshwright.executor.errors import SavedError

SHOWN = 8  # names listed in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A tensor of the model: its FQNs, its global shape, and whether the file must hold it."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    required: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """FQN -> stored name, and the stored names that match no tensor. Names outside a dropped prefix
    belong to something else (an optimizer) and are not listed."""

    stored: Mapping[str, str]
    unexpected: tuple[str, ...]


@dataclass(frozen=True, slots=True, order=True)
class _Prefix:
    """`text` before every stored name that the model's lack (`dropped`), or the reverse."""

    dropped: bool
    text: str


def match_names(
    wanted: Mapping[str, Wanted], shapes: Mapping[str, Sequence[int]], path: str
) -> Matched:
    """Match `wanted` tensors (by FQN) with a file's `shapes` (by stored name).

    Raises ValueError for missing and misshapen tensors, and where two prefixes find as many.
    """
    stored_names = _exact(wanted, shapes)
    lacking = {fqn: want for fqn, want in wanted.items() if fqn not in stored_names}
    prefix = _best_prefix(lacking, shapes, path)
    renamed = {_model_name(name, prefix): name for name in shapes} if prefix else {}
    stored_names |= {fqn: renamed[name] for fqn, name in _exact(lacking, renamed).items()}
    known = {name for want in wanted.values() for name in want.names}
    known |= {renamed[name] for name in known if name in renamed}
    inside = prefix.text if prefix and prefix.dropped else ""
    unexpected = sorted(n for n in shapes if n.startswith(inside) and n not in known)
    _check(wanted, shapes, stored_names, unexpected, path)
    return Matched(stored=stored_names, unexpected=tuple(unexpected))


def differences(wanted: Mapping[str, Wanted], shapes: Mapping[str, Sequence[int]]) -> str:
    """In which names and shapes a model and a checkpoint differ, the first of each kind; empty
    where they don't. Tensors without elements are not stored."""
    known = {name for want in wanted.values() for name in want.names}
    wanted = {fqn: want for fqn, want in wanted.items() if math.prod(want.shape)}
    stored_names = _exact(wanted, shapes)
    return "; ".join(_problems(wanted, shapes, stored_names, sorted(shapes.keys() - known)))


def _exact(wanted: Mapping[str, Wanted], stored: Mapping[str, object]) -> dict[str, str]:
    """FQN -> the first of its names that is stored, where one is."""
    hits = {fqn: [n for n in want.names if n in stored] for fqn, want in wanted.items()}
    return {fqn: names[0] for fqn, names in hits.items() if names}


def _best_prefix(
    lacking: Mapping[str, Wanted], stored: Mapping[str, object], path: str
) -> _Prefix | None:
    """The prefix that finds most of the lacking tensors, None if none does. Raises ValueError for a
    tie."""
    fqn_of = {name: fqn for fqn, want in lacking.items() for name in want.names}
    finds: dict[_Prefix, set[str]] = {}
    for name in stored:
        for head, tail in _cuts(name):
            if tail in fqn_of:
                finds.setdefault(_Prefix(True, head), set()).add(fqn_of[tail])
    for name, fqn in fqn_of.items():
        for head, tail in _cuts(name):
            if tail in stored:
                finds.setdefault(_Prefix(False, head), set()).add(fqn)
    most = max(map(len, finds.values()), default=0)
    best = sorted(prefix for prefix, fqns in finds.items() if len(fqns) == most)
    if len(best) > 1:
        ways = [f"{'without' if p.dropped else 'with'} {p.text!r}" for p in best]
        raise SavedError(
            f"stored names are the model's {' or '.join(ways)}, {most} each",
            place=f"weights: {path!r}",
            way_out="save one model per file, or load_state_dict with the model's names",
        )
    return best[0] if best else None


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """Every (prefix, rest) of a dotted name: ("a.", "b.c"), ("a.b.", "c") of "a.b.c"."""
    for k, character in enumerate(name):
        if character == ".":
            yield name[: k + 1], name[k + 1 :]


def _model_name(stored: str, prefix: _Prefix) -> str:
    """The model's name for a stored one."""
    return stored.removeprefix(prefix.text) if prefix.dropped else prefix.text + stored


def _check(
    wanted: Mapping[str, Wanted],
    shapes: Mapping[str, Sequence[int]],
    stored_names: Mapping[str, str],
    unexpected: Sequence[str],
    path: str,
) -> None:
    """Raise one ValueError for all missing and misshapen tensors."""
    problems = _problems(wanted, shapes, stored_names, unexpected)
    if len(problems) == bool(unexpected):
        return
    raise SavedError(
        f" doesn't fit the model: {'; '.join(problems)}; it holds {len(shapes)} "
        f"tensors, e.g. {', '.join(sorted(shapes)[:3])}",
        place=f"weights: {path!r}",
        way_out="rename or convert them with what wrote the file, or pass a whole state dict to "
        "load_state_dict",
    )


def _problems(
    wanted: Mapping[str, Wanted],
    shapes: Mapping[str, Sequence[int]],
    stored_names: Mapping[str, str],
    unexpected: Sequence[str],
) -> list[str]:
    """Missing, misshapen and unexpected names, each with its count and the first."""
    missing = [fqn for fqn, want in wanted.items() if want.required and fqn not in stored_names]
    misshapen = [
        f"{fqn} is {tuple(shapes[name])} stored as {name!r}, {wanted[fqn].shape} in the model"
        for fqn, name in stored_names.items()
        if tuple(shapes[name]) != wanted[fqn].shape
    ]
    problems = [f"{len(missing)} missing: {', '.join(missing[:SHOWN])}"] if missing else []
    if misshapen:
        problems.append(f"{len(misshapen)} misshapen: {'; '.join(misshapen[:SHOWN])}")
    if unexpected:
        problems.append(f"{len(unexpected)} unexpected: {', '.join(unexpected[:SHOWN])}")
    return problems
