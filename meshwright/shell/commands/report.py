"""`meshwright report`: the page of a plan, or of a report as data."""

from __future__ import annotations

import argparse
from typing import Any

from meshwright.planner.page import SCHEMA, check_installed, render_page
from meshwright.planner.plan import Plan
from meshwright.profiles.inputs import FileError, shown, write_text
from meshwright.shell.commands import flags
from meshwright.shell.commands.parallelized import named_report, parallelized
from meshwright.shell.named import CommandError, no_report, saved_json
from meshwright.shell.terminal import say

WAY_OUT = "`meshwright plan --json` writes a report, `meshwright plan -o FILE` a plan"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The model is needed for a plan alone."""
    parser.add_argument("plan", help="plan file, or what `meshwright plan --json` printed")
    parser.add_argument("-o", "--output", required=True, help="write the page to this file")
    flags.add_price(parser)
    flags.add_model(parser, optional=True)
    flags.add_prices(parser)


def run(args: argparse.Namespace) -> None:
    check_installed()
    data = report_data(args.plan)
    if data is None:
        fill_from_plan(args)
        report = named_report(args, parallelized(args)[0])
        report.html(args.output, sensitivity=False, **flags.asked_costs(args))
    else:
        write_page(data, args)
    say(f"page written to {args.output}")


def report_data(path: str) -> dict[str, Any] | None:
    """The data of a report; None for a plan file, which `Plan.load` reads. Raises ValueError for a
    report of another schema, or one without what a page shows."""
    data = saved_json(path)
    if not isinstance(data, dict) or "schema" not in data:
        return None
    if data["schema"] != SCHEMA or "device_groups" not in data:
        raise FileError(
            f"schema {shown(data['schema'])}",
            place=f"report {path!r}",
            legal=f"{SCHEMA}, with the data of the rank that priced the plan",
            way_out=WAY_OUT,
        )
    return data


def write_page(data: dict[str, Any], args: argparse.Namespace) -> None:
    """The page of a report that was read. Raises ValueError for what a report can't answer."""
    if flags.asked_costs(args):
        raise CommandError(
            "--tokens, --price and --watts are for plans, whose prices are found anew",
            place=f"report {args.plan!r}",
            legal="a report alone",
            way_out="give the plan and its model, or leave them out",
        )
    with no_report(args.plan):
        page = render_page(data)
    write_text(args.output, page, "--output")


def fill_from_plan(args: argparse.Namespace) -> None:
    """Rows and precision as the plan has them, where they are not given. Raises `PlanError`, and
    ValueError without a model."""
    plan = Plan.load(args.plan)
    if args.model is None:
        raise CommandError(
            "a plan has no prices",
            place=f"report {args.plan!r}",
            legal="a report, or a plan with its model",
            way_out="name its model, module:function, and its --cluster, or give a report; "
            + WAY_OUT,
        )
    args.global_batch_size = args.global_batch_size or plan.global_batch_size
    args.precision = args.precision or plan.precision
