"""Mixtures of experts of transformers on one rank: a step under each layout, compared on rank 0
with transformers' own loop over experts on one device."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from meshwright import Cluster, Overrides, auto_parallelize
from meshwright.executor.ranks import launch
from meshwright.profiles.hardware.device import Link
from scripts.zoo.models import SMALL, ZOO
from scripts.zoo.registry import VOCAB
from tests.parity.parity_launch import on_ranks, run_all
from tests.parity.parity_reference import difference

ROWS, LENGTH = 8, 16
MODELS = ("Mixtral", "Qwen3-MoE", "DeepSeek-V3", "GPT-OSS")
LAYOUTS: Mapping[str, Overrides] = {
    "dp4": Overrides(dp=4, tp=1, pp=1, ep=1),
    "dp4 ep2": Overrides(dp=4, tp=1, pp=1, ep=2),
    "dp4 ep4": Overrides(dp=4, tp=1, pp=1, ep=4),
    "tp4": Overrides(dp=1, tp=4, pp=1),
    "dp2 tp2": Overrides(dp=2, tp=2, pp=1, ep=1),
    "dp2 tp2 ep2": Overrides(dp=2, tp=2, pp=1, ep=2),
    "pp2 dp2 ep2": Overrides(dp=2, tp=1, pp=2, ep=2),
}
MASKED = "padded", "dp4 ep2"  # a batch whose padding the balancing loss leaves out


def model_of(name: str, implementation: str = "grouped_mm") -> nn.Module:
    """A small model with transformers' own experts, and its balancing loss where it has one."""
    torch.manual_seed(0)
    model = ZOO[name].build(SMALL, ROWS).model
    config: Any = model.config
    config._experts_implementation = implementation
    if hasattr(config, "output_router_logits"):
        config.output_router_logits, config.router_aux_loss_coef = True, 0.5
        model.router_aux_loss_coef = 0.5
    for path, x in model.named_parameters():
        if path.endswith("bias"):  # transformers starts them at zero, which would hide them
            nn.init.normal_(x, std=0.2)
    return model


def batch_of(masked: bool) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    if not masked:
        return {"input_ids": ids, "labels": ids.clone()}
    mask = torch.ones_like(ids)
    mask[::3, LENGTH // 2 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


def reference(name: str, masked: bool, parts: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of transformers' loop over experts, in micro-batches of equal weight."""
    model, total = model_of(name, "eager"), 0.0
    whole = batch_of(masked)
    for k in range(parts):
        loss = model(**{n: x.chunk(parts)[k] for n, x in whole.items()}).loss / parts
        loss.backward()
        total += float(loss.detach())
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def run(name: str, layout: str, masked: bool = False) -> dict[str, Any]:
    cluster = Cluster.local(4, measure=False)
    free = Link(name="free", latency_s=1e-12, bandwidth=1e18)  # so that all is split that can be
    model = model_of(name)
    result = auto_parallelize(
        model,
        dataclasses.replace(cluster, intra_link=free, inter_link=free),
        example_inputs=batch_of(masked),
        global_batch_size=ROWS,
        precision="fp32",
        overrides=LAYOUTS[layout],
        profile=False,
    )
    loss = float(result.train_step(batch_of(masked)))
    gradients = result.runtime.full_gradients()
    held = {
        p.fqn: p.stored.numel() / model.get_parameter(p.fqn).numel()
        for p in result.runtime.stage_parameters if ".experts." in p.fqn
    }  # fmt: skip
    if launch.rank():
        return {}
    wanted, grads = reference(name, masked, result.plan.num_microbatches)
    router = max(float(g.abs().max()) for n, g in grads.items() if "gate." in n or "router." in n)
    return {
        "loss": abs(loss - wanted) / abs(wanted), "gradient": difference(gradients, grads),
        "missing": sorted(set(grads) - set(gradients)), "router": router, "held": held,
        "ep": [stage.ep for stage in result.plan.stages],
        "divided": [(s.zero and (s.dp_shard or s.dp), s.dp, s.tp) for s in result.plan.stages],
    }  # fmt: skip


def main(folder: Path, only: str = "") -> None:
    work = {f"{n} {x}": partial(run, n, x) for n in MODELS for x in LAYOUTS}
    work[f"Mixtral {' '.join(MASKED)}"] = partial(run, "Mixtral", MASKED[1], masked=True)
    run_all({key: each for key, each in work.items() if only in key}, folder, "")


if __name__ == "__main__":
    on_ranks(main)
