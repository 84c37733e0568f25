"""Pipeline schedules: their records, instruction streams, and the simulated step."""

from meshwright.costmodel.schedules.early import Early, early_parts
from meshwright.costmodel.schedules.fills import PipelineShape
from meshwright.costmodel.schedules.held import (
    Message,
    Moment,
    fewest_alike,
    in_flight,
    least_in_flight,
    moments,
)
from meshwright.costmodel.schedules.orders import Action
from meshwright.costmodel.schedules.schedule import (
    Instruction,
    Streams,
    backward_follows_forward,
    build_schedule,
    unrolled,
)
from meshwright.costmodel.schedules.simulate import (
    Event,
    StageTimes,
    Timeline,
    chrome_trace,
    event_of,
    register_schedule,
    simulate,
    step_times,
)
from meshwright.costmodel.schedules.steady import simulate_steady, simulate_step
from meshwright.costmodel.schedules.table import (
    SCHEDULES,
    Pipeline,
    Schedule,
    ScheduleError,
    compute_orders,
    stages_of_devices,
)
