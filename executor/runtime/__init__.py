"""The running model on a rank: steps, state, evaluation, timeline."""

from meshwright.executor.runtime.ema import Ema
from meshwright.executor.runtime.evaluation import (
    CachedForward,
    Counted,
    Counting,
    counting,
    forward,
    why_not_cached,
)
from meshwright.executor.runtime.meetings import Meetings
from meshwright.executor.runtime.runtime import RunOptions, Runtime
from meshwright.executor.runtime.served import ServedRuntime
from meshwright.executor.runtime.state import RankState, group_of
from meshwright.executor.runtime.timeline import MeasuredStep, Stopwatch, timed_step
