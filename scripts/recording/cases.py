"""Cases whose plans are recorded: models, clusters, overrides; the small ones take seconds."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
import transformers as hf
from torch import nn

from meshwright import Cluster

Built = tuple[nn.Module, Any, Callable[..., Any] | None]


def language_model(config: Any, kind: Any, length: int) -> Built:
    ids = torch.empty(2, length, dtype=torch.long, device="meta")
    return kind(config), {"input_ids": ids, "labels": ids}, None


def gpt2(
    layers: int = 6, hidden: int = 768, length: int = 1024, vocab: int = 50257, **more: Any
) -> Built:
    config = hf.GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=hidden // 64, n_positions=length, vocab_size=vocab,
        bos_token_id=0, eos_token_id=0, **more,
    )  # fmt: skip
    return language_model(config, hf.GPT2LMHeadModel, length)


def llama(
    layers: int = 8, hidden: int = 2048, length: int = 2048, heads: int = 16, vocab: int = 32000
) -> Built:
    config = hf.LlamaConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=hidden * 3,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads // 2,
    )
    return language_model(config, hf.LlamaForCausalLM, length)


def mixtral(layers: int = 4, hidden: int = 1024, length: int = 1024, vocab: int = 32000) -> Built:
    config = hf.MixtralConfig(
        vocab_size=vocab,
        hidden_size=hidden,
        intermediate_size=2 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=8,
        num_local_experts=8,
    )
    return language_model(config, hf.MixtralForCausalLM, length)


def bert() -> Built:
    config = hf.BertConfig(num_hidden_layers=4)
    return language_model(config, hf.BertForMaskedLM, 512)


def t5() -> Built:
    config = hf.T5Config(
        num_layers=4, d_model=512, d_ff=1024, decoder_start_token_id=0, pad_token_id=0
    )
    ids = torch.empty(2, 256, dtype=torch.long, device="meta")
    return hf.T5ForConditionalGeneration(config), {"input_ids": ids, "labels": ids}, None


def images(model: nn.Module, size: int) -> Built:
    batch = (
        torch.empty(2, 3, size, size, device="meta"),
        torch.empty(2, dtype=torch.long, device="meta"),
    )

    def loss(output: Any, targets: torch.Tensor) -> torch.Tensor:
        logits = getattr(output, "logits", output)
        return nn.functional.cross_entropy(logits, targets)

    return model, batch, loss


def resnet() -> Built:
    return images(hf.ResNetForImageClassification(hf.ResNetConfig(depths=[2, 2, 2, 2])), 224)


def vit() -> Built:
    return images(hf.ViTForImageClassification(hf.ViTConfig(num_hidden_layers=6)), 224)


def convolutions() -> Built:
    layers: list[nn.Module] = []
    for inner, outer in ((3, 64), (64, 128), (128, 256), (256, 512)):
        layers += [nn.Conv2d(inner, outer, 3, 2, 1), nn.BatchNorm2d(outer), nn.ReLU()]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 1000)]
    return images(nn.Sequential(*layers, *head), 128)


def encoder_decoder() -> Built:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = nn.Transformer(
                256, 8, 3, 3, dim_feedforward=1024, dropout=0.1, batch_first=True
            )
            self.head = nn.Linear(256, 1000)

        def forward(self, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(source, target))

    batch = {
        "source": torch.empty(2, 64, 256, device="meta"),
        "target": torch.empty(2, 48, 256, device="meta"),
        "targets": torch.empty(2, 48, dtype=torch.long, device="meta"),
    }
    return (Model(), batch, lambda y, t: nn.functional.cross_entropy(y.flatten(0, 1), t.flatten()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model on a cluster, and what is asked for."""

    model: Callable[[], Built]
    cluster: Callable[[], Cluster]
    batch: int
    overrides: Mapping[str, Any] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)


