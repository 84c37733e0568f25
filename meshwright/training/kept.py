"""Files of a run's folder: its newest checkpoints `step-<n>`, with the arguments of the run, and a
lock."""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout

from meshwright.executor.errors import DamagedError, NoCheckpointError, SavedError
from meshwright.executor.files import atomic_folder
from meshwright.executor.ranks import launch
from meshwright.profiles.inputs import MeshwrightError

log = logging.getLogger(__name__)

_NAME = re.compile(r"\.?step-(\d{1,12})(\.old)?")  # .step-<n>.old where a save was cut off


class FitError(MeshwrightError):
    """An argument of `fit`, or its folder, that the run can't go by."""

    CODE = "MW306"
    PLACE = "fit"
    LEGAL = "arguments as docs/reference/fit.md has them, and a folder for each run"
    WAY_OUT = "correct the argument, or leave it out"


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptCheckpoints:
    """Checkpoints in a `folder`, which all ranks see, at most `keep` of them. A folder named
    `step-<n>` is complete as soon as it is there (`executor/files/atomic_folder.py`)."""

    folder: Path
    keep: int

    def path(self, step: int) -> Path:
        return self.folder / f"step-{step:08d}"

    def steps(self) -> list[int]:
        """Steps of the checkpoints that are there, in increasing order, the same on all ranks.
        Collective."""
        return launch.agree_on(self._steps)

    def _steps(self) -> list[int]:
        if not self.folder.is_dir():
            return []
        names = (_NAME.fullmatch(path.name) for path in self.folder.iterdir())
        return sorted({int(name[1]) for name in names if name})

    def resume(self, load: Callable[[Path], None]) -> int | None:
        """Load the newest checkpoint that is sound; returns its step, None where there is none.
        What killed saves left is removed.

        One that is damaged is left where it is, and the one before it is loaded, with a warning;
        what has the name and is no checkpoint is passed over. Other errors, of another model or
        optimizer, are raised, and so is the last where none is sound. Collective.
        """
        launch.agree_on(lambda: atomic_folder.clear_unfinished(self.folder, "step-*"))
        damaged: DamagedError | None = None
        for step in reversed(self.steps()):
            try:
                load(self.path(step))
            except NoCheckpointError as error:  # the same on all ranks
                log.warning("%s; it is passed over", error)
            except DamagedError as error:
                log.warning("%s; the checkpoint before it is tried", error)
                damaged = error
            else:
                return step
        if damaged is not None:
            raise damaged
        return None

    def drop_old(self, saved: int, best: int | None = None) -> None:
        """Remove what is older than the `keep` newest up to the step that was `saved`, on rank 0;
        the `best` one stays in place of the oldest of them (`keep` of one: beside it). What can't
        be removed stays, with a warning. Later ones, of a run that was damaged or begun again
        before, stay too."""
        if launch.rank() != 0:
            return
        steps = [k for k in self._steps() if k <= saved]
        keep = self.keep
        if best in steps[: -self.keep]:
            steps.remove(best)
            keep = max(1, keep - 1)
        for step in steps[:-keep]:
            try:
                atomic_folder.remove(atomic_folder.published(self.path(step)))
            except (OSError, SavedError) as error:
                log.warning("an old checkpoint stays: %s", error)


# --- arguments ------------------------------------------------------------------------------------

# Arguments of a run, kept with it: those that a resumed run is given otherwise are said.
#
# A checkpoint has the optimizer's options, the schedule's state and the order of the data, and
# these go on by default, whatever the script says now. `resume="given"` takes what is given now.


# of a schedule's state: its progress, which no argument gave
PROGRESS = frozenset(
    (
        *("last_epoch", "last_step", "_step_count", "_last_lr", "_get_lr_called_within_step"),
        *("_is_initial", "best", "num_bad_epochs", "cooldown_counter", "T_cur", "_milestones"),
    )
)
ORDER = ("seed", "shuffle")  # of a loader's state: the rest is its position and its data
PLAIN = (bool, int, float, str, type(None))


def given(optimizer: torch.optim.Optimizer, schedule: Any, loader: Any) -> dict[str, Any]:
    """Arguments that a script gave, by name, as plain values, before any step or load."""
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
    named |= {f"data: {name}": order[name] for name in ORDER if name in order}
    plain = {name: _plain(x) for name, x in named.items()}
    return {name: x for name, x in plain.items() if _is_plain(x)}


def _plain(x: Any) -> Any:
    """A value as it is saved and compared."""
    if isinstance(x, torch.Tensor) and x.numel() == 1:
        return x.item()
    return list(x) if isinstance(x, tuple) else x


def _is_plain(x: Any) -> bool:
    return all(isinstance(y, PLAIN) for y in (x if isinstance(x, list) else (x,)))


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
        self.kept = {name: state[name] for name in ORDER if name in state}

    def state_dict(self) -> dict[str, Any]:
        state: dict[str, Any] = self.loader.state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.loader.load_state_dict({**state, **self.kept})


# --- lock of the folder ---------------------------------------------------------------------------

# Lock of a run's folder, so that no two jobs write into one.
#
# The lock is the kernel's, on `.run.lock` (`filelock`): it ends with its process, however that
# ends. `.run.owner` says for readers who holds it. A job that was started anew on another host, by
# the name that torchrun or Slurm gives it, does not wait until a file server notices that the
# first is lost.


LOCK, OWNER = ".run.lock", ".run.owner"


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Context of a run that writes into `folder`; rank 0 holds the lock. Raises ValueError on all
    ranks where another run does. Collective."""
    lock = FileLock(folder / LOCK, timeout=0)
    launch.agree_on(lambda: _take(folder, lock))
    try:
        yield
    finally:
        if lock.is_locked:
            with suppress(OSError):
                (folder / OWNER).unlink()
            lock.release()


def _take(folder: Path, lock: FileLock) -> None:
    here = _here()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        other = _owner(folder)
        anew = here["job"] and here["job"] == other.get("job") and here["host"] != other.get("host")
        if not anew:
            raise FitError(
                f" is written to by {_words(other)}",
                place=f"fit: folder {str(folder)!r}",
                legal="a folder of its own for each run",
                way_out="give another folder, or wait until that run has ended",
            ) from None
        log.warning("fit: %s goes on in %s, without its lock", _words(other), folder)
    except (OSError, NotImplementedError) as error:
        log.warning(
            "fit: %s can't be locked, so that another job may write to it: %s", folder, error
        )
        return
    with suppress(OSError):
        (folder / OWNER).write_text(json.dumps(here), encoding="utf-8")


def _here() -> dict[str, Any]:
    """This process; `job` where torchrun or Slurm names it."""
    job = os.environ.get("SLURM_JOB_ID") or os.environ.get("TORCHELASTIC_RUN_ID", "none")
    return {
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "begun": time.strftime("%Y-%m-%d %H:%M:%S"),
        "job": None if job == "none" else job,
    }


def _owner(folder: Path) -> dict[str, Any]:
    try:
        owner = json.loads((folder / OWNER).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return owner if isinstance(owner, dict) else {}


def _words(owner: dict[str, Any]) -> str:
    if not owner:
        return "another run"
    job = f"job {owner['job']}, " if owner.get("job") else ""
    return f"{job}process {owner.get('pid')} on {owner.get('host')}, begun at {owner.get('begun')}"
