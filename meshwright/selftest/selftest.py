"""`meshwright selftest`: plans of this machine against one device, and their prices against time.

Losses of a small decoder under plans on 1, 2, 4, ... devices are compared with ordinary PyTorch's.
A larger one is profiled, planned in `PLANS` ways on all devices, and run: predicted and measured
seconds of a step, and bytes of tensors at its peak, which on CPU ranks are those of a rehearsal.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from meshwright.api import auto_parallelize
from meshwright.model import ParallelModel
from meshwright.planner.document import Document, Table
from meshwright.planner.overrides import OverrideError, Overrides
from meshwright.planner.plan import InfeasibleError, describe, seconds, sized
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.inputs import MeshwrightError
from meshwright.profiles.inputs.limits import is_number
from meshwright.profiles.measure.local_ranks import run_local
from meshwright.selftest import on_ranks
from meshwright.selftest.on_ranks import ON_CPU, ON_GPU, SMALL, Sizes
from meshwright.shell import override_flags
from meshwright.shell.profile_command import Effort, profile_model

PLANS = 8  # that are timed
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-2}  # of losses, beside those of fp32
RUN_S = 180.0  # of a launch
WAY_OUT = "mend that; `meshwright run` shows what a rank says, CUDA_VISIBLE_DEVICES leaves GPUs out"


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """A plan of the small model on so many ranks, and the largest relative difference of its losses
    from one device's."""

    ranks: int
    precision: str
    plan: str
    error: float

    @property
    def ok(self) -> bool:
        return self.error <= TOLERANCE[self.precision]


@dataclass(frozen=True, slots=True, kw_only=True)
class Timed:
    """A plan of the larger model: predicted and measured seconds, and bytes of tensors at the peak
    of the fullest device."""

    plan: str
    predicted_s: float
    measured_s: float
    predicted_bytes: float
    measured_bytes: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Selftest:
    """Findings of a self-test; `machine` says where, `rehearsed` that no peak was measured."""

    machine: dict[str, str]
    cells: Sequence[Cell]
    timed: Sequence[Timed]
    rehearsed: bool
    seconds: float

    @property
    def ok(self) -> bool:
        """Whether every plan's losses are those of one device."""
        return all(cell.ok for cell in self.cells)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self) | {"ok": self.ok}

    def document(self) -> Document:
        """Text and tables."""
        wrong = sum(not cell.ok for cell in self.cells)
        cells = [
            [str(c.ranks), c.precision, c.plan, f"{c.error:.1e}", "equal" if c.ok else "DIFFERS"]
            for c in self.cells
        ]
        rows = [
            [
                t.plan,
                seconds(t.predicted_s),
                seconds(t.measured_s),
                f"{t.predicted_s / t.measured_s - 1:+.0%}",
                sized(t.predicted_bytes),
                sized(t.measured_bytes),
                f"{t.predicted_bytes / t.measured_bytes - 1:+.0%}",
            ]
            for t in self.timed
        ]
        off = [abs(t.predicted_s / t.measured_s - 1) for t in self.timed]
        peak = "rehearsed" if self.rehearsed else "measured"
        return Document((
            ", ".join(f"{name} {text}" for name, text in self.machine.items()),
            "",
            "Losses beside those of ordinary PyTorch in fp32 on one device",
            Table(heads=["ranks", "precision", "plan", "largest error", "found"], rows=cells),
            "",
            "Predicted and measured steps, and bytes of tensors at the peak",
            Table(
                heads=["plan", "predicted", "measured", "error", "peak", peak, "error"], rows=rows
            ),
            "",
            f"{len(self.cells) - wrong} of {len(self.cells)} plans equal one device; steps are "
            f"{statistics.fmean(off):.0%} off in the mean; {self.seconds:.0f} s",
        ))  # fmt: skip