def nodes(name: str, count: int = 1, **options: Any) -> Callable[[], Cluster]:
    return lambda: Cluster.from_catalog(name, num_nodes=count, **options)


OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "tp 2": {"tp": 2},
    "tp 4 pp 2": {"tp": 4, "pp": 2},
    "pp 4": {"pp": 4},
    "dp 8 zero 3": {"dp": 8, "zero": 3},
    "zero 2 dp_shard 4": {"zero": 2, "dp_shard": 4},
    "full recompute": {"recompute": "full"},
    "selective recompute": {"recompute": "selective"},
    "recompute by block": {"recompute": {"model.layers.0-3": "full"}},
    "1f1b, pp 4, 16 micro-batches": {"schedule": "1f1b", "pp": 4, "num_microbatches": 16},
    "gpipe, pp 2": {"schedule": "gpipe", "pp": 2},
    "interleaved": {"schedule": "interleaved_1f1b", "pp": 4, "virtual_stages": 2},
    "zb_h1": {"schedule": "zb_h1", "pp": 4},
    "zb_v": {"schedule": "zb_v", "pp": 4},
    "dualpipe_v": {"schedule": "dualpipe_v", "pp": 4},
    "zb_h2": {"schedule": "zb_h2", "pp": 4},
    "forbid": {"forbid": ["zb_h1", "zb_v"]},
    "micro-batch 1": {"microbatch_size": 1},
    "up_proj colwise": {"tp": 2, "shardings": {"model.layers.*.mlp.up_proj": "colwise"}},
}


def large() -> Built:
    return llama(16, 4096, 4096, 32)


def case(model: Any, cluster: Any, batch: int, overrides: Any = None, **options: Any) -> Case:
    return Case(
        model=model, cluster=cluster, batch=batch, overrides=overrides or {}, options=options
    )


def cases() -> Iterator[tuple[str, Case]]:
    """Sixty-odd cases by name."""
    yield from small_cases()
    yield from of_decoders()
    for name, overrides in OVERRIDES.items():
        yield f"llama 4096, {name}", case(large, nodes("dgx-h100", 2), 128, overrides)
    yield from of_others()


def small() -> Built:
    return llama(4, 1024, 1024, 8)


def with_memory(cluster: Callable[[], Cluster], memory_bytes: int) -> Callable[[], Cluster]:
    """Devices with so much memory, all of it for tensors."""

    def made() -> Cluster:
        found = cluster()
        device = replace(
            found.device, memory_bytes=memory_bytes, reserved_bytes=0, communicator_bytes=0
        )
        return replace(found, device=device)

    return made


SMALL_OVERRIDES: Mapping[str, Mapping[str, Any]] = {
    "tp 2 zero 3 full recompute": {"tp": 2, "pp": 1, "zero": 3, "recompute": "full"},
    "zb_v": {"schedule": "zb_v", "pp": 2, "num_microbatches": 4},
    "interleaved": {"schedule": "interleaved_1f1b", "pp": 2, "virtual_stages": 2},
    "chimera": {"schedule": "chimera", "pp": 2, "tp": 1, "num_microbatches": 4},
    "up_proj colwise": {"tp": 2, "shardings": {"model.layers.*.mlp.up_proj": "colwise"}},
}


def small_cases() -> Iterator[tuple[str, Case]]:
    """Of models that are traced and planned in a second or two."""
    h100, v100 = "dgx-h100", "p3.16xlarge"
    yield "small llama, h100", case(small, nodes(h100), 32)
    for name, overrides in SMALL_OVERRIDES.items():
        yield f"small llama, {name}", case(small, nodes(h100, devices_per_node=4), 32, overrides)
    tight, tighter = (with_memory(nodes(h100, devices_per_node=2), b) for b in (2**31, 2**29))
    yield "small llama, host memory", case(small, tight, 8)
    yield "small llama, too little memory", case(small, tighter, 8, {"forbid": ["offload"]})
    few = {"layers": 3, "hidden": 512, "length": 512, "vocab": 32000}
    tiny, host = partial(gpt2, **few), Cluster.local(4, measure=False)
    yield "small gpt2, local", case(tiny, lambda: host, 16)
    yield "small gpt2, 2 v100 fp16", case(tiny, nodes(v100, 2), 64, precision="fp16")
    yield "small mixtral, ep 4", case(partial(mixtral, **few), nodes(h100), 64, {"ep": 4})


