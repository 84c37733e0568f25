"""Rows of a batch on the way to the loss: one pass over the graph.

Let a batch of m micro-batches have the loss L, and v be what an operator makes of it. Of v(k), made
of micro-batch k alone, the pass knows one of

    constant    v(k) = v: rows have no part in it
    rows        v(k) are rows of v: each depends on its own row alone
    share       v = Σ v(k) / m, where operators that sum over rows count m times
    met         nothing of the kind: rows met in an operator before

Sums of raw inputs (the number of labels, of a mask's flags) are taken over the batch before the
step, and constant in it: `totals`. Bits that finite numbers decide (`isinf(x).any()`) are constant,
too: `finite`. A loss that is a share of the batch's is exact in micro-batches; else some operator
of `meetings` stands between, where rows meet. Where an operator tells nothing of its dims, nothing
is claimed, and its results are taken for a share.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from typing import Any, Literal

from meshwright.costmodel import rules
from meshwright.costmodel.graph import Graph, Op, Ref, argument, map_refs
from meshwright.costmodel.memo import Memo
from meshwright.costmodel.schedules import ScheduleError
from meshwright.costmodel.sharding.factors import FactorTable, has_rule

TotalKind = Literal["sum", "mean", "max", "min"]
# reductions of raw inputs that are put together from those of micro-batches
EXTREMES: Mapping[str, TotalKind] = {
    "max": "max", "amax": "max", "any": "max", "min": "min", "amin": "min", "all": "min",
}  # fmt: skip
# operators that take the shape of an operand, and nothing else
BY_SHAPE = frozenset({
    "zeros_like", "ones_like", "full_like", "empty_like", "rand_like", "randn_like",
    "new_zeros", "new_ones", "new_full", "new_empty",
})  # fmt: skip
# operators and the positions of operands that may be shares together, the others constant
AFFINE: Mapping[str, frozenset[int]] = {
    "where": frozenset({1, 2}), "masked_fill": frozenset({0, 2}), "rsub": frozenset({0, 1}),
    "nan_to_num": frozenset({0}),
}  # fmt: skip
ZEROS = frozenset({"zeros", "new_zeros", "zeros_like"})
SAME_ELEMENTS = frozenset(
    {"to", "_to_copy", "clone", "contiguous", "alias", "detach", *rules.VIEWS}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Meeting:
    """An operator of which a row's result depends on other rows, with the user's source line."""

    key: str
    target: str
    source: str

    def __str__(self) -> str:
        return f"{self.key} ({self.target}{', ' if self.source else ''}{self.source})"


@dataclass(frozen=True, slots=True, kw_only=True)
class RowUse:
    """Dependence of a loss on the rows of a batch, by keys of operators.

    `meetings` are the first in which rows meet; with one of them nothing else is said. `sums` add
    rows up, and count as often as there are micro-batches. `totals` are decided by raw inputs, each
    with the way to put it together. `finite` are bits of all rows that are constant where numbers
    are finite: each micro-batch has its own. `numbers`: the number of rows may be a plain number in
    the loss, as it was when traced. `filling`: inputs (by path) with values that make rows count
    nothing; None where all count.
    """

    sums: frozenset[str] = frozenset()
    totals: Mapping[str, TotalKind] = field(default_factory=dict)
    meetings: tuple[Meeting, ...] = ()
    finite: tuple[Meeting, ...] = ()
    numbers: bool = False
    filling: Mapping[str, int] | None = None


@dataclass(frozen=True, slots=True)
class _Rows:
    """The batch is in a dim, after so many major parts of it."""

    dim: int
    before: int = 1


class _Kind(Enum):
    CONSTANT = "constant"
    SHARE = "share"
    UNKNOWN = "unknown"
    MET = "met"


_State = _Rows | _Kind
CONSTANT, SHARE, UNKNOWN, MET = _Kind.CONSTANT, _Kind.SHARE, _Kind.UNKNOWN, _Kind.MET


def row_use(graph: Graph, table: FactorTable) -> RowUse:
    """Dependence of the loss on the rows of a graph of two rows at least; of one none is known."""
    if graph.batch_size < 2:
        return RowUse()
    reader = _Reader(graph, table)
    reader.read()
    live = graph.behind({graph.loss})

    def living(ops: Iterable[Op]) -> list[Op]:
        return [op for op in ops if live & set(op.results)]

    meetings, finite = (
        tuple(Meeting(key=op.key, target=op.target, source=op.source) for op in living(ops))
        for ops in (reader.meetings, reader.finite)
    )
    meetings += tuple(_courses(graph))
    if meetings:  # its micro-batches are trained each by itself, if at all
        return RowUse(meetings=meetings)
    sums = frozenset(op.key for op in living(reader.sums))
    derived = {op.key for op in living(graph.derived)}
    totals = {key: kind for key, kind in reader.totals.items() if key in derived}
    filling = None
    if reader.at[graph.loss] is SHARE:
        filling = counting_nothing(graph, living(reader.ends()))
    return RowUse(
        sums=sums,
        totals=totals,
        finite=finite,
        numbers=bool(sums or totals or reader.scaled),
        filling=filling,
    )


def _courses(graph: Graph) -> Iterator[Meeting]:
    """Values of rows that decide the course of the forward: it may be another in each part."""
    makers = {v: op for op in graph.derived for v in op.results}
    for value in graph.known:
        if graph.behind({value}).isdisjoint(graph.batched):
            continue
        if (op := makers.get(value)) is None:
            yield Meeting(key=graph.inputs[value], target="the forward's course", source="")
        else:
            yield Meeting(key=op.key, target=op.target, source=op.source)


class _Reader:
    """The pass: the state of every value, in the order of the operators."""

    def __init__(self, graph: Graph, table: FactorTable) -> None:
        self.graph, self.table, self.rows = graph, table, graph.batch_size
        self.at: dict[str, _State] = dict.fromkeys(graph.values, CONSTANT)
        self.at |= {name: _Rows(0) for name in graph.batched}
        self.maker = {v: op for op in (*graph.derived, *graph.ops) for v in op.results}
        self.raw = {v for op in graph.derived for v in op.results}
        self.raw |= {*graph.inputs, *graph.buffers, *graph.constants}
        self.sums: list[Op] = []
        self.totals: dict[str, TotalKind] = {}
        self.meetings: list[Op] = []
        self.bits = FiniteBits(graph)
        self.finite: list[Op] = []  # that join rows in a bit of finite numbers
        self.relations = Memo[str, tuple[Any, ...]]()  # of calls without a rule, by the call
        self.scaled = False  # a share meets a number, which may be made of the number of rows

    def read(self) -> None:
        """Find the state of every value."""
        for op in self.graph.derived:
            before = len(self.sums)
            states = self._step(op)
            if SHARE in states:
                self.totals[op.key] = "sum" if len(self.sums) > before else "mean"
                states = [CONSTANT for _ in states]
            del self.sums[before:]
            self.at |= dict(zip(op.results, states, strict=True))
        for op in self.graph.ops:
            self.at |= dict(zip(op.results, self._step(op), strict=True))

    def ends(self) -> Iterator[Op]:
        """The operators that take rows and give none."""
        for op in (*self.graph.derived, *self.graph.ops):
            if self._joins(op, [self.at[v] for v in op.results]) and op not in self.finite:
                yield op

    def _joins(self, op: Op, states: Sequence[_State]) -> bool:
        """Whether an operator takes rows and gives none."""
        rows = any(isinstance(self.at[v], _Rows) for v in op.operands)
        return rows and not any(isinstance(state, _Rows) for state in states)

    def _step(self, op: Op) -> list[_State]:
        states = [self.at[v] for v in op.operands]
        if self.bits.add(op) is not None:
            results = self._declared(op, CONSTANT)
            self.finite += [op] * self._joins(op, results)
            return results
        if op.short in BY_SHAPE or all(state is CONSTANT for state in states):
            return self._declared(op, CONSTANT)
        if MET in states:
            return self._all(op, MET)
        if rules.backward_joins(op):
            return self._met(op)
        if UNKNOWN in states:
            return self._declared(op, UNKNOWN)
        shares = {i for i, state in enumerate(states) if state is SHARE}
        rows = {i: state for i, state in enumerate(states) if isinstance(state, _Rows)}
        rule = self.table.ops[op.name]
        if shares:
            numbers = CONSTANT in states or any(map(is_number, op.args))
            self.scaled |= rules.is_pointwise(op) and numbers
            affine = not rows and _affine(op, rule, shares)
            return self._all(op, SHARE) if affine else self._met(op)
        if rules.row_reduction(op):
            return self._row_loss(op, rows)
        if not has_rule(op, rule):
            return self._without_rule(op, rows)
        return self._of_rows(op, rule, rows)

    # --- results ---

    def _all(self, op: Op, state: _State) -> list[_State]:
        return [state for _ in op.results]

    def _met(self, op: Op) -> list[_State]:
        self.meetings.append(op)
        return self._all(op, MET)

    def _summed(self, op: Op) -> list[_State]:
        self.sums.append(op)
        return self._all(op, SHARE)

    def _declared(self, op: Op, other: _State) -> list[_State]:
        """Rows where the factors of the graph say so."""
        batch = self.table.batch
        if batch is None or self.table.sizes.get(batch) != self.rows:
            return self._all(op, other)
        places = (self.table.find(v, batch) for v in op.results)
        return [_Rows(*place) if place else other for place in places]

    # --- operators on rows ---

    def _row_loss(self, op: Op, rows: Mapping[int, _Rows]) -> list[_State]:
        """A loss whose mean divides by the number of rows that are not ignored: counted over the
        batch where raw inputs decide it, else equal in all micro-batches where none is ignored."""
        rule = self.table.ops[op.name]
        if rule.known and self._letters(rule, rows) is None:
            return self._met(op)
        if rules.row_reduction(op) == 2:
            return self._summed(op)
        target, weights = op.operands[1], rules.class_weights(op)
        floating = self.graph.values[target].dtype.is_floating_point
        if floating or self.raw.issuperset(filter(None, (target, weights))):
            return self._all(op, SHARE)
        ignored = argument(op, 4, "ignore_index", -100)
        behind = self.graph.behind({target}) & self.maker.keys() - self.raw
        writes = any(ignored in _numbers(self.maker[v]) for v in behind)
        return self._met(op) if writes or weights else self._all(op, SHARE)

    def _without_rule(self, op: Op, rows: Mapping[int, _Rows]) -> list[_State]:
        """A loss that says how it reduces rows; of others, what a trial tells, and where there can
        be none, rows where they come out again."""
        results, shipped = self._declared(op, UNKNOWN), op.target.startswith("aten.")
        names = [name for name, _ in rules.signature_of(op.target)] if shipped else []
        if UNKNOWN in results and "reduction" in names:
            how = argument(op, names.index("reduction"), "reduction", 1)
            return self._summed(op) if how == 2 else self._all(op, SHARE)
        in_turn = rules.traits_of(op).written_in_turn
        if in_turn is not None:  # a micro-batch has its own elements, or would begin with the first
            return results if in_turn in rows else self._met(op)
        if not self.graph.updates.keys().isdisjoint(op.operands):
            return results  # statistics of a batch norm inside of a leaf
        from meshwright.costmodel import user_rules  # which loads torch

        operands = [self.graph.values[v] for v in op.operands]
        places = {i: (state.dim, state.before) for i, state in rows.items()}
        call = map_refs((op.args, op.kwargs), lambda _: "")
        relations = self.relations.of(
            repr((op.target, call, operands, places)),
            lambda: user_rules.relations_of_rows(op, operands, places, self.rows),
        )
        if not relations:
            return results
        if "met" in relations or ("sum" in relations and {*relations} != {"sum"}):
            return self._met(op)
        if "sum" in relations:
            return self._summed(op)
        named = {"mean": SHARE, "constant": CONSTANT}
        return [_Rows(*r) if isinstance(r, tuple) else named[r] for r in relations]

    def _of_rows(self, op: Op, rule: rules.OpFactors, rows: Mapping[int, _Rows]) -> list[_State]:
        joined = self._joined(op, rows)
        if joined is not None:
            return [joined]
        if op.short == "index" and 0 in rows and rows[0].dim in _indexed(op):
            return self._own_places(op, rows[0])
        factor = self._letters(rule, rows)
        if factor is None:
            return self._declared(op, UNKNOWN) if op.short in rules.VIEWS else self._met(op)
        letter, before = factor
        kind = rule.kinds[letter]
        if kind == "map":
            return [self._mapped(rule, dims, letter, before) for dims in rule.results]
        if kind == "mean":
            return self._all(op, SHARE)
        if kind == "sum" and not rule.implementations.get(letter):
            pinned = [op.operands[i] for i in rule.pinned if i not in rows]
            zeros = all(self.maker.get(v, op).short in ZEROS for v in pinned)
            return self._summed(op) if zeros else self._declared(op, UNKNOWN)
        if kind == "whole":
            return self._whole(op, rows)
        return self._met(op)

    def _letters(self, rule: rules.OpFactors, rows: Mapping[int, _Rows]) -> tuple[str, int] | None:
        """Factor that all rows are, with its parts before them; None where they are several."""
        letters = {self._letter(rule, rule.operands[i], state) for i, state in rows.items()}
        return letters.pop() if len(letters) == 1 else None

    def _letter(
        self, rule: rules.OpFactors, dims: rules.Dims, state: _Rows
    ) -> tuple[str, int] | None:
        cum = 1
        for letter in dims[state.dim]:
            after = cum * rule.sizes[letter]
            if state.before % cum == 0 and after % (state.before * self.rows) == 0:
                return letter, state.before // cum
            cum = after
        return None

    def _mapped(self, rule: rules.OpFactors, dims: rules.Dims, letter: str, before: int) -> _State:
        place = rule.place(dims, letter)
        return _Rows(place[0], place[1] * before) if place else UNKNOWN

    def _joined(self, op: Op, rows: Mapping[int, _Rows]) -> _State | None:
        """Batches joined in their dim, as (batch, row)."""
        if op.short != "cat":
            return None
        dim = int(argument(op, 1, "dim", 0)) % len(self.graph.values[op.operands[0]].shape)
        if {s.dim for s in rows.values()} != {dim}:
            return None
        shapes = {self.graph.values[v].shape for v in op.operands}
        if len(rows) < len(op.operands) or len(shapes) > 1 or len(set(rows.values())) > 1:
            return UNKNOWN
        first = rows[0]
        return _Rows(first.dim, first.before * len(rows))

    def _whole(self, op: Op, rows: Mapping[int, _Rows]) -> list[_State]:
        """An operator along the batch: some give whole batches, or each row at its own place."""
        if op.short == "slice" and 0 in rows:
            part = self._of_batches(op, rows[0])
            return self._met(op) if part is None else [part]
        if op.short in EXTREMES and op.results[0] in self.raw and len(op.results) == 1:
            self.totals[op.key] = EXTREMES[op.short]
            return [CONSTANT]
        viewed = op.short in rules.VIEWS or self._in_turn(op)
        return self._declared(op, UNKNOWN) if viewed else self._met(op)

    def _in_turn(self, op: Op) -> bool:
        """Whether all rows are taken out one by one, as a loop over them does."""
        if op.short == "unbind":
            return True
        calls = (*self.graph.derived, *self.graph.ops)
        alike = [o for o in calls if o.short == op.short and o.operands == op.operands]
        return op.short == "select" and len({o.args for o in alike}) >= self.rows

    def _of_batches(self, op: Op, state: _Rows) -> _State | None:
        """Whole batches out of several joined ones."""
        size = self.graph.values[op.operands[0]].shape[state.dim]
        length = self.graph.values[op.results[0]].shape[state.dim]
        per_batch = size // state.before
        start = int(argument(op, 2, "start", 0) or 0) % size
        step = int(argument(op, 4, "step", 1))
        aligned = step == 1 and start % per_batch == 0 and length % per_batch == 0
        return _Rows(state.dim, length // per_batch) if aligned else None

    def _own_places(self, op: Op, state: _Rows) -> list[_State]:
        """`x[arange(b), i]`: each row finds its own."""
        index = _indexed(op)[state.dim]
        if state.before != 1 or not self._counts_up(index):
            return self._met(op)
        rule, position = self.table.ops[op.name], op.operands.index(index, 1)
        shape = self.graph.values[index].shape
        longest = max(range(len(shape)), key=shape.__getitem__)
        letter = self._letters(rule, {position: _Rows(longest)})
        return self._met(op) if letter is None else [self._mapped(rule, rule.results[0], *letter)]

    def _counts_up(self, value: str) -> bool:
        """Whether a value is 0, 1, ... to the number of rows."""
        while self.graph.values[value].numel == self.rows and (op := self.maker.get(value)):
            if op.short == "arange":
                return list(_numbers(op)) in ([self.rows], [0, self.rows], [0, self.rows, 1])
            if op.short not in SAME_ELEMENTS or not op.operands:
                return False
            value = op.operands[0]
        return False


def _indexed(op: Op) -> dict[int, str]:
    """The indices of a look-up by the dims they are for."""
    return {d: index.name for d, index in enumerate(op.args[1]) if isinstance(index, Ref)}


def _affine(op: Op, rule: rules.OpFactors, shares: set[int]) -> bool:
    """Whether f(Σ v(k) / m) = Σ f(v(k)) / m in these operands, the others constant."""
    if rules.traits_of(op).casts or rule.view or any(shares <= group for group in rule.linear):
        return True
    return shares <= AFFINE.get(op.short, frozenset())


def is_number(argument: Any) -> bool:
    """Whether an operator's argument is a plain number."""
    return isinstance(argument, int | float) and not isinstance(argument, bool)