# plans as `meshwright plan` has them, a line each, for N devices: of the small model, of the larger
# one on one device, and on several, the most telling first; those of halves where N is 4, 8, ...
EQUAL = """
--dp N --zero 0
--dp N --num-microbatches 1 --zero 3
--tp N --num-microbatches 2
--pp N --num-microbatches 4 --schedule 1f1b
--pp 2 --tp 2 --dp N/4 --num-microbatches 4 --schedule zb_h1
"""
ALONE = """
--num-microbatches 1 --recompute none
--num-microbatches 2 --recompute none
--num-microbatches 4 --recompute none
--num-microbatches 8 --recompute none
--num-microbatches 1 --recompute full
--num-microbatches 2 --recompute full
--num-microbatches 4 --recompute full
--num-microbatches 8 --recompute full
"""
SEVERAL = """
--dp N --num-microbatches 1 --zero 0 --recompute none
--dp N --num-microbatches 1 --zero 1 --recompute none
--dp N --num-microbatches 1 --zero 3 --recompute none
--dp N --num-microbatches 4 --zero 2 --recompute full
--tp N --num-microbatches 1 --recompute none
--pp N --num-microbatches 8 --schedule 1f1b --recompute none
--pp 2 --tp 2 --dp N/4 --num-microbatches 4 --recompute none
--dp N/2 --tp 2 --num-microbatches 2 --zero 1 --recompute none
--pp N --num-microbatches 8 --schedule gpipe --recompute full
--dp N --num-microbatches 2 --zero 0 --recompute full
"""


def selftest(ranks: int | None = None, *, budget_s: float = 60.0) -> Selftest:
    """Test this machine's GPUs, or else as many CPU ranks as it has cores (8 at most); `budget_s`
    of a profile. Raises ValueError for a number of ranks that the machine has not, or a budget that
    is none, and RuntimeError where ranks fail."""
    started = time.monotonic()
    if not (is_number(budget_s) and 0 < budget_s < float("inf")):
        raise MeshwrightError.refused("selftest: budget", budget_s, legal="seconds above 0")
    cluster = _cluster(ranks)
    on_gpus, n = cluster.device.kind == "cuda", cluster.num_devices
    cells = [cell for k in _powers(n) for cell in _parity(_cluster(k, like=cluster), k)]
    timed = _timed(cluster, ON_GPU if on_gpus else ON_CPU, budget_s)
    return Selftest(
        machine=_machine(cluster),
        cells=cells,
        timed=timed,
        rehearsed=not on_gpus,
        seconds=time.monotonic() - started,
    )


def _cluster(ranks: int | None, like: Cluster | None = None) -> Cluster:
    """This machine's devices, so many or all; of the kind of another."""
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    cores = min(8, os.cpu_count() or 1)
    return Cluster.local(ranks or gpus or cores, like.device.kind if like else None)


def _powers(n: int) -> list[int]:
    """1, 2, 4, ... and n."""
    return sorted({2**k for k in range(n.bit_length()) if 2**k <= n} | {n})


def _machine(cluster: Cluster) -> dict[str, str]:
    gpu = cluster.device.kind == "cuda"
    return {
        "devices": f"{cluster.num_devices} x "
        + (torch.cuda.get_device_name() if gpu else f"CPU ({platform.machine()})"),
        "torch": str(torch.__version__),
        "meshwright": version("meshwright"),
        "date": date.today().isoformat(),
    }


