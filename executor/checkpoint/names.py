"""Which stored tensor is which of the model's: by name, or by name but for one prefix.

Files differ from the model in what wraps it: a checkpoint of a training loop says `model.`, one of
a base model lacks the name that the model with a head has it under (`transformer.`). One prefix is
dropped from stored names, or added to them, where that finds tensors that are else missing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

SHOWN = 8  # names listed in a message


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """A tensor of the model: all its names, its shape, and whether it needs a stored value."""

    names: tuple[str, ...]
    shape: tuple[int, ...]
    required: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Matched:
    """Stored name by the model's FQN, and the stored names that nobody wants. Those outside a
    dropped prefix belong to something else (an optimizer) and don't count."""

    stored: Mapping[str, str]
    unexpected: tuple[str, ...]


@dataclass(frozen=True, slots=True, order=True)
class _Prefix:
    """`text` before every stored name but not the model's (`dropped`), or the other way round."""

    dropped: bool
    text: str


def match_names(
    wanted: Mapping[str, Wanted], shapes: Mapping[str, Sequence[int]], path: str
) -> Matched:
    """Find every wanted tensor in a file of these `shapes`. ValueError for missing and misshapen
    ones, and where two prefixes find as many."""
    found = _exact(wanted, shapes)
    lacking = {fqn: want for fqn, want in wanted.items() if fqn not in found}
    prefix = _best_prefix(lacking, shapes, path)
    renamed = {_model_name(name, prefix): name for name in shapes} if prefix else {}
    found |= {fqn: renamed[name] for fqn, name in _exact(lacking, renamed).items()}
    _check(wanted, shapes, found, path)
    known = {name for want in wanted.values() for name in want.names}
    known |= {renamed[name] for name in known if name in renamed}
    inside = prefix.text if prefix and prefix.dropped else ""
    unexpected = sorted(n for n in shapes if n.startswith(inside) and n not in known)
    return Matched(stored=found, unexpected=tuple(unexpected))


def _exact(wanted: Mapping[str, Wanted], stored: Mapping[str, object]) -> dict[str, str]:
    """Tensors stored under one of their names, the first that is there."""
    hits = {fqn: [n for n in want.names if n in stored] for fqn, want in wanted.items()}
    return {fqn: names[0] for fqn, names in hits.items() if names}


def _best_prefix(
    lacking: Mapping[str, Wanted], stored: Mapping[str, object], path: str
) -> _Prefix | None:
    """The prefix that finds most of the lacking tensors, if any does."""
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
        raise ValueError(
            f"weights: {path!r}: stored names are the model's {' or '.join(ways)}, {most} each; "
            f"save one model per file, or load_state_dict with the model's names"
        )
    return best[0] if best else None


def _cuts(name: str) -> Iterator[tuple[str, str]]:
    """("a.", "b.c"), ("a.b.", "c") of "a.b.c"."""
    for k, character in enumerate(name):
        if character == ".":
            yield name[: k + 1], name[k + 1 :]


def _model_name(stored: str, prefix: _Prefix) -> str:
    """The model's name of a stored one."""
    return stored.removeprefix(prefix.text) if prefix.dropped else prefix.text + stored


def _check(
    wanted: Mapping[str, Wanted],
    shapes: Mapping[str, Sequence[int]],
    found: Mapping[str, str],
    path: str,
) -> None:
    """One error for all that is missing or misshapen."""
    missing = [fqn for fqn, want in wanted.items() if want.required and fqn not in found]
    misshapen = [
        f"{fqn} is {tuple(shapes[name])} stored as {name!r}, {wanted[fqn].shape} in the model"
        for fqn, name in found.items()
        if tuple(shapes[name]) != wanted[fqn].shape
    ]
    if not missing and not misshapen:
        return
    problems = [f"{len(missing)} missing: {', '.join(missing[:SHOWN])}"] if missing else []
    if misshapen:
        problems.append(f"{len(misshapen)} misshapen: {'; '.join(misshapen[:SHOWN])}")
    raise ValueError(
        f"weights: {path!r} doesn't fit the model: {'; '.join(problems)}; it holds {len(shapes)} "
        f"tensors, e.g. {', '.join(sorted(shapes)[:3])}; rename or convert them with what wrote "
        f"the file, or pass a whole state dict to load_state_dict"
    )
