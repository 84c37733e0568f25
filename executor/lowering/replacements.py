"""Modules that replace operators: leaves, random draws, losses over split rows, vocabulary-parallel
embeddings, synchronised batch norms, products whose weight's gradient is put off."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from meshwright.costmodel import rules
from meshwright.costmodel.graph import Graph, Op, Ref, argument
from meshwright.costmodel.precisions import PRECISIONS
from meshwright.costmodel.rules import Draw, row_reduction, traits_of
from meshwright.costmodel.sharding import (
    BY_BLOCKS,
    BY_HALO,
    REPLICATE,
    RP,
    Placement,
    Shift,
    Strategy,
    shift_of,
    token_dim,
)
from meshwright.executor.backward import DeferredProduct, EightBitExperts, EightBitProduct
from meshwright.executor.context_attention import (
    CachedAttention,
    ContextAttention,
    KeyValueCache,
    SlicedAttention,
)
from meshwright.executor.devices import seeded
from meshwright.executor.host_values import has_values, note_unrun, read
from meshwright.executor.lowering.context import Context, State, seen_locally
from meshwright.executor.lowering.implementations import (
    MODULES,
    ChunkedLoss,
    Chunks,
    GlobalLoss,
    RunningNorm,
    ScatteredRows,
)
from meshwright.executor.resharding import Axis, Reshard, SliceAxis, into_zigzag, zigzag_chunks
from meshwright.planner.operators import Program, UnseenWrite
from meshwright.planner.plan import PlanError

Replacement = tuple[nn.Module, Sequence[Any]]  # a module and the arguments of its call


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """An operator as this rank calls it.

    `strategies` and the states of `results` are by axis; `position` is its number in the block;
    `count` the global count of a loss's rows, if it is known beforehand; `rng` the block's random
    state; `kept` what it keeps of earlier slices.
    """

    op: Op
    position: int
    strategies: tuple[Strategy, ...]
    args: list[Any]
    kwargs: dict[str, Any]
    results: list[State]
    count: fx.Node | None
    rng: fx.Node | None
    kept: fx.Node | None


def replacement(call: Call, context: Context) -> Replacement | None:
    """The module standing in for an operator, with its arguments; None where it runs as traced."""
    op, args = call.op, call.args
    on_axes = list(zip(call.strategies, context.axes, strict=True))
    if rules.traits_of(op).leaf:
        values = context.graph.values
        candidates = [
            (context.local_shape(value, state), values[value].dtype)
            for value, state in zip(op.results, call.results, strict=True)
        ]
        leaf = LeafCall(op, context, call.position, part_number(on_axes), candidates)
        return leaf, (*args[1], *([call.rng] if rules.draws(op) else ()))
    if context.cache is not None and rules.traits_of(op).kernel == "attention":
        return _cached(call, context.cache)
    if rules.draws(op):
        return _drawn(call, context)
    if any(s.implementation == BY_HALO for s in call.strategies):
        return _halo(call, context)
    if any(strategy.implementation == BY_BLOCKS for strategy in call.strategies):
        return _by_blocks(call, context)
    if rules.traits_of(op).kernel == "chunked":
        return _chunked(call, context)
    if is_global(op, context, call.strategies):
        ignore = argument(op, 4, "ignore_index", -100)
        smoothing = argument(op, 5, "label_smoothing", 0.0)
        loss = global_loss(op, context, call.strategies)
        weight = call.kwargs.get("weight", args[2] if len(args) > 2 else None)
        return loss, (args[0], args[1], ignore, smoothing, call.count, weight)
    module = None
    for strategy, axis in on_axes:
        if make := MODULES.get(strategy.implementation):
            module = make(axis, context.table.ops[op.name].sizes[strategy.split_factor])
    statistics = rules.traits_of(op).statistics
    if statistics is not None and rules.updates_statistics(op):
        return RunningNorm(module, callable_of(op), statistics.training), args
    if _written_in_parts(op, context):
        return ScatteredRows(), args
    return (module, args) if module else _deferred(call, context) or _in_8_bits(call, context)


def _cached(call: Call, cache: KeyValueCache) -> Replacement:
    """An attention that reads a cache."""
    scale, groups = argument(call.op, 6, "scale", None), argument(call.op, 7, "enable_gqa", False)
    mask = call.args[3] if len(call.args) > 3 else call.kwargs.get("attn_mask")
    return CachedAttention(cache, scale=scale, groups=bool(groups)), (*call.args[:3], mask)


def _chunked(call: Call, context: Context) -> Replacement:
    """A loss in parts of its rows."""
    x, target, _, _, ignore, smoothing, weight, bias, transposed, parts, steps = call.args
    loss = global_loss(call.op, context, call.strategies)
    wide = (
        PRECISIONS[context.precision].kept_bytes
        > context.graph.values[call.op.operands[2]].dtype.itemsize
    )
    how = Chunks(
        parts=parts,
        steps=tuple((rules.overload(name), args, kwargs) for name, args, kwargs in steps),
        transposed=transposed,
        summed=torch.float32 if wide else None,
        ignore_index=ignore,
        label_smoothing=smoothing,
        classes=loss.classes,
        first_class=loss.first_class,
    )
    return ChunkedLoss(loss, how), (x, target, weight, bias, call.count)


def _written_in_parts(op: Op, context: Context) -> bool:
    """Whether elements are written where flags of rows are up, of one micro-batch of several."""
    batch, in_turn = context.table.batch, rules.traits_of(op).written_in_turn
    if batch is None or in_turn is None or context.microbatches == 1:
        return False
    return context.table.find(op.operands[in_turn - 1], batch) is not None


def callable_of(op: Op) -> Any:
    """Callable of an operator without a replacement."""
    if rules.runs_as_reshape(op):  # a shard's memory need not allow a view
        return torch.ops.aten.reshape.default
    return rules.overload(op.target)


def _deferred(call: Call, context: Context) -> Replacement | None:
    """A product whose weight's gradient is put off: the weight is read as it is stored."""
    op, args = call.op, call.args
    product = rules.traits_of(op).product
    if context.weight_gradients is None or product is None:
        return None
    if call.kwargs or len(args) != len(op.operands):
        return None
    weight, bias = product.weight, product.bias
    stored = [
        node.op == "placeholder" and value in context.deferrable
        for node, value in zip(args, op.operands, strict=True)
    ]
    sizes = [len(context.graph.values[v].shape) for v in op.operands]
    biased = len(args) == 3
    if not stored[weight] or sizes[weight] != 2 or (biased and sizes[bias] != 1):
        return None
    defer_bias = biased and stored[bias]
    module = DeferredProduct(
        op.short, context.weight_gradients, defer_bias=defer_bias, by=context.scaled_by(op)
    )
    return module, args


