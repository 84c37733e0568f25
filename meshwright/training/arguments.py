"""Checks of what `fit` is given: each error names the argument and the legal values."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright.api import auto_parallelize
from meshwright.profiles.inputs import MeshwrightError, shown
from meshwright.profiles.inputs.limits import MAX_ROWS, is_number

MOST_HOSTS = 1000  # a plan is searched for each
PLANNING = tuple(inspect.signature(auto_parallelize).parameters)[1:]


def refused(name: str, given: Any, legal: str, way_out: str) -> MeshwrightError:
    return MeshwrightError.refused(f"fit: {name}", given, legal=legal, way_out=way_out)


def check_counts(*, keep: Any, **counts: Any) -> None:
    """Raise ValueError for a count that counts nothing; one that is None has no end."""
    for name, count in {**counts, "keep": 0 if keep is None else keep}.items():
        if count is not None and not (type(count) is int and 1 <= count <= MAX_ROWS):
            raise refused(
                name, count, f"an integer from 1 to {MAX_ROWS}, or None where that is the default",
                "leave it out for the default",
            )  # fmt: skip


def counted_hosts(hosts: Any) -> tuple[int, ...]:
    """Numbers of hosts that a run may go on with. Raises ValueError for what are none."""
    listed = isinstance(hosts, Iterable) and not isinstance(hosts, str | bytes)
    counts = tuple(islice(hosts, MOST_HOSTS + 1)) if listed else ()
    if not listed or len(counts) > MOST_HOSTS:
        raise refused(
            "hosts", hosts, f"up to {MOST_HOSTS} numbers of hosts", "give a range or a list of them"
        )
    check_counts(keep=1, **{f"hosts[{k}]": count for k, count in enumerate(counts)})
    return counts


def check_hosts(hosts: tuple[int, ...], folder: Path | None, *, decided: bool) -> None:
    """Raise ValueError where there is nothing to plan for other hosts, or no place to keep it."""
    if hosts and (decided or folder is None):
        raise MeshwrightError(
            " are given, but " + ("the plan is, too" if decided else "no folder"),
            place="fit: hosts",
            legal="with a plain module, which is planned here, and a folder that keeps its plans",
            way_out="leave hosts out, or pass folder=, and the module without plan=",
        )


def check_functions(*, optimizer: Any, schedule: Any, max_grad_norm: Any, resume: Any) -> None:
    """Raise ValueError for what makes nothing."""
    if not _takes_one(optimizer) or _is_optimizer_class(optimizer):
        raise refused(
            "optimizer", optimizer, "a function of the parallel model that returns an optimizer",
            "lambda result: torch.optim.AdamW(result.parameters(), lr=3e-4)",
        )  # fmt: skip
    if schedule is not None and not _takes_one(schedule):
        raise refused(
            "schedule", schedule, "a function of the optimizer that returns a scheduler, or None",
            "lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)",
        )  # fmt: skip
    norm = max_grad_norm
    if norm is not None and not (norm == float("inf") or (is_number(norm) and norm >= 0)):
        raise refused("max_grad_norm", norm, "a number from 0, or None", "None doesn't clip")
    if not isinstance(resume, bool):
        raise refused("resume", resume, "True, False", "True goes on from the newest checkpoint")


def _takes_one(function: Any) -> bool:
    """Whether this can be called with one argument, as far as it says."""
    if not callable(function):
        return False
    try:
        inspect.signature(function).bind(None)
    except TypeError:
        return False
    except ValueError:  # it does not say
        return True
    return True


def _is_optimizer_class(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)


def check_made(name: str, built: Any) -> None:
    """Raise ValueError where the user's function returned what is no optimizer, or no schedule."""
    right = (
        isinstance(built, torch.optim.Optimizer)
        if name == "optimizer"
        else callable(getattr(built, "step", None))
    )
    if not right:
        legal = f"a function that returns {'an' if name == 'optimizer' else 'a'} {name} of torch"
        raise MeshwrightError(
            f" returned a {type(built).__name__}, {shown(built)}",
            place=f"fit: {name}",
            legal=legal,
            way_out="return it",
        )  # fmt: skip


def check_planned(model: Any, planning: Any) -> None:
    """Raise ValueError for what is no model, and for planning that is none of
    `auto_parallelize`."""
    if not isinstance(model, nn.Module):
        raise refused(
            "model", model, "what auto_parallelize returned, or a torch.nn.Module", "give one"
        )
    if planning is None:
        return
    if not isinstance(planning, Mapping) or (unknown := set(planning) - set(PLANNING)):
        what = sorted(map(str, unknown)) if isinstance(planning, Mapping) else planning
        raise refused(
            "planning", what, f"a dict of {', '.join(PLANNING)}",
            'planning={"global_batch_size": 64}',
        )  # fmt: skip


def check_batches(name: str, batches: Any, loading: Mapping[str, Any]) -> None:
    """Raise ValueError for what is neither a dataset nor batches, and for a dataset's options
    beside batches, which they say nothing to."""
    if isinstance(batches, str | bytes | Mapping | type) or not isinstance(batches, Iterable):
        raise refused(
            name, batches, "a dataset (len() and samples by number), or an iterable of batches",
            "give a dataset, or a list of batches",
        )  # fmt: skip
    if loading:
        raise refused(
            ", ".join(map(str, loading)), name, "with a dataset",
            "make the batches so yourself, or give the dataset",
        )  # fmt: skip
