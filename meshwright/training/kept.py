"""The checkpoints of a run: `step-<n>` in one folder, of which the newest are kept."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from meshwright.executor.errors import DamagedError, NoCheckpointError, SavedError
from meshwright.executor.files import atomic_folder
from meshwright.executor.ranks import launch

log = logging.getLogger(__name__)

_NAME = re.compile(r"\.?step-(\d{1,12})(\.old)?")  # .step-<n>.old where a save was cut off


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

    def drop_old(self, saved: int) -> None:
        """Remove what is older than the `keep` newest up to the step that was `saved`, on rank 0;
        what can't be removed stays, with a warning. Later ones, of a run that was damaged or begun
        again before, stay too."""
        if launch.rank() != 0:
            return
        for step in [k for k in self._steps() if k <= saved][: -self.keep]:
            try:
                atomic_folder.remove(atomic_folder.published(self.path(step)))
            except (OSError, SavedError) as error:
                log.warning("an old checkpoint stays: %s", error)
