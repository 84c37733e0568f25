"""Checks of what `data_loader` is given: each error names the argument and the legal values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader as TorchLoader
from torch.utils.data import Dataset, default_collate

from meshwright.profiles.inputs import MeshwrightError, shown
from meshwright.profiles.inputs.limits import MAX_COUNT, MAX_ROWS, is_number

# arguments of torch's DataLoader; the others are this loader's
LOADING = (
    *("num_workers", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "pin_memory_device", "in_order"),
)
MAX_SAMPLES = 2**33  # an epoch's order is 8 bytes a sample
MAX_SEED = 2**63
MAX_WORKERS = 1024


class DataError(MeshwrightError):
    """Samples or options of a loader that can't be used."""

    CODE = "MW305"
    PLACE = "data_loader"
    LEGAL = "samples of tensors, numbers, dicts and lists of them, alike but for their values"
    WAY_OUT = "give collate_fn=, which makes a batch of a list of samples"


def check_options(
    *,
    shuffle: Any,
    seed: Any,
    drop_last: Any,
    collate_fn: Any,
    tokens_per_batch: Any,
    padding: Any,
    loading: Mapping[str, Any],
) -> None:
    """Raise ValueError for an option that can't be."""
    for name, flag in (("shuffle", shuffle), ("drop_last", drop_last)):
        if not isinstance(flag, bool):
            raise _refused(name, flag, "True, False")
    if type(seed) is not int or not 0 <= seed < MAX_SEED:
        raise _refused("seed", seed, f"integers from 0 to {MAX_SEED - 1}")
    if collate_fn is not None and not callable(collate_fn):
        raise _refused("collate_fn", collate_fn, "a function of a list of samples, or None")
    if tokens_per_batch is not None and not is_count(tokens_per_batch, least=1):
        raise _refused("tokens_per_batch", tokens_per_batch, "an integer from 1, or None")
    if padding is not None and not (
        isinstance(padding, Mapping) and all(map(is_number, padding.values()))
    ):
        raise _refused("padding", padding, "numbers by the name of an entry, or None")
    unknown = sorted(set(map(str, loading)) - set(LOADING))
    if unknown:
        raise DataError(
            f" has no argument {', '.join(unknown)[:80]}",
            legal=f"its own, and of torch's DataLoader {', '.join(LOADING)}",
            way_out="leave it out",
        )
    workers = loading.get("num_workers", 0)
    if type(workers) is not int or not 0 <= workers <= MAX_WORKERS:
        raise _refused("num_workers", workers, f"integers from 0 to {MAX_WORKERS}")
    try:
        TorchLoader(_Nothing(), **loading)
    except (TypeError, ValueError, AttributeError, AssertionError, RuntimeError) as error:
        raise DataError(
            f": {error}",
            place=f"data_loader: {', '.join(sorted(loading))}",
            legal="what torch's DataLoader takes",
            way_out="see its documentation",
        ) from error


class _Nothing(Dataset[None]):
    """A dataset without samples, to try options with."""

    def __len__(self) -> int:
        return 0


def is_count(x: Any, least: int = 0) -> bool:
    """Whether this is a whole number, `least` or more."""
    return type(x) is int and least <= x <= MAX_COUNT


def _refused(name: str, value: Any, legal: str) -> DataError:
    place, way_out = f"data_loader: {name}", "leave it out for the default"
    return DataError.refused(place, value, legal=legal, way_out=way_out)


def check_lengths_used(given: Mapping[str, Any]) -> None:
    """Raise ValueError for options of lengths that nothing reads, and for both ways at once."""
    names = [name for name, value in given.items() if value is not None]
    if "buckets" not in names and "tokens_per_batch" in names:
        what, legal = "tokens_per_batch is given without buckets", "with buckets=(length, ...)"
    elif names == ["lengths"]:
        what, legal = "lengths is given without buckets", "with buckets= or group_by_length=True"
    elif {"buckets", "group_by_length"}.issubset(names):
        what, legal = "buckets and group_by_length are given", "one of both"
    else:
        return
    raise DataError(
        f": {what}", place="data_loader: lengths", legal=legal, way_out="leave one out, or add it"
    )


