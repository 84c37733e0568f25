"""A plan in words, as `meshwright show` prints it."""

from __future__ import annotations

from meshwright.planner.plan import (
    Plan,
    compress_names,
    compress_ranks,
    describe,
    mesh_words,
    recompute_words,
)


def plan_text(plan: Plan) -> str:
    """The plan in a line, and each stage in one, followed by its shardings."""
    lines = [
        f"{describe(plan)}; global batch {plan.global_batch_size}, {plan.precision}, "
        f"model {plan.model}"
    ]
    for k, stage in enumerate(plan.stages):
        lines.append(
            f"  stage {k}: blocks {', '.join(compress_names(stage.blocks))} on ranks "
            f"{compress_ranks(stage.ranks)}, {mesh_words(stage)}, ZeRO-{stage.zero}"
            f"{f' within {stage.dp_shard} ranks' if stage.dp_shard else ''}"
            f"{f' with secondary shards among {stage.hpz}' if stage.hpz else ''}"
            f"{f', quantised {stage.quantized}' if stage.quantized != 'none' else ''}, "
            f"recompute {recompute_words(stage)}"
        )
        lines += [f"    {name}: {text}" for name, text in stage.shardings.items()]
    return "\n".join(lines)
