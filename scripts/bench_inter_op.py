"""Time the cut into stages on tables of the size of real planning problems, in CPU seconds.

Homogeneous tables price equal Transformer-like blocks by a closed form; heterogeneous ones vary the
blocks; noisy ones also perturb every stage independently.  Three parts: ``inter-op`` (any mesh per
stage), ``variants`` (the same with hundreds of variants of each mesh, with and without a cutoff),
``even`` (equal meshes).  Run as ``python -m scripts.bench_inter_op``; prints one line per problem
to stdout.
"""

import argparse
import resource
import time
from itertools import product

import numpy as np

from meshwright.planner.inter_op import (
    Constraints,
    StageTable,
    cut_evenly,
    minimal_shortfall,
    solve_inter_op,
)

GIB = 2.0**30


def stage_table(
    num_blocks: int, num_devices: int, *, kind: str, node: int = 8, copies: int = 1
) -> StageTable:
    """Return a table with submeshes 1, 2, 4, ... and 4·copies variants of each.

    Per block: 0.05 s and 6 GiB of training state on one device, 1 GiB of activations.  Larger
    submeshes lose efficiency within a node and more across; the variants trade time for memory by
    recomputing and by sharding the states.  Each further copy of them is slower by up to a half and
    needs less memory by up to as much, both drawn at random.
    """
    rng = np.random.default_rng(0)
    weight = np.ones(num_blocks) if kind == "homogeneous" else rng.uniform(0.5, 1.5, num_blocks)
    ends = np.concatenate([[0.0], np.cumsum(weight)])
    work = np.where(np.triu(np.ones((num_blocks + 1,) * 2), 1) > 0, ends - ends[:, None], np.inf)
    devices, times, statics, activations = [], [], [], []
    size = 1
    while size <= num_devices:
        tensor = min(size, node)
        for recompute, shard, copy in product((False, True), (False, True), range(copies)):
            slowdown = (1 + 0.03 * np.log2(size)) * (4 / 3 if recompute else 1.0)
            slowdown *= 1.08 if shard else 1.0
            slower, leaner = rng.uniform(1.0, 1.5, 2) if copy else (1.0, 1.0)
            noise = rng.uniform(0.9, 1.1, work.shape) if kind == "noisy" else 1.0
            times.append(
                (0.05 * work / size * slowdown + 2e-4 * np.log2(2 * size)) * noise * slower
            )
            statics.append(6 * GIB * work / (size if shard else tensor) / leaner)
            activations.append(GIB * work / size * (0.1 if recompute else 1.0) / leaner)
            devices.append(size)
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
    num_stages: int | None = None,
    cutoff_s: float = np.inf,
) -> tuple[str, float]:
    """Solve one problem under 1F1B; return its line of the output and its objective."""
    begin = time.process_time()
    solution = solve_inter_op(
        table,
        Constraints(
            num_devices=num_devices,
            memory_bytes=memory_bytes,
            in_flight=lambda s: min(s, num_microbatches),
            num_stages=num_stages,
        ),
        num_microbatches=num_microbatches,
        cutoff_s=cutoff_s,
    )
    time_s = time.process_time() - begin
    row = f"{memory_bytes / GIB:6.1f}G {num_microbatches:4d} {num_stages or 'any':>7} "
    if solution is None:
        return f"{row} none {time_s:30.3f}", np.inf
    found = f"{len(solution.stages):6d} {solution.candidates_tried:5d} {solution.objective_s:13.5f}"
    return f"{row} {found} {time_s:7.3f}", solution.objective_s


def shortfall_row(table: StageTable, *, num_devices: int) -> str:
    begin = time.process_time()
    one_gib = Constraints(num_devices=num_devices, memory_bytes=GIB, in_flight=lambda s: min(s, 64))
    shortfall = minimal_shortfall(table, one_gib)
    time_s = time.process_time() - begin
    excess = "none" if shortfall is None else f"{shortfall.excess_bytes / GIB:.2f}G"
    return f"shortfall {excess} {time_s:.3f}"


def bench_inter_op(kinds: list[str], microbatches: list[int]) -> None:
    print("  K    D kind           memory    m allowed  stages tried   objective_s  time_s")
    for num_blocks, num_devices in ((32, 64), (128, 512), (98, 1024), (128, 2048)):
        for kind in kinds:
            table = stage_table(num_blocks, num_devices, kind=kind)
            name = f"{num_blocks:3d} {num_devices:4d} {kind:13s}"
            ample, tight = 80 * GIB, 15 * GIB * num_blocks / num_devices
            for memory_bytes, num_stages in ((ample, None), (tight, None), (tight, 8)):
                for m in microbatches:
                    row, _ = timed_row(
                        table,
                        num_devices=num_devices,
                        num_microbatches=m,
                        memory_bytes=memory_bytes,
                        num_stages=num_stages,
                    )
                    print(name, row, flush=True)
            print(name, shortfall_row(table, num_devices=num_devices), flush=True)


def bench_variants(copies: int, microbatches: list[int]) -> None:
    """Print solves without a cutoff, with one that the optimum just meets, and just misses."""
    num_blocks, num_devices = 128, 512
    table = stage_table(num_blocks, num_devices, kind="heterogeneous", copies=copies)
    name = f"{len(table.devices)} variants"
    for memory_bytes in (80 * GIB, 15 * GIB * num_blocks / num_devices):
        for m in microbatches:
            cutoff = np.inf
            for label, factor in (("", 1.0), ("cutoff +1 %", 1.01), ("cutoff -1 %", 0.99)):
                row, found = timed_row(
                    table,
                    num_devices=num_devices,
                    num_microbatches=m,
                    memory_bytes=memory_bytes,
                    cutoff_s=factor * cutoff,
                )
                cutoff = min(cutoff, found)
                print(name, row, label, flush=True)
    print(name, shortfall_row(table, num_devices=num_devices), flush=True)


def bench_even(kinds: list[str], microbatches: list[int]) -> None:
    """Print cuts into P stages, with one level for all and with a slower one for each."""
    print("  C    P kind            m levels   objective_s  time_ms")
    for num_blocks, num_stages in ((34, 8), (98, 16), (130, 64), (130, 128)):
        for kind, m in product(kinds, microbatches):
            time_s = stage_table(num_blocks, 1, kind=kind).time_s[0]
            for levels in (1, num_stages):
                table = time_s * (1 + 0.01 * np.arange(levels))[:, None, None]
                begin = time.process_time()
                cut = cut_evenly(table, None, np.arange(num_stages) % levels, m - 1)
                time_ms = 1e3 * (time.process_time() - begin)
                objective = np.inf if cut is None else cut.objective_s
                print(
                    f"{num_blocks:3d} {num_stages:4d} {kind:13s} {m:4d} {levels:6d} "
                    f"{objective:13.5f} {time_ms:8.2f}",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--microbatches", type=int, nargs="+", default=[1, 4, 64, 512])
    parser.add_argument("--kinds", nargs="+", default=["homogeneous", "heterogeneous", "noisy"])
    parser.add_argument("--parts", nargs="+", default=["inter-op", "variants", "even"])
    parser.add_argument("--copies", type=int, default=20, help="of each variant, for `variants`")
    arguments = parser.parse_args()
    if "inter-op" in arguments.parts:
        bench_inter_op(arguments.kinds, arguments.microbatches)
    if "variants" in arguments.parts:
        bench_variants(arguments.copies, arguments.microbatches)
    if "even" in arguments.parts:
        bench_even(arguments.kinds, arguments.microbatches)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    print(f"peak memory: {peak / GIB:.2f} GiB")


if __name__ == "__main__":
    main()
