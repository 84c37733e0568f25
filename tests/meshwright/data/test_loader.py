"""Which rank gets which samples: each once, and after a resume under any number of ranks."""

import dataclasses
import os
from collections.abc import Sequence
from functools import partial
from itertools import chain, islice
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import default_collate

from meshwright.data.loader import PADDING, Buckets, DataLoader, Order, padded
from meshwright.profiles.inputs import MeshwrightError
from meshwright.running import DataParallel

ROWS = 8
IGNORED = -100


class Numbers:
    """Sample n is n, with a label."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __getitem__(self, n: int) -> dict[str, torch.Tensor]:
        return {"n": torch.tensor([n]), "labels": torch.tensor([n])}


def loaders(
    order: dict[str, Any],
    ranks: int,
    microbatches: int = 2,
    dataset: Any = None,
    rows_in_all: int = ROWS,
) -> list[DataLoader]:
    """Of all ranks of a data axis."""

    def rows_of(rank: int, total: int) -> list[int]:
        parts = max(m for m in range(1, microbatches + 1) if total // ranks % m == 0)
        micro = total // parts
        return [
            int(n)
            for k in range(parts)
            for n in torch.arange(k * micro, (k + 1) * micro).tensor_split(ranks)[rank]
        ]

    return [
        DataLoader(
            dataset or Numbers(order["size"]),
            DataParallel(
                rank=rank,
                size=ranks,
                reads=True,
                rows=tuple(rows_of(rank, rows_in_all)),
                filling={"labels": IGNORED},
                rows_of=partial(rows_of, rank),
            ),
            Order(**{"rows": rows_in_all, "drop_last": False, **order}),
            collate_fn=default_collate,
            padding={"labels": IGNORED},
            loading={},
            waited=lambda seconds: None,
        )
        for rank in range(ranks)
    ]


def counted(batches: Sequence[dict[str, torch.Tensor]]) -> list[int]:
    """Samples of a global batch that count, from its parts on the ranks, which have equal rows."""
    assert len({len(part["labels"]) for part in batches}) == 1
    labels = torch.cat([part["labels"] for part in batches])[:, 0]
    return sorted(labels[labels != IGNORED].tolist())


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(1, 40),
    shuffle=st.booleans(),
    seed=st.integers(0, 5),
    ranks=st.lists(st.sampled_from([1, 2, 4]), min_size=1, max_size=4),
)
def test_every_sample_once_under_any_ranks(
    size: int, shuffle: bool, seed: int, ranks: list[int]
) -> None:
    """A run that goes on under other numbers of ranks after every batch gives the global batches
    of the order."""
    order = {"size": size, "shuffle": shuffle, "seed": seed}
    expected = [
        sorted(b.samples.tolist()) for b in Order(rows=ROWS, drop_last=False, **order).batches(0)
    ]
    found, state = [], None
    for k in range(len(expected)):
        each = loaders({**order, "seed": 99}, ranks[k % len(ranks)])
        for loader in each:
            if state is None:
                state = loaders(order, 1)[0].state_dict()
            loader.load_state_dict(state)
        found.append(counted([next(iter(loader)) for loader in each]))
        states = [loader.state_dict() for loader in each]
        assert states == states[:1] * len(states)
        state = states[0]
    assert found == expected
    assert sorted(n for batch in found for n in batch) == list(range(size))


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("microbatches", [1, 2])
def test_rows_keep_their_places_in_the_global_batch(ranks: int, microbatches: int) -> None:
    """By their place rows draw the same numbers (of dropout) under every plan: also those of the
    last batch, of 5 rows."""
    order = {"size": 13, "shuffle": True, "seed": 0}
    (one,) = loaders(order, 1)
    each = loaders(order, ranks, microbatches)
    for whole, *parts in zip(one, *each, strict=True):
        for loader, part in zip(each, parts, strict=True):
            assert torch.equal(part["labels"], whole["labels"][list(loader.share.rows)])


@pytest.mark.parametrize(("seed", "epoch"), [(3, 0), (3, 2)])
def test_the_order_is_torchs_by_seed_and_epoch(seed: int, epoch: int) -> None:
    """The one that runs saved before go on in."""
    order = Order(size=21, rows=ROWS, shuffle=True, seed=seed, drop_last=False)
    draw = torch.Generator().manual_seed(1_000_003 * seed + 7_919 * epoch)
    batches = [batch.samples.tolist() for batch in order.batches(epoch)]
    assert batches == [x.tolist() for x in torch.randperm(21, generator=draw).split(ROWS)]


def test_epochs_differ_and_follow_each_other() -> None:
    (loader,) = loaders({"size": 16, "shuffle": True, "seed": 0}, 1)
    first, second = [[b["n"].flatten().tolist() for b in loader] for _ in range(2)]
    assert first != second and sorted(chain(*first)) == sorted(chain(*second)) == [*range(16)]
    assert loader.state_dict()["epoch"] == 1


@settings(deadline=None, max_examples=60)
@given(
    size=st.integers(8, 60),
    drop_last=st.booleans(),
    runs=st.lists(
        st.tuples(st.sampled_from([2, 4, 8]), st.sampled_from([1, 2]), st.integers(1, 3)),
        min_size=2,
        max_size=5,
    ),
)
def test_another_global_batch_goes_on_at_the_same_sample(
    size: int, drop_last: bool, runs: list[tuple[int, int, int]]
) -> None:
    """Runs of other rows and ranks, each of some batches: the samples come in the one order, and in
    the next epoch in that of all."""
    order = {"size": size, "shuffle": True, "seed": 3, "drop_last": drop_last}
    plain = Order(rows=1, **order)
    seen: dict[int, list[int]] = {0: [], 1: []}
    state = None
    for rows, ranks, batches in [*runs, (2, 1, 60)]:
        each = loaders(order, ranks, 1, rows_in_all=rows)
        for loader in each:
            if state is not None:
                loader.load_state_dict(state)
        for parts in zip(*map(islice, each, [batches] * ranks), strict=True):
            if each[0].epoch > 1:
                break
            seen[each[0].epoch] += counted(parts)
        state = each[0].state_dict()
    wanted = [int(n) for batch in plain.batches(0) for n in batch.samples]
    if drop_last:
        assert len(seen[0]) > size - 8
        wanted = wanted[: len(seen[0])]
    assert sorted(seen[0]) == sorted(wanted)
    assert len(set(seen[1])) == len(seen[1])


@pytest.mark.parametrize("rows", [ROWS, 4])
def test_another_dataset_is_refused(rows: int) -> None:
    (before,) = loaders({"size": 32, "shuffle": True, "seed": 0}, 1)
    next(iter(before))
    (after,) = loaders({"shuffle": True, "seed": 0, "size": 31, "rows": rows}, 1)
    with pytest.raises(MeshwrightError, match="samples in the dataset: 32; here it is 31"):
        after.load_state_dict(before.state_dict())


class Texts:
    def __init__(self, lengths: Sequence[int]) -> None:
        self.lengths = lengths

    def __getitem__(self, n: int) -> dict[str, Any]:
        ids = torch.full((self.lengths[n],), n)
        return {"input_ids": ids, "labels": ids.clone(), "weight": torch.tensor(1.0)}


@settings(deadline=None, max_examples=40)
@given(lengths=st.lists(st.integers(1, 16), min_size=1, max_size=60), ranks=st.sampled_from([1, 2]))
def test_buckets_hold_every_sample_once_padded_to_their_length(
    lengths: list[int], ranks: int
) -> None:
    buckets = Buckets(lengths=lengths, to=(4, 8, 16), tokens=32)
    order = {"size": len(lengths), "shuffle": True, "seed": 1, "buckets": buckets}
    seen: list[int] = []
    for parts in zip(*loaders(order, ranks, dataset=Texts(lengths)), strict=True):
        (length,) = {part["labels"].shape[1] for part in parts}
        rows = sum(len(part["labels"]) for part in parts)
        assert rows == {4: 8, 8: 4, 16: 2}[length]
        for part in parts:
            assert len(part["weight"]) == len(part["labels"])
            for ids, labels in zip(part["input_ids"], part["labels"], strict=True):
                if not (labels != IGNORED).any():
                    continue
                n = int(ids[0])
                seen.append(n)
                assert (labels != IGNORED).sum() == lengths[n] <= length
                assert length == min(b for b in (4, 8, 16) if b >= lengths[n])
    assert sorted(seen) == list(range(len(lengths)))


def test_rows_of_a_bucket_are_a_power_of_two_within_its_tokens() -> None:
    buckets = Buckets(lengths=[8], to=(4, 8), tokens=55)
    assert [buckets.rows(n, planned=16) for n in (4, 8)] == [8, 4]  # of 13 and 6
    assert buckets.rows(4, planned=6) == 6
    assert Buckets(lengths=[8], to=(4, 8)).rows(4, planned=16) == 16


def test_what_buckets_refuse() -> None:
    Buckets(lengths=[8], to=(8,), tokens=8)
    with pytest.raises(MeshwrightError, match="1 of 3 samples are longer than 8, the longest 9"):
        Buckets(lengths=[1, 9, 8], to=(4, 8))
    with pytest.raises(MeshwrightError, match="increasing"):
        Buckets(lengths=[1], to=(8, 4))
    with pytest.raises(MeshwrightError, match="less than a row of 8"):
        Buckets(lengths=[1], to=(8,), tokens=4)


def test_lists_are_padded_as_tensors_are() -> None:
    found = padded({"input_ids": [1, 2], "labels": [3, 4]}, 3, PADDING)
    assert {k: x.tolist() for k, x in found.items()} == {
        "input_ids": [1, 2, 0], "labels": [3, 4, IGNORED],
    }  # fmt: skip


def test_rows_that_fill_a_batch_up_repeat_the_first_and_do_not_count() -> None:
    share = loaders({"size": ROWS, "shuffle": False, "seed": 0}, ranks=1)[0].share
    ids = torch.arange(6).view(3, 2)
    found = share.filled({"ids": ids, "labels": ids + 1, "scale": 2.0}, own=2, rows=4)
    assert found["ids"].tolist() == [[0, 1], [2, 3], [0, 1], [0, 1]]
    assert found["labels"].tolist() == [[1, 2], [3, 4], *[[IGNORED] * 2] * 2]
    assert found["scale"] == 2.0


class Groups:
    """Samples that say which process group they were loaded in."""

    def __getitem__(self, n: int) -> dict[str, torch.Tensor]:
        return {"labels": torch.tensor([os.getpgid(0)])}


def test_workers_outlive_a_signal_to_the_group_of_their_rank() -> None:
    """torchrun signals a rank's process group; a rank that saves then still needs its workers."""
    (loader,) = loaders({"size": ROWS, "shuffle": False, "seed": 0}, 1, dataset=Groups())
    loader.loading = {"num_workers": 1}
    (batch,) = loader
    assert os.getpgid(0) not in batch["labels"].flatten().tolist()


