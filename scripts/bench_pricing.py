"""Plans priced per second: GPT-3 175B, traced once, on 128 A100 under every mix of degrees.

    python -m scripts.bench_pricing

`cold` prices each plan for the first time, `warm` again: what plans have in common (blocks under
the same mesh and rows, schedules of the same shape) is remembered by the `Evaluator`. CPU seconds.
"""

from __future__ import annotations

import time

from meshwright.costmodel.operators import Problem
from meshwright.planner.plan import Plan
from meshwright.planner.pricing import Evaluator
from scripts.published import make_plan, read_row, traced

MODEL = {
    "model": "GPT-3", "layers": "96", "hidden": "12288", "heads": "96", "vocab": "51200",
    "seq_len": "2048", "gpu": "A100-80GB-SXM", "num_gpus": "128", "precision": "bf16",
    "framework": "Megatron-Core", "global_batch": "512", "vp": "1",
}  # fmt: skip


def rows() -> list[dict[str, str]]:
    """Every mix of degrees, micro-batch, ZeRO and recompute that fills 128 GPUs."""
    return [
        MODEL
        | {
            "tp": str(tp), "pp": str(pp), "dp": str(128 // pp // tp), "micro_batch": str(micro),
            "zero_stage_fsdp": zero, "recompute": recompute,
        }
        for pp in (2, 4, 8, 16)
        for tp in (1, 2, 4, 8)
        for micro in (1, 2, 4)
        for zero in ("0", "1", "3")
        for recompute in ("none", "full")
    ]  # fmt: skip


def main() -> None:
    setups = [read_row(row) for row in rows()]
    started = time.process_time()
    graph, table = traced(setups[0].dims, "bf16")
    print(f"traced: {len(graph.ops)} operators in {time.process_time() - started:.1f} s")
    plans: list[Plan] = [make_plan(setup, graph) for setup in setups]
    problem = Problem(
        graph=graph,
        factors=table,
        cluster=setups[0].cluster,
        precision="bf16",
        target=setups[0].framework.target,
    )
    evaluator = Evaluator(problem)
    for name in ("cold", "warm"):
        started = time.process_time()
        for plan in plans:
            evaluator.price(plan)
        seconds = time.process_time() - started
        print(f"{name}: {len(plans)} plans, {len(plans) / seconds:.0f} plans/s")


if __name__ == "__main__":
    main()
