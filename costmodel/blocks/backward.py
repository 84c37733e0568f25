"""Moments of a block's backward: its steps (`costmodel.sharding.moves`) in reverse.

An operator's backward reads the gradients of its results and makes those of its operands; then the
former are let go, and what it kept for itself alone. A gradient of what several operators read is
held from the first of them; that of a view is a view; a re-shard makes a new one. What becomes of
parameters' gradients depends on the stage (`costmodel/memory/gradients.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

from meshwright.costmodel.blocks.block_memory import BlockMemory
from meshwright.costmodel.graph import Op
from meshwright.costmodel.memory import Storage
from meshwright.costmodel.operators import Pricer, backward_temporaries, chunk_bytes
from meshwright.costmodel.rules import traits_of
from meshwright.costmodel.sharding import Leave, Move, Placement, Run, Step, Strategy

Where = tuple[str, Placement]


@dataclass(frozen=True, slots=True, kw_only=True)
class Moment:
    """A point of a backward: bytes of activations' gradients `during` an operator and `after` it,
    what was `released` of the kept until then, and the parameters, by number in their block, whose
    gradients it makes; `put_off` what a product holds whose weight's gradient is computed later.
    Of what is gathered from tensor-parallel ranks: what was released before it, and by it
    (`gathered`), and how much less is put off with a part of it (`regathered`)."""

    during: float
    after: float
    released: float
    parameters: tuple[int, ...] = ()
    put_off: float = 0.0
    regathered: float = 0.0
    gathered: tuple[float, float] = (0.0, 0.0)

    def with_parts(self) -> Moment:
        """The moment where gathers run again, and are held to the block's end."""
        before, by_it = self.gathered
        return replace(
            self,
            after=self.after + by_it,
            released=self.released - before,
            put_off=self.put_off - self.regathered,
        )


def backward_course(
    pricer: Pricer, steps: Sequence[Step], memory: BlockMemory, parameters: Sequence[str]
) -> tuple[Moment, ...]:
    """Moments of a block's backward that may be its highest; one per operator with `parameters`."""
    numbers = {value: k for k, value in enumerate(parameters)}
    return tuple(_pruned(_Backward(pricer, steps, memory, numbers).moments()))


def gathering(course: tuple[Moment, ...]) -> tuple[Moment, ...]:
    """The course of a block that gathers again: the same where nothing is gathered."""
    gathers = any(moment.gathered != (0.0, 0.0) or moment.regathered for moment in course)
    return tuple(moment.with_parts() for moment in course) if gathers else course


def _pruned(moments: Sequence[Moment]) -> list[Moment]:
    """Moments but for those between parameters that others exceed, on any way of releasing."""
    pruned: list[Moment] = []
    for makes_gradients, run in groupby(moments, key=lambda m: bool(m.parameters)):
        between = [*run]
        if not makes_gradients:
            most = max(between, key=lambda m: m.during)
            least_kept = max(between, key=lambda m: m.during - m.released)
            between = [most] if most is least_kept else [most, least_kept]
        pruned += between
    return pruned


