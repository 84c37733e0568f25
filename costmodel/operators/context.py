"""Seconds and bytes of context parallelism, by the kind of attention over n ranks.

Let c be the seconds of a collective, e of one send to the next rank, of the keys and values of a
rank, f and b those of the rank's part of the scores, forward and backward.

    all_gather   forward c               backward 2c: gathered again, their gradients scattered
    ring         forward (n-1)·e         backward (n-1)·e + n·e: their gradients follow them
                 where the device has streams, less what (n-1)/n of the scores' seconds hide
    ulysses      an all-to-all of each of q, k, v and the output, in either direction

Slices: causal attention of c token slices, one after the other in time (`Batch.slices`), reads its
own keys and those that were kept, but for the first: 2 - 1/c pieces on average. Nothing travels.

Pieces: a ring computes n blocks of scores, each with the keys of one rank; with all keys at hand
there are three, one of them of its own tokens; each but the first is merged into the output in
single precision. Where tokens of causal attention lie in their order, not in zigzag, the last rank
has (2n-1)/n times the mean.

A shift by one token gathers a token of each chunk, in the backward it scatters their gradients.
Other operators have what they take moved from the state in which it was made, by the collectives of
that transition: written-out attention has its keys and values gathered, and their gradients
scattered. One that needs whole sequences runs on all of them; the gradients of its results, of
which each rank goes on with its tokens, are gathered in the backward.
"""

from __future__ import annotations

from collections.abc import Sequence

from meshwright.costmodel import sharding
from meshwright.costmodel.graph import Op
from meshwright.costmodel.kernels import p2p_time, stream_seconds
from meshwright.costmodel.mesh import ALL_GATHER, RING, ULYSSES, ContextKind
from meshwright.costmodel.operators.communication import computed_again, runs_backward
from meshwright.costmodel.operators.cost import BACKWARD_S, FORWARD_S, PASS_COLUMNS, Entry
from meshwright.costmodel.operators.setting import Setting
from meshwright.costmodel.operators.sizes import LocalSizes
from meshwright.costmodel.rules import is_causal, traits_of

PIECES = 3  # of attention with all keys at hand: its own, earlier ones, later ones
MERGED = 3  # passes over an output in single precision, to merge another into it
WIDE = 4  # bytes of single precision


def attention_kind(sizes: LocalSizes, op: Op) -> ContextKind | None:
    """Kind of an operator's attention; None for other operators, and where keys are not split."""
    if sizes.context is None:
        return None
    strategy = sizes.context.strategies[op.name]
    if strategy.implementation == sharding.BY_BLOCKS:
        return sizes.context.kind
    # else its probabilities are written out, and all keys are gathered before
    return ULYSSES if sharding.attends_by_heads(sizes.table, op, strategy) else None


def reads_kept(sizes: LocalSizes, op: Op) -> bool:
    """Whether an operator is attention that reads keys and values of earlier slices."""
    return sizes.setting.batch.slices > 1 and traits_of(op).kernel == "attention" and is_causal(op)


def pieces(sizes: LocalSizes, op: Op) -> tuple[float, float, float]:
    """Number of attention kernels, part of the keys in each, slowest rank's scores over the
    mean."""
    kind, n = attention_kind(sizes, op), sizes.setting.mesh.cp
    if reads_kept(sizes, op):
        return 2 - 1 / sizes.setting.batch.slices, 1 / 2, 1.0
    if sizes.context is None or kind is None or kind == ULYSSES:
        return 1, 1.0, 1.0
    even = sizes.context.zigzag or not is_causal(op)
    late = 1.0 if even else (2 * n - 1) / n
    return (n, 1 / n, late) if kind == RING else (min(n, PIECES), 1 / 2, late)


def merges(sizes: LocalSizes, op: Op, strategy: sharding.Strategy) -> list[Entry]:
    """Merging of the output from its pieces."""
    count, _, _ = pieces(sizes, op)
    nbytes = MERGED * WIDE * sizes.numel(op.results[0], strategy.results[0])
    seconds = stream_seconds(sizes.setting.cluster.device, nbytes)
    merge = Entry(FORWARD_S, "merge", seconds, moved_bytes=nbytes)
    return [merge.times(count - 1)] if count > 1 else []


