"""ParallelModel: a model, the plan for it, and (under torchrun) the plan running."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import nn

from executor import checkpoint
from executor.runtime import Runtime
from planner.evaluate import Prediction
from planner.overrides import Overrides
from planner.plan import Plan
from planner.report import Report
from planner.trace import input_leaves


class ParallelModel:
    """What `auto_parallelize` returns.

    `plan`, `report` and `prediction` are always there; the rest needs the plan's ranks to be
    running (torchrun), or a plan of one rank.
    """

    def __init__(
        self,
        plan: Plan,
        report: Report,
        prediction: Prediction,
        *,
        start: Callable[[], Runtime],
        replan: Callable[[Overrides, float | None, bool | None], ParallelModel],
        why_not: str | None,
    ) -> None:
        self.plan = plan
        self.report = report
        self.prediction = prediction
        self._start, self._replan, self._why_not = start, replan, why_not
        self._runtime: Runtime | None = None

    def replan(
        self,
        overrides: Overrides | None = None,
        *,
        time_limit_s: float | None = None,
        executable: bool | None = None,
    ) -> ParallelModel:
        """Plan again with other overrides, in place of those given before; the rest as in
        `auto_parallelize`, `executable` as it was. The traced model and what was priced for it are
        used again.

        Where ranks are running, all of them call this together. Raises as `auto_parallelize` does.
        """
        return self._replan(overrides or Overrides(), time_limit_s, executable)

    @property
    def runtime(self) -> Runtime:
        """This rank's running part; RuntimeError, with what to launch, where none can run."""
        if self._runtime is None:
            if self._why_not:
                raise RuntimeError(self._why_not)
            self._runtime = self._start()
        return self._runtime

    def train_step(self, batch: Any, targets: Any = None) -> torch.Tensor:
        """One forward and backward over a global batch; the mean loss (fp32 scalar), on every rank.

        `batch` has the structure of `example_inputs` with `global_batch_size` rows; `targets` may
        be given apart. Gradients are added to `.grad`: zero them before, step your optimizer after.
        """
        if targets is not None:
            batch = (
                {**batch, "targets": targets}
                if isinstance(batch, Mapping)
                else (*_tuple(batch), targets)
            )
        known = set(self.runtime.graph.inputs.values())
        given = {path for path, x in input_leaves(batch)[0] if isinstance(x, torch.Tensor)}
        if given - known:
            raise ValueError(
                f"batch: {sorted(given - known)} were not among example_inputs; the model was "
                f"planned with inputs {sorted(known)}: drop them, or plan again with them"
            )
        return self.runtime.train_step(batch)

    def named_parameters(self) -> Iterator[tuple[str, nn.Parameter]]:
        """This rank's parameters by the user's FQNs: DTensors on the stage's (dp, tp) mesh."""
        return self.runtime.named_parameters()

    def parameters(self) -> Iterator[nn.Parameter]:
        """For any torch optimizer."""
        return (p for _, p in self.named_parameters())

    def state_dict(self) -> dict[str, torch.Tensor]:
        """This stage's parameters (DTensors) and buffers by FQN, tied names included."""
        return self.runtime.state_dict()

    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The whole model's state as CPU tensors, for `model.load_state_dict`. Collective."""
        return self.runtime.full_state_dict()

    def load_state_dict(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take this rank's parts from a whole state dict by FQN."""
        self.runtime.load_state_dict(state)

    def save_checkpoint(self, path: str, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Write parameters, buffers and optimizer states by torch's DCP. Collective."""
        checkpoint.save(self.runtime, path, optimizer)

    def load_checkpoint(self, path: str, optimizer: torch.optim.Optimizer | None = None) -> None:
        """Read what `save_checkpoint` wrote, under this plan or another. Collective."""
        checkpoint.load(self.runtime, path, optimizer)


def _tuple(batch: Any) -> tuple[Any, ...]:
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)
