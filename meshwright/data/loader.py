"""A loader of which each rank gives its own rows, and whose state is a position among the samples.

    loader = data_loader(dataset, result, seed=0)
    for batch in loader:
        result.train_step(batch, local=True)
    result.save_checkpoint(path, optimizer, extra={"data": loader})

A batch that was handed out counts as trained. The position is of global samples: saved under one
plan, it goes on under another, no sample lost or repeated, whatever the number of ranks.
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
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset

from meshwright.data import loader_arguments
from meshwright.data.loader_arguments import DataError
from meshwright.executor.errors import StateDictError
from meshwright.executor.ranks import all_gather_object, background, gloo_group, launch
from meshwright.profiles.inputs import shown
from meshwright.profiles.inputs.limits import checked_booleans
from meshwright.running import DataParallel, Steps

log = logging.getLogger(__name__)

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
    padding: Mapping[str, float] | None = None,
    **loading: Any,
) -> DataLoader:
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
    plan's global_batch_size.

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
    size = _size(dataset)
    filled = None
    if buckets is not None:
        to = loader_arguments.checked_buckets(buckets)
        if lengths is None:
            lengths = _length_of
        if callable(lengths):
            lengths = [lengths(dataset[k]) for k in range(size)]
        checked = loader_arguments.checked_lengths(lengths, size)
        filled = Buckets(lengths=checked, to=to, tokens=tokens_per_batch)
    elif tokens_per_batch is not None or lengths is not None:
        raise DataError(
            " is given without buckets",
            place="data_loader: lengths or tokens_per_batch",
            legal="with buckets=(length, ...)",
            way_out="name the lengths that batches are padded to",
        )
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
        raise loader_arguments.DataError(
            f" has no length: {error}", place="data_loader: dataset"
        ) from error
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
        raise loader_arguments.DataError(
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
        raise loader_arguments.DataError(
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
            raise loader_arguments.DataError(
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
        raise loader_arguments.DataError(
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
    to so many tokens, and no more than planned."""

    lengths: Sequence[int]
    to: tuple[int, ...]
    tokens: int | None = None

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
        return [*self.to, self.tokens, lengths]

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

    def _cut(self, samples: torch.Tensor, rows: int, length: int | None) -> Sequence[GlobalBatch]:
        parts = samples.split(rows) if len(samples) else ()
        return [
            GlobalBatch(samples=part, rows=rows, length=length)
            for part in parts
            if len(part) == rows or not self.drop_last
        ]


def hash_of(seed: int, epoch: int) -> int:
    """The seed of an epoch: other epochs and seeds give others."""
    return (seed * 1_000_003 + epoch * 7_919) % 2**63
