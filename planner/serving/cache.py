"""Keys and values that a causal language model keeps of earlier tokens, as its graph has them.

A layer's attention keeps for each token what its keys and values are made of, as far back as they
are moved alone: with h key-value heads of d numbers 2hd of them, in all 4blh(s + n) bytes for b
rows of s + n tokens, l layers and hidden size h in 16 bits where all heads have their own (Sheng et
al., arXiv 2303.06865, section 3), less by grouped heads. Where both are made by products of one
narrower value that other products made (latent attention, arXiv 2405.04434, section 2.1), that is
kept. A window keeps no more tokens than it is long.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.rules import is_causal, traits_of
from meshwright.planner.errors import ServingError

# operators that move numbers and compute none, of their first operand
_MOVES = frozenset((
    "view", "_unsafe_view", "reshape", "transpose", "permute", "expand", "unsqueeze", "squeeze",
    "contiguous", "clone", "slice", "select", "split", "split_with_sizes", "chunk", "unbind", "to",
    "_to_copy", "alias", "detach", "flatten", "unflatten", "t", "mT", "repeat_interleave",
))  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One layer's attention: its operator, `heads` of queries of `width` numbers, of values of
    `value_width`, and `kv_heads` that they share; numbers that are `kept` of a token, by ranks of a
    tensor axis in as many parts as `kv_heads` (of a `latent` value, whole); tokens of its `window`,
    if it has one."""

    op: Op
    heads: int
    kv_heads: int
    width: int
    value_width: int
    kept: int
    latent: bool = False
    window: int | None = None

    def splits(self, tp: int) -> bool:
        """Whether ranks of a tensor axis have equally many heads, whose keys they have or copy."""
        shared = self.kv_heads % tp == 0 or tp % self.kv_heads == 0
        return self.heads % tp == 0 and (self.latent or shared)

    def kept_by(self, tp: int) -> float:
        """Numbers of a token on one of `tp` ranks."""
        return self.kept / (1 if self.latent else math.gcd(tp, self.kv_heads))

    def tokens(self, length: int) -> int:
        """Tokens that are kept of so many."""
        return length if self.window is None else min(length, self.window)


def attentions(graph: Graph, windows: Sequence[int | None] = ()) -> list[Attention]:
    """The graph's attention, layer by layer, with its `windows` (none: none has one). Raises
    `ServingError` where there is none that is torch's."""
    ops = [op for op in graph.ops if traits_of(op).kernel == "attention"]
    if not ops:
        raise ServingError(
            "no operator of the model is torch's scaled_dot_product_attention",
            legal="causal language models with it",
            way_out="attn_implementation='sdpa'",
        )
    if windows and len(windows) != len(ops):
        raise ServingError(
            f"{len(windows)} windows were given for {len(ops)} layers", legal="one for each layer"
        )
    makers = {result: op for op in graph.ops for result in op.results}
    kinds = windows or [None] * len(ops)
    return [_attention(graph, makers, *pair) for pair in zip(ops, kinds, strict=True)]


def _attention(graph: Graph, makers: Mapping[str, Op], op: Op, window: int | None) -> Attention:
    query, key, value = (graph.values[name].shape for name in op.operands[:3])
    masks = [graph.values[name].shape for name in op.operands[3:4]]
    if not is_causal(op) and not any(len(mask) > 1 and mask[-2] == query[2] for mask in masks):
        raise ServingError(
            f": attention at {op.source or op.key} looks ahead",
            legal="causal language models",
            way_out="give a decoder",
        )
    kept = [_before_moves(graph, makers, name) for name in op.operands[1:3]]
    tokens = query[0] * query[2]
    of_key, of_value = (graph.values[name].numel // tokens for name in kept)
    latent = _latent(graph, makers, *op.operands[1:3]) // tokens
    is_latent = 0 < latent < of_key
    return Attention(
        op=op,
        heads=query[1],
        kv_heads=1 if is_latent else min(of_key // key[3], key[1]),
        width=query[3],
        value_width=value[3],
        kept=latent if is_latent else of_key + of_value,
        latent=is_latent,
        window=window,
    )


def _before_moves(graph: Graph, makers: Mapping[str, Op], name: str) -> str:
    """The smallest value that this one is moved from."""
    least = name
    while (op := makers.get(name)) and op.short in _MOVES:
        name = op.operands[0]
        if graph.values[name].numel < graph.values[least].numel:
            least = name
    return least


def _latent(graph: Graph, makers: Mapping[str, Op], key: str, value: str) -> int:
    """Elements of the result of a product from which one other product makes all values, and both
    of them all keys; 0 where there is none."""
    up = _products_behind(graph, makers, [value])
    if len(up) != 1:
        return 0
    (last,) = up.values()
    down = _products_behind(
        graph, makers, [name for name in last.operands if name not in graph.parameters]
    )
    of_keys = _products_behind(graph, makers, [key])
    if len(down) != 1 or down.keys() == up.keys() or not of_keys.keys() <= {*up, *down}:
        return 0
    (first,) = down.values()
    is_product = traits_of(first).kernel == ""
    return sum(graph.values[name].numel for name in first.results) * is_product


def _products_behind(graph: Graph, makers: Mapping[str, Op], names: Iterable[str]) -> dict[str, Op]:
    """The nearest products with weights, and look-ups, behind these values."""
    found, ahead, seen = dict[str, Op](), [*names], set[str]()
    while ahead:
        name = ahead.pop()
        op = makers.get(name)
        if op is None or name in seen:
            continue
        seen.add(name)
        if traits_of(op).main and not graph.parameters.keys().isdisjoint(op.operands):
            found[op.name] = op
        else:
            ahead += op.operands
    return found
