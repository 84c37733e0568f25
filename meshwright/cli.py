"""`meshwright plan | show | report | run | rehearse | profile` and the questions of
`shell/asking.py`: the API from the shell.

stdout carries the result, stderr the progress. Exit 0: done, 1: error, or ranks of a rehearsal that
don't match, 2: no plan fits, or the rehearsed one doesn't, 4: what `diff` compares differs.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import traceback
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import torch

from meshwright import model_flags, rehearsing
from meshwright.api import auto_parallelize, problem_of
from meshwright.arguments import check_search, check_values, default_precision, margin_of, unwrapped
from meshwright.decisions import check_units, in_tf32
from meshwright.executor.ranks import launch
from meshwright.executor.rehearsal import Rehearsal
from meshwright.model import ParallelModel
from meshwright.planner.overrides import Overrides
from meshwright.planner.plan import InfeasibleError, Plan, describe, slower
from meshwright.planner.report import Document, Part, Report, sensitivity_parts
from meshwright.planner.search import Search
from meshwright.profiles.cluster import Cluster
from meshwright.running import repeated
from meshwright.shell import asking, override_flags, page_command, profile_run, progress_shown
from meshwright.shell.convert import add_command as add_convert
from meshwright.shell.named import Parser, UserCodeError, check_writable, cluster_named, model_named
from meshwright.shell.terminal import show, stdout_is_the_result
from meshwright.shown_plan import plan_text
from meshwright.traced import TracedModel

MORE_SEARCHES = 3  # for a plan that fits by its rehearsal


def perform(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code. Raises what goes wrong."""
    args = _parser().parse_args(argv)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO if args.verbose else logging.WARNING)
    try:
        for name in ("output", "trace", "timeline", "export"):
            check_writable(f"--{name}", getattr(args, name, None))
        code: int = args.command(args)
        return code
    except InfeasibleError as error:
        if args.json:
            _print(json.dumps(_infeasible(error), indent=2))
        raise


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit code."""
    try:
        with stdout_is_the_result():
            return perform(argv)
    except InfeasibleError as error:
        _say(f"infeasible: {error}")
        return 2
    except UserCodeError as error:
        traceback.print_exception(error.__cause__)
        _say(f"error: {error}")
        return 1
    except (ValueError, RuntimeError, ImportError, OSError) as error:
        _say(f"error: {error}")
        return 1


def _infeasible(error: InfeasibleError) -> dict[str, Any]:
    return {
        "infeasible": str(error),
        "shortfall_bytes": list(error.shortfall_bytes),
        "relaxations": [asdict(found) for found in error.relaxations],
    }


def _parser() -> argparse.ArgumentParser:
    parser = Parser(
        prog="meshwright",
        description="Decides how to train a PyTorch model on a cluster, says why, and runs it.",
    )
    common = argparse.ArgumentParser(add_help=False)
    common.add_argument("--json", action="store_true", help="print JSON instead of text")
    common.add_argument("--verbose", action="store_true", help="log progress to stderr")
    commands = parser.add_subparsers(
        required=True,
        metavar=" | ".join(
            ("plan", "show", "report", "run", "rehearse", "profile", "convert", *asking.COMMANDS)
        ),
    )
    _add_plan(commands, common)
    _add_show(commands, common)
    page_command.add_command(commands, common, PAGE)
    _add_run(commands, common)
    _add_rehearse(commands, common)
    _add_profile(commands, common)
    add_convert(commands, common, _print)
    asking.add_commands(commands, common, ASK)
    return parser


def _add_plan(commands: Any, common: argparse.ArgumentParser) -> None:
    plan = commands.add_parser(
        "plan", parents=[common], help="search for a plan and print the report"
    )
    model_flags.add_model(plan)
    plan.add_argument("-o", "--output", help="write the plan to this file")
    plan.add_argument("--trace", help="write the simulated step as a Chrome trace")
    plan.add_argument("--html", metavar="FILE", help="write the report as a page")
    plan.add_argument(
        "--sensitivity",
        action="store_true",
        help="say which change of the cluster would flip the decision",
    )
    asking.add_report(plan)
    plan.add_argument(
        "--rehearse",
        action="store_true",
        help="search what `run` can run, run the chosen plan's steps for ranks that are not there, "
        "and say what doesn't match",
    )
    model_flags.add_search(plan)
    override_flags.add_arguments(plan)
    plan.set_defaults(command=_plan)


def _add_show(commands: Any, common: argparse.ArgumentParser) -> None:
    show = commands.add_parser("show", parents=[common], help="print a plan file")
    show.add_argument("plan")
    show.set_defaults(command=_show)


def _add_run(commands: Any, common: argparse.ArgumentParser) -> None:
    run = commands.add_parser(
        "run", parents=[common], help="train for a few steps; launch it with torchrun"
    )
    model_flags.add_model(run)
    run.add_argument("--plan", help="plan file; without it a plan is searched")
    run.add_argument(
        "--steps", type=model_flags.positive, default=10, help="optimizer steps (default 10)"
    )
    run.add_argument("--lr", type=float, default=1e-3)
    run.add_argument(
        "--weights",
        metavar="PATH",
        help="a torch.save file, safetensors or a checkpoint; a model on meta is initialised else",
    )
    run.add_argument(
        "--compile", action="store_true", help="run the model's blocks through torch.compile"
    )
    run.add_argument(
        "--timeline", metavar="FILE", help="time the last step, and write it as a Chrome trace"
    )
    model_flags.add_search(run)
    run.set_defaults(command=_run)


def _add_rehearse(commands: Any, common: argparse.ArgumentParser) -> None:
    rehearsal = commands.add_parser(
        "rehearse", parents=[common], help="run a plan's steps for ranks that are not there"
    )
    model_flags.add_model(rehearsal)
    rehearsing.add_arguments(rehearsal)
    rehearsal.set_defaults(command=_rehearse)


def _add_profile(commands: Any, common: argparse.ArgumentParser) -> None:
    profile = commands.add_parser(
        "profile", parents=[common], help="measure this machine for the plans of a model"
    )
    model_flags.add_model(profile, optional=True)
    profile_run.add_arguments(profile)
    profile.set_defaults(command=_profile)


def _parallelize(
    args: argparse.Namespace, cluster: Cluster | None = None, **more: Any
) -> tuple[ParallelModel, Any]:
    cluster = cluster or cluster_named(args.cluster)  # before the model, which may take long
    model, example, *rest = model_named(args.model)
    with progress_shown():
        result = auto_parallelize(
            model,
            cluster,
            example_inputs=example,
            global_batch_size=args.batch,
            loss_fn=rest[0] if rest else None,
            precision=args.precision,
            optimizer=args.optimizer,
            target=args.target,
            profile=not args.no_profile,
            objective=args.objective,
            memory_margin=args.memory_margin,
            time_limit_s=args.time_limit,
            expert_imbalance=args.expert_imbalance,
            rows_meet=args.rows_meet,
            allow=args.allow,
            tf32=args.tf32,
            **more,
        )
    return result, example


def _report(args: argparse.Namespace, cluster: Cluster, **more: Any) -> Report:
    return _parallelize(args, cluster, **more)[0].report


def _searching(args: argparse.Namespace, cluster: Cluster) -> Search:
    """A search for the command line's model, which has not begun."""
    model, example, *rest = model_named(args.model)
    precision = args.precision or default_precision(cluster)
    check_values(args.batch, precision, args.optimizer, args.time_limit, args.tf32)
    check_units(precision, cluster)
    check_search(args.objective, args.memory_margin, args.rows_meet, cluster)
    problem = problem_of(
        TracedModel(unwrapped(model), example, rest[0] if rest else None, precision),
        cluster,
        precision=precision,
        optimizer=args.optimizer,
        target=args.target or "eager",
        expert_imbalance=args.expert_imbalance,
        profile=not args.no_profile,
        rows_meet=args.rows_meet,
    )
    return Search(
        replace(in_tf32(problem) if args.tf32 else problem, allow=tuple(args.allow)),
        args.batch,
        Overrides(),
        memory_margin=margin_of(args.memory_margin),
        objective=args.objective,
        time_limit_s=args.time_limit,
    )


