"""What a run was given, kept with it: what a resumed run was given otherwise is said.

A checkpoint has the optimizer's options, the schedule's state and the order of the data, and these
go on by default, whatever the script says now. `resume="given"` takes what is given now.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch

from meshwright.executor.ranks import launch

log = logging.getLogger(__name__)

# of a schedule's state: its progress, which no argument gave
PROGRESS = frozenset(
    (
        *("last_epoch", "last_step", "_step_count", "_last_lr", "_get_lr_called_within_step"),
        *("_is_initial", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "_milestones"),
    )
)
PLAIN = (bool, int, float, str, type(None))


def given(optimizer: torch.optim.Optimizer, schedule: Any, loader: Any) -> dict[str, Any]:
    """What a script gave, by name, as plain values, before any step or load."""
    named: dict[str, Any] = {"schedule": None if schedule is None else type(schedule).__name__}
    for k, group in enumerate(optimizer.param_groups):
        own = {name: x for name, x in group.items() if name not in ("params", "param_names")}
        if "initial_lr" in own:  # which the schedule has changed already
            own["lr"] = own.pop("initial_lr")
        named |= {f"optimizer, group {k}: {name}": x for name, x in own.items()}
    if hasattr(schedule, "state_dict"):
        state = schedule.state_dict()
        named |= {f"schedule: {k}": x for k, x in state.items() if k not in PROGRESS}
    order = loader.state_dict() if hasattr(loader, "state_dict") else {}
    named |= {f"data: {name}": order[name] for name in ("seed", "shuffle") if name in order}
    return {name: x for name, x in map(_plain, named.items()) if x is not _NOT_PLAIN}


_NOT_PLAIN = object()


def _plain(item: tuple[str, Any]) -> tuple[str, Any]:
    """A value as it is saved and compared."""
    name, x = item
    if isinstance(x, torch.Tensor) and x.numel() == 1:
        x = x.item()
    if isinstance(x, tuple | list) and all(isinstance(y, PLAIN) for y in x):
        return name, list(x)
    return name, x if isinstance(x, PLAIN) else _NOT_PLAIN


def say_differences(kept: Mapping[str, Any], now: Mapping[str, Any], *, takes_given: bool) -> None:
    """Warn of what the checkpoint's run was given and this one is not, with both values."""
    names = sorted(name for name in kept.keys() | now.keys() if kept.get(name) != now.get(name))
    if not names or launch.rank() != 0:
        return
    listed = "; ".join(f"{n} was {kept.get(n)!r}, is given as {now.get(n)!r}" for n in names)
    if takes_given:
        log.warning("fit: resumed with what is given now: %s", listed)
    else:
        log.warning(
            'fit: resumed with what the checkpoint has; resume="given" takes the other: %s', listed
        )


class GivenOrder:
    """The state of a loader of which a load keeps the order that is given now: the position is that
    which was saved."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        state = loader.state_dict()
        self.kept = {name: state[name] for name in ("seed", "shuffle") if name in state}

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict({**state, **self.kept})
