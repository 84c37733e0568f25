"""Models of the recipes. A function returns a model, an example batch and, where the model has no
loss of its own, a loss."""

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, MixtralConfig, MixtralForCausalLM

from meshwright.moe import MoE


def llama(layers=32, width=4096, length=4096, classes=128256):
    """A decoder of 8 B parameters; on meta, so that no weight is made."""
    with torch.device("meta"):
        config = LlamaConfig(
            vocab_size=classes,
            hidden_size=width,
            intermediate_size=7 * width // 2,
            num_hidden_layers=layers,
            num_attention_heads=width // 128,
            num_key_value_heads=8,
            max_position_embeddings=length,
        )
        ids = torch.empty(2, length, dtype=torch.long)
        return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


def llama_1b():
    return llama(layers=16, width=2048, classes=32000)


def long_llama():
    return llama(layers=16, width=2048, classes=32000, length=131072)


def mixtral():
    """A mixture of 8 experts a layer, with 4 of Mixtral's 32 layers: 6 B parameters."""
    with torch.device("meta"):
        ids = torch.empty(2, 4096, dtype=torch.long)
        return MixtralForCausalLM(MixtralConfig(num_hidden_layers=4)), {
            "input_ids": ids,
            "labels": ids,
        }


def tiny():
    """A decoder that a laptop trains."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=4,
    )
    ids = torch.randint(256, (8, 64))
    return LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}


class Classifier(nn.Module):
    """A model without a loss of its own, with a layer of experts."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(16, 64)
        self.experts = MoE(hidden=64, ffn=128, experts=4, topk=2)
        self.head = nn.Linear(64, 10)

    def forward(self, x):
        return self.head(self.experts(self.embed(x))).mean(1)


def classifier():
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 32, 16), "targets": torch.randint(10, (8,))}
    return Classifier(), batch, nn.functional.cross_entropy
