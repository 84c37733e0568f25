"""LoRA: adapters of peft train, are saved, and are loaded by peft again.

    torchrun --nproc-per-node 2 examples/adapters.py FOLDER

The base model is frozen. Optimizer states, gradients and their reduction are those of the adapters
alone; under ZeRO-3 the ranks divide the frozen weights, too.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright import Cluster, Overrides, auto_parallelize, distributed


def base() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=128, n_positions=32, n_embd=64, n_layer=2, n_head=2, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def main() -> None:
    folder, ranks = sys.argv[1], int(os.environ["WORLD_SIZE"])
    ids = torch.arange(8 * 32).view(8, 32) % 128
    batch = {"input_ids": ids, "labels": ids}
    lora = LoraConfig(r=4, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM")
    with distributed("gloo"):
        model: Any = get_peft_model(base(), lora)
        result = auto_parallelize(
            model,
            Cluster.local(ranks, "cpu"),
            example_inputs=batch,
            global_batch_size=8,
            precision="fp32",
            overrides=Overrides(dp=ranks, zero=3),
        )
        trained = [p for p in result.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        losses = [result.train_step(batch, optimizer=optimizer).item() for _ in range(5)]
        loss = result.eval_step(batch).item()
        result.save_pretrained(folder, trainable_only=True)
    if int(os.environ["RANK"]) == 0:
        loaded = PeftModel.from_pretrained(base(), folder).eval()
        again = loaded(**batch).loss.item()
        print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}; evaluated {loss:.4f}, loaded {again:.4f}")


if __name__ == "__main__":
    main()
