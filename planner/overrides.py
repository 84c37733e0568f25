"""Overrides: what the user has decided, as restrictions on the search before it starts."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from costmodel.graph import Graph
from costmodel.schedule import EXECUTABLE
from planner.plan import RUNS, compress_names, expand_names

_WAY_OUT = "change or drop one of them, or what they must fit"
DEGREES = ("tp", "dp", "pp", "microbatch_size", "num_microbatches")
FORBIDDABLE = ("tp", "dp", "pp", "zero", "recompute", *EXECUTABLE)


class OverrideError(ValueError):
    """An override that can't hold: names the value, the place, the legal values and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Decisions taken by the user; whatever is None stays free.

    `tp`, `dp` are the degrees of every stage, `pp` the number of stages. `microbatch_size` is rows
    per data-parallel rank and micro-batch. `stages` lists the blocks of each stage
    (`"layers.0-11"` is a range). `shardings` maps globs over modules, operators or parameters to
    decisions (`colwise`, `rowwise`, `vocab`, `replicate`, `S(0)@tp`). `forbid` lists what must not
    be used: "tp", "dp", "pp", "zero", "recompute" or a schedule.
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
        for name in DEGREES:
            value = getattr(self, name)
            if value is not None and (
                not isinstance(value, int) or isinstance(value, bool) or value < 1
            ):
                raise OverrideError(
                    f"override {name}={value!r}: legal: an integer from 1, or None to leave it free"
                )
        for name, legal in (
            ("schedule", tuple(EXECUTABLE)),
            ("zero", RUNS["zero"]),
            ("recompute", RUNS["recompute"]),
        ):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or value not in legal):
                raise OverrideError(
                    f"override {name}={value!r}: legal: {', '.join(map(str, legal))}, or None to "
                    "leave it free"
                )
        self._check_forbid()
        self._check_stages()
        self._check_shardings()

    def _check_forbid(self) -> None:
        if isinstance(self.forbid, str):
            raise OverrideError(
                f"override forbid={self.forbid!r}: legal: a list of names, forbid=[{self.forbid!r}]"
            )
        for name in self.forbid:
            if name not in FORBIDDABLE:
                near = difflib.get_close_matches(str(name), FORBIDDABLE, n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise OverrideError(
                    f"override forbid={name!r}: legal: {', '.join(FORBIDDABLE)}{hint}"
                )

    def _check_stages(self) -> None:
        if self.stages is None:
            return
        legal = 'a list of block names per stage, e.g. [["embed", "layers.0-5"], ["layers.6-11"]]'
        if isinstance(self.stages, str) or not self.stages:
            raise OverrideError(f"override stages={self.stages!r}: legal: {legal}")
        for k, stage in enumerate(self.stages):
            if isinstance(stage, str) or not stage or not all(isinstance(n, str) for n in stage):
                raise OverrideError(f"override stages[{k}]={stage!r}: legal: {legal}")

    def _check_shardings(self) -> None:
        if not isinstance(self.shardings, Mapping) or not all(
            isinstance(text, str) for item in self.shardings.items() for text in item
        ):
            raise OverrideError(
                f"override shardings={self.shardings!r:.80}: legal: a dict of glob: decision, e.g. "
                '{"layers.*.mlp.up_proj": "colwise"}'
            )

    def given(self) -> dict[str, object]:
        """The overrides that are set, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        empty = [name for name in ("shardings", "forbid") if not values[name]]
        return {
            name: value for name, value in values.items() if value is not None and name not in empty
        }

    def effective(self) -> Overrides:
        """`forbid` turned into the values it leaves; a contradiction names both overrides."""
        changes: dict[str, object] = {}
        for name, value in (("tp", 1), ("dp", 1), ("pp", 1), ("zero", 0), ("recompute", "none")):
            if name in self.forbid:
                asked = getattr(self, name)
                if asked not in (None, value):
                    raise OverrideError(
                        f"override {name}={asked!r} contradicts forbid={name!r}: "
                        "drop one of the two"
                    )
                changes[name] = value
        if self.schedule in self.forbid:
            raise OverrideError(
                f"override schedule={self.schedule!r} contradicts forbid={self.schedule!r}: "
                "drop one of the two"
            )
        self.schedules()
        if self.stages is not None:
            count = len(self.stages)
            if "pp" in self.forbid and count > 1:
                raise OverrideError(
                    f"override stages= with {count} stages contradicts forbid='pp': "
                    "drop one of the two"
                )
            if self.pp not in (None, count):
                raise OverrideError(
                    f"override pp={self.pp} contradicts stages= with {count} stages: "
                    "drop one of the two"
                )
        return replace(self, **changes)  # type: ignore[arg-type]

    def schedules(self) -> list[str]:
        """Schedules left to search."""
        wanted = [self.schedule] if self.schedule else list(EXECUTABLE)
        left = [s for s in wanted if s not in self.forbid]
        if not left:
            raise OverrideError(
                f"forbid={sorted(self.forbid)} leaves no schedule; legal: {', '.join(EXECUTABLE)}"
            )
        return left


def check_overrides(
    overrides: Overrides, *, num_devices: int, global_batch_size: int, num_blocks: int
) -> None:
    """What must hold between degrees, cluster, batch and blocks, before anything is searched.

    With `tp` and `dp` all stages are alike: `tp · dp` divides the devices, `tp · dp · pp` is their
    number. Stages of other meshes need `pp` times what is given at most. `dp · microbatch_size ·
    num_microbatches` divides the batch, and is the batch where all three are given.
    """
    wanted = overrides.effective()
    pp = len(wanted.stages) if wanted.stages else wanted.pp
    if pp is not None and pp > num_blocks:
        raise OverrideError(
            f"override pp={pp}: the model has {num_blocks} blocks; legal: 1 to {num_blocks}"
        )
    mesh = {"tp": wanted.tp, "dp": wanted.dp}
    devices = f"the cluster's {num_devices} devices"
    if pp is None:
        _check_product(mesh, num_devices, devices, wanted.forbid, free=True)
    elif None in mesh.values():
        _check_product(mesh, num_devices, devices, wanted.forbid, free=True)
        least = {name: n for name, n in {**mesh, "pp": pp}.items() if n is not None}
        needed = math.prod(least.values())
        if needed > num_devices:
            raise OverrideError(
                f"override {_shown(least, wanted.forbid)}: needs at least {needed} devices, more "
                f"than {devices}; {_WAY_OUT}"
            )
    else:
        _check_product({**mesh, "pp": pp}, num_devices, devices, wanted.forbid, free=False)
    rows = {name: getattr(wanted, name) for name in ("dp", "microbatch_size", "num_microbatches")}
    batch, free = f"global_batch_size={global_batch_size}", None in rows.values()
    _check_product(rows, global_batch_size, batch, wanted.forbid, free=free)


def _check_product(
    factors: Mapping[str, int | None],
    total: int,
    what: str,
    forbidden: Collection[str],
    *,
    free: bool,
) -> None:
    """The product of what is given divides `total`, or is it where nothing is left `free`."""
    given = {name: value for name, value in factors.items() if value is not None}
    product = math.prod(given.values())
    if product == total or (free and total % product == 0):
        return
    divisors = ", ".join(str(d) for d in range(1, total + 1) if total % d == 0)
    raise OverrideError(
        f"override {_shown(given, forbidden)}: {'the product ' if len(given) > 1 else ''}{product} "
        f"{'does not divide' if free else 'is not'} {what}; "
        f"legal: {divisors if free else total}; {_WAY_OUT}"
    )


def _shown(given: Mapping[str, int], forbidden: Collection[str]) -> str:
    return ", ".join(
        f"{name}={value}" + (f" (forbid={name!r})" if name in forbidden else "")
        for name, value in given.items()
    )


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
                    f"override stages[{k}]: no block {name!r}; "
                    f"nearest: {', '.join(near) or 'none'}; "
                    f"legal: {', '.join(compress_names(names))}"
                )
            if position >= len(names) or names[position] != name:
                expected = names[position] if position < len(names) else "nothing more"
                raise OverrideError(
                    f"override stages[{k}]: block {name!r} out of order, expected {expected!r}; "
                    "stages must cover the blocks once, in order"
                )
            position += 1
        cuts.append(position)
    if position != len(names):
        raise OverrideError(
            f"override stages: in no stage: {', '.join(compress_names(names[position:]))}; "
            "stages must cover the blocks once, in order"
        )
    return cuts