def _in_8_bits(call: Call, context: Context) -> Replacement | None:
    """A product in 8 bits."""
    by = context.scaled_by(call.op)
    if by is None:
        return None
    if rules.traits_of(call.op).experts:
        dim = 2 if argument(call.op, 4, "transposed", False) else 1
        return EightBitExperts(callable_of(call.op), by=by, dim=dim), call.args
    return EightBitProduct(call.op.short, by=by), call.args


def _drawn(call: Call, context: Context) -> Replacement | None:
    """Draws that are the same under every plan; others run on one device alone."""
    op, draw, (state, *_) = call.op, rules.traits_of(call.op).draw, call.results
    if draw is not None and draw.kind == "attention dropout":
        return _attention(call, context)
    if draw is not None and draw.by_counter:
        dtype = context.graph.values[op.results[0]].dtype
        module = drawn(op, dtype, _grid(context, op.results[0], state), call.position)
        return module, (call.rng, *(a for a in call.args if isinstance(a, fx.Node)))
    if math.prod(axis.size for axis in context.axes) == 1:
        return None
    raise PlanError(
        f"{op.key} ({op.target}) draws random numbers in a way of its own, which would "
        "differ from rank to rank",
        place="plan",
        legal="dropout, rand, randn, bernoulli and the like, or dp=1 and tp=1",
    )