def context_exchange(
    sizes: LocalSizes, op: Op, strategy: sharding.Strategy, forward_s: float, backward_s: float
) -> list[Entry]:
    """Communication over the context axis inside attention, or a shift of tokens."""
    setting, n = sizes.setting, sizes.setting.mesh.cp
    if shifts_tokens(sizes, op):
        assert sizes.context is not None and sizes.table.sequence is not None
        tokens = sizes.table.length / n
        nbytes = sizes.nbytes(op.operands[0], strategy.operands[0])
        # a rank passes on one token of each chunk of each row
        passed = n * ((1 + sizes.context.zigzag) * nbytes / tokens)
        return [_said(setting, column, "all_gather", passed) for column in PASS_COLUMNS]
    kind = attention_kind(sizes, op)
    if kind is None:
        return []
    placed = list(zip(op.operands, strategy.operands, strict=True))
    if kind == ULYSSES:
        moved = [*placed[:3], (op.results[0], strategy.results[0])]
        return [
            _said(setting, column, "all_to_all", n * sizes.nbytes(v, p))
            for column in PASS_COLUMNS
            for v, p in moved
        ]
    shared = sum(sizes.nbytes(v, p) for v, p in placed[1:3])
    if kind == ALL_GATHER:
        ways = (FORWARD_S, "all_gather"), (BACKWARD_S, "all_gather"), (BACKWARD_S, "reduce_scatter")
        return [_said(setting, *way, n * shared) for way in ways]
    forward = _sent_on(FORWARD_S, n - 1, shared, forward_s, setting)
    return [forward, _sent_on(BACKWARD_S, 2 * n - 1, shared, backward_s, setting)]


def backward_temporaries(sizes: LocalSizes, op: Op, strategy: sharding.Strategy) -> float:
    """Bytes that the backward of attention by blocks holds beside the gradients that it reads and
    makes: keys and values of other ranks with their gradients, gradients of one block of them, and
    what query heads share repeated for each."""
    kind, n = attention_kind(sizes, op), sizes.setting.mesh.cp
    if (kind is None or kind == ULYSSES) and not reads_kept(sizes, op):
        return 0.0
    q, *shared = map(sizes.nbytes, op.operands[:3], strategy.operands)
    heads, grouped = sharding.head_counts(sizes.graph, op)
    wide = WIDE * sizes.numel(op.operands[0], strategy.operands[0]) - q  # a sum over blocks
    if kind is None:  # of the last slice: gradients of all earlier keys, for each query head
        earlier = sizes.setting.batch.slices - 1
        return 2 * q + earlier * (sum(shared) + 2 * q * (1 + (heads > grouped)))
    of_others = (2 * n if kind == ALL_GATHER else 4) - 1 + 1 / 2
    return of_others * sum(shared) + wide + q * (3 + 2 * (heads > grouped))


def _said(setting: Setting, column: str, kind: str, nbytes: float) -> Entry:
    """A collective over the context axis."""
    group = setting.group(size=setting.mesh.cp, stride=setting.mesh.tp)
    return setting.collective(column, kind, nbytes, group, "context")


def _sent_on(column: str, calls: int, nbytes: float, beside_s: float, setting: Setting) -> Entry:
    """Sends to the next rank of the axis, of which all but the last hide behind the scores."""
    n, group = setting.mesh.cp, setting.group(size=setting.mesh.cp, stride=setting.mesh.tp)
    crosses = group.per_node < group.size
    send_s = p2p_time(
        nbytes,
        setting.cluster,
        crosses_node=crosses,
        concurrent=group.concurrent,
        over_pools=group.over_pools,
    )
    hiding = (n - 1) / n if setting.cluster.device.kind != "cpu" else 0.0
    sends_s = calls * send_s
    exposed = max(0.0, sends_s - hiding * beside_s)
    return Entry(
        column,
        "collective",
        exposed,
        hidden_s=sends_s - exposed,
        axis="context",
        collective="send",
        calls=calls,
        sent_bytes=calls * nbytes,
        crosses=crosses,
    )


def gathered_tokens(sizes: LocalSizes, op: Op, once: Sequence[Entry]) -> list[Entry]:
    """Seconds of an operator on whole sequences beyond `once`."""
    n = sizes.setting.mesh.cp
    nbytes = sum(sizes.nbytes(v) for v in op.results if sizes.splits_context(v))
    more = 0 if sizes.table.ops[op.name].matmul else n - 1  # `once` has all of a product
    entries = computed_again(once, more) if more else []
    if nbytes and runs_backward(once):
        entries.append(_said(sizes.setting, BACKWARD_S, "all_gather", n * nbytes))
    return entries


def moved_tokens(sizes: LocalSizes, op: Op) -> list[Entry]:
    """Moves of operands and their gradients on the context axis; attention by heads has its own."""
    context, setting = sizes.context, sizes.setting
    if context is None or attention_kind(sizes, op) == ULYSSES:
        return []
    entries: list[Entry] = []
    for value, target in zip(op.operands, context.strategies[op.name].operands, strict=True):
        source, meta = context.states[value], sizes.graph.values[value]
        if value in sizes.graph.parameters or source == target:
            continue
        nbytes = sizes.nbytes(value) * (setting.mesh.cp if source.sharded else 1)
        kinds = sharding.transition(source, target) or ("", "")
        ways = zip(PASS_COLUMNS, kinds[: 1 + meta.requires_grad], strict=False)
        entries += [_said(setting, column, kind, nbytes) for column, kind in ways if kind]
    return entries


def shifts_tokens(sizes: LocalSizes, op: Op) -> bool:
    """Whether an operator shifts tokens by one, so that each rank needs a neighbour's."""
    context = sizes.context
    return context is not None and context.strategies[op.name].implementation == sharding.BY_HALO
