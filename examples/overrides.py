"""Plan for hardware that is not here, then compare with common plans forced by overrides.

    python examples/overrides.py [NODES]

The model is a Llama of 8 B parameters, the cluster nodes of 8 H100. The model is on meta: no weight
is made, and no GPU is needed. Every line is the best plan under one override; all other decisions
are still optimised.
"""

from __future__ import annotations

import sys

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright import Cluster, InfeasibleError, OverrideError, Overrides, auto_parallelize

LENGTH, ROWS_PER_DEVICE = 4096, 4
FORCED = {
    "tensor parallelism within the node": Overrides(tp=8, pp=1),
    "plain FSDP": Overrides(tp=1, pp=1, zero=3),
    "a pipeline, 1F1B": Overrides(pp=4, schedule="1f1b"),
    "every block recomputed": Overrides(recompute="full"),
    "a third of a head": Overrides(tp=3),
}


def main() -> None:
    cluster = Cluster.from_catalog("h100-sxm", num_nodes=int((*sys.argv, "1")[1]))
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128256,
                hidden_size=4096,
                intermediate_size=14336,
                num_hidden_layers=32,
                num_attention_heads=32,
                num_key_value_heads=8,
            )
        )
    ids = torch.empty(2, LENGTH, dtype=torch.long, device="meta")
    result = auto_parallelize(
        model,
        cluster,
        example_inputs={"input_ids": ids, "labels": ids},
        global_batch_size=ROWS_PER_DEVICE * cluster.num_devices,
    )
    print(result.report)
    best_s = result.prediction.step_time_s
    for name, overrides in FORCED.items():
        try:
            step_s = result.replan(overrides).prediction.step_time_s
            print(f"{name}: {step_s:.3f} s a step, {step_s / best_s - 1:+.1%}")
        except (OverrideError, InfeasibleError) as error:
            print(f"{name}: {error}")


if __name__ == "__main__":
    main()
