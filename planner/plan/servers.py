"""Parameter servers of a plan: which keeps what, and the models that they can't serve."""

from __future__ import annotations

from collections.abc import Mapping

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.operators import Problem, owners_of
from meshwright.planner.decisions import DECISIONS
from meshwright.planner.plan.plan import Plan
from meshwright.planner.plan.ranges import PlanError
from meshwright.planner.plan.words import kept_together


def server_of(graph: Graph, servers: int) -> Mapping[str, int]:
    """The server of each trained parameter, by value: tensors whole, tied ones once, the largest
    first to the server that has the fewest elements."""
    trained = [v for v in graph.parameters if graph.values[v].requires_grad]
    owners = owners_of([float(graph.values[v].numel) for v in trained], servers)
    return dict(zip(trained, owners, strict=True))


def check_servers(plan: Plan, graph: Graph) -> None:
    """Raise `PlanError` for servers that can't serve a plan, or a model."""
    for name in ("staleness", "servers"):
        if not DECISIONS[name].accepts(value := getattr(plan, name)):
            raise PlanError.refused(f"plan: {name}", value, legal=DECISIONS[name].values)
    if not plan.servers:
        return
    trained = sum(graph.values[v].requires_grad for v in graph.parameters)
    if plan.servers > trained:
        raise PlanError(
            f"={plan.servers}, and the model has {trained} trained tensors, which stay whole",
            place="plan: servers",
            legal=f"0 to {trained}",
            way_out="plan with fewer servers",
        )
    if why := why_not_served(graph):
        raise PlanError(
            f"={plan.servers}: {why}",
            place="plan: servers",
            legal="0",
            way_out="plan without servers",
        )


def why_unserved(problem: Problem) -> str:
    """Why servers can't be in a problem, beside its graph; empty where they can."""
    if problem.stepped.matrices:
        return f"{problem.optimizer} steps matrices whole, among the ranks that hold them"
    if problem.meetings:
        return f"{kept_together(problem.meetings)}, and each worker has its own rows"
    return ""


def why_not_served(graph: Graph) -> str:
    """Why workers that never meet can't train a model; empty where they can."""
    if graph.updates:
        buffers = sorted(graph.buffers[value] for value in graph.updates)
        return f"the forward writes buffers, of which each worker would have its own: {buffers[0]}"
    if graph.weight_writes:
        return "the forward writes weights, which are the servers'"
    if graph.known:
        return "the forward asks for values of the batch, of which a worker has its rows alone"
    return ""