def _numbers(op: Op) -> Iterator[float]:
    """The numbers among an operator's positional arguments."""
    return (a for a in op.args if is_number(a))


# --- the number of rows as a plain number ---------------------------------------------------------


def with_numbers_of(graph: Graph, full: Graph) -> Graph:
    """A graph with the plain numbers, but for sizes of tensors, of the same model traced at other
    rows: a loss divided by the number of rows is divided by that of the whole batch. Raises
    ValueError where the two are of other operators."""
    old, new = map(_beside_sizes, (graph, full))
    if [op.target for op in old] != [op.target for op in new]:
        raise ScheduleError(
            f"the model runs other operators on {graph.batch_size} rows than on {full.batch_size}, "
            "so that what it makes of their number can't be told",
            place="num_microbatches",
            legal="1, where the rows of a micro-batch change what is run",
            way_out="num_microbatches=1 keeps the batch together",
        )
    numbered = {
        a.name: replace(a, **numbers)
        for a, b in zip(old, new, strict=True)
        if (numbers := _others_numbers(a, b))
    }

    def renumbered(ops: Iterable[Op]) -> tuple[Op, ...]:
        return tuple(numbered.get(op.name, op) for op in ops)

    return replace(
        graph,
        ops=renumbered(graph.ops),
        derived=renumbered(graph.derived),
        constants={n: y if y.shape == x.shape else x for n, x, y in _constants(graph, full)},
        blocks=tuple(replace(block, ops=renumbered(block.ops)) for block in graph.blocks),
    )


