"""What kernels of GPUs keep beside their operands and results, by hand: no GPU is asked."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from meshwright.costmodel.graph import Op, Ref, TensorMeta
from meshwright.costmodel.memory.call import Call
from meshwright.costmodel.memory.kept import keep
from meshwright.costmodel.memory.storage import Local, fresh
from meshwright.costmodel.rules.saves import saves_of

ROWS, WIDTH = 6, 8
HALF = torch.bfloat16


def beside(name: str, shape: tuple[int, ...], *arguments: Any, count: int = 1, **how: Any) -> float:
    """Bytes kept of neither operands nor results, where `count` operands are alike."""
    names = [f"x{k}" for k in range(count)]
    refs = [Ref(name) for name in names]
    op = Op(
        name="y", target=f"aten.{name}.default", args=(*refs, *arguments), kwargs={}, results=("y",)
    )
    metas = [TensorMeta(shape=shape, dtype=HALF, requires_grad=True)] * (count + 1)
    local = Local(shape=shape, dtype=HALF, grad=True)
    operands = tuple(fresh(local, origin="input") for _ in names)
    saves = saves_of(op, metas[:-1], metas[-1:])
    found = keep(Call(op=op, operands=operands, results=(local,), saves=saves, **how))
    known = {x.storage for x in (*operands, *found.results)}
    return sum(storage.nbytes for storage in found.storages if storage not in known)


@pytest.mark.parametrize(("device", "each"), [("cuda", 4), ("cpu", 2)])
def test_norms_keep_statistics_in_single_precision(device: str, each: int) -> None:
    rows = beside("layer_norm", (ROWS, WIDTH), [WIDTH], device=device)
    assert rows == 2 * ROWS * each
    groups = beside("group_norm", (ROWS, WIDTH), 2, device=device)
    assert groups == 2 * 2 * ROWS * each


@pytest.mark.parametrize(
    ("device", "counter", "each"), [("cuda", False, 1), ("cuda", True, 2), ("cpu", False, 2)]
)
def test_dropout_keeps_its_mask(device: str, counter: bool, each: int) -> None:
    """Of bytes where torch's kernel draws it, else as the numbers that it multiplies."""
    for p, mask in ((0.5, ROWS * WIDTH * each), (0.0, 0)):
        how = {"device": device, "counter_dropout": counter}
        assert beside("dropout", (ROWS, WIDTH), p, True, **how) == mask


@pytest.mark.parametrize("device", ["cuda", "cpu"])
def test_pooling_keeps_where_its_maxima_lie(device: str) -> None:
    assert beside("max_pool2d", (2, 3, ROWS, WIDTH), [2, 2], device=device) == 6 * ROWS * WIDTH * 8


@pytest.mark.parametrize(("width", "rows"), [(WIDTH, ROWS), (512, 32)])
def test_attention_keeps_log_sums(width: int, rows: int) -> None:
    """In single precision; of the kernel for wide heads, for whole tiles of queries."""
    shape = (2, 3, ROWS, width)
    found = beside("scaled_dot_product_attention", shape, count=3, device="cuda")
    assert found == 2 * 3 * rows * 4
