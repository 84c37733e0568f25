"""`meshwright selftest`: plans of this machine against one device, and their prices against time.

Losses of a small decoder under plans on 1, 2, 4, ... devices are compared with ordinary PyTorch's.
A larger one is profiled, planned in `PLANS` ways on all devices, and run: predicted and measured
seconds of a step, and bytes of tensors at its peak, which on CPU ranks are those of a rehearsal.

    torchrun --standalone --nproc-per-node N -m meshwright.selftest FOLDER parity|times

is one of its launches. Each rank writes `FOLDER/<what>.<rank>.json`, by plan file of the folder:
losses of `STEPS` steps, or the seconds of `TURNS` steps and the most bytes that tensors took on its
GPU (None on CPUs).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from importlib.metadata import version
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.api import auto_parallelize
from meshwright.executor.ranks import launch
from meshwright.model import ParallelModel
from meshwright.planner.document import Document, Table
from meshwright.planner.overrides import OverrideError, Overrides
from meshwright.planner.plan import InfeasibleError, describe, seconds, sized
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.inputs import ArgumentError, MeasuringError
from meshwright.profiles.inputs.limits import is_number
from meshwright.profiles.measure.local_ranks import run_local
from meshwright.shell import override_flags
from meshwright.shell.profile_command import Effort, profile_model

STEPS, TURNS, WARM_UP = 3, 5, 2
LEARNING_RATE = 0.05
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
        raise ArgumentError.refused("selftest: budget", budget_s, legal="seconds above 0")
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
    wanted = alone(SMALL, torch.device(cluster.device.kind))
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
        model_of(sizes),
        batch_of(sizes, 2),
        loss_of,
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
            model_of(sizes),
            cluster,
            example_inputs=batch_of(sizes, 2),
            global_batch_size=sizes.rows,
            loss_fn=loss_of,
            precision=precision,
            optimizer="adamw_fused",
            overrides=given,
        )
    except (InfeasibleError, OverrideError):
        return None


def _run(folder: Path, what: str, sizes: Sizes, cluster: Cluster) -> list[dict[str, Any]]:
    """Findings of every rank about the folder's plans."""
    settings = settings_of(sizes, cluster.backend)
    (folder / "settings.json").write_text(settings, encoding="utf-8")
    outputs = [folder / f"{what}.{rank}.json" for rank in range(cluster.num_devices)]
    run_local(
        "meshwright.selftest",
        *(str(folder), what),
        ranks=len(outputs),
        budget_s=RUN_S,
        output=outputs[0],
        what=f"testing {what} on {len(outputs)} {cluster.backend} ranks",
        way_out=WAY_OUT,
    )
    missing = [k for k, output in enumerate(outputs) if not output.exists()]
    if missing:
        raise MeasuringError(
            f"ranks {missing} ended without a result", place=f"selftest: {what}", way_out=WAY_OUT
        )
    return [json.loads(output.read_text(encoding="utf-8")) for output in outputs]


# --- the model ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A decoder's sizes, and rows of its global batch."""

    width: int
    layers: int
    heads: int
    tokens: int
    vocabulary: int
    rows: int


SMALL = Sizes(width=64, layers=4, heads=4, tokens=32, vocabulary=128, rows=8)
ON_CPU = Sizes(width=256, layers=4, heads=8, tokens=128, vocabulary=2048, rows=16)
ON_GPU = Sizes(width=2048, layers=8, heads=16, tokens=1024, vocabulary=32768, rows=16)


class Layer(nn.Module):
    """Causal attention and a feed-forward network, each behind a norm, added to what came in."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, self.heads = sizes.width, sizes.heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q, k, v = (
            p(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        made: torch.Tensor = self.down(F.gelu(self.up(self.norms[1](x))))
        return x + made


class Decoder(nn.Module):
    """An ordinary decoder: logits of every token's next one."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.tokens, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.tokens = sizes.tokens

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(self.tokens, device=ids.device)
        x = self.embed(ids) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def model_of(sizes: Sizes) -> Decoder:
    """The same weights in every process."""
    torch.manual_seed(0)
    return Decoder(sizes)


def batch_of(sizes: Sizes, rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (rows, tokens), and their labels, the same in every process."""
    draw = torch.Generator().manual_seed(1)
    shape = (rows or sizes.rows, sizes.tokens)
    ids = torch.randint(0, sizes.vocabulary, shape, generator=draw)
    return ids, ids.roll(-1, dims=1)


def alone(sizes: Sizes, device: torch.device) -> list[float]:
    """Losses of ordinary PyTorch in fp32 on one device, without any plan."""
    model, (ids, labels) = model_of(sizes).to(device), batch_of(sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(ids.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- on every rank --------------------------------------------------------------------------------


def _losses(path: Path, sizes: Sizes, device: torch.device) -> list[float]:
    """Losses under a plan."""
    result = _built(path, sizes)
    optimizer = torch.optim.SGD(result.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(result.train_step(batch_of(sizes)).item())
        optimizer.step()
    return losses


def _steps(path: Path, sizes: Sizes, device: torch.device) -> tuple[list[float], float | None]:
    """Seconds of steps under a plan, and bytes of tensors at their peak."""
    on_gpu = device.type == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    result = _built(path, sizes)
    batch, took = batch_of(sizes), list[float]()
    optimizer = torch.optim.AdamW(result.parameters(), lr=1e-4, fused=True)
    for _ in range(WARM_UP + TURNS):
        launch.agree_on(lambda: None)  # all ranks begin together
        started = time.perf_counter()
        optimizer.zero_grad()
        result.train_step(batch)
        optimizer.step()
        if on_gpu:
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - started)
    peak = float(torch.cuda.max_memory_allocated(device)) if on_gpu else None
    return took[WARM_UP:], peak


def _built(path: Path, sizes: Sizes) -> Any:
    return auto_parallelize(
        model_of(sizes),
        Cluster.detect(),
        example_inputs=batch_of(sizes, 2),
        global_batch_size=sizes.rows,
        loss_fn=loss_of,
        precision=json.loads(path.read_text(encoding="utf-8"))["precision"],
        plan=path,
        profile=False,
    )


WORK: Mapping[str, Callable[[Path, Sizes, torch.device], Any]] = {
    "parity": _losses,
    "times": _steps,
}


def main() -> None:
    folder, what = Path(sys.argv[1]), sys.argv[2]
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    sizes = Sizes(**settings["sizes"])
    with launch.distributed(settings["backend"]):
        device = launch.device_here()
        if device.type == "cpu":
            torch.set_num_threads(1)
        found = {p.name: WORK[what](p, sizes, device) for p in sorted(folder.glob("*.plan.json"))}
        output = folder / f"{what}.{launch.rank()}.json"
        output.write_text(json.dumps(found), encoding="utf-8")


def settings_of(sizes: Sizes, backend: str) -> str:
    """Settings that `main` reads."""
    return json.dumps({"sizes": asdict(sizes), "backend": backend})


if __name__ == "__main__":
    main()
