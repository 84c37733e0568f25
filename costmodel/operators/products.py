"""Matrix products and fused attention: seconds, FLOPs, bytes moved.

matrix product   forward Y = XW, backward dX = dY·Wᵀ and dW = Xᵀ·dY where a gradient is wanted;
                 in 8 bits with what casts its operands move (`costmodel/precisions.py`)
attention        backward 2.5 × the forward's FLOPs (scores are computed again)
loss in parts    forward Y = XW and its loss, backward Y again, dX and dW: one product of each kind
                 per part, and what moves its logits
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from meshwright.costmodel.graph import Op, TensorMeta
from meshwright.costmodel.kernels import attention_seconds, matmul_seconds, stream_seconds
from meshwright.costmodel.operators.context import merges, pieces
from meshwright.costmodel.operators.cost import BACKWARD_S, FORWARD_S, Entry
from meshwright.costmodel.operators.sizes import LocalSizes
from meshwright.costmodel.precisions import NARROW, casts_of
from meshwright.costmodel.rules import EXPERT_FACTOR, Dims, Product, is_causal, traits_of
from meshwright.costmodel.sharding import Strategy, largest_part, replicated

ALIGNED = 8  # elements of 16 bits, 16 bytes
OF_BACKWARD = 2.5  # FLOPs of attention's backward over its forward's
WIDE = 4  # bytes of a logit in single precision
# over logits in single precision, of a logsumexp and of its gradient, counted as those of a
# cross-entropy are: what is read and written once (half of what eager kernels move)
PASSES = 3


def product(sizes: LocalSizes, op: Op, strategy: Strategy) -> list[Entry]:
    """Y = XW, then dX and dW where they are wanted, of which dW can wait; and casts of operands."""
    device, dtype = sizes.setting.cluster.device, sizes.dtype(op)
    m, n, k, batch, scale = _extents(sizes, op, strategy)
    if traits_of(op).experts == "product":
        # tokens of all ranks of the expert axis come to a rank's experts
        batch = sizes.table.ops[op.name].sizes[EXPERT_FACTOR] / sizes.setting.mesh.ep
        m *= sizes.crowding(op.results[0]) / batch
    placed = list(zip(op.operands, strategy.operands, strict=True))
    pair = [placed[k] for k in _pair(op)]
    moved = sizes.nbytes(op.results[0], strategy.results[0])
    moved += NARROW.get(dtype, 16) / 16 * sum(sizes.nbytes(v, p) for v, p in pair)

    of_activations = sizes.table.has_batch(pair[-1][0])
    unaligned = of_activations and dtype in ("bf16", "fp16") and (n % ALIGNED or k % ALIGNED)
    times = scale / (sizes.setting.target.unaligned_products if unaligned else 1.0)

    def seconds(rows: float, columns: float, inner: float) -> float:
        busy_s = matmul_seconds(device, dtype, rows, columns, inner, batch, moved)
        return times * busy_s + device.launch_overhead_s

    of_input, of_weights = (sizes.graph.values[v].requires_grad for v, _ in (pair[0], pair[-1]))
    # a product of two activations has no gradient that could wait
    waits = of_weights and not of_activations
    of_weight, flops = seconds(k, n, m) * of_weights, 2 * m * n * k * batch * scale
    entries = [
        Entry(FORWARD_S, "product", seconds(m, n, k), flops=flops, moved_bytes=moved),
        Entry(
            BACKWARD_S,
            "product",
            seconds(m, k, n) * of_input + of_weight,
            weight_s=of_weight * waits,
            flops=flops * (of_input + of_weights),
            moved_bytes=moved * (of_input + of_weights),
        ),
    ]
    wanted = of_input, of_weights, waits
    if dtype not in NARROW:
        return entries
    elements = m * k * batch, n * k * batch, m * n * batch
    return entries + _casts(sizes, elements, wanted)


def _casts(
    sizes: LocalSizes, elements: tuple[float, float, float], wanted: tuple[bool, bool, bool]
) -> list[Entry]:
    """Rounding of a product's operands to 8 bits, of which and of the result there are so many
    `elements`: in the forward, and for each `wanted` gradient: of the input, and of the weight,
    which may wait."""
    setting, device = sizes.setting, sizes.setting.cluster.device
    casts = casts_of(setting.precision, setting.target, *elements)
    entries = []
    for tensor, cast, runs in zip(("y", "x", "w"), casts, (True, *wanted[:2]), strict=True):
        seconds = stream_seconds(device, cast.nbytes) + cast.calls * device.launch_overhead_s
        entries.append(
            Entry(
                FORWARD_S if tensor == "y" else BACKWARD_S,
                "cast",
                seconds * runs,
                weight_s=seconds * wanted[2] * (tensor == "w"),
                moved_bytes=cast.nbytes * runs,
            )
        )
    return entries


def split_product_seconds(sizes: LocalSizes, op: Op) -> float:
    """Seconds of Y = XW with W split over the tensor axis, without the launch."""
    setting = sizes.setting
    m, n, k, batch, scale = _extents(sizes, op, replicated(op))
    n /= setting.mesh.tp
    moved = (m * n + m * k + k * n) * batch * setting.weight_bytes
    device = setting.cluster.device
    return scale * matmul_seconds(device, sizes.dtype(op), m, n, k, batch, moved)


def attention(sizes: LocalSizes, op: Op, strategy: Strategy) -> list[Entry]:
    """Fused attention, forward and backward; it has no weights."""
    device, factors = sizes.setting.cluster.device, sizes.table.ops[op.name]
    m, n, k, batch, scale = _extents(sizes, op, strategy)
    flops = 2 * m * n * k * batch * scale
    if is_causal(op):
        flops /= 2
    count, of_keys, late = pieces(sizes, op)
    keys = of_keys * next((factors.sizes[f] for f in factors.flop_factors if f == "t"), 1)
    moved = sizes.moved_bytes(op, strategy)
    dtype = sizes.dtype(op)
    target, launch = sizes.setting.target, count * device.launch_overhead_s
    entries = []
    for column, times, passes in ((FORWARD_S, 1.0, 1), (BACKWARD_S, OF_BACKWARD, 2)):
        slowest = times * flops * late / target.attention_scale
        seconds = attention_seconds(
            device, dtype, slowest, keys, passes * moved, tuned=target.tuned_attention
        )
        entries.append(
            Entry(
                column,
                "attention",
                seconds + passes * launch,
                flops=times * flops * late,
                moved_bytes=passes * moved,
            )
        )
    return entries + merges(sizes, op, strategy)


def loss_in_parts(sizes: LocalSizes, op: Op, strategy: Strategy) -> list[Entry]:
    """A product and a loss of its rows, one part of them after the other."""
    device, dtype, target = sizes.setting.cluster.device, sizes.dtype(op), sizes.setting.target
    m, n, k, *_ = _extents(sizes, op, strategy)
    (x, weight), rows, steps = _part(sizes, op, m)
    parts, narrow = m / rows, x.dtype.itemsize
    products = narrow * (rows * n + rows * k + k * n)
    # a step reads and writes logits; where they are narrow, single precision is made of them
    forward = 2 * narrow * len(steps) + (narrow + WIDE) * (narrow < WIDE)
    backward, passes = 2 * forward, PASSES * WIDE
    if target.fusion == "full" and not target.gradients_come:  # `train_step` compiles none of it
        forward, backward, passes = 0, 2 * narrow, narrow

    def entry(column: str, extents: Sequence[tuple[float, float, float]], logit: float) -> Entry:
        busy_s = sum(matmul_seconds(device, dtype, *e, 1, products) for e in extents)
        busy_s += stream_seconds(device, rows * n * logit) / target.stream_speed
        flops = sum(2 * math.prod(extent) for extent in extents)
        launches = len(extents) + len(steps) + 2 * PASSES
        return Entry(
            column,
            "product",
            parts * (busy_s + launches * device.launch_overhead_s),
            flops=parts * flops,
            moved_bytes=parts * (products * len(extents) + rows * n * logit),
        )

    again = (rows, n, k)
    gradients = [(rows, k, n)] * x.requires_grad + [(k, n, rows)] * weight.requires_grad
    return [
        entry(FORWARD_S, [again], forward + passes),
        entry(BACKWARD_S, [again, *gradients], backward + passes),
    ]


def chunk_calls(op: Op) -> int:
    """Operators that the host issues for the forward of a loss in parts."""
    parts, steps = op.args[9:]
    return int(parts) * (1 + len(steps) + 2 * PASSES)


def chunk_bytes(sizes: LocalSizes, op: Op, strategy: Strategy) -> float:
    """Bytes that the backward of a loss in parts holds beside gradients of its operands: a part's
    logits in single precision with their gradient, those between steps, and the weight's gradient
    where it is added up in single precision."""
    m, n, k, *_ = _extents(sizes, op, strategy)
    (x, weight), rows, steps = _part(sizes, op, m)
    narrow, wide = x.dtype.itemsize, sizes.setting.kept_bytes
    logit = WIDE + narrow * (narrow < WIDE) + (narrow * (1 + len(steps)) if steps else 0)
    held = max(0, wide - narrow) * weight.requires_grad  # beside the gradient that is made of it
    return rows * n * logit + held * n * k


def _part(
    sizes: LocalSizes, op: Op, m: float
) -> tuple[tuple[TensorMeta, ...], float, Sequence[object]]:
    """The operands x and weight of a loss in parts, rows of one of its parts of m, and steps."""
    parts, steps = op.args[9:]
    operands = tuple(sizes.graph.values[op.operands[i]] for i in _pair(op))
    return operands, max(1.0, m / float(parts)), steps


def _extents(
    sizes: LocalSizes, op: Op, strategy: Strategy
) -> tuple[float, float, float, float, float]:
    """(m, n, k, batch, FLOPs over 2mnk·batch) of a product at local sizes: factors of the result in
    the left operand alone, in the right one alone, summed ones, and those that all have."""
    factors, atoms = sizes.table.ops[op.name], sizes.table.letters[op.name]
    of_left, of_right = (_letters(factors.operands[k]) for k in _pair(op))
    result = _letters(factors.results[0]) or of_left ^ of_right
    m = n = k = batch = 1.0
    tokens = "" if sizes.context is None else sizes.context.strategies[op.name].split_factor
    for letter in factors.flop_factors:
        size = float(factors.sizes[letter])
        atoms_here = atoms.get(letter, ())
        if sizes.table.batch is not None and sizes.table.batch in atoms_here:
            size *= sizes.setting.batch.rows / sizes.graph.batch_size
        if letter == tokens:
            size /= sizes.setting.mesh.cp
        if letter == strategy.split_factor:
            full = factors.sizes[letter]
            size *= largest_part(full, sizes.setting.mesh.tp) / full
        if letter not in result:
            k *= size
        elif letter not in of_right:
            m *= size
        elif letter not in of_left:
            n *= size
        else:
            batch *= size
    return m, n, k, batch, factors.flops / 2


def _pair(op: Op) -> tuple[int, int]:
    """Positions of a product's left and right operands."""
    if traits_of(op).kernel == "chunked":
        return 0, 2
    first = (traits_of(op).product or Product()).x
    return first, first + 1


def _letters(dims: Dims) -> frozenset[str]:
    return frozenset(letter for names in dims for letter in names)
