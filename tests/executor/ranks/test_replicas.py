"""What ranks must give alike, on two of them: weights, batches, the random state of a trace."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from meshwright.executor.ranks import launch
from meshwright.executor.ranks.replicas import (
    BatchCheck,
    check_equal,
    digest,
    make_equal,
    same_random_state,
)
from tests.helpers.ranks import on_ranks

CPU = torch.device("cpu")


def of_all(x: Any) -> list[Any]:
    every: list[Any] = [None] * launch.world_size()
    dist.all_gather_object(every, x)
    return every


def weights() -> None:
    mine = torch.full((2, 3), float(launch.rank())).t()  # not contiguous
    with pytest.raises(ValueError, match=r"1 of 2 tensors .* from rank 0's, e.g. 'a' on ranks \[1"):
        check_equal({"a": mine, "b": torch.ones(2)})
    make_equal({"a": mine, "none": torch.empty(0), "meta": torch.empty(3, device="meta")}, CPU)
    assert torch.equal(mine, torch.zeros(3, 2))
    check_equal({"a": mine})
    odd: list[Callable[[], dict[str, torch.Tensor]]] = [
        lambda: {"a": torch.ones(2 + launch.rank())},
        lambda: {"a": torch.ones(2, dtype=(torch.float32, torch.float64)[launch.rank()])},
        lambda: {"a": torch.ones(2, device=("cpu", "meta")[launch.rank()])},
        lambda: {"ab"[launch.rank()]: torch.ones(2)},
    ]
    for made in odd:
        with pytest.raises(ValueError, match=r"model differs between ranks: on rank 1 \(shape"):
            make_equal(made(), CPU)


def batches() -> None:
    """The first three, and every hundredth, are compared."""
    me, check, noticed = launch.rank(), BatchCheck(), []
    for k in range(202):
        try:
            check.check(["x"], {"x": torch.tensor([me])}, CPU)
        except ValueError as error:
            assert "from rank 0's in 'x' on ranks [1]: every rank gives the same" in str(error)
            noticed.append(k)
    assert noticed == [0, 1, 2, 100, 200]


def shares() -> None:
    me = launch.rank()

    def check(x: torch.Tensor | None, rows: int, share: tuple[int, int]) -> None:
        given = None if x is None else {"x": x, "alike": torch.ones(2)}
        BatchCheck().check(
            ["x", "alike"], given, CPU, share=share, rows={"x"}, rows_in_all=rows
        )  # fmt: skip

    check(torch.full((2, 3), me), 4, (me, 2))  # other rows in each share
    for x, rows, share, says in (
        (torch.full((2, 3), me), 4, (0, 2), r"differs .*'x' on ranks \[1\]: with local=True"),
        (torch.zeros(2, 3 + me), 4, (me, 2), r"'x' on ranks \[1\]: rows have the same dtype"),
        (torch.zeros(2 + me, 3), 4 + 2 * me, (me, 2), r"give \[2, 3\] rows, where the shares of"),
        (None if me else torch.zeros(2, 3), 4, (me, 2), r"not as planned on ranks \[1\], which"),
    ):
        with pytest.raises(ValueError, match=says):
            check(x, rows, share)


def drawn() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.rand())


def draws() -> None:
    """As rank 0 does inside; then each goes on with its own."""
    for seed in (torch.manual_seed, random.seed, np.random.seed):
        seed(launch.rank())
    with same_random_state():
        inside = of_all(drawn())
    after = of_all(drawn())
    assert inside[0] == inside[1] == after[0]
    assert after[1] != after[0]


@pytest.mark.parametrize("function", [weights, batches, shares, draws])
def test_ranks_agree(function: Callable[[], None]) -> None:
    on_ranks(2, function)


def test_a_digest_is_of_values_shape_and_dtype() -> None:
    x = torch.arange(6.0)
    others = [x + 1, x.view(2, 3), x.double(), x.int(), x[:5], torch.empty(0)]
    assert len({digest(y) for y in [x, *others]}) == 7
    assert digest(x) == digest(x.clone()) and 0 < digest(x) < 2**63
    assert digest(torch.empty(3, device="meta")) == 0
