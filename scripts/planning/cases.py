"""The models, clusters and batches that `bench_planner` plans: published sizes, on meta."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import peft
import torch
import transformers as hf
from torch import nn

from meshwright import Cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A model on meta with a sample batch, and its loss where it has none of its own."""

    module: nn.Module
    batch: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on nodes of 8 devices of the catalog; `batch` rows a step."""

    model: Callable[[], Model]
    node: str
    nodes: int
    batch: int
    precision: str = "bf16"

    def cluster(self) -> Cluster:
        return Cluster.from_catalog(self.node, num_nodes=self.nodes)


def decoder(kind: str, length: int, **config: Any) -> Model:
    """A causal language model of transformers, on rows of `length` tokens."""
    ids = torch.empty(2, length, dtype=torch.long, device="meta")
    with torch.device("meta"):
        name = {"Qwen3MoeConfig": "Qwen3MoeForCausalLM", "GPT2Config": "GPT2LMHeadModel"}
        made = getattr(hf, f"{kind}Config")(**config)
        module = getattr(hf, name.get(f"{kind}Config", f"{kind}ForCausalLM"))(made)
    return Model(module=module, batch={"input_ids": ids, "labels": ids})


def adapted(model: Model, *targets: str) -> Model:
    """The model with LoRA of rank 16 on the layers of these names, the rest of it frozen."""
    config = peft.LoraConfig(r=16, target_modules=list(targets), task_type="CAUSAL_LM")
    with torch.device("meta"):
        return Model(module=peft.get_peft_model(model.module, config), batch=model.batch)


def images(kind: str, side: int, head: str = "ForImageClassification", **config: Any) -> Model:
    """A vision model of transformers; with a segmentation head, a class for each pixel."""
    shape = (2, side, side) if "Segmentation" in head else (2,)
    labels = torch.empty(*shape, dtype=torch.long, device="meta")
    with torch.device("meta"):
        module = getattr(hf, f"{kind}{head}")(getattr(hf, f"{kind}Config")(**config))
    pixels = torch.empty(2, 3, side, side, device="meta")
    return Model(module=module, batch={"pixel_values": pixels, "labels": labels})


def gpt(layers: int, hidden: int, heads: int, vocabulary: int, length: int) -> Model:
    return decoder(
        "GPT2", length,
        n_layer=layers, n_embd=hidden, n_head=heads, n_positions=length, vocab_size=vocabulary,
    )  # fmt: skip


def llama(layers: int, hidden: int, heads: int, ffn: int, length: int) -> Model:
    return decoder(
        "Llama", length,
        vocab_size=128256, hidden_size=hidden, intermediate_size=ffn, num_hidden_layers=layers,
        num_attention_heads=heads, num_key_value_heads=8, max_position_embeddings=8192,
    )  # fmt: skip


class Retriever(nn.Module):
    """An encoder of questions and one of passages, and the loss of all pairs of a batch."""

    def __init__(self, config: hf.BertConfig) -> None:
        super().__init__()
        self.question = hf.BertModel(config, add_pooling_layer=False)
        self.passage = hf.BertModel(config, add_pooling_layer=False)

    def forward(
        self, question: torch.Tensor, passage: torch.Tensor, labels: torch.Tensor
    ) -> dict[str, torch.Tensor]:
        asked = self.question(input_ids=question).last_hidden_state[:, 0]
        found = self.passage(input_ids=passage).last_hidden_state[:, 0]
        return {"loss": nn.functional.cross_entropy(asked @ found.T, labels)}


def dpr() -> Model:
    """DPR (Karpukhin et al. 2020): two BERT-base towers, 256 tokens each."""
    config = hf.BertConfig(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
    with torch.device("meta"):
        module = Retriever(config)
    ids = torch.empty(2, 256, dtype=torch.long, device="meta")
    labels = torch.empty(2, dtype=torch.long, device="meta")
    return Model(module=module, batch={"question": ids, "passage": ids, "labels": labels})


def clip() -> Model:
    """CLIP-L/14, whose image tower is nine tenths of the work."""
    text = {"hidden_size": 768, "intermediate_size": 3072, "num_attention_heads": 12}
    image = {"hidden_size": 1024, "intermediate_size": 4096, "num_attention_heads": 16}
    image |= {"num_hidden_layers": 24, "patch_size": 14}
    config = hf.CLIPConfig(text_config=text, vision_config=image, projection_dim=768)
    with torch.device("meta"):
        module = hf.CLIPModel(config)
    ids = torch.empty(2, 77, dtype=torch.long, device="meta")
    pixels = torch.empty(2, 3, 224, 224, device="meta")
    return Model(
        module=module, batch={"input_ids": ids, "pixel_values": pixels, "return_loss": True}
    )


def gpt3() -> Model:
    return gpt(96, 12288, 96, 51200, 2048)


def llama_8b(length: int) -> Model:
    return llama(32, 4096, 32, 14336, length)


def llama_70b(length: int) -> Model:
    return llama(80, 8192, 64, 28672, length)


def gemma2_9b() -> Model:
    return decoder(
        "Gemma2", 4096,
        vocab_size=256000, hidden_size=3584, intermediate_size=14336, num_hidden_layers=42,
        num_attention_heads=16, num_key_value_heads=8, head_dim=256,
    )  # fmt: skip


def deepseek_v3() -> Model:
    return decoder("DeepseekV3", 4096)  # the defaults of its configuration are DeepSeek-V3's


def qwen3_moe(
    width: int = 2048, layers: int = 48, heads: int = 32, inner: int = 768
) -> Model:  # Qwen3-30B-A3B
    return decoder(
        "Qwen3Moe", 4096,
        vocab_size=151936, hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads,
        num_key_value_heads=4, head_dim=128, num_experts=128, moe_intermediate_size=inner,
        num_experts_per_tok=8,
    )  # fmt: skip


def qwen3_235b() -> Model:  # Qwen3-235B-A22B
    return qwen3_moe(4096, 94, 64, 1536)


def qwen3_next() -> Model:
    return decoder("Qwen3Next", 4096)  # the defaults of its configuration are the 80B-A3B's


def mixtral() -> Model:
    return decoder("Mixtral", 4096)  # the defaults of its configuration are Mixtral-8x7B's


def mamba2() -> Model:  # Mamba-2 2.7B
    return decoder(
        "Mamba2", 2048,
        vocab_size=50288, hidden_size=2560, num_hidden_layers=64, num_heads=80, head_dim=64,
        state_size=128, n_groups=1,
    )  # fmt: skip


def swin() -> Model:  # Swin-L
    return images(
        "Swin", 224,
        image_size=224, embed_dim=192, depths=[2, 2, 18, 2], num_heads=[6, 12, 24, 48],
        window_size=7,
    )  # fmt: skip


def segformer() -> Model:  # SegFormer-B5
    return images(
        "Segformer", 512, "ForSemanticSegmentation",
        depths=[3, 6, 40, 3], hidden_sizes=[64, 128, 320, 512], decoder_hidden_size=768,
        num_labels=150,
    )  # fmt: skip


def efficientnet() -> Model:
    return images("EfficientNet", 600)  # the defaults of its configuration are EfficientNet-B7's


def ibert() -> Model:  # tiny, and not on meta: its activations are run for their shapes
    config = hf.IBertConfig(
        vocab_size=1000, hidden_size=64, num_hidden_layers=4, num_attention_heads=4,
        intermediate_size=128,
    )  # fmt: skip
    ids = torch.ones(2, 128, dtype=torch.long)
    return Model(module=hf.IBertForMaskedLM(config), batch={"input_ids": ids, "labels": ids})


ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
LINEAR = (*ATTENTION, "gate_proj", "up_proj", "down_proj")

CASES: Mapping[str, Case] = {
    "gpt2": Case(
        model=lambda: gpt(12, 768, 12, 50257, 1024), node="dgx-h100", nodes=1, batch=64
    ),
    "gpt-39b": Case(  # Alpa's largest GPT
        model=lambda: gpt(48, 8192, 64, 51200, 1024),
        node="p3.16xlarge", nodes=8, batch=1024, precision="fp16",
    ),
    "llama-8b": Case(model=lambda: llama_8b(4096), node="dgx-h100", nodes=8, batch=256),
    "llama-8b-8k": Case(model=lambda: llama_8b(8192), node="dgx-h100", nodes=8, batch=512),
    "llama-8b-lora": Case(
        model=lambda: adapted(llama_8b(4096), *LINEAR), node="dgx-h100", nodes=8, batch=256
    ),
    "llama-70b-lora": Case(
        model=lambda: adapted(llama_70b(4096), *LINEAR), node="dgx-h100", nodes=1, batch=64
    ),
    "gemma2-9b-lora": Case(
        model=lambda: adapted(gemma2_9b(), *LINEAR), node="dgx-h100", nodes=1, batch=64
    ),
    "qwen3-235b-lora": Case(
        model=lambda: adapted(qwen3_235b(), *ATTENTION), node="dgx-h100", nodes=8, batch=256
    ),
    "gpt3-64": Case(model=gpt3, node="dgx-a100", nodes=8, batch=512),
    "gpt3-1024": Case(model=gpt3, node="dgx-a100", nodes=128, batch=1536),
    "llama-405b": Case(
        model=lambda: llama(126, 16384, 128, 53248, 8192), node="dgx-h100", nodes=2048, batch=2048
    ),
    "deep-gpt": Case(
        model=lambda: gpt(1024, 2048, 16, 51200, 2048), node="dgx-a100", nodes=32, batch=512
    ),
    "deep-gpt-1k": Case(
        model=lambda: gpt(1024, 2048, 16, 51200, 1024), node="dgx-h100", nodes=32, batch=1024
    ),
    "mixtral": Case(model=mixtral, node="dgx-h100", nodes=8, batch=256),
    "qwen3-moe": Case(model=qwen3_moe, node="dgx-h100", nodes=8, batch=256),
    "qwen3-next": Case(model=qwen3_next, node="dgx-h100", nodes=8, batch=256),
    "deepseek-v3-256": Case(model=deepseek_v3, node="dgx-h100", nodes=32, batch=1024),
    "deepseek-v3": Case(model=deepseek_v3, node="dgx-h100", nodes=256, batch=15360),
    "mamba2": Case(model=mamba2, node="dgx-h100", nodes=8, batch=256),
    "swin": Case(model=swin, node="dgx-h100", nodes=8, batch=2048),
    "segformer": Case(model=segformer, node="dgx-h100", nodes=8, batch=512),
    "efficientnet": Case(model=efficientnet, node="dgx-h100", nodes=8, batch=2048),
    "ibert": Case(model=ibert, node="dgx-h100", nodes=1, batch=64),
}  # fmt: skip
