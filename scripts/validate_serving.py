"""Published generation of causal LMs beside its price: seconds a token, tokens a second, seconds to
a first token.

    python -m scripts.validate_serving

Rows are of gpt-fast's README (A100-80GB at 330 W, batch 1, prompts of 5 tokens, bf16; compiled, its
own all-reduce inside the node) and of TensorRT-LLM's docs/source/performance.md of v0.6.1 (A100,
fp16; throughput at large batches, of all GPUs; first tokens at batch 1).
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from transformers import GPTJConfig, GPTJForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from meshwright.planner.serving import Asked, Forwards, Servings
from meshwright.profiles.cluster import Cluster
from meshwright.serving import forwards_of

Measured = Literal["token/s", "tokens/s", "first s"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published number of a `model` on `tp` GPUs."""

    source: str
    model: str
    tp: int
    rows: int
    prompt: int
    new: int
    what: Measured
    value: float


ROWS = (
    *(
        Row(source="gpt-fast", model=model, tp=tp, rows=1, prompt=5, new=200, what="token/s",
            value=value)
        for model, tp, value in (
            ("Llama 7B", 1, 104.9), ("Llama 7B", 2, 168.84), ("Llama 7B", 4, 254.02),
            ("Llama 7B", 8, 328.43), ("Llama 70B", 2, 21.32), ("Llama 70B", 4, 38.01),
            ("Llama 70B", 8, 62.5),
        )
    ),
    *(
        Row(source="TensorRT-LLM", model=model, tp=tp, rows=rows, prompt=prompt, new=new,
            what="tokens/s", value=tp * value)
        for model, rows, tp, prompt, new, value in (
            ("GPT-J 6B", 512, 1, 128, 128, 6374), ("GPT-J 6B", 120, 2, 128, 2048, 2192),
            ("GPT-J 6B", 60, 1, 2048, 128, 670), ("GPT-J 6B", 64, 2, 2048, 2048, 903),
            ("Llama 7B", 384, 1, 128, 128, 5586), ("Llama 7B", 60, 1, 128, 2048, 1928),
            ("Llama 7B", 52, 1, 2048, 128, 591), ("Llama 7B", 64, 2, 2048, 2048, 782),
            ("Llama 70B", 1280, 4, 128, 128, 670), ("Llama 70B", 240, 4, 128, 2048, 525),
            ("Llama 70B", 120, 4, 2048, 128, 79),
        )
    ),
    *(
        Row(source="TensorRT-LLM", model=model, tp=tp, rows=1, prompt=prompt, new=1,
            what="first s", value=ms / 1e3)
        for model, tp, prompt, ms in (
            ("GPT-J 6B", 1, 128, 12), ("GPT-J 6B", 1, 2048, 129), ("Llama 7B", 1, 128, 16),
            ("Llama 7B", 1, 2048, 133), ("Llama 70B", 4, 128, 47), ("Llama 70B", 4, 2048, 377),
        )
    ),
)  # fmt: skip


@cache
def forwards(model: str) -> Forwards:
    """Prices of a model's forwards on A100."""
    with torch.device("meta"):
        made: PreTrainedModel = {
            "Llama 7B": lambda: LlamaForCausalLM(LlamaConfig()),
            "Llama 70B": lambda: LlamaForCausalLM(
                LlamaConfig(
                    hidden_size=8192, intermediate_size=28672, num_hidden_layers=80,
                    num_attention_heads=64, num_key_value_heads=8,
                )
            ),
            "GPT-J 6B": lambda: GPTJForCausalLM(GPTJConfig()),
        }[model]()  # fmt: skip
    ids = torch.zeros(2, 8, dtype=torch.int64)
    on = Cluster.from_catalog("a100-80gb", devices_per_node=8)
    return forwards_of(made, on, example_inputs={"input_ids": ids, "labels": ids})


def predicted(row: Row) -> float:
    """The price of what a row measured."""
    asked = Asked(prompt=row.prompt, new=row.new)
    plan = Servings(forwards(row.model), asked).priced(row.tp, 1, row.rows)
    if row.what == "tokens/s":
        return plan.tokens_per_s / plan.replicas
    return 1 / plan.token_s if row.what == "token/s" else plan.first_s


def main() -> None:
    print("| source | model | tp | rows | prompt | new | what | published | priced | |")
    print("|---|---|--:|--:|--:|--:|---|--:|--:|--:|")
    errors = dict[str, list[float]]()
    for row in ROWS:
        found = predicted(row)
        errors.setdefault(row.source, []).append(found / row.value - 1)
        print(
            f"| {row.source} | {row.model} | {row.tp} | {row.rows} | {row.prompt} | {row.new} | "
            f"{row.what} | {row.value:g} | {found:.3g} | {found / row.value - 1:+.0%} |"
        )
    for source, of in errors.items():
        size = statistics.median(map(abs, of))
        print(
            f"{source}: median error {size:.0%}, bias {statistics.median(of):+.0%}, {len(of)} rows"
        )


if __name__ == "__main__":
    main()
