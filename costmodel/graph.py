"""The operator graph of a traced model as plain data: values, operators, blocks.

A `Graph` holds no torch modules and no weights, only names, shapes and wiring, so that it can be
priced, hashed and rewritten without a device. It is traced for one micro-batch of `batch_size`
rows.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


OWN_NAMESPACES = ("aten", "meshwright")  # whose operators are recognised by name


@dataclass(frozen=True, slots=True)
class Ref:
    """A reference to a value by name, in place of a tensor argument of an operator."""

    name: str


@dataclass(frozen=True, slots=True, kw_only=True)
class TensorMeta:
    """Shape and dtype of a value; `requires_grad` says whether a gradient flows into it. `stored`
    is the dtype that a frozen parameter has in the user's model, where it is computed with in
    another."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    requires_grad: bool = False
    stored: torch.dtype | None = None

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of the whole tensor."""
        return self.numel * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True)
class Op:
    """One operator call.

    `args` and `kwargs` are the call's arguments with every tensor replaced by a `Ref`. `results`
    has one name per output tensor. `key` is the stable name used by plans: the module's FQN, the
    operator, and its occurrence there (`transformer.h.0.mlp.c_fc:addmm`).
    """

    name: str
    target: str
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    results: tuple[str, ...]
    key: str = ""
    module: str = ""
    source: str = ""

    @cached_property
    def operands(self) -> tuple[str, ...]:
        """Names of the tensor arguments in call order, repeats included."""
        return (*refs(self.args), *refs(self.kwargs))

    @cached_property
    def short(self) -> str:
        """`short_name(target)`."""
        return short_name(self.target)


@dataclass(frozen=True, slots=True, kw_only=True)
class Block:
    """A contiguous run of operators, the unit of stage cuts and of recompute.

    `inputs` and `outputs` are activations crossing the block's boundary; `derived` are values
    computed from raw inputs alone that it reads (masks, positions); `parameters` and `buffers` are
    value names. Blocks with equal `class_id` are the same program on different parameters.
    """

    name: str
    ops: tuple[Op, ...]
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    derived: tuple[str, ...]
    parameters: tuple[str, ...]
    buffers: tuple[str, ...]
    class_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Outputs:
    """Outputs of the user's model: `spec` is their structure (a pytree's) of leaves at `paths`
    (`logits`, `0`), each with the name of its value; None for what no operator of the blocks makes
    on the way to the loss."""

    paths: tuple[str, ...]
    values: tuple[str | None, ...]
    spec: Any

    @property
    def known(self) -> dict[str, str]:
        """The values by path, of the leaves that have one."""
        leaves = zip(self.paths, self.values, strict=True)
        return {path: value for path, value in leaves if value is not None}


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A traced model: loss included, batch of `batch_size` rows, operators in execution order.

    `inputs` maps a value name to its path in the user's batch (`input_ids`, `0`, ...); `batched`
    are those whose dim 0 is the batch. `parameters` and `buffers` map value names to FQNs (a tied
    parameter has one name), `constants` to tensors. `derived` are the operators that depend on raw
    inputs, buffers and constants only: they belong to no block, every stage recomputes what it
    needs. `aliases` maps every FQN of a tied parameter to the one kept. `loss` is the scalar
    output; `updates` maps a buffer's value name to the value that replaces it after the forward.
    `fixed` are the entries of the user's batch that are no inputs, by path, and `reads` the
    attributes of modules that the forward read, as (FQN, attribute): their values are part of the
    graph. `outputs` are what the model returns, where it is known. `weight_writes` are in-place
    operators, each on one parameter and plain numbers, that run before a step's first forward.
    `known` are values that follow from inputs alone, with what they were when traced: the course of
    the forward depends on them. A graph with its loss in `loss_parts` was made of the `whole`.
    `name` is the model's, for people.
    """

    values: Mapping[str, TensorMeta]
    ops: tuple[Op, ...]
    derived: tuple[Op, ...]
    inputs: Mapping[str, str]
    batched: frozenset[str]
    parameters: Mapping[str, str]
    buffers: Mapping[str, str]
    constants: Mapping[str, torch.Tensor]
    loss: str
    batch_size: int
    updates: Mapping[str, str] = field(default_factory=dict)
    aliases: Mapping[str, str] = field(default_factory=dict)
    blocks: tuple[Block, ...] = ()
    notes: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    reads: tuple[tuple[str, str], ...] = ()
    outputs: Outputs | None = None
    weight_writes: tuple[Op, ...] = ()
    known: Mapping[str, torch.Tensor] = field(default_factory=dict)
    loss_parts: int = 1
    whole: Graph | None = None
    name: str = ""

    def behind(self, values: Iterable[str]) -> set[str]:
        """These values, and all that they are made of."""
        reached = set(values)
        for op in reversed((*self.derived, *self.ops)):
            if not reached.isdisjoint(op.results):
                reached.update(op.operands)
        return reached

    @property
    def asked_at(self) -> list[str]:
        """The user's lines that ask for `known` values, the first few."""
        asked = (op for op in self.derived if not self.known.keys().isdisjoint(op.results))
        return sorted({op.source for op in asked} - {""})[:3]

    @cached_property
    def read_once(self) -> frozenset[str]:
        """Values that are one operand of one operator of the blocks."""
        reads = Counter(v for block in self.blocks for op in block.ops for v in op.operands)
        return frozenset(value for value, count in reads.items() if count == 1)

    @cached_property
    def gathered_twice(self) -> frozenset[str]:
        """Parameters that ZeRO-3 gathers for a backward, too: of blocks that have one, and of the
        block before these, gathered ahead."""
        gathered, ahead = set[str](), False
        for block in reversed(self.blocks):
            backward = any(self.values[r].requires_grad for op in block.ops for r in op.results)
            gathered.update(block.parameters if backward or ahead else ())
            ahead = backward
        return frozenset(gathered)

    @cached_property
    def in_layers(self) -> frozenset[str]:
        """Operators of repeated blocks: the same program on other parameters."""
        alike = Counter(block.class_id for block in self.blocks)
        layers = (block for block in self.blocks if alike[block.class_id] > 1)
        return frozenset(op.name for block in layers for op in block.ops)

    def num_parameters(self) -> int:
        """Elements of all parameters; tied ones count once."""
        return sum(self.values[name].numel for name in self.parameters)

    def num_trained(self) -> int:
        """Elements of the parameters that have a gradient."""
        values = map(self.values.__getitem__, self.parameters)
        return sum(value.numel for value in values if value.requires_grad)


