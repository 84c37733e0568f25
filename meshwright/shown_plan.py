"""A plan in words, as `meshwright show` prints it."""

from __future__ import annotations

from meshwright.planner.plan import Plan, compress_names, compress_ranks, decision_words, describe


def plan_text(plan: Plan) -> str:
    """The plan in a line, and each stage in one, followed by its shardings."""
    lines = [
        f"{describe(plan)}; global batch {plan.global_batch_size}, {plan.precision}, "
        f"model {plan.model}"
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