def same_numbers(graph: Graph, other: Graph) -> bool:
    """Whether graphs of a model traced at other rows have the same operators and plain numbers."""
    ours, theirs = map(_beside_sizes, (graph, other))
    if [op.target for op in ours] != [op.target for op in theirs]:
        return False
    constants = _constants(graph, other)
    alike = all(x.shape != y.shape or bool((x == y).all()) for _, x, y in constants)
    return alike and not any(_others_numbers(a, b) for a, b in zip(ours, theirs, strict=True))


def _beside_sizes(graph: Graph) -> list[Op]:
    """The operators that may have plain numbers: others, which arrange rows, may be left out where
    there is one."""
    return [op for op in (*graph.derived, *graph.ops) if _has_numbers(op)]


def _constants(graph: Graph, other: Graph) -> Iterator[tuple[str, Any, Any]]:
    """A graph's constants by name, each beside that of the other."""
    return ((n, x, other.constants.get(n, x)) for n, x in graph.constants.items())


def _others_numbers(op: Op, other: Op) -> Mapping[str, Any]:
    """The arguments of a call with the plain numbers of another trace's, where they differ."""
    args = tuple(b if is_number(b) else a for a, b in zip(op.args, other.args, strict=True))
    kwargs = {k: b if is_number(b := other.kwargs[k]) else a for k, a in op.kwargs.items()}
    return {} if (args, kwargs) == (op.args, op.kwargs) else {"args": args, "kwargs": kwargs}


