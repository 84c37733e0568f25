"""Sharding rules of images and sequences of frames: convolutions, their norms, pooling, resampling.

Windows reach over their neighbours, so space is whole; the batch and the channels split. Channels
of grouped operators are (groups × channels of a group): a split of the groups makes their number,
an argument, local.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from meshwright.costmodel.graph import Op, Ref, argument
from meshwright.costmodel.rules.language import Metas, OpFactors, Rule, ein


def _dims(prefix: str, count: int) -> str:
    return " ".join(f"{prefix}{i}" for i in range(count))


def _convolution(weight: str, *, coarse: str) -> Rule:
    """Channels in (g i) meet weights per group and give channels out (g o). Each product has one
    weight and one place of the finer of the two grids of places, `coarse` being the other."""

    def rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
        window = len(operands[1].shape) - 2
        space, kernel, out = (_dims(p, window) for p in "skp")
        return ein(
            f"b (g i) {space}, {weight} {kernel}, (g o) -> b (g o) {out}",
            whole="s. k. p.",
            pinned=(2,),
            flops=2.0,
            uncounted=coarse,
            counts={"groups": "g"},
        )(op, operands, results)

    return rule


def _batch_norm(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Statistics span the batch: a split batch needs the synchronised version (training only)."""
    spec = ", ".join(["b c *x", *["c"] * (len(operands) - 1)]) + " -> b c *x"
    sync = {"b": "batch_norm"} if argument(op, 5, "training", True) else {}
    return ein(spec, whole="x.*", implementations=sync)(op, operands, results)


def _instance_norm(op: Op, operands: Metas, results: Metas) -> OpFactors:
    """Statistics per row and channel; running ones, where kept, are means over the batch."""
    spec = ", ".join(["b c *x", *["c"] * (len(operands) - 1)]) + " -> b c *x"
    tracked = any(isinstance(a, Ref) for a in op.args[3:5])
    return ein(spec, whole="x.* b" if tracked else "x.*")(op, operands, results)


def _pool(count: int) -> Rule:
    """A pool over windows; some also say where each maximum was."""

    def rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
        out = f"b c {_dims('p', count)}"
        spec = f"b c {_dims('s', count)} -> " + ", ".join([out] * len(results))
        return ein(spec, whole="s. p.")(op, operands, results)

    return rule


def _pixels(spec: str) -> Rule:
    """Channels (c, r, r) become places, or back: any of the dims that stay whole pieces splits."""

    def rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
        sizes = dict.fromkeys(("r1", "r2"), int(op.args[1]))
        return ein(spec, whole="r1 r2", sizes=sizes, linear=[[0]])(op, operands, results)

    return rule


def _windows(spec: str, image: int) -> Rule:
    """(Channels × places of the window) per window of an image: operand 0, or result -1."""

    def rule(op: Op, operands: Metas, results: Metas) -> OpFactors:
        sizes = {"c": (*operands, *results)[image].shape[-3]}
        return ein(spec, whole="h w k l", sizes=sizes, linear=[[0]])(op, operands, results)

    return rule


def _grid_sample(op: Op, operands: Metas, results: Metas) -> OpFactors:
    count = len(operands[0].shape) - 2
    space, out = _dims("s", count), _dims("p", count)
    return ein(f"b c {space}, b {out} xy -> b c {out}", whole="s. xy")(op, operands, results)


_UPSAMPLED = {1: "nearest linear", 2: "nearest bilinear bicubic", 3: "nearest trilinear"}


def _rules() -> dict[str, Rule]:
    rules: dict[str, Rule] = {
        "group_norm": ein(
            "b (g c) *x, (g c), (g c) -> b (g c) *x", whole="c x.*", counts={"num_groups": "g"}
        ),
        "batch_norm": _batch_norm,
        "instance_norm": _instance_norm,
        "pixel_shuffle": _pixels("*b (c r1 r2) h w -> *b c (h r1) (w r2)"),
        "pixel_unshuffle": _pixels("*b c (h r1) (w r2) -> *b (c r1 r2) h w"),
        "channel_shuffle": ein("b (g c) *x -> b (c g) *x", linear=[[0]], counts={"groups": "g"}),
        "im2col": _windows("b c h w -> b (c k) l", 0),
        "col2im": _windows("b (c k) l -> b c h w", -1),
        "grid_sampler": _grid_sample,
    }
    for n in (1, 2, 3):
        rules[f"conv{n}d"] = _convolution("(g o) i", coarse="s.")
        rules[f"conv_transpose{n}d"] = _convolution("(g i) o", coarse="p.")
        for kind in ("max_pool", "avg_pool", "adaptive_avg_pool", "adaptive_max_pool"):
            rules[f"{kind}{n}d"] = _pool(n)
        for kind in _UPSAMPLED[n].split():
            rules[f"upsample_{kind}{n}d"] = _pool(n)
    return {f"aten.{name}": rule for name, rule in rules.items()}


IMAGE_RULES: Mapping[str, Rule] = MappingProxyType(_rules())
