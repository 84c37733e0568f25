"""A loader of which each rank gives its own rows, and whose state is a position among the samples.

    loader = data_loader(dataset, result, seed=0)
    for batch in loader:
        result.train_step(batch, local=True)
    result.save_checkpoint(path, optimizer, extra={"data": loader})

A batch that was handed out counts as trained. The position is of global samples: saved under one
plan, it goes on under another, no sample lost or repeated, whatever the number of ranks. A stream,
which has no samples by number, is read whole by every rank, which keeps its own rows.
"""

from __future__ import annotations

import logging
import os
import time
import zlib
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import islice
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, IterableDataset

from meshwright.data import loader_arguments
from meshwright.data.loader_arguments import DataError
from meshwright.executor.errors import StateDictError
from meshwright.executor.ranks import (
    all_gather_object,
    background,
    gloo_group,
    launch,
    run_on_first,
)
from meshwright.planner.batch import batch_rows
from meshwright.profiles.inputs import NotInstalledError, shown
from meshwright.profiles.inputs.limits import checked_booleans
from meshwright.running import DataParallel, Steps

log = logging.getLogger(__name__)

MOST_SORTED = 50  # batches that are sorted together by length
MOST_SHAPES = 16
PADDING: Mapping[str, float] = {"labels": -100}  # by name of the entry; others with 0
WAY_OUT = "drop_last=True leaves the last, smaller batches out"