def check_stream(given: Mapping[str, Any]) -> None:
    """Raise ValueError for options that need samples by number."""
    if names := [name for name, value in given.items() if value is not None]:
        raise DataError(
            " is given with a stream, whose samples have no numbers",
            place=f"data_loader: {', '.join(names)}",
            legal="with a dataset that has len() and samples by number",
            way_out="leave it out, and have the stream give samples in their order and length",
        )


def joined(batches: Sequence[Any]) -> Any:
    """Batches as one. Raises ValueError where they can't be joined."""
    if len(batches) == 1:
        return batches[0]
    try:
        return pytree.tree_map(
            lambda *xs: torch.cat(xs) if isinstance(xs[0], torch.Tensor) else xs[0], *batches
        )
    except (RuntimeError, ValueError) as error:
        raise DataError(
            f": batches of the loader can't be joined to a step's: {error}",
            place="data_loader: dataset",
            legal="batches of one structure and of tensors that differ in their rows alone",
            way_out="pad to one length, or give batches of a step's rows",
        ) from error


def checked_buckets(lengths: Any) -> tuple[int, ...]:
    """The lengths that batches are padded to. Raises ValueError for what are none."""
    if (
        not isinstance(lengths, Sequence)
        or not lengths
        or not all(type(x) is int and 1 <= x <= MAX_ROWS for x in lengths)
        or list(lengths) != sorted(set(lengths))
    ):
        raise DataError.refused(
            "data_loader: buckets",
            lengths,
            legal=f"increasing lengths from 1 to {MAX_ROWS}",
            way_out="name the lengths that batches are padded to, e.g. (128, 256, 512)",
        )
    return tuple(lengths)


def checked_lengths(lengths: Any, size: int) -> Sequence[int]:
    """The length of each of `size` samples, of a list, an array or a tensor. Raises ValueError for
    other numbers of them."""
    if callable(tolist := getattr(lengths, "tolist", None)):
        lengths = tolist()
    listed = isinstance(lengths, Sequence) and not isinstance(lengths, str)
    if not listed or len(lengths) != size or not all(map(is_count, lengths)):
        what = f" of {len(lengths)} entries" if listed else f" is a {type(lengths).__name__}"
        raise DataError(
            f"{what}, {shown(lengths)}",
            place="data_loader: lengths",
            legal=f"the lengths of {size} samples, integers from 0, or a function of one",
            way_out="give one for each sample",
        )
    checked: Sequence[int] = lengths
    return checked


def collated(samples: list[Any]) -> Any:
    """torch's batch of samples. Raises ValueError where they make none."""
    try:
        return default_collate(samples)
    except (TypeError, RuntimeError, KeyError, ValueError) as error:
        raise DataError(
            f": {len(samples)} of them make no batch: {error}", place="data_loader: samples"
        ) from error


def checked_state(state: Any, kinds: Mapping[str, Callable[[Any], bool]]) -> Mapping[str, Any]:
    """A state with these entries. Raises ValueError for another."""
    entries: Mapping[str, Any] = state if isinstance(state, Mapping) else {}
    wrong = [
        name for name, right in kinds.items() if name not in entries or not right(entries[name])
    ]
    if wrong:
        there = {name: entries[name] for name in wrong if name in entries}
        raise DataError(
            f" has no {', '.join(wrong)} that can be: "
            f"{shown(there if isinstance(state, Mapping) else state)}",
            place="data_loader: state",
            legal="what state_dict() of such a loader returned",
            way_out="leave the loader out of extra= to begin anew",
        )
    return entries


STATE: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("epoch", "position", "samples", "size"), is_count),
    "rows": lambda x: is_count(x, least=1),
    "seed": lambda x: type(x) is int and 0 <= x < MAX_SEED,
    "shuffle": lambda x: isinstance(x, bool),
    "buckets": lambda x: x is None or isinstance(x, list),
}
STREAM_STATE: Mapping[str, Callable[[Any], bool]] = {
    **dict.fromkeys(("epoch", "given"), is_count),
    "finished": lambda x: isinstance(x, bool),
    "stream": lambda x: x is None or isinstance(x, Mapping),
}
