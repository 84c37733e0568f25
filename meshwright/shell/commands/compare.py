"""`meshwright compare`: one model planned for several clusters, in a table, and which to take."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from meshwright.planner.document import Document, Table
from meshwright.planner.overrides import Overrides
from meshwright.planner.plan import InfeasibleError, counted, seconds, sized
from meshwright.planner.report import Report
from meshwright.profiles.cluster import Cluster
from meshwright.shell import override_flags
from meshwright.shell.commands import flags
from meshwright.shell.commands.parallelized import parallelized
from meshwright.shell.named import CommandError, cluster_named
from meshwright.shell.terminal import Answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    flags.add_model(parser, several=True)
    flags.add_price(parser, action="append", dest="prices")
    parser.add_argument(
        "--by", choices=("time", "cost"), help="what chooses (default: cost where there are prices)"
    )
    parser.add_argument("--plan", help="plan file, priced on each cluster; else plans are searched")
    flags.add_search(parser)
    override_flags.add_arguments(parser)


def run(args: argparse.Namespace) -> Answer:
    clusters = {text: cluster_named(text) for text in args.cluster}
    overrides = override_flags.overrides_of(args)
    comparison = compared(
        {text: partial(_report, args, cluster, overrides) for text, cluster in clusters.items()},
        prices=args.prices or [],
        tokens=args.tokens,
        watts=args.watts,
        by=args.by,
    )
    code = 0 if comparison.chosen else 2
    return Answer(data=comparison.as_dict, text=comparison.document, code=code)


def _report(args: argparse.Namespace, cluster: Cluster, overrides: Overrides) -> Report:
    return parallelized(args, cluster, overrides=overrides)[0].report


@dataclass(frozen=True, slots=True, kw_only=True)
class Compared:
    """A row for each cluster, in the order given; `chosen` is the name of the one to take `by` time
    or cost, None where the model fits none."""

    rows: tuple[Mapping[str, Any], ...]
    by: str
    chosen: str | None

    def as_dict(self) -> dict[str, Any]:
        return {"rows": [dict(row) for row in self.rows], "by": self.by, "chosen": self.chosen}

    def __str__(self) -> str:
        return str(self.document())

    def document(self) -> Document:
        """The table."""
        heads = ["cluster", "devices", "step", "80 %", "rows/s", "tokens/s", "MFU", "memory"]
        priced = [key for key in _COSTS if any(key in row for row in self.rows)]
        heads += [*(_COSTS[key] for key in priced), "chosen", "plan"]
        lines = []
        for row in self.rows:
            mark = f"CHOSEN by {self.by}" if row["cluster"] == self.chosen else ""
            if row["plan"] is None:
                gaps = [""] * (len(heads) - 4)
                lines.append([row["cluster"], "", *gaps, mark, row["why"]])
                continue
            low, high = map(seconds, row["step_interval_s"])
            tokens = counted(row["tokens_per_s"]) if row["tokens_per_s"] else ""
            costs = [f"{row[key]:,.4g}" if key in row else "" for key in priced]
            lines.append([
                *(row["cluster"], str(row["devices"]), seconds(row["step_time_s"])),
                *(f"{low} to {high}", f"{row['rows_per_s']:.4g}", tokens, f"{row['mfu']:.1%}"),
                *(row["memory_verdict"], *costs, mark, row["plan"]),
            ])  # fmt: skip
        return Document((Table(heads=heads, rows=lines),))


_COSTS = {
    "price_per_step": "price/step",
    "price_per_million_tokens": "price/M tokens",
    "days": "days",
    "price": "price",
    "energy_kwh_per_step": "kWh/step",
    "energy_kwh": "kWh",
}


def compared(
    planned: Mapping[str, Callable[[], Report]],
    *,
    prices: Sequence[float],
    tokens: float | None,
    watts: float | None = None,
    by: str | None,
) -> Compared:
    """Plan for each cluster by name, and choose. One price is for all, else there is one for each.
    Raises ValueError where prices are missing for what is asked."""
    if len(prices) not in (0, 1, len(planned)):
        raise CommandError(
            f" was given {len(prices)} times for {len(planned)} clusters",
            place="--price",
            legal="once for all, or once for each, in their order",
        )
    if by == "cost" and not prices:
        raise CommandError(
            "no price was given",
            place="--by cost",
            legal="with --price MONEY, per device-hour",
            way_out="give one, or choose --by time",
        )
    hourly = [*prices] if len(prices) > 1 else [*prices, None][:1] * len(planned)
    rows = [
        _row(name, plan, {"price_per_hour": price, "tokens": tokens, "power_watts": watts})
        for (name, plan), price in zip(planned.items(), hourly, strict=True)
    ]
    by = by or ("cost" if prices else "time")
    fitting = [row for row in rows if row["plan"] is not None]
    key = "step_time_s" if by == "time" else "price_per_step"
    chosen = str(min(fitting, key=lambda row: row[key])["cluster"]) if fitting else None
    return Compared(rows=tuple(rows), by=by, chosen=chosen)


def _row(
    name: str, plan: Callable[[], Report], costs: Mapping[str, float | None]
) -> dict[str, Any]:
    try:
        report = plan()
    except InfeasibleError as error:
        most = max(error.shortfall_bytes, default=0.0)
        why = f"does not fit: the fullest stage lacks {sized(most)}"
        return {"cluster": name, "plan": None, "why": why, "error": str(error)}
    keys = ("step_time_s", "step_interval_s", "rows_per_s", "tokens_per_s", "mfu", "memory_verdict")
    return {
        "cluster": name,
        "devices": report.plan.num_ranks,
        **{key: report.summary[key] for key in keys},
        **(report.cost(**costs) or {}),
        "plan": report.summary["chosen"],
    }