def _plan(args: argparse.Namespace) -> int:
    overrides = override_flags.overrides_of(args)
    cluster = cluster_named(args.cluster)
    result, _ = _parallelize(args, cluster, overrides=overrides)
    if not args.rehearse:
        _write_plan(args, result)
        _print_report(args, result.report)
        return 0
    try:
        result, found = _rehearsed(args, result, overrides, cluster)
    except ValueError:
        _write_plan(args, result)
        _print_report(args, result.report)
        raise
    _write_plan(args, result)
    _print_report(args, result.report, found.line)
    return _judged(found, result.report)


def _rehearsed(
    args: argparse.Namespace, result: ParallelModel, overrides: Overrides, cluster: Cluster
) -> tuple[ParallelModel, Rehearsal]:
    """The plan with its rehearsal. Where that does not fit, the next best one that does: with as
    much memory free as the rehearsal took more than the price; the first one where none does."""
    margin = margin_of(args.memory_margin)
    first, of_first = result, result.rehearse()
    found = of_first
    for _ in range(MORE_SEARCHES):
        if rehearsing.exit_code(found, result.report) != 2:
            break
        margin = rehearsing.margin_needed(result.prediction, margin, cluster)
        _say(
            f"rehearsed, and does not fit: {result.report.memory}; "
            f"searching again with memory_margin={margin:.3f}"
        )
        try:
            with progress_shown():
                result = result.replan(
                    overrides, memory_margin=margin, time_limit_s=args.time_limit
                )
        except ValueError:  # none fits any more
            break
        found = result.rehearse()
    if rehearsing.exit_code(found, result.report) == 2:
        return first, of_first
    if result is not first:
        more = result.prediction.step_time_s / first.prediction.step_time_s - 1
        _say(
            f"the plan chosen first, {describe(first.plan)}, does not fit by its rehearsal; "
            f"this one does: {slower(more)} a step"
        )
    return result, found


