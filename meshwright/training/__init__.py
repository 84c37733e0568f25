"""A whole training run over a parallel model: its loop, its checkpoints."""

from meshwright.training.fit import Fitted, check_alone, fit
from meshwright.training.kept import KeptCheckpoints
from meshwright.training.loop import RunEvent
