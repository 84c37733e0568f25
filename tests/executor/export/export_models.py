"""Models that are exported, and a single device's training of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import peft
import torch
import transformers
from torch import nn

VOCAB, ROWS, LENGTH, STEPS = 96, 8, 12, 3


def batch() -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids.clone()}


def llama() -> Any:
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.LlamaForCausalLM(config)


def gpt2() -> Any:
    """With fused projections, of which a tensor-parallel rank holds three runs of columns."""
    torch.manual_seed(0)
    config = transformers.GPT2Config(
        vocab_size=VOCAB,
        n_embd=32,
        n_layer=2,
        n_head=4,
        n_positions=LENGTH,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
    )
    return transformers.GPT2LMHeadModel(config)


def bert() -> Any:
    """A head whose weight and bias are both tied."""
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


def mixtral() -> Any:
    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        max_position_embeddings=LENGTH,
        bos_token_id=1,
        eos_token_id=2,
    )
    config._experts_implementation = "grouped_mm"
    return transformers.MixtralForCausalLM(config)


class Wrapped(nn.Module):
    """A model of transformers in the user's own, with a parameter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = llama()
        self.temperature = nn.Parameter(torch.tensor(0.9))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.inner(input_ids=input_ids).logits * self.temperature
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())


MODELS: Mapping[str, Callable[[], Any]] = {
    "llama": llama, "gpt2": gpt2, "bert": bert, "mixtral": mixtral, "wrapped": Wrapped,
}  # fmt: skip


def adapted(name: str) -> Any:
    """A model with peft's LoRA, whose adapters begin with any values, not with zeros."""
    targets = {"llama": ["q_proj", "v_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"]}[name]
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=targets,
        fan_in_fan_out=name == "gpt2",
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    base = MODELS[name]()
    torch.manual_seed(1)
    return peft.get_peft_model(base, config)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


def loss_of(found: Any) -> torch.Tensor:
    return found if isinstance(found, torch.Tensor) else found.loss


def trained_alone(model: Any) -> list[float]:
    """Train a model on this device; the losses."""
    optimizer = optimizer_of([p for p in model.parameters() if p.requires_grad])
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(**batch()))
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses
