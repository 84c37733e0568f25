"""Decisions as records: legal values, place, words, in the order of files and reports; and as rows
the values that rule each other out. Flags, overrides, the check of a plan, its file, the report and
the diff read them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from itertools import product
from types import MappingProxyType
from typing import Any, Literal

from meshwright.costmodel.compressed import COMPRESSED
from meshwright.costmodel.mesh import ALL_GATHER, CONTEXT_KINDS, Stepping
from meshwright.costmodel.quantized import QUANTIZED
from meshwright.costmodel.recompute import RECOMPUTE
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.costmodel.sharing import Sharing
from meshwright.profiles.inputs import MeshwrightError, shown
from meshwright.profiles.inputs.limits import MAX_ROWS, is_number

ZERO = (0, 1, 2, 3)
# axes from the innermost on the ranks: with "tp,pp,dp" a pipeline lies inside the node
PLACEMENTS = ("tp,dp,pp", "tp,pp,dp")
OUTER_BITS = (32, 8)  # of what replicas send when they meet
SYNC_EVERY = 100  # steps between meetings where nothing is said
OFFLOADS = ("optimizer", "weights", "activations", "nvme")  # parts that may lie off devices


@dataclass(frozen=True, slots=True)
class Decision:
    """A decision: the field `name` of `Overrides`, of `StagePlan` or `Plan` where one has it, and
    its flag, of which `what` is the help.

    Values are the `legal` ones, True and False where False is `off`, for each of the `parts` a
    number from 0 to 1, of some no more (`within`) than of another, why, `sizes` (what numbers of a
    list are, whole ones from 1, in an override perhaps how many there are), or else whole numbers
    from 1, or from 0 where that is `off`. `off` does without it. A plan file has it, where it is
    `written`, in a stage, its mesh, the plan itself or its outer loop, `always` or unless it is
    off; what is `beside` another, with that one, without which it is nothing. It `acts` on the
    whole plan, a stage or a block; all but the first may be given by block. `of_devices`: it counts
    some of the cluster's devices.

    `forbidden`: it may be forbidden as itself, which leaves `off` or, where that is no value, the
    search's own choice; `named`: values that may be forbidden, by the names that forbid them.
    `allowed`: it is left out unless the user allows it by its `permission`, its own name where
    that is empty, and refused in a given plan where it changes a training's numbers.
    `of_train_step`: it is priced for that alone.

    Of the data axis: `shared` gives a stage's value from its sharing and the number of ranks that
    hold its states, and `zeros` the ZeRO stages without which it has no effect. A number of ranks
    is a part of so many (`part_of`), which None stands for unless it must be a `proper` one.

    A report has a `column` of stages for it, or for several, each with its `cell`; a plan's line
    has the `line` of the values of its stages or blocks, or of the plan's.
    """

    name: str
    what: str
    _: KW_ONLY
    legal: Collection[Any] = ()
    parts: tuple[str, ...] = ()
    within: tuple[tuple[str, str, str], ...] = ()
    sizes: str = ""
    off: Any = 1
    acts: Literal["plan", "stage", "block"] = "stage"
    written: Literal["", "mesh", "stage", "plan", "outer_loop"] = ""
    always: bool = False
    beside: str = ""
    of_devices: bool = False
    forbidden: bool = False
    named: Callable[[], Iterable[tuple[str, Any]]] = tuple
    allowed: Literal["", "numbers", "steps"] = ""
    permission: str = ""
    of_train_step: bool = False
    shared: Callable[[Sharing, int], Any] | None = None
    zeros: tuple[int, ...] = ()
    part_of: Callable[[Sharing, int], int] | None = None
    proper: bool = False
    column: str = ""
    cell: Callable[[Any], str] = str
    line: Callable[[Sequence[Any]], str] | None = None

    @property
    def by_block(self) -> bool:
        """Whether an override may say it of blocks by globs."""
        return self.acts != "plan" and not self.parts

    @property
    def is_flag(self) -> bool:
        return self.off is False

    @property
    def word(self) -> str:
        """The name by which it is allowed."""
        return self.permission or self.name

    @property
    def least(self) -> int:
        """The least of whole numbers."""
        return 0 if type(self.off) is int and self.off == 0 else 1

    def uses(self, value: Any) -> bool:
        """Whether a value is another one than `off`, or None."""
        if self.sizes and value is not None:
            return slices_in(value) > 1
        return any(value.values()) if self.parts and value else value not in (None, self.off)

    def accepts(self, value: Any) -> bool:
        """Whether this is one of its values; those of another type that equal one are none."""
        if self.is_flag or isinstance(value, bool):
            return self.is_flag and isinstance(value, bool)
        if self.parts:
            return isinstance(value, Mapping) and all(map(is_number, value.values()))
        if self.sizes and isinstance(value, (list, tuple)):
            return all(type(size) is int and 1 <= size <= MAX_ROWS for size in value)
        if self.legal:
            return type(value) in map(type, self.legal) and value in self.legal
        return isinstance(value, int) and self.least <= value <= MAX_ROWS

    def check_parts(
        self, parts: Mapping[str, Any], place: str, error: type[MeshwrightError]
    ) -> None:
        """Raise unless these are its parts, each from 0 to 1 and within the other."""
        for name, part in parts.items():
            if name not in self.parts:
                raise error.refused(place, name, legal=self.parts)
            if not is_number(part) or not 0 <= part <= 1:
                raise error.refused(f"{place}: {name}", part, legal="a part, from 0 to 1")
        for name, other, why in self.within:
            if parts.get(name, 0.0) > (most := parts.get(other, 0.0)):
                raise error(
                    f"={shown(parts[name])}: {why}",
                    place=f"{place}: {name}",
                    legal=f"0 to {shown(most)}, the part of the {other} states",
                    way_out=f"raise that of the {other}, too",
                )

    def works(self, sharing: Sharing) -> bool:
        """Whether it has an effect with this sharing."""
        return not self.zeros or sharing.zero in self.zeros

    def parts_of(self, sharing: Sharing, holders: int) -> list[int] | None:
        """Legal numbers of ranks for stages with this sharing among so many `holders`, or None."""
        if self.part_of is None:
            return None
        ranks = self.part_of(sharing, holders)
        return [n for n in divisors(ranks) if not self.proper or 1 < n < ranks]

    @property
    def values(self) -> str:
        """Its values, in words."""
        if self.parts:
            return f"an object of parts from 0 to 1, of {', '.join(self.parts)}"
        if self.is_flag:
            return "true, false"
        if self.sizes:
            return f"how many, or a list of {self.sizes}, each an integer from 1 to {MAX_ROWS}"
        comma = " or " if any("," in str(value) for value in self.legal) else ", "
        return comma.join(map(str, self.legal)) or f"an integer from {self.least} to {MAX_ROWS}"


@dataclass(frozen=True, slots=True)
class Contradiction:
    """Values of `a` and `b` that `clash`, `why`, and those that are `legal`.

    An override may be something else in a plan (an `hpz` of as many ranks as ZeRO divides among is
    none), or may be planned but not run: then the row is of plans alone (`given`), or of overrides
    and plans that run (`priced`). It holds `unless` another decision is used.
    """

    a: str
    b: str
    clash: Callable[[Any, Any], Any]
    why: str
    legal: str
    given: bool = True
    priced: bool = True
    unless: str = ""

    def holds(self, value: Callable[[str], Any]) -> bool:
        """Whether it does, by decisions' values, None where free."""
        return not (self.unless and DECISIONS[self.unless].uses(value(self.unless)))


