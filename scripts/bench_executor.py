"""What our execution costs over what an expert writes by hand: one device, data, tensor, pipeline
parallelism and their combination on CPU ranks, each beside torch's own tools.

    python -m scripts.bench_executor [--case NAME ...] [--pairs 15] [--layers 8] [--hidden 512]
        [--rows 8] [--link-gbit 1] [--no-memory] [--json FILE] [--record]

Time: one launch per case holds both trainers, ours and theirs, with the same weights, optimizer and
batch, one thread a rank. Their steps are taken in turns, in alternating order, each after a
barrier; a step is forward, backward and optimizer, and takes what the slowest rank takes. The ratio
ours / theirs is taken pair by pair, so that whatever else the machine does hits both sides of it;
shown are the median and the quartiles over the pairs. CPU seconds of all ranks together, the same
way, are a second witness that does not see waiting. Both must show the same losses.

Memory: one launch per side. Resident bytes at the peak of a step, less those before the model was
built, the median over some steps, of the rank that needs most. Both sides train a small model of
the same kind first, so that no library counts.

`--link-gbit` puts every rank on an emulated host of its own (`scripts/emulated_cluster`; needs
root), joined by links of that speed. The case `startup` builds a deep model on 4 ranks.

torch's context parallelism has no attention for CPUs, and its `CPUOffloadPolicy` moves nothing
there: no case has them. `--record` keeps the table for the documents.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from meshwright.executor.ranks import launch
from scripts.ranks import measure
from scripts.ranks.baselines import Setting, mean_loss
from scripts.ranks.cases import CASES, FAR, NEAR, STARTUP_CASE, Case, Size
from scripts.ranks.measure import RETURNS_FREED, SIDES, WARM_UP, Step
from scripts.recording.results import record

LAUNCH_TIMEOUT_S = 400.0
STARTUP, STARTUP_TARGET_S = "startup", 10.0
STARTUP_SETTING = Setting(layers=96, hidden=64, heads=4, vocabulary=256, length=32, rows=8)
HEAD_DIM, VOCABULARY, LENGTH = 64, 2048, 128

LOSS_TOLERANCE = 1e-3  # relative; the optimizer magnifies rounding from step to step
MEBIBYTE = 2**20


# --- figures -------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Ratio:
    """Of ours to theirs: median and quartiles over the pairs."""

    low: float
    median: float
    high: float

    def __str__(self) -> str:
        return f"{self.median:.3f} [{self.low:.3f}, {self.high:.3f}]"


def ratio_of(ours: Sequence[float], theirs: Sequence[float]) -> Ratio:
    """Pair by pair."""
    ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
    if len(ratios) < 2:
        return Ratio(low=ratios[0], median=ratios[0], high=ratios[0])
    low, median, high = statistics.quantiles(ratios, n=4, method="inclusive")
    return Ratio(low=low, median=median, high=high)


def verdict(ratio: Ratio, target: float) -> str:
    """Within noise is where the lower quartile meets the target: at 15 pairs the quartiles are
    about the 95 % interval of the median."""
    if ratio.median <= target:
        return "met"
    return "within noise" if ratio.low <= target else "MISSED"


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One case: times of a step, and resident bytes of the rank that needs most."""

    case: str
    theirs: str
    target: float
    wall: Ratio
    cpu: Ratio
    wall_s: Mapping[str, float]
    loss_difference: float  # the largest over the steps, relative
    peak_bytes: Mapping[str, int] = field(default_factory=dict)

    def shown(self) -> dict[str, Any]:
        """A line of the documents' table."""
        return {
            "case": self.case,
            "beside": self.theirs,
            "wall": self.wall.median,
            "quartiles": f"{self.wall.low:.3f} to {self.wall.high:.3f}",
            "CPU time": self.cpu.median,
            "peak memory": self.memory_ratio,
        }

    @property
    def memory_ratio(self) -> float | None:
        return self.peak_bytes["ours"] / self.peak_bytes["theirs"] if self.peak_bytes else None


