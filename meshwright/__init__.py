"""Meshwright decides how to train a PyTorch model on a cluster, says why, and runs the decision.

Names are imported when they are first asked for: a rank that runs a plan file never loads the
tracer's or the search's modules unless it traces or searches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from meshwright.profiles import VERSION
from meshwright.profiles.inputs.lazy_exports import lazy_exports

if TYPE_CHECKING:
    from meshwright.api import auto_parallelize as auto_parallelize
    from meshwright.costmodel.rules import RuleError as RuleError
    from meshwright.costmodel.schedules import Schedule as Schedule
    from meshwright.costmodel.schedules import register_schedule as register_schedule
    from meshwright.costmodel.user_rules import rule as rule
    from meshwright.data import data_loader as data_loader
    from meshwright.data import packed as packed
    from meshwright.executor.parameters import Reduced as Reduced
    from meshwright.executor.ranks import distributed as distributed
    from meshwright.executor.runtime import Ema as Ema
    from meshwright.model import ParallelModel as ParallelModel
    from meshwright.planner.errors import TraceError as TraceError
    from meshwright.planner.overrides import OverrideError as OverrideError
    from meshwright.planner.overrides import Overrides as Overrides
    from meshwright.planner.plan import InfeasibleError as InfeasibleError
    from meshwright.planner.plan import Plan as Plan
    from meshwright.planner.plan import PlanError as PlanError
    from meshwright.planner.tracing.user_module import leaf as leaf
    from meshwright.profiles.cluster import Cluster as Cluster
    from meshwright.profiles.cluster import Device as Device
    from meshwright.profiles.cluster import Host as Host
    from meshwright.profiles.cluster import Link as Link
    from meshwright.profiles.inputs import MeshwrightError as MeshwrightError
    from meshwright.shell.progress import progress_shown as progress_shown
    from meshwright.training import fit as fit

__version__ = VERSION
__getattr__, __all__ = lazy_exports(__name__, __file__)


def __dir__() -> list[str]:
    return __all__
