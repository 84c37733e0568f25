"""Overrides: what the user has decided, as restrictions on the search before it starts."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields

from costmodel.graph import Graph
from costmodel.schedule import SCHEDULES
from planner.plan import RECOMPUTE, ZERO, expand_names

FORBIDDABLE = ("tp", "dp", "pp", "zero", "recompute", *SCHEDULES)


class OverrideError(ValueError):
    """An override that can't hold: names the value, the place, the legal values and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Decisions taken by the user; whatever is None stays free.

    `tp`, `dp` are the degrees of every stage, `pp` the number of stages. `microbatch_size` is rows per data-parallel rank
    and micro-batch. `stages` lists the blocks of each stage (`"layers.0-11"` is a range). `shardings` maps
    globs over modules, operators or parameters to decisions (`colwise`, `rowwise`, `vocab`, `replicate`, `S(0)@tp`). `forbid` lists
    what must not be used: "tp", "dp", "pp", "zero", "recompute" or a schedule.
    """

    tp: int | None = None
    dp: int | None = None
    pp: int | None = None
    microbatch_size: int | None = None
    num_microbatches: int | None = None
    schedule: str | None = None
    zero: int | None = None
    recompute: str | None = None
    stages: Sequence[Sequence[str]] | None = None
    shardings: Mapping[str, str] = field(default_factory=dict)
    forbid: Collection[str] = ()

    def __post_init__(self) -> None:
        for name in ("tp", "dp", "pp", "microbatch_size", "num_microbatches"):
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise OverrideError(
                    f"override {name}={value!r}: legal: an integer from 1, or None to leave it free"
                )
        for name, legal in (
            ("schedule", tuple(SCHEDULES)),
            ("zero", ZERO),
            ("recompute", RECOMPUTE),
        ):
            value = getattr(self, name)
            if value is not None and value not in legal:
                raise OverrideError(
                    f"override {name}={value!r}: legal: {', '.join(map(str, legal))}"
                )
        for name in self.forbid:
            if name not in FORBIDDABLE:
                near = difflib.get_close_matches(str(name), FORBIDDABLE, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise OverrideError(f"forbid {name!r}: legal: {', '.join(FORBIDDABLE)}{hint}")

    def given(self) -> dict[str, object]:
        """The overrides that are set, by name."""
        return {
            f.name: getattr(self, f.name)
            for f in fields(self)
            if getattr(self, f.name) not in (None, {}, ())
        }

    def effective(self) -> Overrides:
        """`forbid` turned into the values it leaves; a contradiction names both overrides."""
        changes: dict[str, object] = {}
        for name, value in (("tp", 1), ("dp", 1), ("pp", 1), ("zero", 0), ("recompute", "none")):
            if name in self.forbid:
                asked = getattr(self, name)
                if asked not in (None, value):
                    raise OverrideError(
                        f"override {name}={asked!r} contradicts forbid={name!r}: drop one of the two"
                    )
                changes[name] = value
        if self.schedule in self.forbid:
            raise OverrideError(
                f"override schedule={self.schedule!r} contradicts forbid={self.schedule!r}: drop one"
            )
        if self.stages is not None and self.pp not in (None, len(self.stages)):
            raise OverrideError(
                f"override pp={self.pp} contradicts stages= with {len(self.stages)} stages: drop one of the two"
            )
        import dataclasses

        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def schedules(self) -> list[str]:
        """Schedules left to search."""
        wanted = [self.schedule] if self.schedule else list(SCHEDULES)
        left = [s for s in wanted if s not in self.forbid]
        if not left:
            raise OverrideError(
                f"forbid={sorted(self.forbid)} leaves no schedule; legal: {', '.join(SCHEDULES)}"
            )
        return left


def stage_cuts(overrides: Overrides, graph: Graph) -> list[int] | None:
    """Block positions at which the overridden stages end; None where stages are free."""
    if overrides.stages is None:
        return None
    names = [block.name for block in graph.blocks]
    cuts: list[int] = []
    position = 0
    for k, stage in enumerate(overrides.stages):
        for name in expand_names(stage):
            if name not in names:
                near = difflib.get_close_matches(name, names, n=3, cutoff=0.3)
                raise OverrideError(
                    f"override stages[{k}]: no block {name!r}; nearest: {near}; blocks: {names[0]} ... {names[-1]}"
                )
            if position >= len(names) or names[position] != name:
                expected = names[position] if position < len(names) else "nothing more"
                raise OverrideError(
                    f"override stages[{k}]: block {name!r} out of order, expected {expected!r}; stages must cover the blocks once, in order"
                )
            position += 1
        cuts.append(position)
    if position != len(names):
        raise OverrideError(
            f"override stages: block {names[position]!r} and what follows is in no stage"
        )
    return cuts
