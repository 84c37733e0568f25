"""Names of blocks and ranks, short: `h.0-11` and `0-7`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

from meshwright.profiles.inputs import MeshwrightError, shown
from meshwright.profiles.inputs.limits import MAX_DEVICES, MAX_NAMES, MAX_TEXT


class PlanError(MeshwrightError):
    """A plan, or a file of one, that is illegal for the model, the batch or the cluster."""

    CODE = "MW209"
    PLACE = "plan"
    LEGAL = "decisions that the model, the batch and the cluster allow together"
    WAY_OUT = "correct the plan, or plan anew"


# One spelling per number: without leading zeros, which a range would lose.
_NUMBER = "(0|[1-9][0-9]*)"
_RANKS = re.compile(r"\s*([0-9]{1,9})(?:-([0-9]{1,9}))?\s*")


def compress_names(names: Sequence[str]) -> list[str]:
    """`h.0, h.1, h.2, head` -> `h.0-2, head`."""
    runs: list[tuple[str, int, int]] = []  # prefix, first, last; last < 0 for a name without number
    for name in names:
        match = re.fullmatch(rf"(.*\.){_NUMBER}", name, re.DOTALL)
        run = runs[-1] if runs else ("", 0, -2)
        if match and match[1] == run[0] and int(match[2]) == run[2] + 1:
            runs[-1] = (match[1], run[1], int(match[2]))
        else:
            runs.append((match[1], int(match[2]), int(match[2])) if match else (name, 0, -2))
    return [
        prefix if last < 0 else f"{prefix}{first}" + f"-{last}" * (last > first)
        for prefix, first, last in runs
        if prefix
    ]


def expand_names(names: Iterable[str], place: str = "blocks") -> tuple[str, ...]:
    """The inverse of `compress_names`; what is no ascending range is a name of its own. Raises
    `PlanError`, before anything is expanded, for more than `MAX_NAMES`, and for an empty name."""
    out: list[str] = []
    for name in names:
        if not name:
            raise PlanError("has an empty name", place=place, legal="names of blocks, or ranges")
        match = re.fullmatch(rf"(.*\.){_NUMBER}-{_NUMBER}", name[:MAX_TEXT], re.DOTALL)
        first, last = (int(match[2]), int(match[3])) if match else (0, 0)
        if len(name) > MAX_TEXT or len(out) + last - first >= MAX_NAMES:
            raise PlanError(
                f"={shown(name)} is too much",
                place=place,
                legal=f"up to {MAX_NAMES} names of up to {MAX_TEXT} characters",
            )
        prefix = match[1] if match and first < last else ""
        out += [f"{prefix}{i}" for i in range(first, last + 1)] if prefix else [name]
    return tuple(out)


def compress_ranks(ranks: Sequence[int]) -> str:
    """`(0, 1, 2, 3, 8)` -> `"0-3,8"`, in the order given."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][1] + 1:
            runs[-1][1] = rank
        else:
            runs.append([rank, rank])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


def expand_ranks(text: Any, place: str = "plan") -> tuple[int, ...]:
    """The inverse of `compress_ranks`. Raises `PlanError`, before anything is expanded, for a rank
    from `MAX_DEVICES`."""
    if not isinstance(text, str) or text.count(",") >= MAX_DEVICES:
        raise _not_ranks(text, place)
    runs: list[range] = []
    total = 0
    for part in text.split(","):
        match = _RANKS.fullmatch(part)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
        total += last + 1 - first
        if not first <= last < MAX_DEVICES or total > MAX_DEVICES:
            raise _not_ranks(text, place)
        runs.append(range(first, last + 1))
    return tuple(rank for run in runs for rank in run)


def _not_ranks(text: Any, place: str) -> PlanError:
    return PlanError.refused(
        f"{place}: ranks",
        text,
        legal=f'"0-3" or "0,2,4", up to {MAX_DEVICES} ranks, each below {MAX_DEVICES}',
    )