def of_decoders() -> Iterator[tuple[str, Case]]:
    h100, a100, v100 = "dgx-h100", "dgx-a100", "p3.16xlarge"
    yield "gpt2, h100", case(gpt2, nodes(h100), 64)
    yield "gpt2, 2 a100", case(gpt2, nodes(a100, 2), 128)
    yield "gpt2, local", case(gpt2, lambda: Cluster.local(4, measure=False), 16)
    yield "gpt2, batch 100", case(gpt2, nodes(h100, 2), 100)
    yield "gpt2, v100 fp16", case(gpt2, nodes(v100), 64, precision="fp16")
    yield "gpt2, fp32", case(gpt2, nodes(a100), 64, precision="fp32")
    yield "gpt2, sgd", case(gpt2, nodes(a100), 64, optimizer="sgd")
    yield "gpt2, compiled", case(gpt2, nodes(h100), 64, target="compiled")
    yield "gpt2, megatron", case(gpt2, nodes(h100, 2), 64, target="megatron")
    yield "gpt2, one device", case(gpt2, lambda: Cluster.local(1, measure=False), 8)
    yield "gpt2, 4 layers hidden 3072", case(lambda: gpt2(4, 3072), nodes(a100), 64)
    yield "llama, h100", case(llama, nodes(h100), 64)
    yield "llama, 4 h100 nodes", case(llama, nodes(h100, 4), 256)
    yield "llama 4096, h100", case(large, nodes(h100), 64)
    yield "llama 4096, 4 a100 nodes", case(large, nodes(a100, 4), 256)
    yield "llama 4096, 64 megatron", case(large, nodes(h100, 8), 256, target="megatron")
    yield "llama 4096, v100", case(large, nodes(v100, 4), 64, precision="fp16")
    yield "llama, 32k tokens", case(lambda: llama(4, 2048, 32768), nodes(h100, 2), 16)


def of_others() -> Iterator[tuple[str, Case]]:
    h100, a100, v100 = "dgx-h100", "dgx-a100", "p3.16xlarge"
    yield "mixtral, h100", case(mixtral, nodes(h100), 64)
    yield "mixtral, 2 nodes ep 8", case(mixtral, nodes(h100, 2), 64, {"ep": 8})
    yield "mixtral, uneven experts", case(mixtral, nodes(h100), 64, expert_imbalance=2.0)
    yield "bert, a100", case(bert, nodes(a100), 128)
    yield "bert, 2 v100 nodes", case(bert, nodes(v100, 2), 256, precision="fp16")
    yield "t5, a100", case(t5, nodes(a100), 64)
    yield "t5, pp 4", case(t5, nodes(a100), 64, {"pp": 4})
    yield "resnet, v100", case(resnet, nodes(v100), 256, precision="fp16")
    yield "resnet, pp 2", case(resnet, nodes(a100), 256, {"pp": 2})
    yield "vit, h100", case(vit, nodes(h100), 512)
    yield "convolutions, local", case(convolutions, lambda: Cluster.local(2, measure=False), 32)
    yield "convolutions, 2 nodes", case(convolutions, nodes(a100, 2), 512)
    yield "encoder-decoder, a100", case(encoder_decoder, nodes(a100), 128)
    yield "encoder-decoder, pp 2", case(encoder_decoder, nodes(a100), 128, {"pp": 2})
    yield "llama 4096, too little memory", case(large, nodes("l4"), 64, precision="fp16")
