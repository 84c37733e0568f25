"""Dynamic loss scale of fp16, and the check that skips a step whose gradients are not finite.

fp16 ends at 6·10⁻⁸ and 65504. The backward pass is seeded with a scale s instead of 1, so that
small gradients stay above the lower end, and the fp32 gradients are divided by s before anybody
sees them. s is a power of two: scaling changes no bits of what stays within range. A step whose
gradients left it at the upper end is skipped and s halved; after a run of finite steps s is
doubled, to find the end again.

A step is skipped in every precision if any gradient on any rank is NaN or inf: then its norm is,
and all ranks decide by the number of ranks with such a norm, hence alike. Norms are taken where a
backward has just made the gradient and it is still in the cache; what was reduced by others is read
again.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.utils import get_total_norm

from meshwright.executor.errors import StateDictError
from meshwright.executor.host_values import read
from meshwright.executor.parameters.parameters import StageParameter
from meshwright.executor.ranks import Place, all_gather_object, gloo_group
from meshwright.profiles.inputs import ArgumentError

log = logging.getLogger(__name__)

CEILING = 2.0**126  # the largest scale whose inverse is a normal number of fp32


@dataclass(slots=True, kw_only=True)
class LossScale:
    """The scale `value` of fp16's backward: halved, to no less than `floor`, by a step that is not
    finite, doubled after `growth_interval` finite ones in a row."""

    value: float = 65536.0
    growth_interval: int = 2000
    floor: float = 1.0
    finite_steps: int = 0  # since the scale changed

    def __post_init__(self) -> None:
        for name in ("value", "floor"):
            number = getattr(self, name)
            if not 0 < number <= CEILING or math.frexp(number)[0] != 0.5:
                raise ArgumentError(
                    f"{name}={number} is no power of two up to 2**126",
                    place="loss scale",
                    legal="powers of two up to 2**126; other scales would round the gradients",
                    way_out="take e.g. 65536.0",
                )
        if self.value < self.floor:
            raise ArgumentError(
                f"value={self.value} is below floor={self.floor}",
                place="loss scale",
                legal=f"{self.floor} or more",
                way_out="start at the floor or above",
            )
        if self.growth_interval < 1:
            raise ArgumentError(
                f"growth_interval={self.growth_interval} must be at least 1 step",
                place="loss scale",
                legal="1 or more",
                way_out="take e.g. 2000",
            )

    def update(self, finite: bool) -> None:
        """Halve or double the scale after a step whose gradients were `finite` or not."""
        if not finite:
            self.value, self.finite_steps = max(self.value / 2, self.floor), 0
            return
        self.finite_steps += 1
        if self.finite_steps == self.growth_interval:
            self.value, self.finite_steps = min(self.value * 2, CEILING), 0

    def state_dict(self) -> dict[str, float | int]:
        """The scale and its streak of finite steps, for a checkpoint."""
        return {"value": self.value, "finite_steps": self.finite_steps}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict()`. Raises ValueError for a missing or illegal entry."""
        if missing := sorted({"value", "finite_steps"} - set(state)):
            raise StateDictError(
                f"the state lacks {missing}; it has {sorted(state)}",
                place="loss scale",
                legal="what state_dict() returned",
                way_out="give that",
            )
        read = LossScale(
            value=float(state["value"]),
            finite_steps=int(state["finite_steps"]),
            growth_interval=self.growth_interval,
            floor=self.floor,
        )
        self.value, self.finite_steps = read.value, read.finite_steps


