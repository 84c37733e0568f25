"""GPT-2 and Llama of two layers, with Megatron's shardings of each."""

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from tests.models.models import CASES

VOCAB = 96
MEGATRON = {"gpt2": CASES["gpt2_tied"].shardings, "llama": CASES["llama"].shardings}


def built(kind: str) -> nn.Module:
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4}
        no_dropout = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
        return GPT2LMHeadModel(GPT2Config(bos_token_id=0, eos_token_id=0, **sizes, **no_dropout))
    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads))