def _has_numbers(op: Op) -> bool:
    """Whether it changes elements, so that its plain numbers are no sizes."""
    filled = op.short in ("full", "full_like", "new_full", "scalar_tensor")
    return filled or (rules.is_pointwise(op) and op.short not in SAME_ELEMENTS)


# --- rows that fill up a smaller batch ------------------------------------------------------------

# operators that move labels and flags, and leave them what they are
MOVES = SAME_ELEMENTS | {"slice", "pad", "constant_pad_nd", "transpose", "permute"}
COMPARES = frozenset({"eq", "ne", "lt", "le", "gt", "ge"})
# operators that replace numbers under flags: of integers alone, as a row of which all is masked has
# no softmax
REPLACES = frozenset({"masked_fill", "where"})

Filling = tuple[str, int]  # an input, and what its rows are filled with


def counting_nothing(graph: Graph, ends: Iterable[Op]) -> Mapping[str, int] | None:
    """The inputs (by path) that keep rows from counting, each with what these are filled with; None
    where rows would count all the same.

    `ends` are the operators at which rows come together on the way to the loss. Each is a loss of
    class numbers that are inputs, moved at most, or a sum of what such labels or a mask among the
    inputs make zero. Nothing else may look up by them, and no row may leave a trace in a buffer.
    """
    calls = (*graph.derived, *graph.ops)
    if graph.updates or any(map(rules.takes_batch_statistics, calls)):
        return None
    if any(map(rules.updates_statistics, calls)):
        return None
    maker = {v: op for op in calls for v in op.results}
    filled: dict[str, int] = {}
    ended = set()
    for op in ends:
        if rules.row_reduction(op) and graph.values[op.operands[1]].dtype.is_floating_point:
            return None  # probabilities of classes, of which none is ignored
        filling = _filling(op, maker)
        if filling is None or filling[0] not in graph.batched:
            return None
        if filled.setdefault(*filling) != filling[1]:
            return None
        ended.add(op.name)
    moved = set(filled)
    for op in calls:
        if moved.isdisjoint(op.operands) or op.name in ended or op.short == "mul":
            continue
        if op.short in REPLACES and not graph.values[op.results[0]].dtype.is_floating_point:
            continue
        if op.short not in MOVES | COMPARES:
            return None
        moved.update(op.results)
    return {graph.inputs[name]: number for name, number in filled.items()} or None