def _given(call: Call) -> dict[str, Any]:
    """The arguments of a call of attention, by name."""
    names = ("q", "k", "v", "attn_mask", "dropout_p", "is_causal")
    missing = {"attn_mask": None, "dropout_p": 0.0, "is_causal": False, "scale": None}
    return missing | dict(zip(names, call.args, strict=False)) | call.kwargs


def _by_blocks(call: Call, context: Context) -> Replacement:
    """Attention over tokens that other ranks of the context axis have, or earlier slices."""
    assert context.context is not None and context.context_axis is not None
    operands = _given(call)
    if isinstance(context.context_axis, SliceAxis):
        q, k, v, scale = (operands[name] for name in ("q", "k", "v", "scale"))
        return SlicedAttention(context.context_axis, call.position), (q, k, v, scale, call.kept)
    module = ContextAttention(
        context.context_axis,
        context.context.kind,
        causal=rules.is_causal(call.op),
        zigzag=context.context.zigzag,
    )
    return module, [operands[name] for name in ("q", "k", "v", "attn_mask", "scale")]


def _halo(call: Call, context: Context) -> Replacement:
    """A shift by one token, of which some are other ranks'."""
    assert context.context is not None and context.context_axis is not None
    shift = shift_of(context.graph, call.op)
    assert shift is not None
    return Halo(shift, context.context_axis, zigzag=context.context.zigzag), call.args[:1]


def _attention(call: Call, context: Context) -> Replacement:
    op, operands = call.op, _given(call)
    q, k = (context.graph.values[name].shape for name in op.operands[:2])
    grid = _grid(context, op.results[0], call.results[0], (*q[:-1], k[-2]))
    args = (
        operands["q"],
        operands["k"],
        operands["v"],
        operands["attn_mask"],
        operands["dropout_p"],
        operands["is_causal"],
        operands["scale"],
        call.rng,
    )
    return DropoutAttention(grid, call.position), args