def _write_plan(args: argparse.Namespace, result: ParallelModel) -> None:
    if args.output:
        result.plan.save(args.output)
        _say(f"plan written to {args.output}")
    if args.trace:
        result.report.trace(args.trace)


def _print_report(args: argparse.Namespace, report: Report, last: str = "") -> None:
    costs = asking.asked_costs(args)
    with progress_shown():  # what was deferred takes seconds
        data = report.to_dict() if args.json else {}
        text: list[list[Part]] = [] if args.json else [[*report.document(full=args.full).parts]]
        if costs:
            data["cost"] = dict(report.cost(**costs) or {})
            text.append([asking.cost_text(data["cost"])])
        if args.sensitivity:
            data["sensitivity"] = [dict(row) for row in report.sensitivity()]
            text.append(sensitivity_parts(data["sensitivity"]))
        if args.html:
            report.html(args.html, sensitivity=args.sensitivity, **costs)
    if args.html:
        _say(f"page written to {args.html}")
    _print(json.dumps(data, indent=2) if args.json else Document.of(*text, [last] if last else []))


def _show(args: argparse.Namespace) -> int:
    plan = Plan.load(args.plan)
    if args.json:
        _print(plan.to_json())
        return 0
    _print(plan_text(plan))
    return 0


def _run(args: argparse.Namespace) -> int:
    cluster = cluster_named(args.cluster)
    with launch.distributed(cluster.backend):
        result, example = _parallelize(args, plan=args.plan, compile=args.compile)
        if args.weights:
            with progress_shown():
                result.load_weights(args.weights)
        elif not result.runtime.loaded:
            result.init_weights()
        batch = repeated(example, args.batch)
        optimizer = torch.optim.AdamW(result.parameters(), lr=args.lr)
        losses, timed = [], None
        for step in range(args.steps):
            optimizer.zero_grad()
            if args.timeline and step + 1 == args.steps:
                timed = result.timeline(args.timeline, batch)
            loss = timed.loss if timed else result.train_step(batch)
            losses.append(loss.item())
            optimizer.step()
            if launch.rank() == 0:
                _say(f"step {step + 1}/{args.steps}: loss {losses[-1]:.4f}")
        if launch.rank() == 0:
            text = f"loss {losses[0]:.4f} -> {losses[-1]:.4f}"
            _print(json.dumps({"losses": losses}) if args.json else text)
            if timed:
                _say(str(timed))
    return 0


def _profile(args: argparse.Namespace) -> int:
    cluster = cluster_named(args.cluster)
    precision = args.precision or default_precision(cluster)
    found = profile_run.profile(args, cluster, precision, say=_say)
    _print(json.dumps(found.to_dict(), indent=2) if args.json else str(found))
    return 0


def _rehearse(args: argparse.Namespace) -> int:
    result, _ = _parallelize(args, plan=args.plan)
    found = result.rehearse(every=args.every)
    _print(json.dumps(rehearsing.as_data(found), indent=2) if args.json else str(found))
    return _judged(found, result.report)


def _judged(found: Rehearsal, report: Report) -> int:
    """The exit code of a rehearsal, with the reason on stderr."""
    for mismatch in found.mismatches:
        _say(f"mismatch: {mismatch}")
    code = rehearsing.exit_code(found, report)
    if code == 2:
        _say(f"infeasible: the plan was rehearsed, and does not fit: {report.memory}")
    return code


def _print(text: str | Document) -> None:
    show(text, colour=isinstance(text, Document) or text[:1] not in "[{")


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")


def _priced(args: argparse.Namespace, plan: str) -> Report:
    return _parallelize(args, plan=plan)[0].report


PAGE = page_command.Page(
    report=_priced, add_model=model_flags.add_model, add_prices=model_flags.add_prices, said=_say
)
ASK = asking.Ask(
    report=_report,
    searching=_searching,
    add_model=model_flags.add_model,
    add_search=model_flags.add_search,
    show=_print,
)

if __name__ == "__main__":
    sys.exit(main())
