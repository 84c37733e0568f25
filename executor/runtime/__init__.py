"""The running model on a rank: steps, state, evaluation, timeline."""

from meshwright.executor.runtime.counting import Counted, Counting, counting
from meshwright.executor.runtime.ema import Ema
from meshwright.executor.runtime.evaluation import why_not_evaluable
from meshwright.executor.runtime.outputs import forward
from meshwright.executor.runtime.runtime import RunOptions, Runtime
from meshwright.executor.runtime.state import RankState, group_of
from meshwright.executor.runtime.timeline import MeasuredStep, Stopwatch, timed_step