def _filling(end: Op, maker: Mapping[str, Op]) -> Filling | None:
    """Input and value that keep rows from counting where they come together."""
    if rules.row_reduction(end):
        return _source(end.operands[1], maker), int(argument(end, 4, "ignore_index", -100))
    return _zero(end.operands[0], maker) if end.short == "sum" else None


def _zero(value: str, maker: Mapping[str, Op]) -> Filling | None:
    """Input and value that make the rows of a value zero."""
    op = maker.get(value)
    if op is None:
        return value, 0
    if op.short in MOVES or op.short in ("sum", "neg", "div"):
        return _zero(op.operands[0], maker)
    if op.short == "ne" and len(op.operands) == 1 and isinstance(op.args[1], int):
        return _source(op.operands[0], maker), op.args[1]
    if op.short == "mul":
        for operand in op.operands:
            source = _source(operand, maker)
            if source not in maker or maker[source].short == "ne":  # an input, or flags of one
                return _zero(operand, maker)
    return None


def _source(value: str, maker: Mapping[str, Op]) -> str:
    """The value that others are moved from."""
    while value in maker and maker[value].short in MOVES:
        value = maker[value].operands[0]
    return value


# --- what stays finite ----------------------------------------------------------------------------

# Bits that are known where numbers are finite: whether something overflowed.
#
# `isinf(x)` is false of every finite x, and so is what `any` makes of it. Clamps behind such a
# bit, as half precision needs them, leave each row to itself although the bit is one of all rows.
# Nothing is claimed of what need not be finite: raw inputs (missing labels are NaN), infinities
# that the graph writes, as masks do, logarithms of zero; up to the product that reads what comes
# of them.


