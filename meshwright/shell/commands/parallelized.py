"""The model that the command line names, planned as its flags say."""

from __future__ import annotations

import argparse
from dataclasses import fields, replace
from typing import TYPE_CHECKING, Any

from meshwright.shell.named import cluster_named, model_named
from meshwright.shell.progress import progress_shown
from meshwright.shell.terminal import say

if TYPE_CHECKING:
    from meshwright.model import ParallelModel
    from meshwright.planner.overrides import Overrides
    from meshwright.planner.report import Report
    from meshwright.planner.search import Search
    from meshwright.profiles.cluster import Cluster


def parallelized(
    args: argparse.Namespace, cluster: Cluster | None = None, **more: Any
) -> tuple[ParallelModel, Any]:
    """The planned model and its example inputs; `more` are arguments of `auto_parallelize`."""
    from meshwright.api import auto_parallelize

    cluster = cluster or cluster_named(args.cluster)  # before the model, which may take long
    model, arguments = arguments_of(args)
    plan = getattr(args, "plan", None)
    with progress_shown():
        result = auto_parallelize(model, cluster, plan=plan, **arguments, **more)
    return result, arguments["example_inputs"]


def named_report(args: argparse.Namespace, result: ParallelModel) -> Report:
    """The report of a result, with the model and the cluster as the command line names them, and
    that line."""
    given = {"module": args.model, "cluster": args.cluster, "command": args.line}
    return replace(result.report, made={**result.report.made, **given})


def searching(args: argparse.Namespace, cluster: Cluster, overrides: Overrides) -> Search:
    """The search that `parallelized` would run, or end with, which has not begun; with `--plan` all
    that a plan decides is decided."""
    from meshwright.api import Arguments, asked
    from meshwright.arguments import check_types
    from meshwright.plan_search import search_of, with_a_plan
    from meshwright.planner.overrides import plan_overrides
    from meshwright.planner.plan import Plan, graph_for

    model, arguments = arguments_of(args)
    if args.source:
        from meshwright.configurations import notes_of, question_of

        said, question = question_of(args.source, model, cluster, overrides.given(), **arguments)
        for note in notes_of(said):
            say(note)
        return with_a_plan(search_of(question.problem, question.request))
    check_types(model=model, cluster=cluster, overrides=overrides, plan=args.plan)
    question = asked(model, cluster, Arguments(overrides=overrides, **arguments))
    request = question.request
    if args.plan:
        plan, problem = Plan.load(args.plan), question.problem
        graph, _ = graph_for(plan, problem.graph, problem.factors)
        decided = plan_overrides(plan, graph)
        request = replace(request, overrides=decided)
    return with_a_plan(search_of(question.problem, request))


def arguments_of(args: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The model, and the arguments of `auto_parallelize` that flags give."""
    from meshwright.api import Arguments

    model, example, *rest = model_named(args.model)
    flags = {field.name: getattr(args, field.name, None) for field in fields(Arguments)}
    arguments = {name: value for name, value in flags.items() if value is not None}
    return model, {**arguments, "example_inputs": example, "loss_fn": rest[0] if rest else None}
