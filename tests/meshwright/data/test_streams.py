"""Streams under `data_loader`: every rank's rows, states, the last batch, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import IterableDataset

from meshwright import MeshwrightError, data_loader, fit
from meshwright.data.loader import digest_of, few_lengths
from meshwright.executor.ranks import launch
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import loss, net
from tests.meshwright.data import feeding
from tests.meshwright.data.feeding import ROWS, SAMPLES, Tokens

Samples = list[tuple[torch.Tensor, torch.Tensor]]


class Stream(IterableDataset[tuple[torch.Tensor, torch.Tensor]]):
    """The samples in order, from `start` on; of rank 1 others, where they are `sharded`."""

    def __init__(self, size: int = SAMPLES, *, sharded: bool = False) -> None:
        self.numbers = range(launch.rank() * sharded, size)

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        yield from (Tokens()[k] for k in self.numbers)


class Kept(Stream):
    """One with a state, which it goes on from; it is never read over."""

    at = 0

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        for k in range(self.at, SAMPLES):
            self.at = k + 1
            yield Tokens()[k]
        self.at = 0

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.at = state["at"]


def of_torchdata(batch_size: int = ROWS // 2, workers: int = 0) -> Any:
    stateful = pytest.importorskip("torchdata.stateful_dataloader")
    return stateful.StatefulDataLoader(
        Tokens(), batch_size=batch_size, num_workers=workers, drop_last=False
    )


STREAMS = {"plain": Stream, "kept": Kept, "torchdata": of_torchdata}


def sums(batches: Any) -> list[int]:
    return [int(batch[0].sum()) for batch in batches]


EXPECTED = [
    sum(int(Tokens()[k][0].sum()) for k in range(first, min(first + ROWS, SAMPLES)))
    for first in range(0, SAMPLES, ROWS)
]


@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_goes_on_where_it_was_saved(name: str) -> None:
    """Twice over the data; the last batch of 5 rows is filled up with a row that counts nothing."""
    result = feeding.planned_alone()
    whole = data_loader(STREAMS[name](), result)
    found = [*whole, *whole]
    assert sums(found)[:2] == EXPECTED[:2] and sums(found)[3:] == sums(found)[:3]
    ids, labels = found[2]
    assert int(ids[:5].sum()) == EXPECTED[2] and len(ids) == ROWS
    assert (labels[5:] == -100).all() and (labels[:5] != -100).any()
    for handed in (1, 2, 4):
        before = data_loader(STREAMS[name](), result)
        assert sums(islice(chain(before, before), handed)) == sums(found[:handed])
        after = data_loader(STREAMS[name](), result)
        after.load_state_dict(before.state_dict())
        assert sums(after) == sums(found[handed : 3 if handed < 3 else 6])


@second_tier("a plain module is planned on the first samples of a data set in test_fit")
def test_the_first_samples_of_a_stream_are_not_lost() -> None:
    """A plain module is traced on them."""
    stream = Kept()
    planning = {"global_batch_size": ROWS, "loss_fn": loss, "precision": "fp32"}
    done = fit(
        net(), stream, planning=planning, steps=1, max_grad_norm=None,
        optimizer=lambda result: torch.optim.SGD(result.parameters(), lr=0.5),
    )  # fmt: skip
    assert done.loss == pytest.approx(feeding.plain_losses([range(ROWS)])[0], rel=1e-5)


def test_workers_read_a_stream(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    loader = data_loader(Stream(), feeding.planned_alone(), num_workers=1)
    state: dict[str, Any] = {}
    for _ in islice(loader, 1):
        state = loader.state_dict()
    assert state["stream"] is not None
    again = data_loader(Stream(), feeding.planned_alone(), num_workers=1)
    again.load_state_dict(state)
    assert sums(again)[:1] == EXPECTED[1:2]


def trained(folder: Path, name: str, plan: str | None, world: int) -> list[float]:
    """Losses of a run over a stream that is stopped after a step, and goes on under this plan."""
    losses: list[float] = []
    for steps, layout in ((1, None if world == 1 else "dp4"), (5, plan)):
        done = fit(
            feeding.planned(layout, world), STREAMS[name](), steps=steps, folder=folder,
            optimizer=lambda result: torch.optim.SGD(result.parameters(), lr=0.5),
            max_grad_norm=None, log_every=1,
            log_to=lambda metrics: losses.append(metrics["loss"]),
        )  # fmt: skip
        assert done.steps == steps
    return losses


@pytest.mark.parametrize(
    ("name", "plan"),
    [
        pytest.param(
            "plain", "pp2×dp2", marks=second_tier("a loader of torchdata has states, too")
        ),
        ("torchdata", "dp2×tp2"),
    ],
)
def test_ranks_train_their_rows_of_a_stream(name: str, plan: str, tmp_path: Path) -> None:
    rows = [range(k, min(k + ROWS, SAMPLES)) for k in range(0, SAMPLES, ROWS)]
    expected = feeding.plain_losses([*rows, *rows[:2]])
    assert on_ranks(4, trained, tmp_path, name, plan, 4) == pytest.approx(expected, rel=1e-5)


def read_otherwise() -> None:
    loader = data_loader(Stream(sharded=True), feeding.planned(ranks=2))
    with pytest.raises(MeshwrightError, match=r"gives ranks \[1\] other samples than rank 0"):
        next(iter(loader))


def test_a_stream_that_differs_between_ranks_is_refused() -> None:
    on_ranks(2, read_otherwise)


@pytest.mark.parametrize(
    ("stream", "given", "says"),
    [
        (Stream, {"lengths": [1]}, "lengths is given with a stream"),
        (Stream, {"group_by_length": True}, "group_by_length is given with a stream"),
        (lambda: of_torchdata(5), {}, "batches of the loader have 10 rows, where a step has 8"),
        (Tokens, {"lengths": [1] * SAMPLES}, "lengths is given without buckets"),
        (Tokens, {"buckets": (8,), "group_by_length": True}, "buckets and group_by_length"),
    ],
)
def test_what_does_not_go_with_a_stream_or_with_lengths_is_refused(
    stream: Any, given: dict[str, Any], says: str
) -> None:
    with pytest.raises(MeshwrightError, match=says) as caught:
        next(iter(data_loader(stream(), feeding.planned_alone(), **given)))
    assert caught.value.legal and caught.value.way_out


def test_lengths_to_pad_to_are_few_and_hold_all() -> None:
    assert few_lengths([3, 5]) == (5,)
    assert few_lengths([1000, 7])[-1] == 1000 and len(few_lengths([1000, 7])) <= 16
    assert digest_of([torch.ones(3)]) != digest_of([torch.zeros(3)])
