"""`meshwright show`: a plan file in words."""

from __future__ import annotations

import argparse

from meshwright.planner.plan import (
    Plan,
    compress_names,
    compress_ranks,
    decision_words,
    describe,
    made_words,
)
from meshwright.shell.terminal import Answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", help="plan file")


def run(args: argparse.Namespace) -> Answer:
    plan = Plan.load(args.plan)
    return Answer(data=plan.to_json, text=lambda: plan_text(plan))


def plan_text(plan: Plan) -> str:
    """The plan in a line, and each stage in one, followed by its shardings."""
    name = f"{plan.made['model']}, " if "model" in plan.made else ""
    made = f", planned {made_words(plan.made)}" if plan.made else ""
    lines = [
        f"{describe(plan)}; global batch {plan.global_batch_size}, {plan.precision}, "
        f"model {name}{plan.model}{made}"
    ]
    for k, stage in enumerate(plan.stages):
        mesh, *others = decision_words(stage).items()
        words = [mesh[1], *(f"{column} {text}" for column, text in others)]
        lines.append(
            f"  stage {k}: blocks {', '.join(compress_names(stage.blocks))} on ranks "
            f"{compress_ranks(stage.ranks)}, {', '.join(words)}"
        )
        lines += [f"    {name}: {text}" for name, text in stage.shardings.items()]
    return "\n".join(lines)
