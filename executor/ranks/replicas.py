"""Agreement of ranks: on the weights they start from, the batches they train on, and the random
state in which they trace.

Ranks that differ in one of them train something else than anybody asked for: replicas drift apart,
tensor ranks hold parts of different models, one rank's inputs meet another's labels.
"""

from __future__ import annotations

import hashlib
import random
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from meshwright.executor.errors import BatchError, StateError
from meshwright.executor.host_values import has_values, read, share_memory
from meshwright.executor.ranks import launch, object_collectives
from meshwright.executor.ranks.watchdog import progress
from meshwright.executor.resharding import Axis, all_gather_flat

SHOWN = 3  # names in a message
FIRST, EVERY = 3, 100  # batches compared: the first ones, and every one of so many
HASHED_BYTES = 1 << 24  # at a time
SAMPLE = 512  # values of an input that are compared in each step
DIGESTS = 2**19  # the sums of whose squares over 2¹⁵ ranks are exact in fp64
RIDING = 6  # numbers of a batch that are summed at the end of its step


def make_equal(tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
    """Give every rank rank 0's values, tensor by tensor; those on meta have none. Collective.

    Raises ValueError, on all ranks, where they hold tensors of other names, shapes or dtypes, or
    another part of them on meta.
    """
    _check_alike(tensors)
    with torch.no_grad():
        for x in tensors.values():
            if x.is_meta or not x.numel():
                continue
            sent = x.detach().to(device).contiguous()
            dist.broadcast(sent, src=0)
            if launch.rank() and not share_memory(sent, x):
                x.copy_(sent)


def check_equal(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError, on all ranks, for tensors whose values differ between ranks. Collective."""
    _check_alike(tensors)
    digests = object_collectives.all_gather_object(
        object_collectives.gloo_group(), {n: digest(x) for n, x in tensors.items()}
    )
    differing = {
        name: [rank for rank, of_rank in enumerate(digests) if of_rank[name] != digests[0][name]]
        for name in tensors
    }
    if names := [name for name, ranks in differing.items() if ranks]:
        shown = "; ".join(f"{name!r} on ranks {differing[name]}" for name in names[:SHOWN])
        raise StateError(
            f"{len(names)} of {len(tensors)} tensors of the model differ from rank 0's, e.g. "
            f"{shown}",
            place="check_replicas",
            way_out="seed every rank alike before building the model, load the same weights, or "
            "leave check_replicas out: rank 0's weights are broadcast then",
        )


def _check_alike(tensors: Mapping[str, torch.Tensor]) -> None:
    """Raise ValueError, on all ranks, where they hold other tensors than rank 0."""
    described = {n: (tuple(x.shape), str(x.dtype), x.is_meta) for n, x in tensors.items()}
    first = object_collectives.broadcast_object(object_collectives.gloo_group(), 0, described)
    unlike = sorted(n for n in described.keys() | first.keys() if described.get(n) != first.get(n))
    said = [(n, described.get(n), first.get(n)) for n in unlike[:SHOWN]]
    of_ranks = object_collectives.all_gather_object(object_collectives.gloo_group(), said)
    for rank, names in enumerate(of_ranks):
        if names:
            shown = "; ".join(f"{n!r} is {a}, on rank 0 {b}" for n, a, b in names)
            raise StateError(
                f"the model differs between ranks: on rank {rank} (shape, dtype, on meta) of "
                f"{shown}",
                way_out="build the same model on every rank",
            )


def digest(x: torch.Tensor) -> int:
    """63 bits that say what a tensor holds; 0 without values."""
    if not has_values(x):
        return 0
    hashed = hashlib.blake2b(f"{tuple(x.shape)} {x.dtype}".encode(), digest_size=8)
    flat = x.detach().reshape(-1).view(torch.uint8) if x.numel() else x.new_empty(0)
    for start in range(0, flat.numel(), HASHED_BYTES):
        hashed.update(flat[start : start + HASHED_BYTES].cpu().numpy().tobytes())
    return int.from_bytes(hashed.digest(), "little") >> 1


class BatchCheck:
    """Compares the batches of all ranks: the first ones and every so many before they are run, by
    all that they hold; every one by two digests d, of dtypes and sizes and of a sample of values.
    Of these `riding` has (1, d, d²), or zeros without a batch; their sums over ranks ride on the
    exchange at the end of the step."""

    def __init__(self) -> None:
        self.batches = 0
        self.riding = [0.0] * RIDING

    def check(
        self,
        names: Sequence[str],
        inputs: Mapping[str, torch.Tensor] | None,
        device: torch.device,
        *,
        share: tuple[int, int] = (0, 1),
        rows: Collection[str] = (),
        rows_in_all: int = 0,
    ) -> None:
        """Raise ValueError, on all ranks, for a batch that is another on some rank, or illegal
        there (None). Collective.

        `names` are those of the inputs, of which a rank that reads none may give none. Ranks of one
        `share` (rank and size on the data axis) must give the same; those of others the same but
        for inputs with `rows`, of which they give the same dtype and sizes of a row. `rows_in_all`
        are those of the global batch that would be run.
        """
        due = self.batches < FIRST or self.batches % EVERY == 0
        self.batches += 1
        if not launch.running() or launch.world_size() == 1:
            return
        digests = _of_kind(inputs or {}, rows, rows_in_all), _of_sample(inputs or {}, rows)
        self.riding = [
            float(x) for d in digests for x in ((0, 0, 0) if d is None else (1, d, d * d))
        ]
        if not due:
            return
        described = [_described((inputs or {}).get(name)) for name in names]
        digest = [int(inputs is None), *share, rows_in_all, *(x for of in described for x in of)]
        table = _from_all(torch.tensor(digest, device=device))
        if illegal := [rank for rank, row in enumerate(table) if row[0]]:
            raise BatchError(f"batch: it is not as planned on ranks {illegal}, which say why")
        if unlike := _unlike(names, table, CONTENT, alone=rows):
            raise BatchError(_other_batches(unlike, LOCAL if rows else GLOBAL))
        if unlike := _unlike(names, table, KIND):
            raise BatchError(_other_batches(unlike, SIZES))
        if len({row[3] for row in table}) > 1:
            raise BatchError(
                f"batch: ranks give {[row[3] // row[2] for row in table]} rows, where the shares "
                f"of a global batch are as long: {ROWS}"
            )

    def conclude(self, summed: Sequence[float], device: torch.device | None = None) -> None:
        """Raise ValueError, on all ranks, where a step's `riding`, `summed` over ranks, tells of
        different batches: with the ranks, exchanged on `device`, unless another step has begun."""
        for k, legal in ((0, SIZES), (3, GLOBAL)):
            count, total, squares = map(int, summed[k : k + 3])
            if count * squares == total**2:
                continue
            where = ""
            if device is not None:
                mine = torch.tensor(self.riding, dtype=torch.float64, device=device)
                table = [(row[k], row[k + 1]) for row in _from_all(mine)]
                first = next(row for row in table if row[0])
                others = [rank for rank, row in enumerate(table) if row[0] and row != first]
                where = f" on ranks {others} than on rank {table.index(first)}"
            raise BatchError(f"batch: in this step it was another one{where}: {legal}")


def _from_all(row: torch.Tensor) -> list[list[Any]]:
    """The rows of all ranks. Collective."""
    size = launch.world_size()
    every, work = all_gather_flat(row, Axis("world", size, launch.rank()))
    work.wait()
    table: list[list[Any]] = read(every, lambda: [[0] * len(row)] * size)
    return table


def _of_kind(
    inputs: Mapping[str, torch.Tensor], rows: Collection[str], rows_in_all: int
) -> int | None:
    """A digest of dtypes and sizes, but for the number of rows of those with `rows`."""
    kinds = [f"{n} {tuple(x.shape)[n in rows :]} {x.dtype}" for n, x in sorted(inputs.items())]
    return _short(f"{rows_in_all} {kinds}".encode()) if kinds else None


def _of_sample(inputs: Mapping[str, torch.Tensor], rows: Collection[str]) -> int | None:
    """A digest of some values of the inputs without `rows`; None where these are not at hand."""
    alike = [x for name, x in sorted(inputs.items()) if name not in rows]
    if not all(x.device.type == "cpu" and has_values(x) for x in alike):
        return None
    samples = [digest(x.flatten()[:: x.numel() // SAMPLE + 1].contiguous()) for x in alike]
    return _short(f"{samples}".encode()) if samples else None


def _short(values: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(values, digest_size=8).digest(), "little") % DIGESTS


CONTENT, KIND = 0, 1  # which digest
GLOBAL = (
    "every rank gives the same whole batch and reads its rows of it. Seed shuffling alike on all "
    "ranks (or use no DistributedSampler), or read the batch on rank 0 and broadcast it"
)
LOCAL = (
    "with local=True, ranks of one result.data_parallel.rank give the same rows: tp and pp peers "
    "read the same data. Shard the data by that rank and size (data_loader does), not by torch's"
)
SIZES = "rows have the same dtype and sizes on every rank: pad to the same length on all of them"

ROWS = (
    "give as many rows on every rank, fewer alike for the last batch (data_loader does), or end "
    "the loop on all ranks before it"
)


def _unlike(
    names: Sequence[str],
    table: Sequence[Sequence[int]],
    digest_of: int,
    *,
    alone: Collection[str] = (),
) -> dict[str, list[int]]:
    """The inputs that differ, with the ranks where they do from the first that gives one, of the
    share alone where the input is `alone`."""
    ranks_of: dict[str, list[int]] = {}
    for k, name in enumerate(names):
        first: dict[tuple[int, ...], int] = {}
        for rank, (_, number, size, _, *described) in enumerate(table):
            described_first, *digests = described[3 * k : 3 * k + 3]
            group = (number, size) if name in alone else ()
            if (
                described_first
                and first.setdefault(group, digests[digest_of]) != digests[digest_of]
            ):
                ranks_of.setdefault(name, []).append(rank)
    return ranks_of


def _other_batches(unlike: Mapping[str, Sequence[int]], what_is_legal: str) -> str:
    names = [*unlike][:SHOWN]
    shown = "; ".join(f"{name!r} on ranks {[*unlike[name]]}" for name in names)
    return f"batch: it differs from rank 0's in {shown}: {what_is_legal}"


def _described(x: torch.Tensor | None) -> tuple[int, int, int]:
    """Whether there is an input, digests of its values and of its dtype and the sizes of a row."""
    if x is None:
        return 0, 0, 0
    return 1, digest(x), digest(x.new_empty((0, *x.shape[1:])))


@contextmanager
def same_random_state() -> Iterator[None]:
    """Context in which torch, numpy and Python draw on every rank what they would draw on rank 0;
    each rank goes on with its own state after it. Collective, but where ranks are apart."""
    if not launch.running():
        yield
        return
    states = _random_states()
    if not progress.apart:
        _set_random_states(
            object_collectives.broadcast_object(object_collectives.gloo_group(), 0, states)
        )
    try:
        yield
    finally:
        _set_random_states(states)


def _random_states() -> tuple[Any, ...]:
    numpy = sys.modules.get("numpy")
    return (
        torch.get_rng_state(),
        random.getstate(),
        None if numpy is None else numpy.random.get_state(),
    )


def _set_random_states(states: tuple[Any, ...]) -> None:
    of_torch, of_python, of_numpy = states
    torch.set_rng_state(of_torch)
    random.setstate(of_python)
    numpy = sys.modules.get("numpy")
    if numpy is not None and of_numpy is not None:
        numpy.random.set_state(of_numpy)
