"""ParallelModel: a model, the plan for it, and (under torchrun) the plan running."""

from __future__ import annotations

from dataclasses import replace

import torch

from meshwright.arguments import check_margin, check_types
from meshwright.decisions import Decision, one_at_a_time
from meshwright.executor.checkpoint import hand_over, take_over
from meshwright.executor.errors import OptimizerError, StateError
from meshwright.executor.parameters import WholeTensors
from meshwright.executor.ranks import launch
from meshwright.executor.rehearsal import MakeOptimizer, Rehearsal
from meshwright.planner.overrides import Overrides
from meshwright.planner.plan import Plan
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.inputs.limits import checked_booleans
from meshwright.rehearsing import rehearse_plan, with_rehearsal
from meshwright.running import (
    Evaluation,
    Recalibration,
    State,
    Steps,
    recalibrated,
    with_corrections,
)


class ParallelModel(Steps, Evaluation, State):
    """Result of `auto_parallelize`: the plan, its report, and the running model.

    `plan`, `report` and `prediction` are always there; the rest needs the plan's ranks to be
    running (torchrun), or a plan of one rank.
    """

    @one_at_a_time()
    def replan(
        self,
        overrides: Overrides | None = None,
        *,
        optimizer: torch.optim.Optimizer | None = None,
        time_limit_s: float | None = None,
        memory_margin: float | None = None,
    ) -> ParallelModel:
        """Plan again with other overrides, in place of those given before; the rest as in
        `auto_parallelize`, `memory_margin` as it was. The traced model and what was priced for it
        are used again.

        What was trained goes on: weights, buffers, the count of steps, and the states of the
        `optimizer` that is given, which then trains under the new plan; this one runs no more.
        Where ranks are running, all of them call this together. Raises as `auto_parallelize` does.
        """
        from meshwright.plan_search import search_plan  # a rank with a plan file loads no search

        self.without_servers("replan")
        model, cluster = self._traced.model, self._problem.cluster
        check_types(model=model, cluster=cluster, overrides=overrides, plan=None)
        if self._runtime is not None:
            self._runtime.check_drained("replan")
        if isinstance(optimizer, WholeTensors):
            raise OptimizerError(
                " steps whole tensors at owners of this plan",
                place="replan: optimizer",
                way_out="save_checkpoint(path, optimizer), replan(), and load_checkpoint(path, "
                "new.make_optimizer(...))",
            )
        self._check_optimizer(optimizer)
        check_margin(memory_margin, cluster)
        before = self._request
        request = replace(
            before,
            memory_margin=before.memory_margin if memory_margin is None else memory_margin,
            overrides=overrides or Overrides(),
            time_limit_s=time_limit_s,
        )
        decision = search_plan(self._problem, request, self._traced.phases_s, self._decision)
        new = ParallelModel(decision, self._problem, request, self._traced)
        if self._runtime is not None and (self.plan.outer_loop or new.plan.outer_loop):
            raise StateError(
                ": of replicas that train apart, no weights pass to a new plan in memory",
                place="replan",
                legal="plans without an outer loop, while ranks are running",
                way_out="save_checkpoint(path, optimizer), auto_parallelize anew, and "
                "load_checkpoint(path, optimizer)",
            )
        if self._monitor is not None:
            self._monitor.close()
        if self._runtime is not None and not new._why_not:
            handover = hand_over(self._runtime, new.plan, optimizer)
            take_over(new.runtime, handover, optimizer)
        return new.started()

    @one_at_a_time()
    def plan_for(self, cluster: Cluster) -> Plan:
        """The plan of this model, as it was asked for, on another cluster: searched, not run here.
        What is chosen can be run there, by `auto_parallelize(..., plan=)`.

        Where ranks are running, all of them call this together. Raises as `auto_parallelize` does.
        """
        from meshwright.plan_search import plan_elsewhere  # as above

        check_types(model=self._traced.model, cluster=cluster, overrides=None, plan=None)
        return plan_elsewhere(self._problem, self._request, cluster)

    def started(self) -> ParallelModel:
        """This model, lowered where ranks are running: process groups are made by all of them
        together."""
        if launch.running():
            assert self.runtime is not None
        return self

    @one_at_a_time()
    def recalibrate(self) -> Recalibration:
        """Fold the steps that ran into what prices of this cluster rest on. Collective.

        The medians of forward, backward, gradient reduction and whole `train_step`, over the steps
        that `metrics()` observed, are kept beside their prices in the cache of `meshwright
        profile`, once per plan. All that is kept of this device, torch, precision, backend and
        target gives a factor for each component that it tells (compute of either pass, collectives
        of either axis, messages, by link; the host), which multiplies measured and modelled seconds
        alike from then on: in `replan` and in the next `auto_parallelize`. The centre of a
        prediction moves; the interval around it keeps its relative width. `Store().forget_steps`
        or `meshwright profile --forget-steps` takes it back.

        Raises RuntimeError before five steps were observed, and where no ranks run. A cache that
        can't be written is a warning: the factors hold in this process.
        """
        self.without_servers("recalibrate")
        if self.plan.outer_loop is not None:
            raise StateError(
                ": steps of replicas that train apart are not those of one plan of all ranks",
                place="recalibrate",
                legal="a plan without an outer loop",
                way_out="train with plan.of_one_replica on the ranks of one, and recalibrate there",
            )
        recalibration = recalibrated(
            self.plan, self._problem, self.monitor, self.runtime.place.device
        )
        self._problem = with_corrections(self._problem, recalibration.corrections)
        # what the search knows is at the old prices
        before = self._decision
        self._decision = Decision(
            plan=before.plan, report=before.report, prediction=before.prediction
        )
        return recalibration

    @checked_booleans
    @one_at_a_time()
    def rehearse(self, *, every: bool = False, optimizer: MakeOptimizer | None = None) -> Rehearsal:
        """Run the plan's own steps for one rank of each kind, or for `every` rank, on this process
        and on tensors without values: no weight is made, nothing is sent, nothing changes here.

        Returns what does not match between ranks (nothing, if the plan can't hang), each kind's
        peak bytes beside the price's, FLOPs and bytes sent; `str()` of it is a table. `optimizer`
        makes one of a rank's parameters; by default torch's of the planned name. Ranks of GPUs
        are rehearsed on a device that stands for one. The report has the table from then on, and
        its verdict on memory (`prediction.memory_verdict`) rests on the rehearsed peak. Raises
        ValueError in a process of a run, for a plan that can't run, for operators and optimizers
        that read values of tensors, and for operators that mix tensors of the host with those of
        the device.
        """
        self.without_servers("rehearse")
        if self.plan.outer_loop is not None:
            raise StateError(
                ": replicas that train apart are rehearsed one by one",
                place="rehearse",
                legal="a plan without an outer loop",
                way_out="rehearse auto_parallelize(model, cluster of one replica, "
                "plan=plan.of_one_replica)",
            )
        rehearsal = rehearse_plan(
            self._checked(),
            self._problem,
            self._traced,
            optimizer=optimizer,
            every=every,
            report=self.report,
            compiled=bool(self._request.compile),
        )
        self._decision = with_rehearsal(self._decision, rehearsal, self._problem)
        self.report, self.prediction = self._decision.report, self._decision.prediction
        return rehearsal
