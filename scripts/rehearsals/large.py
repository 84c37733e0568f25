"""What the rehearsal of large plans takes: GPT-3 175B, Llama 3.1 405B, DeepSeek-V3.

    python -m scripts.rehearsals.large [gpt3-1024 ...] [--limit 900]

Models on meta in bf16 are planned for clusters of the catalog, and rehearsed, each in a process of
its own, one after the other, for at most `--limit` seconds. Shown are the verdict, CPU seconds of
the rehearsal and its workers, and the most memory that the process and a worker had.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import transformers

from meshwright import Cluster, Overrides, auto_parallelize

GIB_OF_KIB = 2.0**-20


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model by its family in `transformers` and its configuration, and what it is planned for;
    sequences of `length`, `batch` of them."""

    family: str
    length: int
    node: str
    nodes: int
    batch: int
    config: Mapping[str, Any]
    overrides: Mapping[str, Any]


GPT3 = {"n_layer": 96, "n_embd": 12288, "n_head": 96, "n_positions": 2048, "vocab_size": 51200}
CASES: Mapping[str, Case] = {
    "gpt3-1024-h100": Case(
        family="GPT2", length=2048, node="h100-sxm", nodes=128, batch=1536, config=GPT3,
        overrides={},
    ),
    "gpt3-1024": Case(
        family="GPT2", length=2048, node="dgx-a100", nodes=128, batch=1536, config=GPT3,
        overrides={"tp": 8, "pp": 4, "schedule": "interleaved_1f1b", "num_microbatches": 48},
    ),
    "llama-405b-16384": Case(
        family="Llama", length=8192, node="h100-sxm", nodes=2048, batch=2048,
        config={
            "vocab_size": 128256, "hidden_size": 16384, "intermediate_size": 53248,
            "num_hidden_layers": 126, "num_attention_heads": 128, "num_key_value_heads": 8,
            "max_position_embeddings": 8192,
        },
        overrides={"tp": 8, "pp": 16, "schedule": "interleaved_1f1b", "num_microbatches": 16},
    ),
    "deepseek-v3-2048": Case(
        family="DeepseekV3", length=4096, node="h100-sxm", nodes=256, batch=8192,
        config={}, overrides={},
    ),
}  # fmt: skip


def rehearsed(case: Case) -> str:
    """A line on a case."""
    config = getattr(transformers, f"{case.family}Config")(use_cache=False, **case.config)
    lm = "GPT2LMHeadModel" if case.family == "GPT2" else f"{case.family}ForCausalLM"
    with torch.device("meta"):
        model = getattr(transformers, lm)(config).to(torch.bfloat16)
        tokens = torch.zeros(1, case.length, dtype=torch.long)
    result = auto_parallelize(
        model,
        Cluster.from_catalog(case.node, num_nodes=case.nodes),
        example_inputs={"input_ids": tokens, "labels": tokens},
        global_batch_size=case.batch,
        overrides=Overrides(**case.overrides),
        profile=False,
    )
    before = os.times()
    found = result.rehearse()
    cpu_s = sum(os.times()[:4]) - sum(before[:4])
    peaks = [
        resource.getrusage(who).ru_maxrss * GIB_OF_KIB
        for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)
    ]
    sizes = f"{peaks[0]:.1f} GiB here, {peaks[1]:.1f} in a worker"
    return f"{found.line}; {cpu_s:.0f} CPU s, {sizes}\n" + "\n".join(map(str, found.mismatches))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("cases", nargs="*", choices=[[], *CASES], help="by default all")
    parser.add_argument("--limit", type=float, default=900.0, help="seconds of each")
    parser.add_argument("--one", choices=CASES, help=argparse.SUPPRESS)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    if args.one:
        sys.stdout.write(rehearsed(CASES[args.one]) + "\n")
        return
    for name in args.cases or CASES:
        command = [sys.executable, "-m", "scripts.rehearsals.large", "--one", name]
        try:
            done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=args.limit)
            said = done.stdout.strip() or f"failed, exit {done.returncode}"
        except subprocess.TimeoutExpired:
            said = f"more than {args.limit:.0f} s"
        sys.stdout.write(f"{name}: {said}\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main()
