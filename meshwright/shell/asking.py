"""Commands that ask and change nothing: diff, explain, compare, fit, catalog. They get what plans
and searches from the command line (`Ask`)."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from meshwright.planner.plan import counted
from meshwright.planner.report import Document, Report
from meshwright.planner.search import Search
from meshwright.profiles.cluster import Cluster
from meshwright.shell import catalog_listing, comparing, differing, explaining, fitting
from meshwright.shell.named import add_price, cluster_named
from meshwright.shell.progress import progress_shown

COMMANDS = ("diff", "explain", "compare", "fit", "catalog")
SAME, DIFFERENT = 0, 4


class Planner(Protocol):
    """The report of the command line's model on a cluster; `more` are further arguments of
    `auto_parallelize`."""

    def __call__(self, args: argparse.Namespace, cluster: Cluster, **more: Any) -> Report: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Ask:
    """What the commands take from the command line: it plans, makes a search, adds the flags of
    models and searches, and shows a result."""

    report: Planner
    searching: Callable[[argparse.Namespace, Cluster], Search]
    add_model: Callable[..., None]
    add_search: Callable[[argparse.ArgumentParser], None]
    show: Callable[[str | Document], None]


def add_report(parser: argparse.ArgumentParser) -> None:
    """Flags of what a report says."""
    parser.add_argument(
        "--full",
        action="store_true",
        help="print everything: every family, what overrides cost, advice, assumptions, proofs",
    )
    add_price(parser)


def asked_costs(args: argparse.Namespace) -> dict[str, float | None]:
    """What the flags of `add_price` ask of `Report.cost`; empty where nothing is asked."""
    asked = {"tokens": args.tokens, "price_per_hour": args.price, "power_watts": args.watts}
    return asked if any(value is not None for value in asked.values()) else {}


def _counted(x: float) -> str:
    """A number of at least three digits that count, without an exponent where it has more."""
    return f"{x:,.0f}" if x >= 100 else f"{x:.3g}"


def cost_text(cost: Mapping[str, Any]) -> str:
    """What a run costs, as `Report.cost` has it."""
    lines = [f"  {cost['device_hours_per_step']:.4g} device-hours a step"]
    if "price_per_step" in cost:
        lines[0] += f", {cost['price_per_step']:.4g} at the price given"
    if "energy_kwh_per_step" in cost:
        power = f"{_counted(cost['power_watts'])} W a device as given"
        lines[0] += f", {cost['energy_kwh_per_step']:.4g} kWh at {power}"
    if "tokens" in cost:
        lines.append(
            f"  {counted(cost['tokens'])} tokens: {cost['steps']:,.0f} steps, "
            f"{_counted(cost['days'])} days, {_counted(cost['device_hours'])} device-hours"
        )
    if "price" in cost:
        per_million = cost["price_per_million_tokens"]
        lines[-1] += f", {_counted(cost['price'])} ({per_million:.3g} per million tokens)"
    if "energy_kwh" in cost:
        per_million = cost["energy_kwh_per_million_tokens"]
        lines[-1] += f", {_counted(cost['energy_kwh'])} kWh ({per_million:.3g} per million tokens)"
    return "\n".join(["Cost (of steps that take what is predicted)", *lines])


def add_commands(commands: Any, common: argparse.ArgumentParser, ask: Ask) -> None:
    """The commands of `COMMANDS`."""
    diff = commands.add_parser(
        "diff", parents=[common], help="what differs between two plans, or reports: exit 0 or 4"
    )
    diff.add_argument("a", metavar="A", help="plan file, or a report (`plan --json`)")
    diff.add_argument("b", metavar="B", help="the same of another plan")
    diff.set_defaults(command=lambda args: _diff(args, ask))

    explain = commands.add_parser(
        "explain", parents=[common], help="why operators are split as they are on the tensor axis"
    )
    ask.add_model(explain)
    explain.add_argument("glob", help="modules, operators (with `:`) or parameters")
    explain.add_argument("--plan", help="plan file; without it a plan is searched")
    ask.add_search(explain)
    explain.set_defaults(command=lambda args: _explain(args, ask))

    compare = commands.add_parser(
        "compare", parents=[common], help="plan for several clusters, and choose one"
    )
    ask.add_model(compare, several=True)
    add_price(compare, action="append", dest="prices")
    compare.add_argument(
        "--by", choices=("time", "cost"), help="what chooses (default: cost where there are prices)"
    )
    ask.add_search(compare)
    compare.set_defaults(command=lambda args: _compare(args, ask))

    fit = commands.add_parser(
        "fit", parents=[common], help="whether a model fits, up to which batch and sequence"
    )
    ask.add_model(fit)
    ask.add_search(fit)
    fit.set_defaults(command=lambda args: _fit(args, ask))

    catalog = commands.add_parser(
        "catalog", parents=[common], help="the hardware that is known, and where numbers are from"
    )
    catalog.add_argument("name", nargs="?", help="a device or node: each of its numbers")
    catalog.set_defaults(command=lambda args: _catalog(args, ask))


def _show(args: argparse.Namespace, ask: Ask, data: Any, text: str | Document) -> None:
    ask.show(json.dumps(data, indent=2) if args.json else text)


def _diff(args: argparse.Namespace, ask: Ask) -> int:
    found = differing.between(args.a, args.b)
    _show(args, ask, found.as_dict(), found.document())
    return DIFFERENT if found else SAME


def _explain(args: argparse.Namespace, ask: Ask) -> int:
    report = ask.report(args, cluster_named(args.cluster), plan=args.plan)
    found = explaining.explained(report, args.glob)
    _show(args, ask, [each.as_dict() for each in found], explaining.text(found, report.plan))
    return 0


def _compare(args: argparse.Namespace, ask: Ask) -> int:
    clusters = {text: cluster_named(text) for text in args.cluster}
    found = comparing.compared(
        {text: partial(ask.report, args, cluster) for text, cluster in clusters.items()},
        prices=args.prices or [],
        tokens=args.tokens,
        watts=args.watts,
        by=args.by,
    )
    _show(args, ask, found.as_dict(), found.document())
    return 0 if found.chosen else 2


def _fit(args: argparse.Namespace, ask: Ask) -> int:
    with progress_shown():
        found = fitting.fit(ask.searching(args, cluster_named(args.cluster)))
    _show(args, ask, found.as_dict(), str(found))
    return 2 if found.verdict == fitting.NOT else 0


def _catalog(args: argparse.Namespace, ask: Ask) -> int:
    data, text = catalog_listing.entry(args.name) if args.name else catalog_listing.every()
    _show(args, ask, data, text)
    return 0
