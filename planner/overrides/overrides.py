"""Overrides: decisions that the user takes in place of the search.

An illegal value and two overrides that contradict each other are refused when `Overrides` is made;
a contradiction with the cluster or the batch by `check_overrides`, one with the model's blocks by
`restrictions.py`.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from itertools import product
from typing import Any, Self

from meshwright.costmodel.compressed import OFFERED
from meshwright.costmodel.mesh import ContextKind
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.planner import decisions
from meshwright.profiles.inputs import MeshwrightError, shown
from meshwright.profiles.inputs.limits import MAX_TEXT


class OverrideError(MeshwrightError):
    """An override that can't hold, by itself or beside another one."""

    CODE = "MW208"
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Overrides:
    """Decisions taken by the user; whatever is None stays free.

    By block, as one value for all or a mapping from block names (`"layers.0-11"` is a range, `*`
    stays within one component, `**` crosses dots) to values, blocks without a match being free:
    `tp`, `dp`, `cp`, `ep` the degrees of the block's stage, `zero` 0 to 3, `dp_shard` the ranks
    among which ZeRO divides, `hpz` those that keep a secondary shard of its weights for the
    backward (as many as it divides among: none), `quantized` what it sends in blocks of few bits,
    where that is allowed ("none", "weights", "gradients", "both"), `compressed` what stands for
    gradients in their sum without ZeRO, where that is allowed ("none", "powersgd-4", "topk-0.1" and
    others), `recompute` what a block's backward runs again: "none", "selective", "pointwise",
    "widening", "products", "full" (each keeps less), or "alternate"; "regather", or "+regather"
    behind a partial one, gathers again what tensor-parallel ranks gathered; `segments` how many
    neighbours run again together, of which the first one's input alone is kept (1: none).

    Of the whole: `pp` the device groups of the pipeline, `virtual_stages` the stages on each,
    `microbatch_size` rows per data-parallel rank and micro-batch, `num_microbatches`, `slices`, in
    how many parts of its tokens each goes through the pipeline, or their sizes (1: whole),
    `branches`, how many of the model's lie on device groups of their own, or how many groups each
    stage is from the end (1: stages follow each other), the `schedule`, `placement`, the axes from
    the innermost ("tp,pp,dp": the pipeline inside the node), and `cp_kind`, how attention runs
    where cp splits its tokens: "all_gather", "ring" or "ulysses". `stages` lists the blocks of each
    stage (of one copy of the model). `shardings` maps globs over modules, operators or parameters
    to decisions (`colwise`, `rowwise`, `vocab`, `replicate`, `S(0)@tp`).
    `offload` is the part of each stage's optimizer states, with their step, in host memory, and of
    its blocks those that send what they save for the backward there: {"optimizer": 0.5,
    "activations": 1}, what isn't named 0; free, there is none unless nothing fits without, or it is
    faster. `chunked_loss` is the number of parts of its rows in which the last product, which makes
    logits, and their cross-entropy run; free, there are several where logits take too much. With
    `post_validation` stages of a pipeline step their optimizers without waiting for each other, in
    `train_step(..., optimizer=)` and `fit`; free, they do where it is allowed and pays. With
    `optimizer_in_backward` these step each parameter as its gradient is whole, one micro-batch a
    step, so that only a few gradients are there at once. `staleness` is the number of steps by
    which gradients may come late, of a pipeline that is never flushed or to servers (0: none do).
    The first `servers` ranks keep and step the weights for all others. `replicas`
    train apart, each on its rows of the batch, and meet every `sync_every` steps (100), where they
    send changes in `outer_bits` (32 or 8), their weights in `fragments` at steps of their own;
    without them there are none, unless they are allowed and pay. `forbid`
    lists what must not be used: one of `forbiddable()`. Raises `OverrideError`.
    """

    tp: int | Mapping[str, int] | None = None
    dp: int | Mapping[str, int] | None = None
    cp: int | Mapping[str, int] | None = None
    ep: int | Mapping[str, int] | None = None
    pp: int | None = None
    virtual_stages: int | None = None
    microbatch_size: int | None = None
    num_microbatches: int | None = None
    slices: int | Sequence[int] | None = None
    branches: int | Sequence[int] | None = None
    schedule: str | None = None
    placement: str | None = None
    cp_kind: ContextKind | None = None
    zero: int | Mapping[str, int] | None = None
    dp_shard: int | Mapping[str, int] | None = None
    hpz: int | Mapping[str, int] | None = None
    quantized: str | Mapping[str, str] | None = None
    compressed: str | Mapping[str, str] | None = None
    staleness: int | None = None
    servers: int | None = None
    recompute: str | Mapping[str, str] | None = None
    segments: int | Mapping[str, int] | None = None
    stages: Sequence[Sequence[str]] | None = None
    shardings: Mapping[str, str] = field(default_factory=dict)
    offload: Mapping[str, float] | None = None
    chunked_loss: int | None = None
    post_validation: bool | None = None
    optimizer_in_backward: bool | None = None
    replicas: int | None = None
    sync_every: int | None = None
    outer_bits: int | None = None
    fragments: int | None = None
    forbid: Collection[str] = ()

    def __new__(cls, *_: Any, **given: Any) -> Self:
        """Raises `OverrideError` for a name that is no decision."""
        names = [f.name for f in fields(cls)] if given else []
        for name in given.keys() - set(names):
            near = difflib.get_close_matches(name, names, n=1) or difflib.get_close_matches(
                name[:2], names, n=1
            )
            raise OverrideError(
                f" is given ({shown(given[name])}), and is no decision",
                place=f"override {name!r}",
                legal=", ".join(sorted(names)),
                way_out=f"did you mean {near[0]!r}?" if near else "leave it out",
            )
        return object.__new__(cls)

    def __post_init__(self) -> None:
        for name, decision in decisions.DECISIONS.items():
            _check_value(decision, getattr(self, name))
        _check_forbid(self.forbid)
        _check_stages(self.stages)
        _check_shardings(self.shardings)
        for error in self.ruled_out(given=True):
            raise error
        for forbidden in self.forbid:
            self._check_forbidden(forbidden)
        self._check_meshes()
        self._check_virtual()
        self._check_count()

    def items(self, name: str) -> Iterator[tuple[str | None, Any]]:
        """(glob, value) of an override; the glob is None where one value is for all."""
        value = getattr(self, name)
        if isinstance(value, Mapping) and decisions.DECISIONS[name].by_block:
            yield from value.items()
        elif value is not None:
            yield None, value

    def given(self) -> dict[str, object]:
        """The overrides that are set, by name."""
        values = {f.name: getattr(self, f.name) for f in fields(self)}
        return {
            name: value
            for name, value in values.items()
            if value is not None and (value or name not in ("shardings", "forbid"))
        }

    def left(self, name: str) -> tuple[Any, ...]:
        """The values of a choice (zero, recompute, schedule, placement) that are not forbidden."""
        forbidden = map(decisions.forbids, self.forbid)
        others = [values for decision, values in forbidden if decision == name]
        return tuple(v for v in decisions.CHOICES[name] if all(v in values for values in others))

    def everywhere(self, name: str) -> Any:
        """The one value that is set for all blocks, or that `forbid` leaves; else None."""
        value = getattr(self, name)
        if value is not None and not isinstance(value, Mapping):
            return value
        if name in decisions.CHOICES:
            values = self.left(name)
        else:
            values = decisions.forbids(name)[1] if name in self.forbid else ()
        return values[0] if len(values) == 1 else None

    def offloaded(self, what: str) -> float | None:
        """Part of `what` (of `OFFLOADS`) that is off devices; None where it is free."""
        if self.offload is not None:
            return float(self.offload.get(what, 0.0))
        steps = self.post_validation or self.optimizer_in_backward or self.late
        return 0.0 if "offload" in self.forbid or steps else None

    @property
    def late(self) -> bool:
        """Whether a pipeline's gradients that come late are asked for, by their number or the
        schedule; those of servers are others."""
        late = self.staleness or (self.schedule and not SCHEDULES[self.schedule].flushes)
        return bool(late and not self.servers)

    def virtual(self) -> tuple[int | None, str]:
        """Stages per device group, where it is known, and the override that says so."""
        if self.virtual_stages is not None:
            return self.virtual_stages, f"virtual_stages={self.virtual_stages}"
        for name in ("virtual_stages", "pp"):  # without a pipeline there is one stage
            if name in self.forbid:
                return 1, f"forbid={name!r}"
        per_device = SCHEDULES[self.schedule].stages_per_device if self.schedule else None
        return per_device, f"schedule={self.schedule!r}"

    @property
    def copies(self) -> int:
        """Copies of the model that the schedule holds; `stages` names those of one."""
        return SCHEDULES[self.schedule].copies if self.schedule else 1

    # --- two overrides ---

    def ruled_out(self, *, given: bool) -> Iterator[OverrideError]:
        """Values that rule each other out wherever they are, of which one at least is for all: as
        soon as they are `given`, or where a plan is looked for."""
        for row in decisions.CONTRADICTIONS:
            if row.given != given or not row.holds(self.everywhere):
                continue
            for (at, a), (where, b) in product(self._known(row.a), self._known(row.b)):
                if None in (at, where) and row.clash(a, b):
                    forbidden = row.b in self.forbid
                    other = f"forbid={row.b!r}" if forbidden else spelled(row.b, where, b)
                    yield contradiction(spelled(row.a, at, a), f"{other}: {row.why}", row.legal)

    def _known(self, name: str) -> list[tuple[str | None, Any]]:
        """(glob, value) of a decision, or the value that `forbid` leaves for all."""
        if not hasattr(self, name):  # the problem's
            return []
        value = self.everywhere(name)
        return [*self.items(name)] or ([] if value is None else [(None, value)])

    def _check_forbidden(self, forbidden: str) -> None:
        name, others = decisions.forbids(forbidden)
        for pattern, value in self.items(name) if name else ():
            nothing = isinstance(value, Mapping) and not any(value.values())
            if value not in others and not nothing:
                said = spelled(name, pattern, value)
                legal = [other for other in others if other != {}] or "none"
                raise contradiction(said, f"forbid={forbidden!r}", legal)

    def _check_meshes(self) -> None:
        """Degrees that differ between blocks need stages of unequal meshes."""
        for name in decisions.MESH:
            values = getattr(self, name)
            if not isinstance(values, Mapping) or len(set(values.values())) < 2:
                continue
            other = ""
            if "unequal_meshes" in self.forbid:
                other = "forbid='unequal_meshes'"
            elif name == "dp" and self.microbatch_size is not None:
                # dp · microbatch_size rows are one micro-batch, which all stages share
                other = f"microbatch_size={self.microbatch_size}"
            if other:
                said = f"{name}={shown(dict(values))}"
                raise contradiction(said, other, "one value for all blocks")

    def _check_virtual(self) -> None:
        if "pp" in self.forbid and (self.virtual_stages or 1) > 1:
            raise contradiction(f"virtual_stages={self.virtual_stages}", "forbid='pp'", 1)
        if self.schedule is None:
            return
        per_device, (count, who) = SCHEDULES[self.schedule].stages_per_device, self.virtual()
        needless = per_device is None and count == 1 and self.virtual_stages is None
        if needless or (per_device is not None and count != per_device):
            places = "several stages" if per_device is None else per_device
            raise contradiction(
                f"schedule={self.schedule!r}",
                f"{who}: it places {places} on each device group",
                f"for virtual_stages={count}: {', '.join(schedules_with(count))}",
            )

    def _check_count(self) -> None:
        """`stages` are pp device groups times virtual_stages."""
        if self.stages is None:
            return
        count, pp, (per_device, who) = len(self.stages), self.everywhere("pp"), self.virtual()
        unit = max(1, (pp or 1) * (per_device or 1) // self.copies)
        if not (count == unit if pp and per_device else count % unit == 0):
            asked = [f"pp={pp}" if self.pp else "forbid='pp'"] if pp else []
            asked += [who] if (per_device or 1) > 1 else []
            legal = f"{unit} stages, or a multiple of them"
            raise contradiction(" with ".join(asked), f"stages= with {count} stages", legal)


def spelled(name: str, pattern: str | None, value: Any) -> str:
    """One value as the override spells it."""
    return f"{name}={value!r}" if pattern is None else f"{name}={{{pattern!r}: {value!r}}}"


# --- without some of them ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Dropped:
    """The overrides `left` without one, `said` as the user spelled it; `what` says that it goes."""

    said: str
    what: str
    left: Overrides


def each_dropped(overrides: Overrides) -> Iterator[Dropped]:
    """The overrides without one of them; names in `forbid` count one by one."""
    for name, value in overrides.given().items():
        if name != "forbid":
            rest = without(overrides, name)
            yield Dropped(said=f"{name}={value!r}", what=f"leave {name} free", left=rest)
    for forbidden in overrides.forbid:
        rest = replace(overrides, forbid=tuple(f for f in overrides.forbid if f != forbidden))
        yield Dropped(said=f"forbid={forbidden!r}", what=f"allow {forbidden}", left=rest)


def making_logits(overrides: Overrides) -> Overrides:
    """The overrides, with a plan that makes all logits of a micro-batch at once. Raises
    `OverrideError` where they want its loss in parts."""
    if overrides.chunked_loss not in (None, 1):
        raise OverrideError(
            f"={overrides.chunked_loss}: logits are read, of which there is a part at a time",
            place="override chunked_loss",
            legal="1",
            way_out="leave it out, or compute no metrics of logits",
        )
    return replace(overrides, chunked_loss=1)


def without(overrides: Overrides, *names: str) -> Overrides:
    """The overrides with these left free."""
    free: dict[str, Any] = {name: getattr(Overrides(), name) for name in names}
    return replace(overrides, **free)


# --- schedules ------------------------------------------------------------------------------------


def schedules_with(virtual_stages: int | None) -> tuple[str, ...]:
    """Schedules that place so many stages on a device group, any number for None; interleaving one
    stage is 1F1B."""
    counts = {name: schedule.stages_per_device for name, schedule in SCHEDULES.items()}
    return tuple(
        name
        for name, n in counts.items()
        if virtual_stages is None or n == virtual_stages or (n is None and virtual_stages > 1)
    )


def left_schedules(overrides: Overrides) -> list[str]:
    """The schedule that is set, or those not forbidden that place so many stages."""
    if overrides.schedule is not None:
        return [overrides.schedule]
    virtual_stages, who = overrides.virtual()
    fitting = schedules_with(virtual_stages)
    schedules = [s for s in fitting if s in overrides.left("schedule")]
    if not schedules:
        beside = f" with {who}" if virtual_stages else ""
        raise OverrideError(
            f"={sorted(overrides.forbid)}{beside} leaves no schedule",
            place="override forbid",
            legal=fitting,
        )
    return schedules


def left_with_consent(
    overrides: Overrides, name: str, allow: Collection[str], precision: str
) -> tuple[str, ...]:
    """Values that free blocks may have of a decision by which fewer bytes of weights or gradients
    are sent: `quantized` or `compressed`. Raises `OverrideError` for an override that asks for what
    is not allowed, or what fp16 can't have."""
    if name not in allow:
        why = "numbers change with it, and it is not allowed"
        way_out = f'give allow=["{name}"] (--allow {name}), or drop the override'
    elif precision == "fp16":
        why = f"not with fp16: {decisions.not_in_fp16(name)}"
        way_out = "train in bf16, or drop the override"
    else:
        left = overrides.left(name)
        return left if name != "compressed" else tuple(x for x in left if x in OFFERED)
    for pattern, value in overrides.items(name):
        if value != "none":
            place = f"override {spelled(name, pattern, value)}"
            raise OverrideError(f": {why}", place=place, legal="none", way_out=way_out)
    return ("none",)


# --- one value ------------------------------------------------------------------------------------


def _check_value(decision: decisions.Decision, value: Any) -> None:
    """Raise `OverrideError` unless this is a value of a decision, None, or where blocks may differ
    a mapping from globs to values."""
    if value is None:
        return
    place, parts = f"override {decision.name}", decision.parts
    if parts:
        if not isinstance(value, Mapping) or not value:
            legal = f'parts from 0 to 1, e.g. {{"{parts[0]}": 0.5}}, or None to leave it free'
            raise OverrideError.refused(place, value, legal=legal)
        decision.check_parts(value, place, OverrideError)
        return
    legal = "True, False" if decision.is_flag else decision.values
    legal += ", {glob over block names: such a value}" * decision.by_block
    by_glob = value if decision.by_block and isinstance(value, Mapping) else {"*": value}
    named = all(isinstance(glob, str) and 0 < len(glob) <= MAX_TEXT for glob in by_glob)
    if not (by_glob and named and all(map(decision.accepts, by_glob.values()))):
        legal += ", or None to leave it free"
        raise OverrideError.refused(place, value, legal=legal)


def _check_forbid(forbid: Any) -> None:
    if isinstance(forbid, str) or not isinstance(forbid, Collection):
        legal = f"a list of names, e.g. forbid=[{shown(forbid)}]"
        raise OverrideError.refused("override forbid", forbid, legal=legal)
    for name in forbid:
        if not isinstance(name, str) or name not in decisions.forbiddable():
            text = name[:MAX_TEXT] if isinstance(name, str) else ""
            near = difflib.get_close_matches(text, decisions.forbiddable(), n=1)
            raise OverrideError.refused(
                "override forbid",
                name,
                legal=decisions.forbiddable(),
                way_out=f"did you mean {near[0]!r}?" if near else "",
            )


def _check_stages(stages: Any) -> None:
    if stages is None:
        return
    legal = 'a list of block names per stage, e.g. [["embed", "layers.0-5"], ["layers.6-11"]]'
    if not _is_list(stages) or not stages:
        raise OverrideError.refused("override stages", stages, legal=legal)
    for k, stage in enumerate(stages):
        if not _is_list(stage) or not stage or not all(isinstance(n, str) for n in stage):
            raise OverrideError.refused(f"override stages[{k}]", stage, legal=legal)


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _check_shardings(shardings: Any) -> None:
    if not isinstance(shardings, Mapping) or not all(
        isinstance(text, str) and len(text) <= MAX_TEXT
        for item in shardings.items()
        for text in item
    ):
        raise OverrideError.refused(
            "override shardings",
            shardings,
            legal='a dict of glob: decision, e.g. {"layers.*.mlp.up_proj": "colwise"}, each of up '
            f"to {MAX_TEXT} characters",
        )


def check_allow(allow: Any) -> tuple[str, ...]:
    """The names of what may change numbers. Raises `OverrideError` for another."""
    names = decisions.ALLOWABLE
    listed = _is_list(allow) or isinstance(allow, set | frozenset)
    if not listed or not all(isinstance(name, str) and name in names for name in allow):
        legal = f"a list of {', '.join(names)}, e.g. allow=[{names[0]!r}]"
        raise OverrideError.refused("allow", allow, legal=legal)
    return tuple(dict.fromkeys(allow))


# --- check against cluster and batch --------------------------------------------------------------

# Check of overrides against cluster and batch.


_WAY_OUT = "change or drop one of them, or what they must fit"


def check_overrides(
    overrides: Overrides,
    *,
    num_devices: int,
    global_batch_size: int,
    num_blocks: int,
    sequences: bool = True,
) -> None:
    """Check the degrees against cluster, batch and blocks, before anything is searched; raises
    `OverrideError`.

    Where `tp`, `cp` and `dp` are one value for all blocks all stages are alike: `tp · cp · dp`
    divides the devices, `tp · cp · dp · pp` is their number; a free `cp` is 1 without `sequences`
    to split. Stages of other meshes need `pp` times as many as are set at most. `dp ·
    microbatch_size · num_microbatches` divides the batch, and is the batch where all three are set.
    """
    pp, (per_device, _) = overrides.everywhere("pp"), overrides.virtual()
    stages = len(overrides.stages or ()) or (pp and pp * (per_device or 1) // overrides.copies)
    if pp is None and stages and per_device:
        pp = stages * overrides.copies // per_device
    if stages is not None and stages > num_blocks:
        asked = {"pp": pp or stages}
        if per_device is not None and per_device > 1:
            asked["virtual_stages"] = per_device
        raise OverrideError(
            f"the model has {num_blocks} blocks",
            place=f"override {_shown(asked, ())}",
            legal=f"1 to {num_blocks} stages",
        )
    no_cp = overrides.everywhere("cp") in ((1,) if sequences else (1, None))
    mesh = {name: overrides.everywhere(name) for name in ("tp", *(["cp"] * (not no_cp)), "dp")}
    forbidden = [name for name in overrides.forbid if name in mesh or name == "pp"]
    devices = f"the cluster's {num_devices} devices"
    for name, decision in decisions.DECISIONS.items():
        for pattern, value in overrides.items(name) if decision.of_devices else ():
            if (pattern is not None or decision.shared) and value > num_devices:
                raise OverrideError(
                    f"more than {devices}",
                    place=f"override {spelled(name, pattern, value)}",
                    legal=f"up to {num_devices}",
                    way_out=_WAY_OUT,
                )
    free = pp is None or None in mesh.values()
    degrees = mesh if free else {**mesh, "pp": pp}
    _check_product(degrees, num_devices, devices, forbidden, free=free)
    if free:
        least = {name: n for name, n in {**mesh, "pp": pp}.items() if n is not None}
        needed = math.prod(least.values())
        if needed > num_devices:
            raise OverrideError(
                f"needs at least {needed} devices, more than {devices}",
                place=f"override {_shown(least, forbidden)}",
                legal=f"up to {num_devices} together",
                way_out=_WAY_OUT,
            )
    rows = {
        name: overrides.everywhere(name) for name in ("dp", "microbatch_size", "num_microbatches")
    }
    batch, free = f"global_batch_size={global_batch_size}", None in rows.values()
    _check_product(rows, global_batch_size, batch, forbidden, free=free)


def _check_product(
    factors: Mapping[str, int | None],
    total: int,
    what: str,
    forbidden: Collection[str],
    *,
    free: bool,
) -> None:
    """Raise unless the product of the factors that are set divides `total`, or where none is
    `free`, equals it."""
    degrees = {name: value for name, value in factors.items() if value is not None}
    product = math.prod(degrees.values())
    if product == total or (free and total % product == 0):
        return
    raise OverrideError(
        f"{('the product ' if len(degrees) > 1 else '')}{product} "
        f"{('does not divide' if free else 'is not')} {what}",
        place=f"override {_shown(degrees, forbidden)}",
        legal=decisions.divisors(total) if free else total,
        way_out=_WAY_OUT,
    )


def _shown(degrees: Mapping[str, int], forbidden: Collection[str]) -> str:
    return ", ".join(
        f"{name}={value}" + (f" (forbid={name!r})" if name in forbidden else "")
        for name, value in degrees.items()
    )