def row_of(name: str, target: float, ranks: Sequence[Mapping[str, Sequence[Step]]]) -> Row:
    """From the steps of every rank. ValueError where the two sides did not do the same work."""
    walls, cpus, losses = (
        {
            side: [merge([getattr(step, field) for step in turn]) for turn in turns]
            for side, turns in _turns(ranks).items()
        }
        for field, merge in (("wall_s", max), ("cpu_s", sum), ("loss", mean_loss))
    )
    pairs = list(zip(losses["ours"], losses["theirs"], strict=True))
    apart = max(abs(a - b) / abs(b) for a, b in pairs)
    if not apart <= LOSS_TOLERANCE:  # so that NaN is refused too
        raise ValueError(
            f"{name}: the losses of ours and theirs differ by {apart:.1e}, more than "
            f"{LOSS_TOLERANCE:g}: they do not do the same work; by step: {pairs}"
        )
    wall, cpu = (
        {side: values[WARM_UP:] for side, values in every.items()} for every in (walls, cpus)
    )
    return Row(
        case=name,
        theirs=CASES[name].what,
        target=target,
        wall=ratio_of(**wall),
        cpu=ratio_of(**cpu),
        loss_difference=apart,
        wall_s={side: statistics.median(values) for side, values in wall.items()},
    )


def _turns(ranks: Sequence[Mapping[str, Sequence[Step]]]) -> dict[str, list[tuple[Step, ...]]]:
    return {side: list(zip(*(rank[side] for rank in ranks), strict=True)) for side in SIDES}


def table(rows: Sequence[Row]) -> str:
    head = (
        f"{'case':<12} {'against':<50} {'ours':>8} {'theirs':>8}  {'ours / theirs':<22} "
        f"{'target':>6}  {'verdict':<12}  {'CPU time':<22}  {'MiB ours':>8} {'theirs':>8} "
        f"{'ratio':>6}"
    )
    lines = [head, "-" * len(head)]
    for row in rows:
        memory = f"{'':>8} {'':>8} {'':>6}"
        if row.memory_ratio is not None:
            ours, theirs = (row.peak_bytes[side] / MEBIBYTE for side in SIDES)
            memory = f"{ours:8.0f} {theirs:8.0f} {row.memory_ratio:6.3f}"
        lines.append(
            f"{row.case:<12} {row.theirs:<50} {row.wall_s['ours'] * 1e3:5.0f} ms "
            f"{row.wall_s['theirs'] * 1e3:5.0f} ms  {row.wall!s:<22} {row.target:6.2f}  "
            f"{verdict(row.wall, row.target):<12}  {row.cpu!s:<22}  {memory}".rstrip()
        )
    return "\n".join(lines)


# --- one rank ------------------------------------------------------------------------------------


def setting_of(case: Case, size: Size) -> Setting:
    return Setting(
        layers=size.layers,
        hidden=size.hidden,
        heads=size.hidden // HEAD_DIM,
        vocabulary=VOCABULARY,
        length=LENGTH,
        rows=size.rows,
        microbatches=case.microbatches,
        adapters=case.adapters,
    )


def work(args: argparse.Namespace) -> None:
    """What one rank of a launch measures, written for the parent."""
    torch.set_num_threads(1)
    [name], found = args.case, None
    with launch.distributed("gloo"):
        if name == STARTUP:
            overrides = STARTUP_CASE.overrides(STARTUP_SETTING.layers)
            phases = measure.start_up(STARTUP_SETTING, overrides)
            found = {phase: asdict(seconds) for phase, seconds in phases.items()}
        else:
            case = CASES[name]
            setting = setting_of(case, Size(layers=args.layers, hidden=args.hidden, rows=args.rows))
            overrides = case.overrides(args.layers)
            ours = measure.ours(overrides, compile=case.compile)
            makes = {"ours": ours, "theirs": case.theirs}
            if args.worker == "time":
                trainers = {side: make(setting) for side, make in makes.items()}
                turns = measure.take_turns(trainers, setting.batch(), args.pairs)
                found = {side: [asdict(step) for step in steps] for side, steps in turns.items()}
            else:
                found = measure.peak_bytes(args.worker, makes, setting)
        (args.folder / f"{launch.rank()}.json").write_text(json.dumps(found))


# --- a case --------------------------------------------------------------------------------------


