"""Rehearsal: the executor's code for ranks that are not there, recorded and proved."""

from meshwright.executor.rehearsal.estimate import Estimate, Priced, estimate
from meshwright.executor.rehearsal.events import Event, Kind, RankLog, link_bytes
from meshwright.executor.rehearsal.optimizers import MakeOptimizer
from meshwright.executor.rehearsal.proof import Mismatch, mismatches
from meshwright.executor.rehearsal.record import Recorder
from meshwright.executor.rehearsal.rehearse import kinds_of_ranks, rehearse, unlike_saves
from meshwright.executor.rehearsal.result import Rehearsal
from meshwright.executor.rehearsal.steps import rank_log, run_steps
