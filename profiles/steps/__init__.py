"""Steps of plans that were run here: what they took by term, and what that says of prices."""

from meshwright.profiles.steps.corrections import NO_CORRECTIONS, Correction, Corrections, fitted
from meshwright.profiles.steps.timing import (
    BACKWARD,
    COMPONENTS,
    DATA_AXIS,
    FORWARD,
    HOST,
    MESSAGES,
    STEP,
    TENSOR_AXIS,
    TERMS,
    RunKind,
    StepTiming,
    linked,
)
