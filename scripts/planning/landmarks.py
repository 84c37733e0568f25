"""What the search chooses where sequences are long or memory is short: a row for each case.

    python -m scripts.planning.landmarks [CASE ...]

Nothing is forced but what the case says; models are on meta, hardware is the catalog's. The same
file runs in older checkouts, to compare what they chose. Seconds of planning are wall time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from meshwright import Cluster, Link, Overrides, auto_parallelize
from meshwright.planner.plan import InfeasibleError, PlanError
from scripts.planning.cases import Model, clip, decoder, dpr, gpt, gpt3, llama


@dataclass(frozen=True, slots=True, kw_only=True)
class Landmark:
    """A model on `nodes` of `devices` each, with a link between `sites` of one node where they are
    that; `batch` rows a step; `given` goes to the planner."""

    model: Callable[[], Model]
    node: str
    batch: int
    nodes: int = 1
    devices: int | None = None
    precision: str = "bf16"
    given: Mapping[str, Any] = field(default_factory=dict)
    sites: Link | None = None


def llama_8b(length: int) -> Callable[[], Model]:
    return lambda: llama(32, 4096, 32, 14336, length)


LANDMARKS: Mapping[str, Landmark] = {
    # a fine-tuning on two consumer cards: weights, gradients and states are five times their memory
    "llama-8b on 2 RTX 4090": Landmark(
        model=llama_8b(2048), node="pcie-8-rtx-4090", devices=2, batch=16
    ),
    # ZeRO-Offload's largest model on one device (Ren et al. 2021)
    "gpt-10b on a V100": Landmark(
        model=lambda: gpt(50, 4096, 32, 50257, 1024),
        node="dgx-2-v100", devices=1, batch=8, precision="fp16",
    ),
    "llama-8b, 131k tokens, 32 H100": Landmark(
        model=llama_8b(131072), node="dgx-h100", nodes=4, batch=4
    ),
    "openllama-3b, 131k tokens, one H100": Landmark(
        model=lambda: decoder(
            "Llama", 131072,
            vocab_size=32000, hidden_size=3200, intermediate_size=8640, num_hidden_layers=26,
            num_attention_heads=32, num_key_value_heads=32, max_position_embeddings=131072,
        ),
        node="dgx-h100", devices=1, batch=1,
    ),
    # the last stage of Llama 3's training (Grattafiori et al. 2024, table 4): 38 % MFU
    "llama-405b, 131k tokens, 16384 H100": Landmark(
        model=lambda: llama(126, 16384, 128, 53248, 131072),
        node="dgx-h100", nodes=2048, batch=128,
    ),
    # few long rows over slow links leave a pipeline empty: token slices (Li et al. 2021)
    "llama-1b, 32k tokens, 32 V100": Landmark(
        model=lambda: llama(16, 2048, 32, 8192, 32768),
        node="p3.16xlarge", nodes=4, batch=4, precision="fp16",
    ),
    # memory binds: what sequence parallelism keeps decides
    "gpt3 on 64 A100": Landmark(model=gpt3, node="dgx-a100", nodes=8, batch=512),
    # 100 Gb/s a node and small devices: ZeRO++'s ground (Wang et al. 2023)
    "llama-8b on 64 RTX 4090, quantized": Landmark(
        model=llama_8b(4096), node="pcie-8-rtx-4090", nodes=8, batch=64,
        given={"allow": ["quantized"]},
    ),
    # few rows a rank over Ethernet: what stands for gradients pays (Vogels et al. 2019)
    "gpt-350m on 32 RTX 4090, compressed": Landmark(
        model=lambda: gpt(24, 1024, 16, 50304, 1024),
        node="pcie-8-rtx-4090", nodes=4, batch=64, given={"allow": ["compressed"]},
    ),
    # and over NVLink nothing does, though it may
    "gpt-350m on 8 H100, compressed": Landmark(
        model=lambda: gpt(24, 1024, 16, 50304, 1024),
        node="dgx-h100", batch=64, given={"allow": ["compressed"]},
    ),
    # few tokens on CPU hosts, whose sums hide behind nothing: of plans of data parallelism late
    # gradients pay (Ho et al. 2013), with half of the hosts as servers
    "gpt-85m on 16 CPU hosts, stale": Landmark(
        model=lambda: gpt(12, 768, 12, 512, 16),
        node="local-host", nodes=16, devices=1, batch=64, precision="fp32",
        given={"allow": ["stale"], "overrides": Overrides(pp=1, tp=1)},
    ),
    # and where a sum goes beside the backward a ring computes on all ranks
    "gpt-350m on 8 H100, stale": Landmark(
        model=lambda: gpt(24, 1024, 16, 50304, 1024),
        node="dgx-h100", batch=64, given={"allow": ["stale"]},
    ),
    # two sites with 1 Gb/s between: replicas that train apart (Douillard et al. 2023)
    "gpt-350m on two sites of 8 H100": Landmark(
        model=lambda: gpt(24, 1024, 16, 50304, 1024),
        node="dgx-h100", nodes=2, batch=128, given={"allow": ["replicas"]},
        sites=Link(name="1 Gb/s between sites", latency_s=0.02, bandwidth=1.25e8),
    ),
    # and on one site nothing changes, though it may
    "gpt-350m on one of two sites' nodes": Landmark(
        model=lambda: gpt(24, 1024, 16, 50304, 1024),
        node="dgx-h100", nodes=2, batch=128, given={"allow": ["replicas"]},
    ),
    # two equal towers whose rows meet in the loss: apart, no gradient crosses the slow link
    "dpr on 2 RTX 4090, 10 GB/s": Landmark(
        model=dpr, node="pcie-8-rtx-4090", nodes=2, devices=1, batch=128
    ),
    # the same where it was trained: each tower's gradients are summed over half of the devices
    "dpr on 8 V100": Landmark(model=dpr, node="p3.16xlarge", batch=128, precision="fp16"),
    # unequal towers, whose work three devices and one share
    "clip-l/14 on 4 RTX 4090, 10 GB/s": Landmark(
        model=clip, node="pcie-8-rtx-4090", nodes=4, devices=1, batch=96
    ),
    # and on fast links, of rows that seven devices can't share, all devices take both
    "clip-l/14 on 8 H100": Landmark(model=clip, node="dgx-h100", batch=512),
    # a device a node, no more rows than twice the groups: never flushed (Narayanan et al. 2020)
    "llama-8b on 8 nodes of one H100, stale": Landmark(
        model=llama_8b(2048), node="p5.48xlarge", nodes=8, devices=1, batch=16,
        given={"allow": ["stale"]},
    ),
    # the same without permission
    "llama-8b on 8 nodes of one H100": Landmark(
        model=llama_8b(2048), node="p5.48xlarge", nodes=8, devices=1, batch=16
    ),
    # no room for versions of the weights, and none needed: ZeRO-3 has no bubble
    "llama-8b on 16 V100, stale": Landmark(
        model=llama_8b(2048), node="dgx-2-v100", devices=8, nodes=2, batch=16,
        given={"allow": ["stale"]},
    ),
    # Qi et al. 2023: 14.6 B, a layer less for the first and the last of 16 stages
    "gpt-14.6b, pipeline of 16 A100": Landmark(
        model=lambda: gpt(46, 5120, 40, 50304, 1024),
        node="dgx-a100", nodes=2, batch=128, given={"overrides": Overrides(pp=16)},
    ),
}  # fmt: skip


def show(name: str) -> None:
    case = LANDMARKS[name]
    model, started = case.model(), time.perf_counter()
    size = {} if case.devices is None else {"devices_per_node": case.devices}
    cluster = Cluster.from_catalog(case.node, num_nodes=case.nodes, **size)
    if case.sites is not None:
        cluster = replace(cluster, num_pools=case.nodes, pool_link=case.sites)
    try:
        result = auto_parallelize(
            model.module,
            cluster,
            example_inputs=dict(model.batch),
            global_batch_size=case.batch,
            precision=case.precision,
            **case.given,
        )
    except (InfeasibleError, PlanError, ValueError) as error:
        print(f"{name}\n  none in {time.perf_counter() - started:.0f} s: {str(error)[:300]}")
        return
    summary = str(result.report).splitlines()[1:3]
    print("\n".join([name, *(f"  {line.strip()}" for line in summary)]))
    print(f"  planned in {time.perf_counter() - started:.0f} s", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help="parts of names; all by default")
    asked = parser.parse_args().cases
    for name in LANDMARKS:
        if not asked or any(part in name for part in asked):
            show(name)


if __name__ == "__main__":
    main()