def test_ranks_without_need_load_a_smaller_batch_that_cannot_be_filled() -> None:
    """Its shape is another, which all ranks must know."""
    for size, none in ((2 * ROWS, True), (ROWS + 4, False)):
        (loader,) = loaders({"size": size, "shuffle": False, "seed": 0}, 1)
        loader.share = dataclasses.replace(loader.share, reads=False, filling=None)
        assert [batch is None for batch in loader] == [none] * 2


def bucketed(to: tuple[int, ...] = (4,), rows: int = ROWS) -> DataLoader:
    buckets = Buckets(lengths=[3] * 16, to=to)
    order = {"size": 16, "shuffle": True, "seed": 0, "buckets": buckets}
    return loaders(order, 1, 1, dataset=Texts([3] * 16), rows_in_all=rows)[0]


def test_buckets_go_on_in_other_rows_at_an_epoch_alone() -> None:
    before, after = bucketed(rows=8), bucketed(rows=4)
    for k, _ in enumerate(before):
        if k == 0:
            with pytest.raises(MeshwrightError, match="rows in a batch, and buckets: 8; here it"):
                after.load_state_dict(before.state_dict())
    after.load_state_dict(before.state_dict())
    assert (after.epoch, after.position) == (1, 0)


def test_a_state_of_other_buckets_is_refused() -> None:
    state = bucketed((8, 16)).state_dict()
    bucketed((8, 16)).load_state_dict(state)
    with pytest.raises(MeshwrightError, match="was saved with buckets"):
        bucketed((4, 16)).load_state_dict(state)
