"""Model families: dims that published tables leave out, from public configurations.

A table's columns say layers, widths and heads. The size of a head where it isn't hidden / heads,
latent attention, shared experts and dense first layers are taken from the `config.json` that the
model's authors published; `expert_ffn` of a mixture-of-experts row is its column ffn.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from meshwright.planner.published.models import Latent
from meshwright.profiles.inputs import MeshwrightError

_LATENT = Latent(q_rank=1536)

# the first pattern that the model's name matches; keys are fields of `TransformerDims`
_FACTS: tuple[tuple[str, Mapping[str, Any]], ...] = (
    (r"Qwen3-[\d.]+B", {"head_dim": 128}),
    (r"Qwen2-57B-A14B", {"shared_ffn": 20480}),
    (r"Qwen1\.5-MoE-A2\.7B", {"shared_ffn": 5632}),
    (
        r"DeepSeek-V3|DeepSeek-R1",
        {"latent": _LATENT, "shared_ffn": 2048, "dense_layers": 3, "ffn": 18432},
    ),
    (r"Kimi-K2", {"latent": _LATENT, "shared_ffn": 2048, "dense_layers": 1, "ffn": 18432}),
    (
        r"DeepSeek-V2-Lite",
        {"latent": Latent(q_rank=0), "shared_ffn": 2816, "dense_layers": 1, "ffn": 10944},
    ),
    (r"DeepSeek-V2", {"latent": _LATENT, "shared_ffn": 3072, "dense_layers": 1, "ffn": 12288}),
    (
        r"Moonlight-16B",
        {"latent": Latent(q_rank=0), "shared_ffn": 2816, "dense_layers": 1, "ffn": 11264},
    ),
    (
        r"GLM-4\.5-Air|GLM-4\.6-Air",
        {"head_dim": 128, "shared_ffn": 1408, "dense_layers": 1, "ffn": 10944},
    ),
    (r"GLM-4\.[56]", {"head_dim": 128, "shared_ffn": 1536, "dense_layers": 3, "ffn": 12288}),
    (r"gpt-oss", {"head_dim": 64}),
    (r"Llama-?4-Scout", {"head_dim": 128, "shared_ffn": 8192}),
)
# families that the reference models can't stand for, with the reason
_OTHER = (
    (
        r"Nemotron-?3-(Nano|Super|Ultra)|Nemotron-?H\b|Nemotron-Nano-\d+B-v2|Jamba|Zamba",
        "state-space layers",
    ),
    (r"Qwen3-Next", "linear attention in most layers"),
    (r"Llama-?4-Maverick", "dense and sparse layers in turn"),
)


def facts_of(name: str) -> Mapping[str, Any]:
    """Fields of `TransformerDims` that a model's name stands for; raises ValueError for a family
    that the reference models don't cover."""
    for pattern, reason in _OTHER:
        if re.search(pattern, name, re.I):
            raise MeshwrightError(
                f" has {reason}, which no reference model has",
                place=f"model {name!r}",
                legal="decoders of attention and MLPs, dense or with experts",
                way_out="leave the row out, or plan for the model itself",
            )
    for pattern, facts in _FACTS:
        if re.search(pattern, name, re.I):
            return MappingProxyType(dict(facts))
    return MappingProxyType({})
