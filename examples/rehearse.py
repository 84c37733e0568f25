"""Prove a plan for 16 GPUs on this machine, without one: its step on tensors without values.

    python examples/rehearse.py

One rank of each kind is run, with the optimizer and a checkpoint. The rehearsal shows that the
collectives and messages of all ranks match, what each rank's peak is, and a second estimate of the
step.
"""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright import Cluster, Overrides, auto_parallelize


def main() -> None:
    with torch.device("meta"):
        config = LlamaConfig(
            vocab_size=32000, hidden_size=1024, intermediate_size=2816, num_hidden_layers=8,
            num_attention_heads=16, num_key_value_heads=8,
        )  # fmt: skip
        model = LlamaForCausalLM(config)
    ids = torch.empty(2, 1024, dtype=torch.long, device="meta")
    cluster = Cluster.from_catalog("h100-sxm", num_nodes=2)
    result = auto_parallelize(
        model,
        cluster,
        example_inputs={"input_ids": ids, "labels": ids},
        global_batch_size=64,
        overrides=Overrides(pp=2, tp=2),
    )
    rehearsal = result.rehearse()
    print(rehearsal)
    print(f"{len(rehearsal.mismatches)} mismatches")
    print(result.prediction.memory_verdict(cluster))


if __name__ == "__main__":
    main()
