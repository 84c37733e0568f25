"""The device that stands for a GPU where there is none: in rehearsals."""

from meshwright.executor.stand_in.device import (
    NAME,
    MovingData,
    device_for,
    mixes_devices,
    module,
    standing_in,
)
from meshwright.executor.stand_in.known import NOT_KNOWN, Key, KnownFakes
from meshwright.executor.stand_in.layouts import Known, Parts, parts_on_demand
from meshwright.executor.stand_in.streams import (
    ALLOCATE,
    ORDER,
    MixedDevicesError,
    Stream,
    operands_of,
)