class _Backward:
    def __init__(
        self, pricer: Pricer, steps: Sequence[Step], memory: BlockMemory, numbers: Mapping[str, int]
    ) -> None:
        self.pricer, self.graph, self.memory = pricer, pricer.graph, memory
        self.steps, self.numbers = steps, numbers
        self.seen: set[int] = set()  # parameters
        self.held: set[Storage] = set()  # inputs of products
        self.gathered = memory.gathered
        self.live: dict[Where, float] = {}
        self.released = self.ungathered = 0.0  # all, what was gathered
        self.first: dict[Storage, str] = {}  # the last operator of a backward that needs it
        for name, storages in memory.keeps.items():
            for storage in storages:
                if storage in memory.kept and storage not in memory.outside:
                    self.first.setdefault(storage, name)

    def moments(self) -> list[Moment]:
        moments: list[Moment | None] = []
        for step in reversed(self.steps):
            match step:
                case Leave(value, state):
                    self._add((value, state))
                case Move(value, source, target) if not step.known:
                    moments.append(self._moved((value, source), (value, target)))
                case Run(op, strategy):
                    moments.append(self._run(op, strategy))
        return [moment for moment in moments if moment]

    def _add(self, where: Where, nbytes: float | None = None) -> None:
        value, _ = where
        meta = self.graph.values[value]
        if meta.requires_grad and value not in self.graph.parameters and where not in self.live:
            self.live[where] = self.pricer.nbytes(*where) if nbytes is None else nbytes

    def _moved(self, source: Where, target: Where) -> Moment | None:
        if target not in self.live:
            return None
        if (source[1].kind, target[1].kind) in (("P", "R"), ("Rp", "R")):  # passed on as it is
            self._add(source, 0.0)
            self.live[source] += self.live.pop(target)
            return None
        self._add(source)
        during = sum(self.live.values())
        del self.live[target]
        return Moment(
            during=during,
            after=sum(self.live.values()),
            released=self.released,
            gathered=(self.ungathered, 0.0),
        )

    def _run(self, op: Op, strategy: Strategy) -> Moment | None:
        results = [r for r in zip(op.results, strategy.results, strict=True) if r in self.live]
        if not results:
            return None
        traits = traits_of(op)
        view = self.pricer.table.ops[op.name].view and not traits.copies
        seeds = sum(self.live[r] for r in results)
        operands = [*zip(op.operands, strategy.operands, strict=True)]
        if view and not self.pricer.table.ops[op.name].matmul:
            self._add(operands[0], 0.0)
            if operands[0] in self.live:
                self.live[operands[0]] += seeds
                for r in results:
                    del self.live[r]
            return None
        # a further gradient of what others read, too, is made before it is added to theirs
        further = sum(self.pricer.nbytes(*read) for read in {*operands} & self.live.keys())
        for operand in operands:
            self._add(operand)
        during = sum(self.live.values()) + further
        during += traits.backward_temporaries * self.pricer.nbytes(*operands[0])
        during += backward_temporaries(self.pricer, op, strategy)
        if traits.kernel == "chunked":
            during += chunk_bytes(self.pricer, op, strategy)
        if traits.loss is not None and traits.loss.kind == "cross_entropy":
            during += self.pricer.nbytes(*operands[0])  # of the log-softmax
        before, ungathered = self.released, self.ungathered
        for r in results:
            del self.live[r]
        for storage in self.memory.keeps.get(op.name, ()):
            if self.first.get(storage) == op.name:
                self.released += self.memory.nbytes(storage)
                self.ungathered += self.memory.nbytes(storage) * (storage in self.gathered)
        put_off, regathered = self._put_off(op, seeds)
        return Moment(
            during=during,
            after=sum(self.live.values()) - (self.released - before),
            released=before,
            parameters=self._parameters(op),
            put_off=put_off,
            regathered=regathered,
            gathered=(ungathered, self.ungathered - ungathered),
        )

    def _put_off(self, op: Op, seed: float) -> tuple[float, float]:
        """Bytes of a product's input and of its result's gradient, where its weight is trained; and
        those spared by the part of an input that is gathered."""
        product = traits_of(op).product
        if product is None or op.operands[product.weight] not in self.numbers:
            return 0.0, 0.0
        weight = op.operands[product.weight]
        if not self.graph.values[weight].requires_grad or weight not in self.graph.read_once:
            return 0.0, 0.0
        x = self.memory.reads[op.name][product.x]
        keeps = x in self.memory.keeps.get(op.name, ()) and x not in self.held
        self.held.add(x)
        nbytes = self.memory.nbytes(x) if keeps else 0.0
        less = nbytes - self.memory.nbytes(self.memory.moved[x][1]) if x in self.gathered else 0.0
        return seed + nbytes, max(0.0, less)

    def _parameters(self, op: Op) -> tuple[int, ...]:
        """Numbers of an operator's trained parameters that no operator behind it reads."""
        trained = (v for v in op.operands if self.graph.values[v].requires_grad)
        numbers = dict.fromkeys(self.numbers[v] for v in trained if v in self.numbers)
        new = tuple(k for k in numbers if k not in self.seen)
        self.seen.update(new)
        return new