# what an operator says of finite numbers
OF_FINITE: Mapping[str, bool] = {
    "isinf": False, "isposinf": False, "isneginf": False, "isnan": False, "isfinite": True,
}  # fmt: skip
# what becomes of known bits
OF_BITS: Mapping[str, Callable[[Sequence[bool]], bool]] = {
    **dict.fromkeys(("any", "all", "clone", "expand", "select", "transpose", *rules.VIEWS), all),
    **dict.fromkeys(("logical_and", "bitwise_and", "__and__"), all),
    **dict.fromkeys(("logical_or", "bitwise_or", "__or__"), any),
    **dict.fromkeys(("logical_not", "bitwise_not"), lambda bits: not all(bits)),
}
COMPARED = {"eq": True, "ne": False}  # what comes of a number beside itself
POLES = frozenset({"log", "log2", "log10", "log1p", "logit", "xlogy"})
MADE_FINITE = frozenset({"nan_to_num"})


class FiniteBits:
    """Bit of all elements of a value, by value, of operators told in their order."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.bits: dict[str, bool] = {}
        real = (n for n in graph.inputs if graph.values[n].dtype.is_floating_point)
        written = (n for n, x in graph.constants.items() if not x.isfinite().all())
        self.infinite = {*real, *written}  # values that need not be finite

    def add(self, op: Op) -> bool | None:
        """The bit that an operator makes; None where it is not known."""
        bit = self._bit(op)
        if bit is not None:
            self.bits |= dict.fromkeys(op.results, bit)
        elif self._infinite(op):
            self.infinite.update(op.results)
        return bit

    def _bit(self, op: Op) -> bool | None:
        import torch

        if any(self.graph.values[v].dtype != torch.bool for v in op.results):
            return None
        if op.operands and self.bits.keys() >= set(op.operands):
            how = OF_BITS.get(op.short)
            return how([self.bits[v] for v in op.operands]) if how else None
        if not self.infinite.isdisjoint(op.operands):
            return None
        return OF_FINITE.get(op.short, _compared(op))

    def _infinite(self, op: Op) -> bool:
        """Whether an operator's results need not be finite."""
        foreign = op.short.count(".") > 0  # may do anything
        if op.short in POLES or foreign or rules.traits_of(op).leaf:
            return True
        if op.short in MADE_FINITE or rules.traits_of(op).main:
            return False
        floats = any(self.graph.values[v].dtype.is_floating_point for v in op.results)
        writes = _writes_infinity((op.args, *op.kwargs.values()))
        return floats and (writes or not self.infinite.isdisjoint(op.operands))