class DataLoader:
    """This rank's rows of the global batches of a dataset, from its position to the end of the
    epoch; iterated again, the next epoch. Made by `data_loader`."""

    local = True  # for train_step

    def __init__(
        self,
        dataset: Any,
        share: DataParallel,
        order: Order,
        *,
        collate_fn: Callable[[list[Any]], Any],
        padding: Mapping[str, float],
        loading: Mapping[str, Any],
        waited: Callable[[float], None],
    ) -> None:
        self.dataset, self.share, self.order = dataset, share, order
        self.collate_fn, self.padding, self.loading = collate_fn, padding, loading
        self.waited = waited  # takes the seconds that a batch was waited for
        self.epoch = 0
        self.position = 0  # batches of the epoch that were handed out
        if not self.order.batches(0):
            raise DataError(
                f" has {order.size} samples, less than a batch of {order.rows}",
                place="data_loader: dataset",
                legal=f"{order.rows} samples (the plan's global_batch_size) or more with drop_last",
                way_out="drop_last=False, or plan for a smaller global_batch_size",
            )
        self._check_last()

    def __len__(self) -> int:
        """Batches of the epoch."""
        return len(self.order.batches(self.epoch))

    @property
    def finished(self) -> bool:
        """Whether the epoch is over: iterated again, the next begins."""
        return self.position >= len(self)

    def __iter__(self) -> Iterator[Any]:
        if self.finished:
            self.epoch, self.position = self.epoch + 1, 0
        due = self.order.batches(self.epoch)[self.position :]
        full = all(len(batch.samples) == batch.rows for batch in due)
        if not self.share.reads and self.order.buckets is None and (full or self.share.filling):
            for _ in due:
                self.position += 1
                yield None
            return
        loaded: Iterable[Any] = TorchLoader(
            _Padded(self.dataset, self.padding),
            batch_sampler=_Numbers(self, due),
            collate_fn=self.collate_fn,
            **{**self.loading, **self._workers()},
        )
        began_s = time.perf_counter()
        for batch, rows in zip(due, loaded, strict=True):
            self.position += 1
            filled = self._filled(batch, rows)
            self.waited(time.perf_counter() - began_s)
            yield filled
            began_s = time.perf_counter()

    def _workers(self) -> dict[str, Any]:
        """Workers in process groups of their own: a signal to this rank's group, by which torchrun
        ends it, must not end them while it saves."""
        if not self.loading.get("num_workers"):
            return {}
        return {"worker_init_fn": partial(_apart, self.loading.get("worker_init_fn"))}

    def samples_here(self, batch: GlobalBatch) -> list[int]:
        """The numbers of this rank's samples: those in its rows of the global batch, under any
        plan. Of a smaller batch, which is filled up at its end, a rank may have none."""
        samples = batch.samples
        total = len(samples) if self.share.filling is None else batch.rows
        return [int(samples[row]) for row in self.share.rows_of(total) if row < len(samples)]

    def _filled(self, batch: GlobalBatch, rows: Any) -> Any:
        """A rank's part of a smaller batch, with rows that count nothing where there may be any."""
        if len(batch.samples) == batch.rows or self.share.filling is None:
            return rows
        count = len(self.samples_here(batch))
        return self.share.filled(rows, count, batch.rows // self.share.size)

    def _check_last(self) -> None:
        """Raise ValueError for batches that can't be shared out."""
        batches, size = self.order.batches(self.epoch), self.share.size
        uneven = {len(b.samples) for b in batches if len(b.samples) % size or b.rows % size}
        if uneven and (self.share.filling is None or any(b.rows % size for b in batches)):
            raise DataError(
                f" makes a batch of {min(uneven)} rows, which {size} data-parallel ranks can't "
                "share out",
                place="data_loader: dataset",
                legal=f"batches of a multiple of {size} rows; smaller ones where the loss can "
                "leave rows out, as by labels that it ignores",
                way_out=WAY_OUT,
            )

    def state_dict(self) -> dict[str, Any]:
        """The position, the same on all ranks."""
        due = self.order.batches(self.epoch)[: self.position]
        order = self.order
        return {
            "epoch": self.epoch,
            "position": self.position,
            "samples": order.behind(self.epoch) + sum(len(batch.samples) for batch in due),
            "begun": order.behind(self.epoch),
            "rows": order.rows,
            "size": order.size,
            "seed": order.seed,
            "shuffle": order.shuffle,
            "buckets": order.buckets and order.buckets.described(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position that was saved, of the same dataset, in the order it was in; in
        batches of other rows from the sample on that is next. Raises ValueError for another
        dataset, and for buckets that were made otherwise."""
        order, state = self.order, loader_arguments.checked_state(state, loader_arguments.STATE)
        self._check_same("samples in the dataset", state["size"], order.size)
        self._check_same("buckets", state["buckets"], order.buckets and order.buckets.described())
        self.epoch, self.position = state["epoch"], state["position"]
        samples, begun = state["samples"], state.get("begun", 0)
        if state["rows"] != order.rows:
            if samples == order.size:
                self.epoch, samples = self.epoch + 1, 0
            if order.buckets is not None and samples:
                self._check_same("rows in a batch, and buckets", state["rows"], order.rows)
            self.position, begun = 0, samples
        self.order = replace(
            order,
            seed=state["seed"],
            shuffle=state["shuffle"],
            begun=(self.epoch, begun),
            _epoch=None,
            _batches=(),
        )
        self._check_last()

    def _check_same(self, what: str, saved: Any, here: Any) -> None:
        if saved != here:
            raise StateDictError(
                f" was saved with {what}: {saved}; here it is {here}",
                place="data_loader: state",
                legal="the dataset and the batches that it was saved with",
                way_out="give the same, or leave the loader out of extra= and begin anew",
            )


@checked_booleans
def data_loader(
    dataset: Any,
    result: Steps,
    *,
    shuffle: bool = True,
    seed: int = 0,
    drop_last: bool = False,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    lengths: Sequence[int] | Callable[[Any], int] | None = None,
    buckets: Sequence[int] | None = None,
    tokens_per_batch: int | None = None,
    group_by_length: bool = False,
    padding: Mapping[str, float] | None = None,
    **loading: Any,
) -> DataLoader | StreamLoader:
    """Batches of a dataset for `result.train_step(batch, local=True)`: every rank loads its own
    rows of each global batch, and gives None where it needs none. Collective.

    `dataset` has `len()` and samples by number. The order is a permutation by `seed` and epoch, the
    same for any number of ranks. Without `drop_last` the last batch is smaller: rows that count
    nothing fill it up where the loss can leave them out, so that the mean is that of its rows.
    `collate_fn` makes a batch of samples, by default torch's; `loading` goes to torch's DataLoader
    (num_workers, pin_memory, prefetch_factor, ...).

    With `buckets`, increasing lengths, a batch has samples of one bucket, padded to its length in
    their first dim: the entries that are tensors (or lists) as long as the sample, with 0 or what
    `padding` says by name (labels: -100). `lengths` gives the length of every sample, or of one
    (called once a sample). Every bucket is another shape, for which the plan is lowered once.
    `tokens_per_batch` has batches of shorter buckets take more rows, a power of two, up to the
    plan's global_batch_size. `group_by_length` sorts stretches of up to 50 batches of a shuffled
    order by length, as transformers does, and pads each batch to one of up to 16 lengths.

    A stream, torch's `IterableDataset` or torchdata's `StatefulDataLoader`, has an order of its
    own, the same on all ranks: each reads all of it, and gives its rows. It goes on where it was
    saved by its own state, if it has one, else after as many samples. With `num_workers` the
    package torchdata reads an `IterableDataset`.

    The state (`state_dict`) counts global samples, for `save_checkpoint(extra={"data": loader})`.
    Raises ValueError for a dataset without a batch, of other sizes on ranks, or whose last batch
    can't be shared out.
    """
    if not isinstance(result, Steps):
        raise DataError.refused(
            "data_loader: result",
            result,
            legal="the model that auto_parallelize returned",
            way_out="data_loader(dataset, result)",
        )
    loader_arguments.check_options(
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        collate_fn=collate_fn,
        tokens_per_batch=tokens_per_batch,
        padding=padding,
        loading=loading,
    )
    background.finish_all()  # a save in the background uses the same group
    by_length = {
        "buckets": buckets,
        "lengths": lengths,
        "tokens_per_batch": tokens_per_batch,
        "group_by_length": group_by_length or None,
    }
    if is_stream(dataset):
        loader_arguments.check_stream(by_length)
        if result.plan.outer_loop is not None:
            raise DataError(
                ": all ranks compare each batch of a stream, and replicas that train apart are at "
                "steps of their own",
                place="data_loader: dataset",
                legal="a dataset with samples by number",
                way_out="read each rank's rows (result.data_parallel) of the stream yourself, and "
                "give them with local=True",
            )
        return StreamLoader(
            dataset,
            result.data_parallel,
            rows=result.plan.global_batch_size,
            drop_last=drop_last,
            collate_fn=collate_fn or loader_arguments.collated,
            loading=loading,
            waited=result.monitor.waited_for_input,
        )
    size = _size(dataset)
    loader_arguments.check_lengths_used(by_length)
    filled = None
    if buckets is not None or group_by_length:
        if lengths is None:
            lengths = _length_of
        if callable(lengths):
            lengths = [lengths(dataset[k]) for k in range(size)]
        checked = loader_arguments.checked_lengths(lengths, size)
        to = few_lengths(checked) if buckets is None else loader_arguments.checked_buckets(buckets)
        filled = Buckets(lengths=checked, to=to, tokens=tokens_per_batch, grouped=group_by_length)
    order = Order(
        size=size,
        rows=result.plan.global_batch_size,
        shuffle=shuffle,
        seed=seed,
        drop_last=drop_last,
        buckets=filled,
    )
    return DataLoader(
        dataset,
        result.data_parallel,
        order,
        collate_fn=collate_fn or loader_arguments.collated,
        padding={**PADDING, **(padding or {})},
        loading=loading,
        waited=result.monitor.waited_for_input,
    )


def _size(dataset: Any) -> int:
    """The number of samples, the same on all ranks. Raises ValueError on all alike."""
    try:
        size = len(dataset) if hasattr(dataset, "__getitem__") else -1
    except (TypeError, OverflowError):
        size = -1
    except ValueError as error:  # on all ranks alike: the length is a negative one
        raise DataError(f" has no length: {error}", place="data_loader: dataset") from error
    sizes = all_gather_object(gloo_group(), size) if launch.world_size() > 1 else [size]
    if min(sizes) < 0 or isinstance(dataset, type | Mapping | str):
        raise DataError(
            f" is of type {type(dataset).__name__}, without len() or samples by number",
            place="data_loader: dataset",
            legal="a dataset with __len__ and __getitem__",
            way_out="iterate over one without yourself, and feed train_step the global batch, the "
            "same on all ranks, or this rank's rows (local=True, result.data_parallel)",
        )
    if max(sizes) > loader_arguments.MAX_SAMPLES:
        raise DataError(
            f" has {max(sizes)} samples",
            place="data_loader: dataset",
            legal=f"up to {loader_arguments.MAX_SAMPLES} samples",
            way_out="iterate over the data yourself, and feed train_step",
        )
    if len({*sizes}) > 1:
        raise DataError(
            f" has {sizes} samples on the ranks",
            place="data_loader: dataset",
            legal="the same dataset on every rank, whole: each loads its own rows of it",
            way_out="don't shard it before",
        )
    return size


def _length_of(sample: Any) -> int:
    """The first dim of a sample's first tensor or list. Raises ValueError where it has none."""
    try:
        entries = sample.values() if isinstance(sample, Mapping) else sample
        return len(next(iter(entries)))
    except (TypeError, StopIteration) as error:
        raise DataError(
            f" has no length: a {type(sample).__name__}, {shown(sample)}",
            place="data_loader: a sample",
            legal="a dict, tuple or list whose first entry is a tensor or a list of tokens",
            way_out="give lengths=, or samples like these",
        ) from error


def _apart(init: Callable[[int], None] | None, number: int) -> None:
    os.setpgid(0, 0)
    if init is not None:
        init(number)


# --- padding --------------------------------------------------------------------------------------


class _Numbers:
    """Batch after batch, this rank's samples as (number, length to pad to); where it has none, one
    that stands for rows that count nothing."""

    def __init__(self, loader: DataLoader, due: Sequence[GlobalBatch]) -> None:
        self.loader, self.due = loader, due

    def __len__(self) -> int:
        return len(self.due)

    def __iter__(self) -> Iterator[list[tuple[int, int | None]]]:
        for batch in self.due:
            numbers = self.loader.samples_here(batch) or batch.samples[:1].tolist()
            yield [(number, batch.length) for number in numbers]


class _Padded(Dataset[Any]):
    """Samples by (number, length to pad to)."""

    def __init__(self, dataset: Any, padding: Mapping[str, float]) -> None:
        self.dataset, self.padding = dataset, padding

    def __getitem__(self, at: tuple[int, int | None]) -> Any:
        number, length = at
        sample = self.dataset[number]
        return sample if length is None else padded(sample, length, self.padding)


def padded(sample: Any, length: int, padding: Mapping[str, float]) -> Any:
    """A sample whose entries as long as the first are padded to a length, by their names."""
    tokens = _length_of(sample)

    def pad(path: tuple[Any, ...], entry: Any) -> Any:
        name = str(getattr(path[-1], "key", "")) if path else ""
        if not isinstance(entry, torch.Tensor):
            entry = _tensor_of(entry, name)
        if not entry.dim() or len(entry) != tokens:
            return entry
        if length < tokens:
            raise DataError(
                f" has {tokens} tokens, and the bucket's length is {length}",
                place="data_loader: a sample",
                legal="samples as long as lengths= says",
                way_out="correct lengths",
            )
        missing = entry.new_full((length - tokens, *entry.shape[1:]), padding.get(name, 0))
        return torch.cat([entry, missing])

    plain = dict(sample) if isinstance(sample, Mapping) else sample
    return pytree.tree_map_with_path(pad, plain, is_leaf=lambda x: isinstance(x, list))


def _tensor_of(entry: Any, name: str) -> torch.Tensor:
    try:
        return torch.as_tensor(entry)
    except (TypeError, ValueError, RuntimeError) as error:
        raise DataError(
            f": the entry {name!r} is a {type(entry).__name__}, {shown(entry)}",
            place="data_loader: a sample",
            legal="tensors, numbers and lists of numbers",
            way_out="leave the entry out, or make a tensor of it",
        ) from error


# --- order of rows --------------------------------------------------------------------------------

# A function of the seed, the epoch and the number of the batch alone, the same on every rank and
# for every number of ranks.


@dataclass(frozen=True, slots=True, kw_only=True)
class GlobalBatch:
    """Numbers of the samples, of `rows` or less, and the length that they are padded to (None: as
    they are)."""

    samples: torch.Tensor
    rows: int
    length: int | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """Samples of similar lengths together: the length of every sample, and the lengths that batches
    are padded to, increasing; with `tokens`, a batch has as many rows, a power of two, as make up
    to so many tokens, and no more than planned. `grouped`: samples are sorted in stretches of the
    order, and a batch is padded for its longest."""

    lengths: Sequence[int]
    to: tuple[int, ...]
    tokens: int | None = None
    grouped: bool = False

    def __post_init__(self) -> None:
        loader_arguments.checked_buckets(self.to)
        longer = sum(n > self.to[-1] for n in self.lengths)
        if longer:
            raise DataError(
                f": {longer} of {len(self.lengths)} samples are longer than {self.to[-1]}, the "
                f"longest {max(self.lengths)}",
                place="data_loader: buckets",
                legal=f"a last bucket of {max(self.lengths)} or more",
                way_out="add one, or cut or leave out the longer samples",
            )
        if self.tokens is not None and self.tokens < self.to[-1]:
            raise DataError(
                f"={self.tokens!r:.40}: less than a row of {self.to[-1]}",
                place="data_loader: tokens_per_batch",
                legal=f"{self.to[-1]} or more",
            )

    def described(self) -> list[Any]:
        """Numbers that make the batches: the same ones make the same."""
        lengths = zlib.crc32(",".join(map(str, self.lengths)).encode())
        return [*self.to, self.tokens, lengths, *(["grouped"] if self.grouped else [])]

    def rows(self, length: int, planned: int) -> int:
        """Rows of a global batch padded to a length."""
        if self.tokens is None:
            return planned
        fit: int = 1 << (self.tokens // length).bit_length() - 1
        return min(planned, fit)


@dataclass(slots=True, kw_only=True)
class Order:
    """The order of `size` samples in batches of `rows`; shuffled, another in every epoch. `begun`:
    an epoch, and how many of its samples were in batches of other rows already."""

    size: int
    rows: int
    shuffle: bool
    seed: int
    drop_last: bool
    buckets: Buckets | None = None
    begun: tuple[int, int] = (0, 0)
    _epoch: int | None = None
    _batches: Sequence[GlobalBatch] = ()

    def behind(self, epoch: int) -> int:
        """Samples of an epoch that were in batches of other rows."""
        return self.begun[1] if epoch == self.begun[0] else 0

    def batches(self, epoch: int) -> Sequence[GlobalBatch]:
        """The global batches of an epoch, in order; of one that was begun in batches of other rows
        those that are left."""
        if self._epoch != epoch:
            self._epoch, self._batches = epoch, self._drawn(epoch)
        return self._batches

    def _drawn(self, epoch: int) -> Sequence[GlobalBatch]:
        generator = torch.Generator().manual_seed(hash_of(self.seed, epoch))
        samples = torch.arange(self.size)
        if self.shuffle:
            samples = torch.randperm(self.size, generator=generator)
        if self.buckets is None:
            return self._cut(samples[self.behind(epoch) :], self.rows, None)
        if self.buckets.grouped:
            return self._grouped(samples)
        to = self.buckets.to
        number = torch.tensor([bisect_left(to, n) for n in self.buckets.lengths])
        batches: list[GlobalBatch] = []
        for k, length in enumerate(to):
            in_bucket = samples[number[samples] == k]
            batches += self._cut(in_bucket, self.buckets.rows(length, self.rows), length)
        if self.shuffle:
            mixed = torch.randperm(len(batches), generator=generator).tolist()
            batches = [batches[k] for k in mixed]
        return batches

    def _grouped(self, samples: torch.Tensor) -> Sequence[GlobalBatch]:
        """Batches of similar lengths, the one with the longest sample first: where memory is short
        it shows at once. Sorted as `transformers.trainer_pt_utils.get_length_grouped_indices`."""
        buckets = self.buckets
        assert buckets is not None
        lengths, order = buckets.lengths, samples.tolist()
        if self.shuffle and order:
            span = max(1, min(self.size // (4 * self.rows), MOST_SORTED)) * self.rows
            parts = [order[k : k + span] for k in range(0, self.size, span)]
            parts = [sorted(part, key=lambda k: lengths[k], reverse=True) for part in parts]
            longest = max(range(len(parts)), key=lambda k: lengths[parts[k][0]])
            parts[0][0], parts[longest][0] = parts[longest][0], parts[0][0]
            order = [k for part in parts for k in part]
        batches = self._cut(torch.tensor(order, dtype=torch.int64), self.rows, None)
        return [
            replace(
                batch,
                length=buckets.to[
                    bisect_left(buckets.to, max(lengths[k] for k in batch.samples.tolist()))
                ],
            )
            for batch in batches
        ]

    def _cut(self, samples: torch.Tensor, rows: int, length: int | None) -> Sequence[GlobalBatch]:
        parts = samples.split(rows) if len(samples) else ()
        return [
            GlobalBatch(samples=part, rows=rows, length=length)
            for part in parts
            if len(part) == rows or not self.drop_last
        ]


def few_lengths(lengths: Sequence[int]) -> tuple[int, ...]:
    """Up to `MOST_SHAPES` lengths to pad to, the longest among them, in equal distances: each is a
    shape, for which the plan is lowered."""
    longest, apart = max(lengths, default=1) or 1, 8
    while longest > apart * MOST_SHAPES:
        apart *= 2
    return tuple(sorted({min(k + apart, longest) for k in range(0, longest, apart)}))


def hash_of(seed: int, epoch: int) -> int:
    """The seed of an epoch: other epochs and seeds give others."""
    return (seed * 1_000_003 + epoch * 7_919) % 2**63


# --- streams --------------------------------------------------------------------------------------


def is_stream(data: Any) -> bool:
    """Whether this is a data set without samples by number, or a loader with a state that is read
    in its place."""
    if isinstance(data, IterableDataset):
        return True
    of_loader = ("dataset", "batch_size", "state_dict", "load_state_dict", "__iter__")
    return not isinstance(data, DataLoader | type) and all(hasattr(data, x) for x in of_loader)


def first_samples(data: Any, count: int) -> list[Any]:
    """The first samples of a dataset or a stream, which goes on as if they had not been read."""
    if not is_stream(data):
        size = len(data) if hasattr(data, "__len__") else 0
        return [data[k] for k in range(min(count, size))]
    state = data.state_dict() if hasattr(data, "state_dict") else None
    samples = list(islice(data, count))
    if state is not None:
        data.load_state_dict(state)
    return samples


class StreamLoader:
    """This rank's rows of the global batches of a stream, from its position to its end; iterated
    again, from its beginning. Made by `data_loader`. `place` names it in errors."""

    local = True  # for train_step

    def __init__(
        self,
        stream: Any,
        share: DataParallel,
        *,
        rows: int,
        drop_last: bool,
        collate_fn: Callable[[list[Any]], Any],
        loading: Mapping[str, Any],
        waited: Callable[[float], None],
        place: str = "data_loader: dataset",
    ) -> None:
        self.place = place
        self.share, self.rows, self.drop_last = share, rows, drop_last
        self.collate_fn, self.waited = collate_fn, waited
        self.samples = isinstance(stream, IterableDataset)  # it gives samples, else batches
        self.stream = _with_workers(stream, loading) if self.samples else stream
        self.dataset = stream
        self.epoch = self.given = self.skipped = 0  # passes, samples that were given, to skip
        self.finished = False

    def __iter__(self) -> Iterator[Any]:
        """Raises DataError on all ranks where they read other samples."""
        if self.finished:
            self.epoch, self.given, self.skipped, self.finished = self.epoch + 1, 0, 0, False
        if hasattr(self.dataset, "set_epoch"):
            self.dataset.set_epoch(self.epoch)
        skipped, self.skipped = self.skipped, 0
        parts = self._parts(skipped)
        while True:
            began_s = time.perf_counter()
            count, part = self._agreed(next(parts, (0, None)))
            if count == 0 or (count < self.rows and self.drop_last):
                self.finished = True
                return
            self.given += count
            batch = self._own(count, part)
            self.waited(time.perf_counter() - began_s)
            yield batch

    def _parts(self, skipped: int) -> Iterator[tuple[int, Any]]:
        """Numbers of rows, and samples or batches with as many."""
        stream = iter(self.stream)
        if self.samples:
            stream = islice(stream, skipped, None)
            while part := list(islice(stream, self.rows)):
                yield len(part), part
            return
        batches, count = list[Any](), 0
        for batch in stream:
            if skipped > 0:
                skipped -= batch_rows(batch)
                continue
            batches.append(dict(batch) if isinstance(batch, Mapping) else batch)
            count += batch_rows(batches[-1])
            if count > self.rows:
                raise DataError(
                    f": batches of the loader have {count} rows, where a step has {self.rows}",
                    place=self.place,
                    legal="batches of which some in a row have as many rows as a step",
                    way_out=f"give it a batch_size of {self.rows}, or of a divisor of it",
                )
            if count == self.rows:
                yield count, loader_arguments.joined(batches)
                batches, count = [], 0
        if batches:
            yield count, loader_arguments.joined(batches)

    def _agreed(self, part: tuple[int, Any]) -> tuple[int, Any]:
        """The part, where all ranks have the same. Collective."""
        if launch.world_size() == 1:
            return part
        here = part[0], digest_of(part[1])
        told = all_gather_object(gloo_group(), here)
        if unlike := [rank for rank, there in enumerate(told) if there != told[0]]:
            raise DataError(
                f" gives ranks {unlike} other samples than rank 0",
                place=self.place,
                legal="a stream that is the same on every rank, whole: each takes its own rows",
                way_out="don't shard it before; shuffle it by a generator with a seed",
            )
        return part

    def _own(self, count: int, part: Any) -> Any:
        """This rank's rows of a batch of so many."""
        share, full = self.share, count == self.rows
        if not share.reads and (full or share.filling):
            return None
        if not full and share.filling is None and count % share.size:
            raise DataError(
                f" ends with a batch of {count} rows, which {share.size} data-parallel ranks can't "
                "share out",
                place=self.place,
                legal=f"batches of a multiple of {share.size} rows; smaller ones where the loss "
                "can leave rows out, as by labels that it ignores",
                way_out=WAY_OUT,
            )
        total = self.rows if share.filling is not None else count
        rows = [row for row in share.rows_of(total) if row < count]
        batch = self._of_rows(rows or [0], count, part)
        if full or share.filling is None:
            return batch
        return share.filled(batch, len(rows), self.rows // share.size)

    def _of_rows(self, rows: Sequence[int], count: int, part: Any) -> Any:
        if self.samples:
            return self.collate_fn([part[row] for row in rows])

        def taken(x: Any) -> Any:
            batched = isinstance(x, torch.Tensor) and x.dim() and len(x) == count
            return x[list(rows)] if batched else x

        return pytree.tree_map(taken, part)

    def state_dict(self) -> dict[str, Any]:
        """The position: rank 0's state of the stream, and what was given. Collective."""
        of_stream = None
        if hasattr(self.stream, "state_dict") and not self.finished:
            group = gloo_group() if launch.world_size() > 1 else None
            of_stream = run_on_first(group, self.stream.state_dict)
        return {
            "epoch": self.epoch,
            "given": self.given,
            "finished": self.finished,
            "stream": of_stream,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on at a position that was saved."""
        state = loader_arguments.checked_state(state, loader_arguments.STREAM_STATE)
        self.epoch, self.given, self.finished = state["epoch"], state["given"], state["finished"]
        self.skipped = self.given
        if state["stream"] is not None and hasattr(self.stream, "load_state_dict"):
            self.stream.load_state_dict(state["stream"])
            self.skipped = 0


def _with_workers(stream: Any, loading: Mapping[str, Any]) -> Any:
    """The stream, read by worker processes where some are asked for."""
    if not loading.get("num_workers"):
        return stream
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader
    except ImportError as error:
        raise NotInstalledError(
            "the package torchdata is not installed, which reads streams by worker processes",
            place="data_loader: num_workers",
            way_out="`pip install torchdata`, or num_workers=0",
        ) from error
    return StatefulDataLoader(stream, batch_size=None, **loading)


def digest_of(part: Any) -> int:
    """A number of the values of samples or of a batch, by some elements of each tensor."""
    digest = 0
    for leaf in pytree.tree_leaves(part):
        if isinstance(leaf, torch.Tensor):
            flat = leaf.detach().reshape(-1)[:64].cpu()
            leaf = [*leaf.shape, *flat.tolist()]
        digest = zlib.crc32(repr(leaf).encode(), digest)
    return digest
