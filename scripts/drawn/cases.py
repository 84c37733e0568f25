"""Drawn cases of planning: models of `recording.cases` in drawn sizes, on drawn clusters, with
batches that divide well and badly and, half of the time, with devices too small for plain plans;
and overrides to force on them.

Case and overrides follow from the seed and the number of the case alone, whatever is planned.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from random import Random
from typing import Any

import torch

from meshwright import Cluster, Overrides
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.planner.overrides import OverrideError
from meshwright.planner.plan import PLACEMENTS, divisors
from scripts.recording import cases as models
from scripts.recording.cases import Built, Case, nodes, with_memory

STATE_BYTES = 18  # a parameter's, with AdamW under autocast: what memory is drawn in terms of
LEAST_MEMORY = 2**28
# of the bytes of a model's states, what a device holds in cases that memory binds
SHARES = (0.15, 0.3, 0.6, 1.2, 2.5)
BATCHES = (16, 32, 64, 128, 256)
BAD_BATCHES = (6, 7, 18, 30, 36, 50, 97, 100, 126, 252, 330)
NODES: Mapping[str, tuple[int, ...]] = {  # devices of a node that a case may have
    "dgx-h100": (2, 3, 4, 6, 8, 8, 8),
    "dgx-a100": (2, 4, 8, 8, 8),
    "p3.16xlarge": (4, 8),
    "pcie-8-rtx-4090": (2, 4, 5, 8),
    "pcie-8-l40s": (4, 8),
    "dgx-2-v100": (8, 16),
    "dgx-b200": (8,),
}
FEW = ((1, 2), (1, 3), (1, 4), (2, 2))  # nodes and devices of each where memory binds: a quick plan
FORCED = 4  # overrides of a case
OPTIMIZERS = ("adamw", "adamw", "adamw", "adamw_fused", "adamw8bit", "sgd")
EXPERTS = 8  # of the mixture
LAYERS = "model.layers.*:add*"
RESIDUALS = {"gpt2": "transformer.h.*:add*", "llama": LAYERS, "mixtral": LAYERS}  # what blocks add
TARGETS = (None, None, None, None, "compiled", "megatron")


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A case of a seed, by its number; `overrides` are forced on it one after the other, and
    `limit_s` is the time that a search under a limit gets."""

    number: int
    name: str
    case: Case
    overrides: tuple[Overrides, ...]
    limit_s: float


def drawn(seed: int, number: int) -> Drawn:
    """The case of this number."""
    rng = Random(f"{seed}/{number}")
    kind, name, model = _model(rng)
    node, bound = rng.choice(sorted(NODES)), rng.random() < 0.5
    count, devices = rng.choice((1, 1, 1, 2, 2, 4)), rng.choice(NODES[node])
    if bound:
        count, devices = rng.choice(FEW)
    batch = rng.choice(rng.choice((BATCHES, BAD_BATCHES)))
    options: dict[str, Any] = {"precision": "fp16" if "v100" in node or "p3" in node else "bf16"}
    options["optimizer"], target = rng.choice(OPTIMIZERS), rng.choice(TARGETS)
    options |= {"target": target} if target else {}
    if kind == "mixtral" and rng.random() < 0.3:
        options["expert_imbalance"] = 1.5
    cluster: Callable[[], Cluster] = nodes(node, count, devices_per_node=devices)
    said = f"{name}, {count} × {devices} {node}, {options['optimizer']}, batch {batch}"
    if bound:
        nbytes = max(LEAST_MEMORY, round(rng.choice(SHARES) * STATE_BYTES * _parameters(model)))
        if nbytes < cluster().device.memory_bytes:
            cluster = with_memory(cluster, nbytes)
            said += f", {nbytes / 2**30:.3g} GiB a device"
    made = cluster()
    return Drawn(
        number=number,
        name=said + (f", target {target}" if target else ""),
        case=Case(model=model, cluster=cluster, batch=batch, options=options),
        overrides=tuple(_overrides(rng, made, batch, kind) for _ in range(FORCED)),
        limit_s=rng.choice((0.01, 0.05, 0.2)),
    )


# --- models ---------------------------------------------------------------------------------------