def divisors(n: int) -> list[int]:
    """The legal degrees of `n` >= 1 equal ranks or rows: all its divisors, ascending."""
    small = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return small + [n // d for d in reversed(small) if d * d != n]


# --- the table ------------------------------------------------------------------------------------

_OFFLOADED = {
    "optimizer": "{} optimizer states",
    "weights": "{} weights",
    "activations": "activations of {} blocks",
}


def _degree(name: str, what: str) -> Decision:
    always = name in ("tp", "dp")
    return Decision(name, what, written="mesh", always=always, of_devices=True, forbidden=True)


def _quantized_line(sent: Sequence[str]) -> str:
    kinds = {*sent} - {"none"}
    both = "weights and gradients" if "both" in kinds or len(kinds) > 1 else "".join(kinds)
    return f" with quantised {both}" if kinds else ""


def _compressed_line(stages: Sequence[str]) -> str:
    kinds = "/".join(sorted({*stages} - {"none"}))
    return f"gradients by {kinds}" if kinds else ""


def _staleness_line(steps: Sequence[int]) -> str:
    late = max(steps, default=0)
    return f"gradients {late:,} step{'s' * (late > 1)} late" if late else ""


def _servers_line(counts: Sequence[int]) -> str:
    return "".join(f"{n} parameter server{'s' * (n > 1)}" for n in counts if n)


def _recompute_line(policies: Sequence[str]) -> str:
    used = [policy for policy in RECOMPUTE if policy in {*policies} - {"none"}]
    text = f"{'/'.join(used)} recompute" if used else ""
    return text + " of some blocks" * ("none" in policies and bool(used))


def _slices_line(sizes: Sequence[Sequence[int]]) -> str:
    """Words as `in 4 slices of 440 to 704 tokens`."""
    return "".join(f"in {len(s)} slices of {_span(min(s), max(s))} tokens" for s in sizes if s)


def _branches_line(depths: Sequence[Sequence[int]]) -> str:
    return "".join("branches apart" for of_stages in depths if of_stages)


def _span(least: int, most: int) -> str:
    return f"{least:,} to {most:,}" if least < most else f"{most:,}"


def _segments_line(sizes: Sequence[int]) -> str:
    several = sorted({size for size in sizes if size > 1})
    return f"segments of {'/'.join(map(str, several))} blocks" if several else ""


def _most(text: str, counts: Sequence[int | None]) -> str:
    most = max(filter(None, counts), default=None)
    return text.format(most) if most else ""


def _several(counts: Sequence[int]) -> list[int]:
    return [n for n in counts if n > 1]


def offloaded(stages: Sequence[Mapping[str, float]]) -> str:
    """Parts off devices of the stage with the most, as `62 % of the optimizer states and
    activations of 50 % of the blocks in host memory, 10 % of the states in files on flash instead`;
    nothing where there is none."""
    most = {name: max(parts.get(name, 0.0) for parts in stages) for name in OFFLOADS}
    files = most.pop("nvme")
    said = [_OFFLOADED[name].format(_part(part)) for name, part in most.items() if part]
    text = f"{' and '.join(said)} in host memory" if said else ""
    return text + (f", {_part(files)} states in files on flash instead" if files else "")


def _part(part: float) -> str:
    """all, or 62 % of the."""
    return "all" if part >= 1 else f"{part:.0%} of the"


_TABLE = (
    _degree("dp", "data-parallel degree"),
    _degree("tp", "tensor-parallel degree"),
    _degree("cp", "context-parallel degree (ranks that split the sequence)"),
    Decision(
        "cp_kind", "how attention runs where cp splits its tokens", legal=CONTEXT_KINDS,
        off=ALL_GATHER, acts="plan", written="mesh", beside="cp",
    ),
    _degree("ep", "expert-parallel degree"),
    Decision("pp", "device groups of the pipeline", acts="plan", forbidden=True),
    Decision("virtual_stages", "stages per device group", acts="plan", forbidden=True),
    Decision("microbatch_size", "rows per data-parallel rank and micro-batch", acts="plan"),
    Decision("num_microbatches", "micro-batches per step", acts="plan"),
    Decision(
        "slices", "token slices in which a micro-batch goes through the pipeline: how many, or the "
        "tokens of each", sizes="sizes", off=(), acts="plan", written="plan", forbidden=True,
        of_train_step=True, line=_slices_line,
    ),
    Decision(
        "branches", "branches of the model on device groups of their own, at the same time: how "
        "many, or how many groups each stage is from the end", sizes="depths", off=(), acts="plan",
        written="plan", forbidden=True, of_train_step=True, line=_branches_line,
    ),
    Decision(
        "schedule", "pipeline schedule", legal=SCHEDULES.keys(), off=None, acts="plan",
        named=lambda: ((name, name) for name in SCHEDULES),
    ),
    Decision(
        "placement", "axes from the innermost; with tp,pp,dp the pipeline lies inside the node",
        legal=PLACEMENTS, off=PLACEMENTS[0], acts="plan", forbidden=True,
    ),
    Decision(
        "zero", "ZeRO stage", legal=ZERO, off=0, written="stage", always=True, forbidden=True,
        named=lambda: ((f"zero-{stage}", stage) for stage in ZERO if stage),
        shared=lambda sharing, holders: sharing.zero, column="ZeRO",
        line=lambda stages: f"ZeRO-{'/'.join(map(str, sorted({*stages})))}",
    ),
    Decision(
        "dp_shard", "ranks among which ZeRO divides", off=None, written="mesh", of_devices=True,
        forbidden=True, shared=lambda sharing, holders: sharing.among(holders),
        part_of=lambda sharing, holders: holders, zeros=(1, 2, 3), column="ZeRO",
        cell=" within {}".format, line=lambda ranks: _most(" within {} ranks", ranks),
    ),
    Decision(
        "hpz", "ranks that keep a secondary shard of ZeRO-3's weights for the backward", off=None,
        written="mesh", of_devices=True, forbidden=True,
        shared=lambda zero, holders: zero.hpz or zero.among(holders) if zero.zero == 3 else None,
        part_of=lambda sharing, holders: sharing.among(holders), proper=True, zeros=(3,),
        column="ZeRO", cell=", hpZ {}".format,
        line=lambda ranks: _most(" (secondary shards among {})", ranks),
    ),
    Decision(
        "quantized", "what ZeRO-3 sends in blocks of few bits; needs --allow quantized",
        legal=QUANTIZED, off="none", written="stage", forbidden=True, allowed="numbers",
        shared=lambda sharing, holders: sharing.quantized, column="ZeRO",
        cell=", quantised {}".format, line=_quantized_line,
    ),
    Decision(
        "compressed", "what stands for gradients in their sum without ZeRO, PowerSGD of a rank "
        "or top-k, the largest percent of elements; needs --allow compressed",
        legal=COMPRESSED, off="none", written="stage", forbidden=True, allowed="numbers",
        shared=lambda sharing, holders: sharing.compressed, column="gradients",
        line=_compressed_line,
    ),
    Decision(
        "staleness", "steps by which gradients may come late; needs --allow stale, or to be asked "
        "for", off=0, acts="plan", written="plan", forbidden=True, allowed="numbers",
        permission="stale", of_train_step=True, line=_staleness_line,
    ),
    Decision(
        "servers", "ranks, the first ones, that keep and step the weights for all others", off=0,
        acts="plan", written="plan", allowed="steps", permission="stale",
        of_train_step=True, line=_servers_line,
    ),
    Decision(
        "recompute", "what the backward computes again", legal=RECOMPUTE, off="none", acts="block",
        forbidden=True, 
        named=lambda: ((policy, policy) for policy in RECOMPUTE if policy != "none"),
        column="recompute", line=_recompute_line,
    ),
    Decision(
        "segments", "blocks of which the first one's input alone is kept", written="stage",
        forbidden=True, column="recompute", cell=", in {}s".format, line=_segments_line,
    ),
    Decision(
        "offload", "part of each stage in host memory, from 0 to 1", parts=OFFLOADS, off={},
        within=(
            ("weights", "optimizer", "the optimizer steps weights in host memory there"),
            ("nvme", "optimizer", "it is a part of the optimizer states that are off devices"),
        ),
        written="stage", forbidden=True, of_train_step=True, column="host memory",
        cell=lambda parts: offloaded([parts]), line=offloaded,
    ),
    Decision(
        "chunked_loss", "parts of its rows in which a model's last product and loss run",
        acts="plan", written="plan", forbidden=True,
        line=lambda parts: "".join(f"loss in {n} parts" for n in parts if n > 1),
    ),
    Decision(
        "post_validation",
        "stages step their optimizers without waiting for each other, and validate it later",
        off=False, acts="plan", written="plan", allowed="steps", of_train_step=True,
        line=lambda validated: "validated afterwards" * any(validated),
    ),
    Decision(
        "optimizer_in_backward",
        "each parameter is stepped as its gradient is whole, and that let go",
        off=False, acts="plan", written="plan", allowed="steps", of_train_step=True,
        line=lambda stepped: "optimizer in the backward" * any(stepped),
    ),
    Decision(
        "replicas",
        "replicas of the model that train apart and meet in an outer Nesterov step on their mean "
        "(DiLoCo); free, with --allow replicas, as many as pay",
        acts="plan", written="outer_loop", always=True, allowed="numbers",
        of_train_step=True, line=lambda counts: _most("{} replicas", _several(counts)),
    ),
    Decision(
        "sync_every", "steps from one meeting of replicas to the next; 100 where it is free",
        off=None, acts="plan", written="outer_loop", always=True,
        line=lambda steps: _most("meeting every {} steps", steps),
    ),
    Decision(
        "outer_bits", "bits of what replicas send of each weight when they meet",
        legal=OUTER_BITS, off=OUTER_BITS[0], acts="plan", written="outer_loop",
        line=lambda bits: _most("in {} bits", [n for n in bits if n != OUTER_BITS[0]]),
    ),
    Decision(
        "fragments", "parts of the weights that meet one after the other (Streaming DiLoCo)",
        acts="plan", written="outer_loop",
        line=lambda parts: _most("in {} fragments", _several(parts)),
    ),
)  # fmt: skip

_BY_NAME = {d.name: d for d in _TABLE}
DECISIONS: Mapping[str, Decision] = MappingProxyType(_BY_NAME)
BY_BLOCK = tuple(d.name for d in _TABLE if d.by_block)
SHARING = tuple(d for d in _TABLE if d.shared)  # how states are shared out
# how replicas meet, the first being how many there are
OUTER_LOOP = tuple(d.name for d in _TABLE if d.written == "outer_loop")
MESH = tuple(d.name for d in _TABLE if d.by_block and d.of_devices and not d.shared)
CHOICES: Mapping[str, Collection[Any]] = MappingProxyType(
    {d.name: d.legal for d in _TABLE if d.legal}
)


def _forbidden(d: Decision) -> Iterator[tuple[str, tuple[str, tuple[Any, ...]]]]:
    if d.forbidden:
        off = 1 if d.sizes else d.off
        yield d.name, (d.name, (off,) if d.accepts(off) else ())
    for name, value in d.named():
        yield name, (d.name, tuple(other for other in d.legal if other != value))


def forbids(name: str) -> tuple[str, tuple[Any, ...]]:
    """The decision that a forbidden name is of, and the values that are left; nothing for others'
    names."""
    return _forbids(tuple(SCHEDULES)).get(name, ("", ()))


def forbiddable() -> tuple[str, ...]:
    """The names that may be forbidden: of decisions, of values, of schedules as they are by now."""
    return (*_forbids(tuple(SCHEDULES)), "unequal_meshes")


@functools.cache
def _forbids(schedules: tuple[str, ...]) -> Mapping[str, tuple[str, tuple[Any, ...]]]:
    return dict(pair for d in _TABLE for pair in _forbidden(d))


# decisions that change a training's numbers, or want its steps made by
# `train_step(..., optimizer=)`: left out unless the user allows them by this name
ALLOWABLE = tuple(dict.fromkeys(d.word for d in _TABLE if d.allowed))
# decisions by which an optimizer steps otherwise than at the end, each with the way
STEPPINGS: Mapping[str, Stepping] = MappingProxyType(
    {"post_validation": "validated", "optimizer_in_backward": "in_backward"}
)


def taken(sharing: Sharing, holders: int) -> dict[str, Any]:
    """Values of the decisions about sharing for such stages; None where it divides nothing."""
    return {d.name: d.shared(sharing, holders) for d in SHARING if d.shared}


# --- what rules each other out ------------------------------------------------------------------


def _of_copies(other: str, clash: Callable[[Any], Any], legal: str) -> Contradiction:
    return Contradiction(
        "schedule",
        other,
        lambda schedule, value: SCHEDULES[schedule].copies > 1 and clash(value),
        "it runs two copies of the model in opposite directions",
        f"{legal}, or a schedule with one copy (1f1b, zb_v, dualpipe_v)",
    )


def _of_branches() -> Iterator[Contradiction]:
    """Contradictions of branches that lie apart."""
    ruled_out: tuple[tuple[str, Callable[[Any], Any], str, str], ...] = (
        ("pp", lambda pp: pp == 1, "there is one device group", "pp from 2"),
        ("virtual_stages", lambda v: v > 1, "stages of one device run as one", "virtual_stages=1"),
        (
            "schedule",
            lambda name: not SCHEDULES[name].branched,
            "its order is that of stages which follow each other",
            ", ".join(name for name, s in SCHEDULES.items() if s.branched),
        ),
        (
            "slices",
            lambda sizes: slices_in(sizes) > 1,
            "slices go through stages that follow each other",
            "slices=1",
        ),
        (
            "post_validation",
            bool,
            "device groups that begin together have no early forwards to wait behind",
            "post_validation=False",
        ),
    )
    for other, clash, why, legal in ruled_out:
        yield Contradiction(
            "branches", other, partial(_if_apart, clash), why, f"{legal}, or branches=1"
        )


def _if_apart(clash: Callable[[Any], Any], branches: Any, value: Any) -> Any:
    return slices_in(branches) > 1 and clash(value)


def _of_slices(other: str, clash: Callable[[Any], Any], why: str, legal: str) -> Contradiction:
    return Contradiction(
        "slices", other, lambda slices, value: slices_in(slices) > 1 and clash(value), why, legal
    )


def _of_one_pass() -> Iterator[Contradiction]:
    """Contradictions of stepping in the backward."""
    meet, whole = "gradients of tied weights meet after it", "it is stepped when all of it is there"
    ruled_out: tuple[tuple[str, Callable[[Any], Any], str], ...] = (
        ("num_microbatches", lambda m: m > 1, "the gradients of all are added up before a step"),
        ("slices", lambda x: slices_in(x) > 1, "the gradients of all are added up before a step"),
        ("pp", lambda pp: pp > 1, meet),
        ("virtual_stages", lambda v: v > 1, meet),
        ("schedule", _several_parts, "its second part reads weights that are stepped by then"),
        ("zero", bool, whole),
        ("dp_shard", bool, whole),
        ("hpz", bool, whole),
        ("offload", _away, "the host steps what it has after the backward"),
        ("post_validation", bool, "a step that has been made part by part is not undone"),
        ("precision", lambda x: x == "fp16", "a scaled loss asks all gradients before a step"),
    )
    for other, clash, why in ruled_out:
        yield Contradiction(
            "optimizer_in_backward", other,
            partial(_if_used, bool, clash), why,
            "one micro-batch and stage, a schedule with a whole backward, zero=0, nothing in host "
            "memory, not fp16",
            given=other != "precision",
        )  # fmt: skip


def not_in_fp16(name: str) -> str:
    """Why fp16 can't have a decision, or what is allowed by its name; empty where it can."""
    names = [d.name for d in _TABLE if name in (d.name, d.word)]
    rows = (one for one in CONTRADICTIONS if one.a in names and one.b == "precision")
    clashes = (one.why for one in rows)
    return next(clashes, "")


def _of_compressed() -> Iterator[Contradiction]:
    """Contradictions of compressed gradients."""
    ruled_out: tuple[tuple[str, Callable[[Any], Any], str, str], ...] = (
        ("zero", bool, "each rank would keep a part of a sum that all have to make", "zero=0"),
        ("ep", lambda ep: ep > 1, "sums of experts that are shared out are not compressed", "ep=1"),
        (
            "offload",
            lambda parts: parts.get("optimizer"),
            "the errors stay on devices",
            "optimizer states on devices",
        ),
        (
            "post_validation",
            bool,
            "a step is undone, and the errors that it left are not",
            "post_validation=False",
        ),
        (
            "optimizer_in_backward",
            bool,
            "the sum's second part follows the next gradients",
            "optimizer_in_backward=False",
        ),
        (
            "schedule",
            lambda name: SCHEDULES[name].copies > 1,
            "two copies of the model would each remember errors of their own",
            "a schedule with one copy (1f1b, zb_v, dualpipe_v)",
        ),
        (
            "precision",
            lambda x: x == "fp16",
            "errors would be scaled with the loss of another step",
            "precision bf16 or fp32",
        ),
    )
    for other, clash, why, legal in ruled_out:
        yield Contradiction(
            "compressed", other, partial(_if_used, lambda how: how != "none", clash), why,
            f"{legal}, or compressed='none'", given=other != "precision",
        )  # fmt: skip


def _of_stale() -> Iterator[Contradiction]:
    """Contradictions of schedules without a flush, and of gradients that come late."""
    ruled_out: tuple[tuple[str, Callable[[Any], Any], str, str], ...] = (
        ("pp", lambda pp: pp == 1, "on one device group there is no flush to save", "pp from 2"),
        ("virtual_stages", lambda v: v > 1, "stages of a device would end apart", "one stage each"),
        ("slices", lambda x: slices_in(x) > 1, "backwards left over are whole ones", "no slices"),
        ("zero", lambda z: z > 1, "shards of two steps' gradients would be one", "zero 0 or 1"),
        ("cp", lambda cp: cp > 1, "the context axis is not tried with it", "cp=1"),
        ("ep", lambda ep: ep > 1, "experts that are shared out are not tried with it", "ep=1"),
        ("compressed", lambda x: x != "none", "the next gradients would make up for errors of an "
         "earlier step", "compressed='none'"),
        ("offload", _away, "there is one version of what lies in host memory", "all on devices"),
        ("post_validation", bool, "no step waits for a common end", "post_validation=False"),
        ("optimizer_in_backward", bool, "a backward's weights are of an earlier step",
         "optimizer_in_backward=False"),
        ("replicas", lambda r: r > 1, "replicas meet when all gradients are there", "replicas=1"),
        ("branches", lambda b: slices_in(b) > 1, "stages that are left over follow each other",
         "branches=1"),
        ("precision", lambda x: x == "fp16", "gradients would have the scale of another step",
         "precision bf16 or fp32"),
    )  # fmt: skip
    keys: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
        ("schedule", lambda name: not SCHEDULES[name].flushes, "a schedule with a flush, as 1f1b"),
        ("staleness", bool, "staleness=0"),
    )
    for (key, used, without), (other, clash, why, legal) in product(keys, ruled_out):
        yield Contradiction(
            key, other, partial(_if_used, used, clash), why, f"{legal}, or {without}",
            given=other != "precision", unless="servers" * (key == "staleness"),
        )  # fmt: skip
    yield Contradiction(
        "staleness", "schedule",
        lambda steps, schedule: steps and SCHEDULES[schedule].flushes,
        "gradients come late where no step flushes the pipeline", f"0, or one of {_LATE}",
        unless="servers",
    )  # fmt: skip
    yield Contradiction(
        "schedule", "staleness",
        lambda schedule, steps: not SCHEDULES[schedule].flushes and not steps,
        "no step flushes the pipeline", "a schedule with a flush, as 1f1b, or staleness from 1",
    )  # fmt: skip


