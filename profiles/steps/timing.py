"""Records of measured steps: one per plan and term, with what the term's price is made of."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

# What a step's seconds are made of, as far as prices of it can be corrected
FORWARD, BACKWARD, HOST = "forward compute", "backward compute", "host"
TENSOR_AXIS, DATA_AXIS = "tensor-axis collectives", "data-axis collectives"
MESSAGES = "messages between stages"


def linked(what: str, *, crosses: bool) -> str:
    """The component of communication inside a node, or between nodes."""
    return f"{what} {'between nodes' if crosses else 'inside a node'}"


COMPONENTS = (
    FORWARD, BACKWARD, HOST,
    *(linked(what, crosses=crosses) for what in (TENSOR_AXIS, DATA_AXIS, MESSAGES)
      for crosses in (False, True)),
)  # fmt: skip

# What is measured of a step: three terms, added up over the device groups, and the whole of it
STEP = "step"
TERMS = ("forward", "backward", "reduction", STEP)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunKind:
    """Properties that steps must share for one to say something of another, beside the device: the
    precision, and the target that prices were for ("compiled" where blocks were compiled)."""

    precision: str
    target: str


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTiming:
    """Seconds of a term of a plan's `train_step`: the median of `samples` steps after warm-up.

    `predicted_s` is its price without any correction, of which `parts` seconds are each
    component's; `basis` says what that price rested on (`Profile.basis`). `plan` is a hash.
    """

    backend: str
    precision: str
    target: str
    basis: str
    plan: str
    term: str
    measured_s: float
    predicted_s: float
    parts: Mapping[str, float]
    samples: int

    @property
    def key(self) -> tuple[str, ...]:
        """Key among the others of its device."""
        return self.backend, self.precision, self.target, self.basis, self.plan, self.term
