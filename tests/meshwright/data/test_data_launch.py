"""A rank feeds its own rows: the losses are those of one device on the global batches; what a
loader is given and can't be is refused when it is made."""

import re
from typing import Any

import numpy as np
import pytest
import torch

from meshwright import ParallelModel, data_loader
from meshwright.data.loader import Order
from meshwright.data.loader_arguments import DataError, checked_lengths
from meshwright.executor.ranks import all_gather_object, gloo_group, launch
from meshwright.profiles.inputs import MeshwrightError
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import tiered
from tests.meshwright.data import feeding
from tests.meshwright.data.feeding import PLANS, RANKS, ROWS, SAMPLES, Tokens, planned_alone


def train_on_own_rows(plan: str, expected: list[float]) -> list[bool]:
    """An epoch whose last batch is smaller; which ranks read."""
    result = feeding.planned(plan)
    optimizer = torch.optim.SGD(result.parameters(), lr=0.5)
    losses = []
    for batch in data_loader(Tokens(), result, seed=3):
        optimizer.zero_grad()
        losses.append(float(result.train_step(batch, local=True)))
        optimizer.step()
    assert losses == pytest.approx(expected, rel=1e-5)
    share = result.data_parallel
    own = feeding.batch_of(share.rows) if share.reads else None
    whole = float(result.eval_step(feeding.batch_of(range(ROWS))))
    assert float(result.eval_step(own, local=True)) == pytest.approx(whole, rel=1e-6)
    return all_gather_object(gloo_group(), share.reads)


@pytest.mark.parametrize(
    "plan", tiered(PLANS, lambda plan: plan == "dp2×tp2", "tensor groups share rows here")
)
def test_own_rows_train_as_the_global_batch_does(plan: str) -> None:
    order = Order(size=SAMPLES, rows=ROWS, shuffle=True, seed=3, drop_last=False)
    expected = feeding.plain_losses([batch.samples for batch in order.batches(0)])
    assert len(expected) == 3
    reads = on_ranks(RANKS, train_on_own_rows, plan, expected)
    if plan != "pp2×dp2":  # whose schedule may have the last stage beside the first
        assert reads == ([True, False, False, True] if plan == "pp4" else [True] * RANKS)


def refuse_wrong_rows() -> None:
    """What wrong batches and datasets are told, on every rank."""
    result, rank = feeding.planned("dp2×tp2"), launch.rank()
    right = feeding.batch_of(result.data_parallel.rows)

    def refused(text: str, call: Any, *given: Any, **options: Any) -> None:
        with pytest.raises(ValueError, match=re.escape(text)):
            call(*given, **options)

    other_rows = feeding.batch_of(rows_of(rank % 2, result))
    wide = tuple(torch.cat([x, x], 1) for x in right) if rank >= 2 else right
    twice = tuple(torch.cat([x, x]) for x in right) if rank >= 2 else right
    for text, batch in (
        ("ranks of one result.data_parallel.rank give the same rows", other_rows),
        ("on ranks [2, 3]: rows have the same dtype and sizes on every rank", wide),
        ("ranks give [4, 4, 8, 8] rows, where the shares of a global batch", twice),
        ("it is None, and this rank reads data", None),
        ("['ids'] were not among example_inputs", {"ids": right[0]}),
    ):
        refused(text, result.train_step, batch, local=True)
    sizes = [SAMPLES + k for k in range(RANKS)]
    refused(f"has {sizes} samples on the ranks", data_loader, Tokens(SAMPLES + rank), result)
    refused("less than a batch of 8", data_loader, Tokens(5), result, drop_last=True)
    refused("without len() or samples by number", data_loader, iter([]), result)


def rows_of(share: int, result: ParallelModel) -> list[int]:
    """Rows of a share: ranks of one tensor group ask for different ones."""
    micro = result.plan.microbatch_rows
    rows = torch.arange(result.plan.global_batch_size).split(micro)
    return [int(n) for part in rows for n in part.tensor_split(2)[share]]


def test_every_rank_is_told_what_is_wrong() -> None:
    on_ranks(RANKS, refuse_wrong_rows)


def test_one_device_has_all_rows() -> None:
    share = planned_alone().data_parallel
    assert (share.rank, share.size, share.reads) == (0, 1, True)
    assert share.rows == tuple(range(ROWS))


@pytest.mark.parametrize(
    ("given", "place"),
    [
        ({"seed": -1}, "seed"),
        ({"shuffle": "yes"}, "shuffle"),
        ({"drop_last": None}, "drop_last"),
        ({"collate_fn": 3}, "collate_fn"),
        ({"padding": {"input_ids": "x"}, "buckets": [8]}, "padding"),
        ({"num_workers": -1}, "num_workers"),
        ({"batch_size": 4}, "has no argument batch_size"),
        ({"buckets": [8, 4]}, "buckets"),
        ({"buckets": [8], "lengths": [1, 2]}, "lengths"),
        ({"buckets": [8], "lengths": "abc"}, "lengths"),
        ({"buckets": [8], "tokens_per_batch": 0}, "tokens_per_batch"),
    ],
    ids=str,
)
def test_options_that_cannot_be_are_refused(given: dict[str, Any], place: str) -> None:
    with pytest.raises(MeshwrightError, match=place) as caught:
        data_loader(Tokens(), planned_alone(), **given)
    assert caught.value.place.startswith("data_loader") and caught.value.legal


@pytest.mark.parametrize("state", [None, {}, {"epoch": -1}, "state", {"seed": "x"}], ids=str)
def test_a_state_of_something_else_is_refused(state: Any) -> None:
    loader = data_loader(Tokens(), planned_alone())
    with pytest.raises(DataError, match="data_loader: state"):
        loader.load_state_dict(state)
    right = loader.state_dict()
    with pytest.raises(DataError, match="has no position"):
        loader.load_state_dict({**right, "position": 10**30})
    loader.load_state_dict(right)


def test_samples_that_make_no_batch_are_told() -> None:
    class Ragged(Tokens):
        def __getitem__(self, number: int) -> Any:
            return torch.zeros(1 + number)

    with pytest.raises(DataError, match="make no batch"):
        next(iter(data_loader(Ragged(), planned_alone())))


def test_lengths_may_be_arrays() -> None:
    for make in (tuple, np.array, torch.tensor):
        assert list(checked_lengths(make([3] * SAMPLES), SAMPLES)) == [3] * SAMPLES