def _compared(op: Op) -> bool | None:
    """Comparison of a finite number with itself, or an infinity; None for others."""
    if op.short not in COMPARED:
        return None
    alike = COMPARED[op.short]
    if len(op.operands) == 2 and len(set(op.operands)) == 1:
        return alike
    return not alike if _writes_infinity(op.args) else None


def _writes_infinity(tree: Any) -> bool:
    """Whether nested arguments have a number that is not finite."""
    if isinstance(tree, (tuple, list)):
        return any(map(_writes_infinity, tree))
    return isinstance(tree, float) and not math.isfinite(tree)


# --- buffers --------------------------------------------------------------------------------------


def written_once(graph: Graph) -> frozenset[str]:
    """The buffers that the forward writes, whose new values come from no rows and no random draw: a
    counter, vectors of a power iteration. Every micro-batch of a step makes the same one of what
    the step began with, and the step writes it once, as one batch would. A norm's counter goes with
    the running statistics of its module, which each micro-batch adds to."""
    if not graph.updates:
        return frozenset()
    calls = (*graph.derived, *graph.ops)
    by_rows = {buffer for op in calls for buffer in running_statistics(op)}
    norms = {graph.buffers[buffer].rpartition(".")[0] for buffer in by_rows}
    by_rows |= {b for b in graph.updates if graph.buffers[b].rpartition(".")[0] in norms}
    while True:
        reached = {*graph.batched, *by_rows}
        for op in calls:
            if rules.draws(op) or not reached.isdisjoint(op.operands):
                reached.update(op.results)
        more = {buffer for buffer, value in graph.updates.items() if value in reached}
        if more <= by_rows:
            return frozenset(graph.updates.keys() - by_rows)
        by_rows |= more


def running_statistics(op: Op) -> list[str]:
    """The buffers that an operator updates in place by the rows that it saw."""
    statistics = rules.traits_of(op).statistics
    if statistics is None or not rules.updates_statistics(op):
        return []
    return [x.name for k in statistics.running if isinstance(x := op.args[k], Ref)]
