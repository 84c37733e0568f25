"""Overrides with one of them dropped: what each by itself costs, or rules out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from meshwright.planner.overrides.overrides import Overrides


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """The overrides `left` without one, `said` as the user spelled it; `what` says that it goes."""

    said: str
    what: str
    left: Overrides


def each_dropped(overrides: Overrides) -> Iterator[Dropped]:
    """The overrides without one of them, for each; names in `forbid` count one by one."""
    for name, value in overrides.given().items():
        if name != "forbid":
            left = without(overrides, name)
            yield Dropped(said=f"{name}={value!r}", what=f"leave {name} free", left=left)
    for forbidden in overrides.forbid:
        kept = tuple(name for name in overrides.forbid if name != forbidden)
        left = replace(overrides, forbid=kept)
        yield Dropped(said=f"forbid={forbidden!r}", what=f"allow {forbidden}", left=left)


def without(overrides: Overrides, *names: str) -> Overrides:
    """The overrides with these left free."""
    free: dict[str, Any] = {name: getattr(Overrides(), name) for name in names}
    return replace(overrides, **free)
