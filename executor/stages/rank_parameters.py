"""Parameters of one rank's stages: made once where several of its stages read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import nn

from meshwright.costmodel.graph import Block, Graph
from meshwright.costmodel.sharding import RP, Assignment, DataLayout, Placement, R
from meshwright.executor import parameters
from meshwright.executor.backward import reached
from meshwright.executor.host_memory import use_cores
from meshwright.executor.lowering import State
from meshwright.executor.ranks import Place
from meshwright.executor.stages.checked import CheckedPlan
from meshwright.planner.plan import (
    Plan,
    PlanError,
    expert_weights,
    off_device,
    stages_of_parameters,
)


class RankParameters:
    """Makes the parameters of the stages of one rank, in the compute `dtype`, the optimizer's in
    the `kept` one.

    `shared` are those that several stages of this rank read, by value name; `tied` gives per FQN
    held by several stages of the plan its layout on each.
    """

    def __init__(
        self,
        checked: CheckedPlan,
        model: nn.Module,
        place: Place,
        dtype: torch.dtype,
        kept: torch.dtype,
    ) -> None:
        self.plan = plan = checked.plan
        self.graph = graph = checked.graph
        self.place = place
        self.dtype, self.kept = dtype, kept
        self.sources = dict(model.named_parameters())
        self.owners = stages_of_parameters(plan, graph)
        self.experts = expert_weights(graph)
        self.shared: dict[str, parameters.StageParameter] = {}
        self.homes: dict[str, parameters.Home] = {}
        self.away = set[str]()
        for stage in plan.stages:
            off = off_device(stage, graph)
            self.homes |= {v: "file" if v in off.files else "host" for v in off.states}
            self.away |= off.weights
        if self.homes:
            use_cores(place.device)
        if "file" in self.homes.values():
            parameters.keep_states_in_files()
        self.tied = _tied(plan, graph, checked.assignments)
        self._states: dict[str, State] = {}  # of the shared ones
        self._reached = reached(graph)

    def of_stage(
        self, k: int, blocks: Sequence[Block], stored: Mapping[str, State]
    ) -> tuple[parameters.StageParameter, ...]:
        """The parameters of stage k alone, in the order of the forward; those that other stages of
        this rank read, too, are put into `shared`.

        Raises `PlanError` where stages of one device group shard a parameter differently, or
        several stages hold experts that are shared out.
        """
        alone = []
        for value in dict.fromkeys(n for b in blocks for n in b.parameters):
            here = [j for j in self.owners[value] if j in self.place.stages]
            if value in self.shared:
                self._check_alike(value, here, stored[value])
                continue
            parameter = self._make(k, value, stored[value], gatherable=len(here) == 1)
            if len(here) == 1:
                alone.append(parameter)
            else:
                self.shared[value], self._states[value] = parameter, stored[value]
                self.expose(parameter)
        return tuple(alone)

    def expose(self, parameter: parameters.StageParameter) -> None:
        """Make the API's parameter: the user's own where every rank holds the whole model."""
        source = self.sources[parameter.fqn] if replicated(self.plan) else None
        parameters.expose(parameter, self.place, source)

    def _check_alike(self, value: str, here: Sequence[int], state: State) -> None:
        if self._states[value] != state:
            fqn = self.graph.parameters[value]
            raise PlanError(
                f"stages {here} lie on one device group and share {fqn!r}, sharded "
                f"{self._states[value][-1]} and {state[-1]}",
                place="plan",
                way_out="shard it alike in both",
            )

    def _make(
        self, k: int, value: str, state: State, *, gatherable: bool
    ) -> parameters.StageParameter:
        fqn, owners = self.graph.parameters[value], self.owners[value]
        alone = len(owners) == 1
        *outer, on_tensor = state
        experts = value in self.experts and self.place.exchange is not None
        if experts and not alone:
            raise PlanError(
                f"stages {list(owners)} share the experts {fqn!r}; legal "
                "with ep > 1: experts of one stage",
                place="plan",
                way_out="put their readers into one",
            )
        if experts and self.place.here.folded:
            on_tensor = Placement("S", 0)
        dtype = self.graph.values[value].dtype
        spec = parameters.ParameterSpec(
            value=value,
            fqn=fqn,
            placement=on_tensor if on_tensor.sharded else R,
            sum_data=RP in outer,
            sum_tensor=on_tensor == RP,
            sharing=self.plan.stages[k].sharing,
            dtype=dtype,
            kept=self.kept,
            shared_stages=owners,
            experts=experts,
            gatherable=gatherable and dtype == self.dtype,
            reached=value in self._reached,
            home=self.homes.get(value, "device") if alone else "device",  # copies step alike
            away=alone and value in self.away,
        )
        return parameters.make_parameter(spec, self.sources[fqn], self.place)


def replicated(plan: Plan) -> bool:
    """Whether every rank of a plan holds the whole model, on its device."""
    return len(plan.devices) == 1 and all(
        stage.tp == stage.ep == 1 and stage.parts(stage.shards) == 1 and not stage.host.states
        for stage in plan.stages
    )


def parameter_states(
    graph: Graph,
    blocks: Sequence[Block],
    chosen: Mapping[str, Assignment],
    outer: Sequence[DataLayout],
    sizes: Sequence[int],
) -> dict[str, State]:
    """State of each parameter of a stage: partial where every reader leaves it so, to be summed
    once per step; a parameter read in two ways is summed inside the graph. `outer` are the layouts
    on the other axes, of these `sizes`."""
    on_outer: list[dict[str, set[Placement]]] = [{} for _ in outer]
    on_tensor: dict[str, set[Placement]] = {}
    stored: dict[str, Placement] = {}
    for block in blocks:
        assignment = chosen[block.name]
        for op in block.ops:
            for i, value in enumerate(op.operands):
                if value in graph.parameters:
                    for states, layout in zip(on_outer, outer, strict=True):
                        states.setdefault(value, set()).add(layout.strategies[op.name].operands[i])
                    on_tensor.setdefault(value, set()).add(
                        assignment.strategies[op.name].operands[i]
                    )
        for value in block.parameters:
            stored.setdefault(value, assignment.states[value])
    return {
        value: (
            *_summed([states[value] for states in on_outer], sizes),
            RP if state == R and on_tensor[value] == {RP} else state,
        )
        for value, state in stored.items()
    }


def _summed(read: Sequence[set[Placement]], sizes: Sequence[int]) -> tuple[Placement, ...]:
    """The state of a parameter on the outer axes, by the states in which it is `read` on each: one
    sum is over all of them, so that it is partial on all or on none. A gradient that an axis has
    whole is then its first rank's, and one of a part of the parameter that part's."""
    rows, *tokens = read
    used = [states for states, size in zip(tokens, sizes[1:], strict=True) if size > 1]
    partial = rows == {RP} or (sizes[0] == 1 and any(states != {R} for states in used))
    return (RP if partial else R,) * len(read)


def _tied(
    plan: Plan, graph: Graph, assignments: Sequence[Mapping[str, Assignment]]
) -> dict[str, dict[int, parameters.TiedLayout]]:
    """FQN -> stage -> layout, of parameters held by several stages."""
    owners = stages_of_parameters(plan, graph)
    blocks = {block.name: block for block in graph.blocks}
    layouts: dict[str, dict[int, parameters.TiedLayout]] = {}
    for k, stage in enumerate(plan.stages):
        for name in stage.blocks:
            for value in blocks[name].parameters:
                if len(owners[value]) > 1:
                    state = assignments[k][name].states[value]
                    layout = parameters.TiedLayout(
                        placement=state if state.sharded else R, sharing=stage.sharing
                    )
                    layouts.setdefault(graph.parameters[value], {}).setdefault(k, layout)
    return layouts