def launched(name: str, worker: str, args: argparse.Namespace) -> list[Any]:
    """What every rank of one launch measured."""
    case = STARTUP_CASE if name == STARTUP else CASES[name]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        measure.run_ranks(
            [
                "-m",
                "scripts.bench_executor",
                "--case",
                name,
                "--worker",
                worker,
                "--folder",
                str(folder),
                "--pairs",
                str(args.pairs),
                "--layers",
                str(args.layers),
                "--hidden",
                str(args.hidden),
                "--rows",
                str(args.rows),
            ],
            ranks=case.ranks,
            log=folder / "log",
            timeout_s=LAUNCH_TIMEOUT_S,
            link_gbit=args.link_gbit,
            environment=RETURNS_FREED if worker in SIDES else None,
        )
        return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(case.ranks)]


def bench(name: str, args: argparse.Namespace) -> Row:
    case = CASES[name]
    target = case.target
    if args.link_gbit is not None and case.link_target is not None:
        target = case.link_target
    ranks = [
        {side: [Step(**step) for step in steps] for side, steps in rank.items()}
        for rank in launched(name, "time", args)
    ]
    row = row_of(name, target, ranks)
    if not args.memory:
        return row
    return replace(row, peak_bytes={side: max(launched(name, side, args)) for side in SIDES})


def bench_startup(args: argparse.Namespace) -> str:
    ranks = launched(STARTUP, STARTUP, args)
    lines = [f"start-up of {STARTUP_SETTING.layers} layers on {len(ranks)} ranks, the slowest:"]
    for phase in ranks[0]:
        wall_s, cpu_s = (max(rank[phase][kind] for rank in ranks) for kind in ("wall_s", "cpu_s"))
        line = f"  {phase:<28} {wall_s:6.2f} s  {cpu_s:6.2f} CPU-s"
        if phase == measure.LOWER:
            met = "met" if wall_s <= STARTUP_TARGET_S else "MISSED"
            line += f"  target {STARTUP_TARGET_S:g} s: {met}"
        lines.append(line)
    return "\n".join(lines)


def main() -> None:
    args = _arguments()
    if args.worker:
        work(args)
        return
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the ranks are stopped, too
    rows: list[Row] = []
    for name in args.case:
        sys.stderr.write(f"{name} ... load average {os.getloadavg()[0]:.2f}\n")
        if name == STARTUP:
            print(bench_startup(args), flush=True)
            continue
        rows.append(bench(name, args))
        print(table(rows[-1:]), flush=True)
    if len(rows) > 1:
        print(f"\n{table(rows)}")
    if args.json:
        args.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if args.record:
        record(
            "executor",
            " ".join(["python -m scripts.bench_executor", *sys.argv[1:]]),
            title="The executor beside torch's own tools",
            note="Ours over theirs, step by step: median of the pairs, and quartiles. A GPT on 1 "
            "to 8 processes of one thread, gloo.",
            rows=[row.shown() for row in rows],
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    every = [*CASES, STARTUP]
    parser.add_argument("--case", nargs="+", choices=every, default=every)
    parser.add_argument("--pairs", type=int, default=15)
    sizes = {"layers": 4, "hidden": 2 * HEAD_DIM, "rows": 8}  # each a multiple of
    for name, unit in sizes.items():
        near, far = getattr(NEAR, name), getattr(FAR, name)
        parser.add_argument(
            f"--{name}", type=int, help=f"a multiple of {unit}; {near}, or {far} between hosts"
        )
    parser.add_argument("--link-gbit", type=float, help="one emulated host per rank")
    parser.add_argument("--memory", action=argparse.BooleanOptionalAction, default=True)
    parser.add_argument("--json", type=Path, help="where to write the rows")
    parser.add_argument("--record", action="store_true", help="keep the table for the documents")
    parser.add_argument("--worker", choices=("time", *SIDES, STARTUP), help=argparse.SUPPRESS)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    for name, unit in sizes.items():
        if getattr(args, name) is None:
            setattr(args, name, getattr(NEAR if args.link_gbit is None else FAR, name))
        if getattr(args, name) < 1 or getattr(args, name) % unit:
            parser.error(f"--{name} {getattr(args, name)}; legal: a positive multiple of {unit}")
    if args.pairs < 1:
        parser.error(f"--pairs {args.pairs}; legal: an integer from 1")
    return args


if __name__ == "__main__":
    main()
