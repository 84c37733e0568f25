"""A plan that runs: its steps, and what it holds."""

from meshwright.running.data_parallel import DataParallel
from meshwright.running.evaluation import Evaluated, Evaluation, logits_and_ids
from meshwright.running.planned import PlannedModel
from meshwright.running.recalibrated import Recalibration, recalibrated, with_corrections
from meshwright.running.state import State
from meshwright.running.steps import Steps, check_in_backward, repeated