def _if_used(
    used: Callable[[Any], bool], clash: Callable[[Any], Any], value: Any, other: Any
) -> Any:
    return used(value) and clash(other)


def _of_servers() -> Iterator[Contradiction]:
    """Contradictions of parameter servers."""
    whole = "each worker computes with all weights"
    ruled_out: tuple[tuple[str, Callable[[Any], Any], str, str], ...] = (
        *((name, lambda n: n > 1, whole, f"{name}=1") for name in _SPLITS),
        ("zero", bool, "the servers hold all optimizer states, and step them", "zero=0"),
        ("compressed", lambda how: how != "none", "nothing is summed among workers", "'none'"),
        ("offload", _but_activations, "workers have no optimizer states", "activations alone"),
        ("post_validation", bool, "the servers step, at each push", "post_validation=False"),
        ("optimizer_in_backward", bool, "the servers step", "optimizer_in_backward=False"),
        ("precision", lambda x: x == "fp16", "its loss scale is one of all ranks", "bf16, fp32"),
        ("schedule", lambda s: not SCHEDULES[s].flushes, "a worker is no pipeline", _FLUSHING),
        ("slices", lambda sizes: slices_in(sizes) > 1, "a worker is no pipeline", "slices=1"),
        ("branches", lambda depths: slices_in(depths) > 1, whole, "branches=1"),
        ("replicas", lambda n: n > 1, "replicas sum gradients, each within", "replicas=1"),
    )
    for other, clash, why, legal in ruled_out:
        yield Contradiction(
            "servers", other, partial(_if_used, bool, clash), why, f"{legal}, or servers=0",
            given=other != "precision",
        )  # fmt: skip