def short_name(target: str) -> str:
    """An operator's name: `add` for `aten.add.Tensor`; with its namespace for others' operators,
    `mylib.add` for `mylib.add.default`."""
    namespace, name = target.split(".")[:2]
    return name if namespace in OWN_NAMESPACES else f"{namespace}.{name}"


def refs(tree: Any) -> Iterator[str]:
    """Names of all `Ref`s in nested tuples, lists and mappings, in order."""
    if isinstance(tree, Ref):
        yield tree.name
    elif isinstance(tree, (tuple, list)):
        for item in tree:
            yield from refs(item)
    elif isinstance(tree, Mapping):
        for item in tree.values():
            yield from refs(item)


def map_refs(tree: Any, fn: Any) -> Any:
    """The tree with every `Ref` replaced by `fn(name)`."""
    if isinstance(tree, Ref):
        return fn(tree.name)
    if isinstance(tree, tuple):
        return tuple(map_refs(item, fn) for item in tree)
    if isinstance(tree, list):
        return [map_refs(item, fn) for item in tree]
    if isinstance(tree, Mapping):
        return {key: map_refs(item, fn) for key, item in tree.items()}
    return tree


def argument(op: Op, index: int, name: str, default: Any) -> Any:
    """A non-tensor argument of a call by position or keyword, or its default."""
    if name in op.kwargs:
        return op.kwargs[name]
    return op.args[index] if index < len(op.args) else default


def verify_graph(graph: Graph) -> None:
    """Raise AssertionError for an inconsistent graph, which is a bug of the tracer.

    Every operand is defined before it is read, by one definition of known shape; names and keys are
    unique; derived operators read no parameter and no activation; the loss is a scalar; blocks, if
    cut, partition the operators in order.
    """
    sources = (*graph.inputs, *graph.parameters, *graph.buffers, *graph.constants)
    defined = set(sources)
    _check(len(defined) == len(sources), "a value is of two kinds")
    for name in sources:
        _check(name in graph.values, f"{name} has no shape")
    for op in graph.derived:
        read = graph.parameters.keys() & set(op.operands)
        _check(not read, f"derived {op.name} reads parameters {sorted(read)}")
        _define(graph, op, defined)
    for op in graph.ops:
        _define(graph, op, defined)
    calls = (*graph.derived, *graph.ops)
    for what in ("name", "key"):
        unique = {getattr(op, what) for op in calls}
        _check(len(unique) == len(calls), f"an operator {what} is used twice")
    _check(graph.loss in defined, f"loss {graph.loss} is not defined")
    _check(graph.values[graph.loss].shape == (), f"loss {graph.loss} is no scalar")
    _check(graph.batched <= set(graph.inputs), "a batched value is no input")
    for buffer, update in graph.updates.items():
        _check(buffer in graph.buffers, f"update of {buffer}, which is no buffer")
        _check(update in defined, f"update {update} of {buffer} is not defined")
    raw = {*graph.inputs, *(r for op in graph.derived for r in op.results)}
    _check(graph.known.keys() <= raw, "a known value does not follow from inputs")
    chained = graph.aliases.keys() & set(graph.aliases.values())
    _check(not chained, f"aliases of aliases: {sorted(chained)}")
    if graph.blocks:
        flat = tuple(op for block in graph.blocks for op in block.ops)
        _check(flat == graph.ops, "the blocks do not partition the operators in order")


def _define(graph: Graph, op: Op, defined: set[str]) -> None:
    """Check an operator's reads, and add its results to the `defined` names."""
    for name in op.operands:
        _check(name in defined, f"{op.name} ({op.key}) reads {name} before it is defined")
    for name in op.results:
        _check(name not in defined, f"{op.name} ({op.key}) defines {name} again")
        _check(name in graph.values, f"{name} has no shape")
    defined.update(op.results)


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise AssertionError(f"inconsistent graph: {what}")


# a float scalar in a call's text
FLOAT = r"(?<![\w.])-?(\d+\.\d*(e[+-]?\d+)?|\d+e[+-]?\d+|inf|nan)(?![\w.])"


def class_hash(graph: Graph, block: Block, *, exact: bool = False) -> str:
    """Structural hash of a block: equal for the same program on other values. Float scalars are
    masked unless `exact`."""
    local: dict[str, int] = {}  # value name -> its number in the block

    def number(name: str) -> str:
        meta = graph.values[name]
        kind = "p" if name in graph.parameters else "b" if name in graph.buffers else "v"
        index = local.setdefault(name, len(local))
        stored = meta.stored or ""
        return f"{kind}{index}{meta.shape}{meta.dtype}{meta.requires_grad}{stored}"

    lines = [str([number(n) for n in block.inputs])]
    for op in block.ops:
        call = map_refs((op.args, op.kwargs), number)
        text = f"{op.target}{call}{[number(r) for r in op.results]}"
        lines.append(text if exact else re.sub(FLOAT, "#", text))
    lines.append(str([number(n) for n in block.outputs]))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