def _model(rng: Random) -> tuple[str, str, Callable[[], Built]]:
    """A kind of model, what it is called, and how it is built."""
    kind = rng.choice(("gpt2",) * 3 + ("llama",) * 4 + ("mixtral",) * 3 + ("other",) * 2)
    if kind == "other":
        other = rng.choice(("bert", "t5", "resnet", "vit", "convolutions", "encoder_decoder"))
        return other, other, getattr(models, other)
    hidden = rng.choice((512, 1024, 2048) if kind == "mixtral" else (512, 1024, 2048, 4096))
    given = {
        "layers": rng.choice((2, 3, 4, 6, 8)),
        "hidden": hidden,
        "length": rng.choice((512, 1024, 2048)),
        "vocab": rng.choice((32000, 50257)),
    }
    said = f"{kind} {given['layers']} × {hidden}, {given['length']} tokens"
    return kind, said, partial(getattr(models, kind), **given)


def _parameters(model: Callable[[], Built]) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in model()[0].parameters())


# --- overrides ------------------------------------------------------------------------------------


def _overrides(rng: Random, cluster: Cluster, batch: int, kind: str) -> Overrides:
    """One to three decisions each by itself, or a mesh with micro-batches and some more."""
    experts, residual = EXPERTS if kind == "mixtral" else 0, RESIDUALS.get(kind, "")
    while True:
        if rng.random() < 0.5:
            alone = _alone(rng, cluster, batch, experts)
            given = dict(rng.sample(sorted(alone.items()), rng.choice((1, 1, 2, 3))))
        else:
            given = _mesh(rng, cluster, batch)
            more = _more(rng, given, residual)
            given |= dict(rng.sample(sorted(more.items()), rng.choice((0, 1, 1, 2))))
        try:
            return Overrides(**given)
        except OverrideError:
            continue


def _alone(rng: Random, cluster: Cluster, batch: int, experts: int) -> dict[str, Any]:
    """A value of each decision, whatever the others are."""
    devices, counts = cluster.num_devices, divisors(batch)
    found: dict[str, Any] = {
        "tp": rng.choice(divisors(cluster.devices_per_node)),
        "dp": rng.choice(divisors(devices)),
        "pp": rng.choice([n for n in divisors(devices) if n <= 8]),
        "zero": rng.choice((0, 1, 2, 3)),
        "num_microbatches": rng.choice(counts),
        "microbatch_size": rng.choice((1, 2, 4)),
        "schedule": rng.choice(sorted(n for n, s in SCHEDULES.items() if not s.on_request)),
        "placement": rng.choice(PLACEMENTS),
        "recompute": rng.choice(("none", "selective", "pointwise", "products", "full")),
        "segments": 2,
        "offload": _offload(rng),
        "forbid": rng.sample(
            ("tp", "pp", "zero", "recompute", "offload", "unequal_meshes", "zero-3", "zb_h1"),
            rng.choice((1, 2)),
        ),
    }
    return found | ({"ep": rng.choice(divisors(experts))} if experts else {})


def _mesh(rng: Random, cluster: Cluster, batch: int) -> dict[str, Any]:
    """Degrees that multiply to the cluster, and micro-batches whose rows they share out where there
    are such."""
    devices, node = cluster.num_devices, cluster.devices_per_node
    found: dict[tuple[int, int], list[int]] = {}
    for pp in (n for n in divisors(devices) if n <= 8):
        for tp in (n for n in divisors(devices // pp) if node % n == 0):
            dp = devices // pp // tp
            found[pp, tp] = [m for m in divisors(batch) if batch // m % dp == 0]
    pp, tp = rng.choice([mesh for mesh, counts in found.items() if counts] or [*found])
    counts = found[pp, tp]
    return {"pp": pp, "tp": tp} | ({"num_microbatches": rng.choice(counts)} if counts else {})


def _more(rng: Random, mesh: Mapping[str, Any], residual: str) -> dict[str, Any]:
    """What may be decided beside a mesh; how sums that `residual` names lie on the tensor axis."""
    found: dict[str, Any] = {
        "zero": rng.choice((0, 1, 2, 3)),
        "recompute": rng.choice(("none", "pointwise", "full")),
        "offload": _offload(rng),
    }
    if mesh["tp"] > 1 and residual:
        found["shardings"] = {residual: rng.choice(("-> S(1)", "-> R"))}
    if mesh["pp"] > 1:
        found["schedule"] = rng.choice(("1f1b", "gpipe", "zb_h1", "zb_v", "interleaved_1f1b"))
    return found


def _offload(rng: Random) -> dict[str, float]:
    parts: Sequence[dict[str, float]] = (
        {"optimizer": 1.0},
        {"optimizer": 0.5},
        {"activations": 1.0},
        {"activations": 0.5},
        {"optimizer": 1.0, "activations": 0.5},
        {"optimizer": 0.0},
    )
    return rng.choice(parts)