def _but_activations(parts: Any) -> bool:
    return any(part for name, part in parts.items() if name != "activations")


def _several_parts(schedule: str) -> bool:
    """Whether a schedule splits the backward, or places several stages on a device group."""
    record = SCHEDULES[schedule]
    return record.splits_backward or record.stages_per_device != 1


def slices_in(value: int | Sequence[int]) -> int:
    """Slices of a micro-batch: so many, or of so many sizes; 1 where it is whole."""
    return value if isinstance(value, int) else max(1, len(value))


def _away(parts: Any) -> bool:
    return any(parts.values())


_LATE = ", ".join(name for name, s in SCHEDULES.items() if not s.flushes)
_FLUSHING = ", ".join(name for name, s in SCHEDULES.items() if s.flushes)
_WHOLE_BACKWARD = ", ".join(n for n, s in SCHEDULES.items() if s.flushes and not s.splits_backward)
_SPLITS = ("pp", "virtual_stages", "tp", "cp", "ep")  # of a model
_PIPELINE = "with pp from 2, zero 0 to 2 and without offload"
_SENT_PLAIN = "what comes from the host is neither kept twice nor sent in blocks"

# of values that a user gave, and of a whole plan
CONTRADICTIONS = (
    Contradiction(
        "post_validation", "pp", lambda validated, pp: validated and pp == 1,
        "there is one device group, which waits for no other", _PIPELINE,
    ),
    Contradiction(
        "post_validation", "zero", lambda validated, zero: validated and zero == 3,
        "weights that were gathered before a step is undone would be the wrong ones", _PIPELINE,
    ),
    Contradiction(
        "post_validation", "offload", lambda validated, parts: validated and _away(parts),
        "states are undone on devices", _PIPELINE,
    ),
    Contradiction(
        "fragments", "sync_every", lambda parts, steps: parts > 1 and steps and steps % parts,
        "each meets so many steps after the one before: their quotient",
        "a divisor of sync_every",
    ),
    *_of_one_pass(),
    *_of_compressed(),
    *_of_branches(),
    *_of_stale(),
    *_of_servers(),
    _of_slices(
        "zero", lambda zero: zero == 3, "weights would be gathered anew for each slice",
        "zero 0 to 2",
    ),
    _of_slices(
        "cp", lambda cp: cp > 1, "the context axis splits tokens in an order of its own",
        "cp=1, or no slices",
    ),
    _of_slices(
        "segments", lambda blocks: blocks > 1,
        "what each block keeps for later slices would be held all the same", "segments=1",
    ),
    _of_slices(
        "schedule", lambda name: not SCHEDULES[name].sliced,
        "it leaves no room for backwards from the last slice to the first",
        ", ".join(name for name, s in SCHEDULES.items() if s.sliced),
    ),
    _of_copies("pp", lambda pp: pp % 2, "an even pp"),
    _of_copies("num_microbatches", lambda m: m % 2, "an even num_microbatches"),
    _of_copies("zero", lambda zero: zero == 3, "zero 0 to 2"),
    _of_copies("cp", lambda cp: cp > 1, "cp=1"),
    _of_copies("ep", lambda ep: ep > 1, "ep=1"),
    _of_copies("offload", _away, "states on devices"),
    _of_copies("post_validation", bool, "post_validation=False"),
    Contradiction(
        "zero", "schedule",
        lambda zero, schedule: zero == 3 and SCHEDULES[schedule].splits_backward,
        "torch loses gradients where the backward is split in two",
        f"zero 0, 1 or 2, or a schedule with a whole backward: {_WHOLE_BACKWARD}",
        given=False, priced=False,
    ),
    Contradiction(
        "dp_shard", "zero", lambda shard, zero: shard and not zero,
        "without ZeRO nothing is divided", "zero 1, 2 or 3, or no dp_shard",
    ),
    Contradiction(
        "hpz", "zero", lambda hpz, zero: hpz and zero != 3,
        "secondary shards are of ZeRO-3's weights", "zero=3, or no hpz",
    ),
    Contradiction(
        "hpz", "ep", lambda hpz, ep: hpz and ep > 1,
        "experts that are shared out have no secondary shards", "ep=1, or no hpz", given=False,
    ),
    Contradiction(
        "quantized", "zero", lambda sent, zero: sent != "none" and zero != 3,
        "quantised are collectives of ZeRO-3", "zero=3, or quantized='none'",
    ),
    Contradiction(
        "quantized", "ep", lambda sent, ep: sent != "none" and ep > 1,
        "collectives of experts that are shared out are not quantised",
        "ep=1, or quantized='none'",
    ),
    Contradiction(
        "quantized", "precision", lambda sent, precision: sent != "none" and precision == "fp16",
        "its scaled loss looks for the largest gradients that are finite, which the "
        "blocks' scales would hide and rounding lose",
        "precision bf16 or fp32, or quantized='none'", given=False,
    ),
    Contradiction(
        "segments", "schedule",
        lambda size, schedule: size > 1 and SCHEDULES[schedule].splits_backward,
        "what the first part of a backward makes again, the second would have to keep",
        "segments=1, or a schedule that doesn't split the backward",
    ),
    Contradiction(
        "offload", "hpz", lambda parts, hpz: parts.get("optimizer") and hpz, _SENT_PLAIN,
        "one of the two", given=False,
    ),
    Contradiction(
        "offload", "quantized", lambda parts, sent: parts.get("optimizer") and sent != "none",
        _SENT_PLAIN, "one of the two",
    ),
    Contradiction(
        "offload", "zero", lambda parts, zero: parts.get("weights") and zero == 3,
        "its weights are there with the optimizer states",
        "weights with zero 0, 1 or 2; with zero 3 the optimizer states alone",
    ),
    Contradiction(
        "offload", "zero", lambda parts, zero: parts.get("nvme") and zero == 3,
        "torch keeps the shards that its optimizers step", "nvme with zero 0, 1 or 2",
    ),
    Contradiction(
        "offload", "segments", lambda parts, size: parts.get("weights") and size > 1,
        "weights come for blocks that run again alone", "segments=1, or no weights in host memory",
    ),
)  # fmt: skip
