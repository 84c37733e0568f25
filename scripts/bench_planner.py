"""Time of every planning phase for models of published size, without a weight or a GPU.

    python scripts/bench_planner.py [gpt2 | llama-8b | gpt3-64 | gpt3-1024] ...

CPU seconds of this process; the plan, its predicted step and MFU beside them.
"""

from __future__ import annotations

import resource
import sys
import time
from collections.abc import Callable

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from costmodel.factors import analyse
from planner.blocks import cut_blocks
from planner.overrides import Overrides
from planner.report import describe, seconds
from planner.search import Search
from planner.trace import trace
from profiles.cluster import Cluster


def gpt(layers: int, hidden: int, heads: int, vocabulary: int, length: int) -> torch.nn.Module:
    with torch.device("meta"):
        config = GPT2Config(n_layer=layers, n_embd=hidden, n_head=heads, n_positions=length)
        config.vocab_size = vocabulary
        return GPT2LMHeadModel(config)


def llama_8b() -> torch.nn.Module:
    with torch.device("meta"):
        return LlamaForCausalLM(
            LlamaConfig(
                vocab_size=128256, hidden_size=4096, intermediate_size=14336, num_hidden_layers=32,
                num_attention_heads=32, num_key_value_heads=8, max_position_embeddings=8192,
            )
        )  # fmt: skip


def gpt3() -> torch.nn.Module:
    return gpt(96, 12288, 96, 51200, 2048)


# name -> (model, sequence length, H100 nodes of 8, global batch)
CASES: dict[str, tuple[Callable[[], torch.nn.Module], int, int, int]] = {
    "gpt2": (lambda: gpt(12, 768, 12, 50257, 1024), 1024, 1, 64),
    "llama-8b": (llama_8b, 4096, 8, 256),
    "gpt3-64": (gpt3, 2048, 8, 512),
    "gpt3-1024": (gpt3, 2048, 128, 1536),
}


def bench(name: str) -> None:
    build, length, nodes, batch = CASES[name]
    cluster = Cluster.from_catalog("h100-sxm", num_nodes=nodes)
    ids = torch.empty(2, length, dtype=torch.long, device="meta")
    model = build()
    started = time.process_time()
    graph = trace(model, {"input_ids": ids, "labels": ids}, precision="bf16")
    traced = time.process_time()
    table = analyse(graph)
    graph = cut_blocks(graph, table)
    cut = time.process_time()
    result = Search(graph, table, cluster, batch, "bf16", "adamw", Overrides()).run()
    done = time.process_time()
    best = result.best
    phases = {"trace": traced - started, "factors, blocks": cut - traced, **result.phases_s}
    print(f"{name}: {graph.num_parameters() / 1e9:.3g} B parameters on {cluster.num_devices} H100")
    print("  " + ", ".join(f"{phase} {s:.1f}" for phase, s in phases.items()), end="")
    print(f"; in all {done - started:.1f} CPU-s")
    mfu = best.evaluation.prediction.mfu
    print(f"  {describe(best.plan)}: {seconds(best.step_time_s)} a step, MFU {mfu:.1%}")


def main() -> None:
    transformers.logging.set_verbosity_error()
    for name in sys.argv[1:] or CASES:
        if name not in CASES:
            raise SystemExit(f"no case {name!r}; legal: {', '.join(CASES)}")
        bench(name)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak memory of the planner {peak:.2f} GiB")


if __name__ == "__main__":
    main()
