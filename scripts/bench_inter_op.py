"""Time the inter-operator search on tables of the size of real planning problems.

Homogeneous tables price equal Transformer-like blocks by a closed form; heterogeneous ones vary the
blocks; noisy ones also perturb every stage independently.  Run as
``python -m scripts.bench_inter_op``; prints one line per problem to stdout.
"""

import argparse
import resource
import time

import numpy as np

from planner.inter_op import StageTable, minimal_shortfall, solve_inter_op

GIB = 2.0**30


def stage_table(num_blocks: int, num_devices: int, *, kind: str, node: int = 8) -> StageTable:
    """Return a table with submeshes 1, 2, 4, ... and four variants of each.

    Per block: 0.05 s and 6 GiB of training state on one device, 1 GiB of activations.  Larger
    submeshes lose efficiency within a node and more across; the variants trade time for memory by
    recomputing and by sharding the states.
    """
    rng = np.random.default_rng(0)
    weight = np.ones(num_blocks) if kind == "homogeneous" else rng.uniform(0.5, 1.5, num_blocks)
    ends = np.concatenate([[0.0], np.cumsum(weight)])
    work = np.where(np.triu(np.ones((num_blocks + 1,) * 2), 1) > 0, ends - ends[:, None], np.inf)
    devices, times, statics, activations = [], [], [], []
    size = 1
    while size <= num_devices:
        tensor = min(size, node)
        for recompute in (False, True):
            for shard in (False, True):
                slowdown = (1 + 0.03 * np.log2(size)) * (4 / 3 if recompute else 1.0)
                slowdown *= 1.08 if shard else 1.0
                noise = rng.uniform(0.9, 1.1, work.shape) if kind == "noisy" else 1.0
                devices.append(size)
                times.append((0.05 * work / size * slowdown + 2e-4 * np.log2(2 * size)) * noise)
                statics.append(6 * GIB * work / (size if shard else tensor))
                activations.append(GIB * work / size * (0.1 if recompute else 1.0))
        size *= 2
    return StageTable(
        devices=np.array(devices),
        time_s=np.stack(times),
        static_bytes=np.nan_to_num(np.stack(statics), posinf=0.0),
        activation_bytes=np.nan_to_num(np.stack(activations), posinf=0.0),
    )


def timed_row(
    table: StageTable,
    *,
    num_devices: int,
    num_microbatches: int,
    memory_bytes: float,
    num_stages: int | None,
) -> str:
    """Solve one problem under 1F1B and return its line of the output."""
    begin = time.perf_counter()
    solution = solve_inter_op(
        table,
        num_devices=num_devices,
        num_microbatches=num_microbatches,
        memory_bytes=memory_bytes,
        in_flight=lambda s: min(s, num_microbatches),
        num_stages=num_stages,
    )
    time_s = time.perf_counter() - begin
    row = f"{memory_bytes / GIB:6.1f}G {num_microbatches:4d} {num_stages or 'any':>7} "
    if solution is None:
        return f"{row} infeasible {time_s:23.3f}"
    found = f"{len(solution.stages):6d} {solution.candidates_tried:5d} {solution.objective_s:13.5f}"
    return f"{row} {found} {time_s:7.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4, 64, 512])
    parser.add_argument("--kinds", nargs="+", default=["homogeneous", "heterogeneous", "noisy"])
    arguments = parser.parse_args()
    print("  K    D kind           memory    m allowed  stages tried   objective_s  time_s")
    for num_blocks, num_devices in ((32, 64), (128, 512), (98, 1024)):
        for kind in arguments.kinds:
            table = stage_table(num_blocks, num_devices, kind=kind)
            ample, tight = 80 * GIB, 15 * GIB * num_blocks / num_devices
            cases = [(ample, None), (tight, None), (tight, 8)]
            for memory_bytes, num_stages in cases:
                for m in arguments.microbatches:
                    row = timed_row(
                        table,
                        num_devices=num_devices,
                        num_microbatches=m,
                        memory_bytes=memory_bytes,
                        num_stages=num_stages,
                    )
                    print(f"{num_blocks:3d} {num_devices:4d} {kind:13s} {row}", flush=True)
    table = stage_table(128, 512, kind="noisy")
    begin = time.perf_counter()
    shortfall = minimal_shortfall(
        table, num_devices=512, memory_bytes=GIB, in_flight=lambda s: min(s, 64)
    )
    time_s = time.perf_counter() - begin
    if shortfall is not None:
        print(f"shortfall, K=128 D=512: {shortfall.excess_bytes / GIB:.2f}G, {time_s:.3f} s")
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"peak memory: {peak / GIB:.2f} GiB")


if __name__ == "__main__":
    main()
