"""The operators that stand for a leaf's call in an exported program:

    leaf(operands, number, ranks, sizes, strides, dtypes) -> results

`number` counts the `Leaf`s of the trace; shape and stride of result k are the next `ranks[k]`
elements of `sizes` and `strides`. `random_leaf` is the one of a leaf that draws random numbers.
"""

from __future__ import annotations

import torch

from meshwright.costmodel.rules import LEAF, RANDOM_LEAF

_SCHEMA = (
    "(Tensor[] operands, int leaf, int[] ranks, int[] sizes, int[] strides, ScalarType[] dtypes) "
    "-> Tensor[]"
)
torch.library.define(f"meshwright::{LEAF}", _SCHEMA)
torch.library.define(
    f"meshwright::{RANDOM_LEAF}", _SCHEMA, tags=(torch.Tag.nondeterministic_seeded,)
)
LEAF_OPERATORS = (torch.ops.meshwright.leaf.default, torch.ops.meshwright.random_leaf.default)


def _empty_results(
    operands: list[torch.Tensor],
    leaf: int,
    ranks: list[int],
    sizes: list[int],
    strides: list[int],
    dtypes: list[torch.dtype],
) -> list[torch.Tensor]:
    results = []
    at = 0
    for rank, dtype in zip(ranks, dtypes, strict=True):
        part = slice(at, at + rank)
        results.append(
            torch.empty_strided(sizes[part], strides[part], dtype=dtype, device=operands[0].device)
        )
        at += rank
    return results


for _operator in LEAF_OPERATORS:
    torch.library.register_fake(_operator, _empty_results)