def _grid(
    context: Context, value: str, state: State, shape: Sequence[int] | None = None
) -> IndexGrid:
    """Positions of this rank's elements in a result, or in a tensor of `shape` split as it."""
    cuts = [
        Cut(seen_locally(k, placement, state, context.axes), axis, zigzag)
        for k, (placement, axis) in enumerate(zip(state, context.axes, strict=True))
        for zigzag in [context.lies_in_zigzag(value, k, placement)]
    ]
    if context.context is not None and not token_dim(context.table, value, state[1]):
        cuts[1:] = cuts[:0:-1]  # heads are split by the tensor axis first
    shape = tuple(shape or context.graph.values[value].shape)
    batched = context.table.has_batch(value) or value in single_rows(context.graph)
    numel = math.prod(shape)
    return IndexGrid(shape, cuts, numel // context.graph.batch_size if batched else 0)


# --- leaves ---------------------------------------------------------------------------------------

# A leaf in a lowered graph: its own forward on this rank's tensors, in ordinary autograd.
#
# Random numbers inside are drawn from a stream seeded by the step, the micro-batch and the leaf:
# ranks that hold replicas draw the same, a rank with a part of the tensors its own. Running the
# leaf again in the backward repeats the stream. The generators' seed is a number of the host, so
# that on a GPU the host waits for the device once per such leaf and micro-batch.
#
# A forward that can't run without values (a rehearsal) is replaced by what its trace knows of it:
# results of these shapes, and what it keeps for the backward.


MIXER = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: spreads neighbouring numbers
SEEDS = 2**63
ShapeAndDtype = tuple[Sequence[int], torch.dtype]


class LeafCall(nn.Module):
    """One leaf. `salt` tells it apart within its block, `part` is the number of this rank's part of
    its tensors, `results` are the shape and the dtype of each that it makes, as traced: autocast's
    lists differ by device. With a leaf that draws, the last argument is the pair (step seed, first
    row)."""

    def __init__(
        self, op: Op, context: Context, salt: int, part: int, results: Sequence[ShapeAndDtype]
    ) -> None:
        super().__init__()
        self.name, self.flow, device = op.name, context.flow, context.device
        self.leaf, self.results = rules.leaf_of(op), tuple(results)
        program = self.leaf.program
        assert isinstance(program, Program)
        self.random = rules.draws(op)
        self.salt, self.part, self.device = salt, part, device
        # in a tuple, so that the module, which has no weights of its own, is not registered
        self.held = (program, [(m, m.training) for m in _modules(program)])
        for module in _modules(program):
            plain = {k: v for k, v in vars(module).items() if isinstance(v, torch.Tensor)}
            vars(module).update({name: x.to(device) for name, x in plain.items()})

    def forward(self, *operands: torch.Tensor) -> Sequence[torch.Tensor]:
        program, modes = self.held
        for module, training in modes:
            module.training = training and self.training
        stream = self._stream(operands[-1]) if self.random else nullcontext()
        inputs, run = operands[: len(operands) - self.random], partial(self._run, program)
        with stream:
            return self.flow.through(self.name, run, inputs, self.leaf.gradients)

    def _run(self, program: Program, operands: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
        try:
            results = program(operands)
            return [x.to(dtype) for x, (_, dtype) in zip(results, self.results, strict=True)]
        except Exception as error:  # whatever a forward does with values it lacks
            if all(map(has_values, operands)) or isinstance(error, UnseenWrite):
                raise
            note_unrun(program.name, error)
        as_traced: Callable[..., Any] = _AsTraced.apply
        results = as_traced(self.leaf, self.results, *operands)
        flows = (*self.leaf.gradients, *[False] * len(results))
        return [x if flow else x.detach() for x, flow in zip(results, flows, strict=False)]

    @contextmanager
    def _stream(self, rng: torch.Tensor) -> Iterator[None]:
        seed = 0
        for number in (*read(rng, lambda: [0, 0]), self.salt, self.part):
            seed = (seed ^ number) * MIXER % SEEDS
        with seeded(self.device, seed):
            yield


class _AsTraced(torch.autograd.Function):
    """A leaf's results without values, and what it keeps: its work's `saves` and `saved_bytes`."""

    @staticmethod
    def forward(
        ctx: Any, leaf: rules.Leaf, results: Sequence[ShapeAndDtype], *operands: Any
    ) -> Any:
        device = operands[0].device
        outputs = [torch.empty(shape, dtype=dtype, device=device) for shape, dtype in results]
        work, ctx.operands = leaf.work, [(x.shape, x.dtype) for x in operands]
        part = outputs[0].numel() / max(1, work.numel) if outputs else 1.0
        beside = torch.empty(int(work.saved_bytes * part), dtype=torch.uint8, device=device)
        saved = [operands[k] if k >= 0 else outputs[-1 - k] for k in work.saves]
        ctx.save_for_backward(*saved, beside)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Any) -> Any:
        _ = ctx.saved_tensors  # lets go of them
        device = gradients[0].device
        needed = zip(ctx.needs_input_grad[2:], ctx.operands, strict=True)
        grads = [
            torch.zeros(x, dtype=d, device=device) if flow else None for flow, (x, d) in needed
        ]
        return (None, None, *grads)


def part_number(axes: Sequence[tuple[Strategy, Axis]]) -> int:
    """The number of this rank's part of a leaf's tensors: the same on ranks with replicas."""
    part = 0
    for strategy, axis in axes:
        part = part * axis.size + (axis.rank if strategy.split_factor else 0)
    return part


def _modules(program: Program) -> list[nn.Module]:
    return [] if program.module is None else list(program.module.modules())


# --- random draws ---------------------------------------------------------------------------------

# Random numbers by counter: every element's draw is a function of (seed, operator, its global
# number), so that every plan, and one device, draws the same.


_LOW = 0xFFFFFFFF
LEAST_PART, PARTS = 2**20, 32  # elements of a mask that are drawn at once, parts of a large one
_SECOND = 0x5851F42D  # tells the second stream of a pair from the first


@dataclass(frozen=True, slots=True)
class Cut:
    """An axis that splits a tensor, which the axes before it have split."""

    placement: Placement
    axis: Axis
    zigzag: bool = False

    def part(self, index: torch.Tensor) -> torch.Tensor:
        """This rank's part of a vector along the dim that is split."""
        along = Placement("S", 0, self.placement.split)
        if self.zigzag:
            index = into_zigzag(index, along, self.axis.size)
        return self.axis.local(index, along)


class IndexGrid(nn.Module):
    """Global element numbers of a local tensor: every plan sees the same number for the same
    element.

    `shape` is the global shape of one micro-batch; `cuts` what made it local, in order; `per_row`
    the elements of one batch row, by which the micro-batch's first row shifts the numbers. With the
    batch outermost, as in batch-first tensors, the numbers do not depend on how the batch is cut
    into micro-batches either.
    """

    def __init__(self, shape: tuple[int, ...], cuts: Sequence[Cut], per_row: int) -> None:
        super().__init__()
        self.shape, self.cuts, self.per_row = shape, cuts, per_row

    def forward(self, first_row: torch.Tensor) -> torch.Tensor:
        """The numbers."""
        total, stride = first_row * self.per_row, 1
        for d in reversed(range(len(self.shape))):
            index = self.along(d, first_row.device)
            total = total + (index * stride).view([-1] + [1] * (len(self.shape) - 1 - d))
            stride *= self.shape[d]
        return total

    def kept(
        self, rng: torch.Tensor, salt: int, p: float, dtype: torch.dtype, dims: int | None = None
    ) -> torch.Tensor:
        """1 with probability 1-p, else 0; with `dims` the same for all elements along later ones.
        In parts, since an element takes its number and what is mixed of it: 40 bytes."""
        shape, stride = self.shape[:dims], math.prod(self.shape[dims or len(self.shape) :])
        vectors = []
        for d in reversed(range(len(shape))):
            vectors.append(self.along(d, rng.device) * stride)
            stride *= shape[d]
        last = vectors[0] if vectors else rng.new_zeros(1)
        rows = rng[1:] * self.per_row
        for vector in reversed(vectors[1:]):
            rows = (rows.unsqueeze(-1) + vector).flatten()
        total = rows.numel() * last.numel()
        part = total if torch.compiler.is_compiling() else max(LEAST_PART, -(-total // PARTS))
        count = max(1, part // last.numel())
        mask = torch.empty(rows.numel(), last.numel(), dtype=dtype, device=rng.device)
        for k in range(0, rows.numel(), count):
            numbers = rows[k : k + count].unsqueeze(-1) + last
            mask[k : k + count] = keep_mask(numbers, rng[0], salt, p)
        sizes = [vector.numel() for vector in reversed(vectors)]
        return mask.view(sizes + [1] * (len(self.shape) - len(shape)))

    def along(self, d: int, device: torch.device) -> torch.Tensor:
        """The global numbers of this rank's elements along a dim."""
        index = torch.arange(self.shape[d], dtype=torch.int64, device=device)
        for cut in self.cuts:
            if cut.placement.sharded and cut.placement.dim == d:
                index = cut.part(index)
        return index


def random_bits(index: torch.Tensor, seed: torch.Tensor, salt: int) -> torch.Tensor:
    """32 random bits, a pure function of (seed, salt, index): 32-bit integer mixes, of the stream's
    number first, so that no stream is another one shifted, and of the index's high part, so that
    none repeats after 2^32 elements.

    Source of the mixer: the "lowbias32" constants of C. Wellons' hash prospector.
    """
    stream = _mixed(_mixed(seed & _LOW) ^ (salt * 0x9E3779B1 & _LOW))
    return _mixed((index & _LOW) ^ _mixed((index >> 32) + stream & _LOW))


def keep_mask(index: torch.Tensor, seed: torch.Tensor, salt: int, p: float) -> torch.Tensor:
    """True with probability 1-p."""
    return random_bits(index, seed, salt) >= int(p * 2**32)


def uniform(bits: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In [0, 1): as many of the bits as `dtype` tells apart, so that none rounds up to 1."""
    digits = min(32, 1 - round(math.log2(torch.finfo(dtype).eps)))
    return (bits >> (32 - digits)).to(dtype) * 2.0**-digits


def _mixed(h: torch.Tensor) -> torch.Tensor:
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & _LOW
    h = ((h ^ (h >> 15)) * 0x846CA68B) & _LOW
    return h ^ (h >> 16)


class CounterDropout(nn.Module):
    """Dropout whose mask is the same under every plan: of elements, or of whole channels
    (`features`). `rng` is the pair (step seed, first row)."""

    def __init__(self, grid: IndexGrid, salt: int, p: float, *, features: bool = False) -> None:
        super().__init__()
        self.grid, self.salt, self.p, self.features = grid, salt, p, features

    def forward(self, rng: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        if not self.training:
            return x
        return _dropped(x, self.grid, rng, self.salt, self.p, 2 if self.features else None)


def _dropped(
    x: torch.Tensor,
    grid: IndexGrid,
    rng: torch.Tensor,
    salt: int,
    p: float,
    dims: int | None = None,
) -> torch.Tensor:
    if p == 1.0:
        return x * 0
    return x * grid.kept(rng, salt, p, x.dtype, dims) * (1.0 / (1.0 - p))


class CounterDraw(nn.Module):
    """The draws of one operator: uniform in [low, high), normal (mean `low`, deviation `high`),
    exponential of the rate `high` (and positive, as torch's are), integers from `low` below `high`,
    or flags that are up with a probability (a number or a tensor)."""

    def __init__(self, op: Op, dtype: torch.dtype, grid: IndexGrid, salt: int) -> None:
        super().__init__()
        draw = traits_of(op).draw
        assert draw is not None
        self.kind, self.dtype, self.grid, self.salt = draw.kind, dtype, grid, salt
        self.low, self.high = _bounds(op, draw)

    def forward(self, rng: torch.Tensor, *operands: torch.Tensor) -> torch.Tensor:
        index = self.grid(rng[1])
        bits = random_bits(index, rng[0], self.salt)
        if self.kind == "integers":
            return self._integers(index, bits, rng[0]).to(self.dtype)
        if self.kind == "flags":
            chance = operands[-1] if math.isnan(self.high) else self.high
            return (bits < torch.as_tensor(chance, dtype=torch.float64) * 2.0**32).to(self.dtype)
        if self.kind == "uniform":
            drawn = uniform(bits, self.dtype) * (self.high - self.low) + self.low
            return drawn
        wide = torch.promote_types(self.dtype, torch.float32)
        if self.kind == "exponential":
            drawn = -(1.0 - uniform(bits, wide)).log().clamp(max=-torch.finfo(wide).eps / 2)
            return (drawn / self.high).to(self.dtype)
        angle = uniform(random_bits(index, rng[0], self.salt ^ _SECOND), wide)
        radius = (-2.0 * (1.0 - uniform(bits, wide)).log()).sqrt()  # Box and Muller, 1958
        return (radius * (2 * math.pi * angle).cos() * self.high + self.low).to(self.dtype)

    def _integers(
        self, index: torch.Tensor, bits: torch.Tensor, seed: torch.Tensor
    ) -> torch.Tensor:
        low, span = int(self.low), int(self.high) - int(self.low)
        if span <= 2**31:
            return low + (bits * span >> 32)
        more = random_bits(index, seed, self.salt ^ _SECOND)  # 63 bits: the product has no room
        return low + (bits << 31 | more >> 1) % span


def _bounds(op: Op, draw: Draw) -> tuple[float, float]:
    """The numbers a call draws between; for flags 0 and their chance, NaN where a tensor holds
    it."""
    if draw.kind == "integers":
        numbers = [a for a in op.args if isinstance(a, int)]
        low, high = (0, numbers[0]) if len(numbers) == 1 else (numbers[0], numbers[1])
        if high - low >= 2**63:
            raise PlanError(
                f"{op.key} ({op.target}) draws integers from {low} below {high}",
                place="plan",
                legal="ranges of less than 2**63",
                way_out="draw from a smaller one",
            )
        return low, high
    if draw.kind == "flags":
        chance = argument(op, 1, "p", None)
        return 0.0, math.nan if chance is None or isinstance(chance, Ref) else chance
    if draw.kind == "exponential":
        return 0.0, argument(op, 1, "lambd", 1.0)
    names = ("mean", "std") if draw.kind == "normal" else ("from", "to")
    at = len(op.args) if draw.bounds is None else draw.bounds
    return argument(op, at, names[0], 0.0), argument(op, at + 1, names[1], 1.0)


def single_rows(graph: Graph) -> frozenset[str]:
    """Values that carry the batch of a micro-batch of one row, which no dim tells: they come of a
    batched input, or of none at all with a first dim of one."""
    if graph.batch_size != 1:
        return frozenset()
    values = set(graph.batched)
    for op in (*graph.derived, *graph.ops):
        if not op.operands:
            values |= {v for v in op.results if graph.values[v].shape[:1] == (1,)}
        elif not values.isdisjoint(op.operands):
            values |= set(op.results)
    return frozenset(values)


def drawn(op: Op, dtype: torch.dtype, grid: IndexGrid, salt: int) -> nn.Module:
    """The module that draws by counter in the place of an operator."""
    draw = traits_of(op).draw
    if draw is not None and draw.kind in ("dropout", "channel dropout"):
        p = float(argument(op, 1, "p", 0.0))
        return CounterDropout(grid, salt, p, features=draw.kind == "channel dropout")
    return CounterDraw(op, dtype, grid, salt)


class DropoutAttention(nn.Module):
    """Scaled dot-product attention with counter dropout on its probabilities, written out."""

    def __init__(self, grid: IndexGrid, salt: int) -> None:
        super().__init__()
        self.grid, self.salt = grid, salt

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        mask: torch.Tensor | None,
        p: float,
        causal: bool,
        scale: float | None,
        rng: torch.Tensor,
    ) -> torch.Tensor:
        if q.shape[-3] != k.shape[-3]:  # groups of queries share keys and values
            k = k.repeat_interleave(q.shape[-3] // k.shape[-3], -3)
            v = v.repeat_interleave(q.shape[-3] // v.shape[-3], -3)
        scores = q @ k.transpose(-2, -1) * (q.shape[-1] ** -0.5 if scale is None else scale)
        if causal:
            rows = self.grid.along(len(self.grid.shape) - 2, q.device)
            future = rows.unsqueeze(-1) < torch.arange(scores.shape[-1], device=q.device)
            scores = scores.masked_fill(future, float("-inf"))
        if mask is not None:
            scores = (
                scores.masked_fill(~mask, float("-inf"))
                if mask.dtype == torch.bool
                else scores + mask
            )
        weights = scores.softmax(-1)
        if self.training:
            weights = _dropped(weights, self.grid, rng, self.salt, p)
        return weights @ v


# --- shift of tokens ------------------------------------------------------------------------------

# A shift of tokens by one where they are split: each rank needs one token of a neighbour.
#
#     pad     y[i] = x[i-1], or x[i+1]; what has no neighbour is filled
#     roll    the same, round the ends
#
# The tokens lie in chunks, one per rank or, in zigzag, two. Every chunk's token at the end that is
# passed on is gathered from all ranks (n tokens, or 2n); of these each rank takes the ones that
# come before, or after, its own chunks. In the backward their gradients go back by a
# reduce-scatter.


class Halo(nn.Module):
    """Tokens along `shift.dim` moved by one, on this rank's part of them."""

    def __init__(self, shift: Shift, axis: Axis, *, zigzag: bool) -> None:
        super().__init__()
        self.shift, self.axis = shift, axis
        self.own = [axis.rank]
        order = list(range(axis.size))
        if zigzag:
            order = zigzag_chunks(axis.size)
            self.own = order[2 * axis.rank : 2 * axis.rank + 2]
        self.places = [order.index(k) for k in range(len(order))]  # of each chunk, as gathered
        self.gather = Reshard(Placement("S", shift.dim), RP, axis)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dim, later = self.shift.dim, self.shift.by > 0
        chunks = x.chunk(len(self.own), dim)
        length = chunks[0].shape[dim]
        ends = [c.narrow(dim, length - 1 if later else 0, 1) for c in chunks]
        passed = self.gather(torch.cat(ends, dim))
        moved = []
        for k, chunk in zip(self.own, chunks, strict=True):
            entering = self._entering(passed, k)
            interior = chunk.narrow(dim, 0 if later else 1, length - 1)
            moved += [entering, interior] if later else [interior, entering]
        return torch.cat(moved, dim)

    def _entering(self, passed: torch.Tensor, k: int) -> torch.Tensor:
        """The token that comes into the k-th chunk."""
        source, count = k - self.shift.by, len(self.places)
        token = passed.narrow(self.shift.dim, self.places[source % count], 1)
        if 0 <= source < count or self.shift.wraps:
            return token
        # in the graph all the same: every rank takes part in the backward's reduce-scatter
        everywhere = torch.ones((), dtype=torch.bool, device=token.device)
        return token.masked_fill(everywhere, self.shift.fill)

    def extra_repr(self) -> str:
        return f"{self.shift} on {self.axis.name}"


# --- losses over split rows -----------------------------------------------------------------------

# Losses over rows that are split: divided by the count of rows on all ranks and micro-batches.


MEAN = 1  # of `row_reduction`


def is_global(op: Op, context: Context, strategies: Sequence[Strategy]) -> bool:
    """Whether an operator is a loss of class numbers, reduced, of which a rank or a micro-batch has
    some rows or classes only. `strategies` are its own, by axis."""
    if not row_reduction(op) or context.graph.values[op.operands[1]].dtype.is_floating_point:
        return False
    return context.microbatches > 1 or any(s.name != REPLICATE for s in strategies)


def is_counted(op: Op, context: Context, strategies: Sequence[Strategy]) -> bool:
    """Whether such a loss is a mean, whose rows are counted over all micro-batches beforehand if
    its target is known by then."""
    return row_reduction(op) == MEAN and is_global(op, context, strategies)


def global_loss(op: Op, context: Context, strategies: Sequence[Strategy]) -> GlobalLoss:
    """The module in the place of such a loss."""
    on_axes = list(zip(strategies, context.axes, strict=True))
    # the data axis splits classes too where they are rows, as in a contrastive loss
    inner = next(((x.split_factor, axis) for x, axis in on_axes if x.implementation), None)
    sizes, loss = context.table.ops[op.name].sizes, traits_of(op).loss
    assert loss is not None
    return GlobalLoss(
        loss.kind,
        row_reduction(op),
        inner and inner[1],
        tuple(axis for x, axis in on_axes if x.split_factor and not x.implementation),
        first_class=inner[1].part(sizes[inner[0]])[0] if inner else 0,
    )
