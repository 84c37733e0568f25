"""What is right in a case before something is made wrong: a model that traces in a moment, plans of
it, files that are read without an error. Made once, before the cases are."""

from __future__ import annotations

import json
from contextlib import suppress
from dataclasses import replace
from functools import cache
from typing import Any

from meshwright.arguments import MEMORY_MARGIN
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.targets import target_named
from meshwright.decisions import Request, take_plan
from meshwright.planner.overrides import Overrides
from meshwright.planner.plan import InfeasibleError, Plan
from meshwright.profiles.cluster import Cluster, _device, _link
from meshwright.profiles.hardware.catalog_reader import CATALOG_DIR, Entry

# the tiny model lives with the tests
from tests.helpers.tiny import ROWS, cut, net, plan_for, slow_host, with_stage

DEVICES = 4

TOML: dict[str, Any] = {
    "base": "dgx-a100",
    "name": "ours",
    "num_nodes": 2,
    "devices_per_node": 4,
    "device": {
        "memory_bytes": 2**36,
        "peak_flops": {"fp32": 1e13, "bf16": 3e14},
        "matmul_efficiency": [[1e9, 0.3], [1e12, 0.8]],
        "tiles": [[256, 128], [128, 128]],
        "launch_overhead_s": 5e-6,
    },
    "intra_link": {"bandwidth": 2.5e11, "latency_s": 1e-5, "efficiency": 0.9},
    "inter_link": {"bandwidth": 1e11, "per_rank_bandwidth": 2.5e10},
}
SIGNATURE: dict[str, Any] = {
    "op": "aten.linear.default",
    "operands": [["float32", [4, 16], 1], ["float32", [8, 16], 1]],
    "args": [{"$operand": 0}, {"$operand": 1}],
    "kwargs": {},
}
PROFILE: dict[str, Any] = {
    "format": 1,
    "kind": "meshwright profile",
    "device": {"name": "cpu", "driver": "AVX2", "torch": "2"},
    "operators": [
        {
            "signature": SIGNATURE,
            "forward_s": 1e-5,
            "backward_s": 2e-5,
            "repetitions": 5,
            "spread": 0.1,
        }
    ],
    "collectives": [
        {
            "backend": "gloo",
            "kind": "all_reduce",
            "ranks": 4,
            "size": 4,
            "per_node": 4,
            "nbytes": 1024,
            "seconds": 1e-4,
            "repetitions": 3,
            "spread": 0.1,
        }
    ],
}
LOG = """# nThread 1 nGpus 8 minBytes 8 all_reduce_perf
#  Rank  0 Group  0 Pid  1 on    host1 device  0 [0x07] NVIDIA A100-SXM4-80GB
#  Rank  1 Group  0 Pid  2 on    host1 device  1 [0x0f] NVIDIA A100-SXM4-80GB
     1048576        262144     float     sum      -1    40.1   26.1   26.1      0    39.9   26.3   26.3      0
     4194304       1048576     float     sum      -1    90.1   46.5   46.5      0    89.9   46.6   46.6      0
"""  # noqa: E501
TABLE = """source,collective,gpu,nodes,n_gpus,inter_link,size_bytes,size_convention,time_us
ours,all_reduce,A100-SXM4-80GB,1,8,,1048576,nccl-tests size,40.1
ours,all_gather,A100-SXM4-80GB,1,8,,4194304,full buffer,90.1
"""


@cache
def problem() -> Problem:
    graph, factors = cut_net()
    return Problem(
        graph=graph,
        factors=factors,
        cluster=slow_host(DEVICES),
        precision="fp32",
        optimizer="adamw",
        target=target_named("eager"),
        profile=None,
        meetings=(),
    )


@cache
def cut_net() -> Any:
    return cut(net())


def request(overrides: Overrides | None = None) -> Request:
    return Request(
        global_batch_size=2 * ROWS,
        overrides=overrides or Overrides(),
        objective="robust",
        memory_margin=MEMORY_MARGIN,
        time_limit_s=None,
        compile=False,
        tf32=False,
    )


@cache
def plans() -> tuple[dict[str, Any], ...]:
    """Trees of plans that can be priced."""
    graph, _ = cut_net()
    one = plan_for(graph, stages=1)
    two = plan_for(graph, stages=2, dp=2, tp=1)
    split = with_stage(
        one,
        zero=1,
        recompute={"full": ("layers.0", "layers.1")},
        shardings={"layers.*.up": "colwise", "layers.*.down": "rowwise", "head": "colwise"},
    )
    return tuple(json.loads(plan.to_json()) for plan in (one, two, split))


@cache
def catalog() -> tuple[tuple[str, dict[str, Any]], ...]:
    """Names and trees of catalog files, devices and nodes."""
    names = ("a100-80gb", "h100-sxm", "l4", "dgx-a100", "p5.48xlarge", "local-host")
    return tuple(
        (name, json.loads((CATALOG_DIR / f"{name}.json").read_text(encoding="utf-8")))
        for name in names
    )


def local() -> Cluster:
    """CPU processes, which profiles of this machine are for."""
    return slow_host(DEVICES)


def priced_on(cluster: Cluster) -> None:
    """Price a plan on a cluster of any size."""
    here = replace(cluster, num_nodes=1, devices_per_node=DEVICES)
    given = Plan.from_json(json.dumps(plans()[0]))
    with suppress(InfeasibleError):
        take_plan(given, replace(problem(), cluster=here), request(), {}, 0.0)


def cluster_of(entry: Entry) -> object:
    """What a catalog entry describes: a device, or the links of a node."""
    if not entry.is_node:
        return _device(entry, host_s=None)
    return [_link(entry, key) for key in ("intra_link", "inter_link")]