@dataclass(slots=True, kw_only=True)
class StepGuard:
    """Unscales a step's gradients if all of them are finite, and drops them otherwise.

    A step seeds its backward pass with `seed` in place of 1 and calls `admit` when every `gradient`
    is reduced and of the shape of `stored`. A step not admitted adds nothing to `.grad`, which is
    None after `zero_grad()`, so that the optimizer does nothing.

    The norm is not kept for clipping: `.grad` is the user's by then, and torch's version counters
    don't show whether it was changed (`torch._foreach_*` over DTensors leaves them alone).
    """

    place: Place
    scale: LossScale | None = None  # fp16's; None: the loss is not scaled
    skipped_steps: int = 0
    warned: bool = False

    @property
    def seed(self) -> float:
        """The gradient of the loss: the loss scale, or 1."""
        return 1.0 if self.scale is None else self.scale.value

    def admit(
        self, parameters: Iterable[StageParameter], beside: list[float] | None = None
    ) -> bool:
        """Whether all gradients on all ranks are finite: unscaled then, else dropped. Collective;
        the same on every rank. The same exchange sums numbers `beside` over ranks, in place."""
        beside = [] if beside is None else beside
        held = [p for p in parameters if p.gradient is not None]
        with torch.no_grad():
            numbers = self.not_finite(held).view(1)
            if beside:
                more = torch.tensor(beside, dtype=torch.float64, device=numbers.device)
                numbers = torch.cat((numbers.double(), more))
            if self.place.mesh is not None:
                dist.all_reduce(numbers)
            found_inf, *beside[:] = read(numbers, lambda: [0.0, *beside])
            finite = not found_inf
            if finite:
                self.unscale(held)
        if not finite:
            self.say_skipped(held)
            for p in held:
                p.gradient = None
        self.conclude(finite)
        return finite

    def unscale(self, parameters: Iterable[StageParameter]) -> None:
        """Divide gradients by the scale that their backward was seeded with."""
        gradients = [p.gradient for p in parameters if p.gradient is not None]
        if gradients and self.scale is not None:
            torch._foreach_mul_(gradients, 1 / self.scale.value)

    def conclude(self, finite: bool) -> None:
        """Count a step, of which all ranks know whether its gradients were finite."""
        self.skipped_steps += not finite
        if self.scale is not None:
            self.scale.update(finite)

    def not_finite(self, parameters: Iterable[StageParameter]) -> torch.Tensor:
        """1 where a gradient of this rank is not finite, else 0; a scalar on its device."""
        parameters = [p for p in parameters if p.gradient is not None]
        assert all(
            p.gradient is not None and p.gradient.shape == p.stored.shape for p in parameters
        )
        found_inf = torch.zeros((), device=self.place.device)
        norms = [p.norm for p in parameters if p.norm is not None]
        others = [p.gradient for p in parameters if p.norm is None and p.gradient is not None]
        if others:
            norms.append(get_total_norm(others))
        if norms:
            here = [norm.to(self.place.device) for norm in norms]  # those of the host, too
            found_inf += ~torch.stack(here).isfinite().all()
        for p in parameters:
            p.norm = None
        return found_inf

    def say_skipped(self, parameters: list[StageParameter] | None) -> None:
        """Log a skipped step: fp16's search for a scale each time, others once, with the parameter
        whose gradient was the first of the backward to be not finite, of those that are given.
        Collective, if any are."""
        if self.scale is not None and self.scale.value > self.scale.floor:
            if not self.place.rank:
                log.info("step skipped: gradients left fp16 at loss scale %g", self.scale.value)
        elif not self.warned:
            self.warned = True
            name = self._first_not_finite(parameters) if parameters is not None else None
            first = "" if name is None else f", first in the backward that of {name!r}"
            if not self.place.rank:
                log.warning(
                    "step skipped: gradients are not finite%s; "
                    "look for a learning rate that is too high, or for NaN in the batch (said "
                    "once: skipped_steps counts the others)",
                    first,
                )

    def _first_not_finite(self, parameters: list[StageParameter]) -> str:
        """The last parameter, in the order of the forward, whose gradient is not finite."""
        bad = [p.fqn for p in parameters if p.gradient is not None and not _is_finite(p.gradient)]
        position = (max(self.place.stages), bad[-1]) if bad else (-1, "")
        if self.place.mesh is None:
            return position[1]
        return max(all_gather_object(gloo_group(), position))[1]


def _is_finite(x: torch.Tensor) -> bool:
    return bool(x.isfinite().all())