def _given(lines: str, n: int) -> list[Overrides]:
    """The overrides of lines of flags, for n devices."""
    parser = argparse.ArgumentParser()
    override_flags.add_arguments(parser)
    parts = {"N/4": n // 4, "N/2": n // 2, "N": n}
    return [
        override_flags.overrides_of(
            parser.parse_args([str(parts.get(word, word)) for word in line.split()])
        )
        for line in lines.strip().splitlines()
        if "N/" not in line or (n >= 4 and n % 4 == 0)
    ]


# --- parity ---------------------------------------------------------------------------------------


def _parity(cluster: Cluster, ranks: int) -> list[Cell]:
    """The small model's losses under a plan of each kind, in each precision."""
    precisions = ("fp32", "bf16") if cluster.device.kind == "cuda" else ("fp32",)
    cells, names = list[Cell](), dict[str, tuple[str, str]]()
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for precision in precisions:
            for given in _given(EQUAL if ranks > 1 else ALONE, ranks):
                found = _planned(cluster, SMALL, given, precision)
                if found is None:
                    continue
                name = f"{len(names):02d}.plan.json"
                found.plan.save(folder / name)
                names[name] = precision, describe(found.plan)
        (every, *_) = _run(folder, "parity", SMALL, cluster)
    wanted = on_ranks.alone(SMALL, torch.device(cluster.device.kind))
    for name, losses in every.items():
        precision, plan = names[name]
        error = max(abs(a / b - 1) for a, b in zip(losses, wanted, strict=True))
        cells.append(Cell(ranks=ranks, precision=precision, plan=plan, error=error))
    return cells


# --- prices ---------------------------------------------------------------------------------------


def _timed(cluster: Cluster, sizes: Sizes, budget_s: float) -> list[Timed]:
    """Profile, plan, rehearse and run."""
    precision = "bf16" if cluster.device.kind == "cuda" else "fp32"
    profile_model(
        on_ranks.model_of(sizes),
        on_ranks.batch_of(sizes, 2),
        on_ranks.loss_of,
        cluster,
        batch=sizes.rows,
        precision=precision,
        effort=Effort(budget_s=budget_s),
    )
    n = cluster.num_devices
    wanted = _given(SEVERAL if n > 1 else ALONE, n)
    every = (_planned(cluster, sizes, given, precision) for given in wanted)
    apart = {describe(found.plan): found for found in every if found is not None}
    plans = dict(islice(apart.items(), PLANS))
    rehearsals = [found.rehearse() for found in plans.values()]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for k, found in enumerate(plans.values()):
            found.plan.save(folder / f"{k:02d}.plan.json")
        ranks = _run(folder, "times", sizes, cluster)
    rows = []
    for k, (name, found) in enumerate(plans.items()):
        took, peaks = zip(*(rank[f"{k:02d}.plan.json"] for rank in ranks), strict=True)
        slowest = [max(turn) for turn in zip(*took, strict=True)]
        rehearsed = max(rehearsals[k].peak_bytes)
        rows.append(
            Timed(
                plan=name,
                predicted_s=found.prediction.step_time_s,
                measured_s=statistics.median(slowest),
                predicted_bytes=float(max(rehearsals[k].priced_bytes)),
                measured_bytes=float(rehearsed if None in peaks else max(peaks)),
            )
        )
    return rows


def _planned(
    cluster: Cluster, sizes: Sizes, given: Overrides, precision: str
) -> ParallelModel | None:
    """The plan under overrides, where there is one that fits."""
    try:
        return auto_parallelize(
            on_ranks.model_of(sizes),
            cluster,
            example_inputs=on_ranks.batch_of(sizes, 2),
            global_batch_size=sizes.rows,
            loss_fn=on_ranks.loss_of,
            precision=precision,
            optimizer="adamw_fused",
            overrides=given,
        )
    except (InfeasibleError, OverrideError):
        return None


def _run(folder: Path, what: str, sizes: Sizes, cluster: Cluster) -> list[dict[str, Any]]:
    """Findings of every rank about the folder's plans."""
    settings = on_ranks.settings_of(sizes, cluster.backend)
    (folder / "settings.json").write_text(settings, encoding="utf-8")
    outputs = [folder / f"{what}.{rank}.json" for rank in range(cluster.num_devices)]
    run_local(
        "meshwright.selftest.on_ranks",
        *(str(folder), what),
        ranks=len(outputs),
        budget_s=RUN_S,
        output=outputs[0],
        way_out=WAY_OUT,
    )
    missing = [k for k, output in enumerate(outputs) if not output.exists()]
    if missing:
        raise MeshwrightError(
            f"ranks {missing} ended without a result", place=f"selftest: {what}", way_out=WAY_OUT
        )
    return [json.loads(output.read_text(encoding="utf-8")) for output in outputs]
