"""Predicted against measured step time of many plans on this machine's CPU ranks.

    python -m scripts.predicted_vs_measured [--ranks 2] [--models gpt2 llama ...] [--budget 90]
                                            [--regret]

Per model: profile what its plans may run, plan under each of a list of overrides, price the plan on
the profile, then run all plans in one launch, their steps taken in turns so that whatever else the
machine does hits all of them alike. A step is forward, backward, gradient reduction and optimizer;
its time is the median over the turns of the slowest rank's. Printed: both times, the error, the
share of the prediction that rests on measurements; the mean error; Spearman's rank correlation.

`--regret` runs the plan that the search chooses, the five predicted best of other decisions, drawn
at random, and five more of these, and prints the choice's measured time over the best measured.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from meshwright import Cluster, ParallelModel, auto_parallelize, distributed
from meshwright.executor.ranks import launch
from meshwright.planner.overrides import OverrideError, Overrides
from meshwright.planner.plan import InfeasibleError, Plan, describe
from meshwright.profile_command import Effort, profile_model
from scripts.ranks.rank_correlation import spearman

BATCH, LENGTH, VOCABULARY, CLASSES = 16, 128, 2048, 32
TURNS, WARM_UP = 7, 2
DRAWN, COMPARED = 16, 5  # decisions drawn for a regret; how many of the best, and of the rest, run
LAUNCH_TIMEOUT_S = 170.0


# --- models ---------------------------------------------------------------------------------------


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=LENGTH,
        n_embd=256,
        n_layer=4,
        n_head=8,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=4,
    )
    return transformers.LlamaForCausalLM(config)


def bert() -> nn.Module:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        max_position_embeddings=LENGTH,
        hidden_size=256,
        intermediate_size=1024,
        num_hidden_layers=4,
        num_attention_heads=8,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    return transformers.BertForMaskedLM(config)


class Residual(nn.Module):
    """Two convolutions with batch norm around a skip connection."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.c1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.b1 = nn.BatchNorm2d(outputs)
        self.c2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.b2 = nn.BatchNorm2d(outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b2(self.c2(F.relu(self.b1(self.c1(x)))))
        return F.relu(y + self.skip(x))


class ConvNet(nn.Module):
    """A stem, six residual blocks that halve the image twice, a classifier."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 32, 3, 1, 1, bias=False)
        widths = (32, 32, 64, 64, 128, 128)
        pairs = zip((32, *widths), widths, strict=False)
        self.layers = nn.ModuleList(Residual(a, b, 1 if a == b else 2) for a, b in pairs)
        self.head = nn.Linear(128, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.mean((2, 3)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model, a batch for it, and the loss where the model does not return one."""

    build: Callable[[], nn.Module]
    batch: Callable[[int], Any]
    loss_fn: Callable[..., torch.Tensor] | None = None

    def model(self) -> nn.Module:
        torch.manual_seed(0)
        return self.build()


def tokens(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCABULARY, (rows, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids}


def images(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return (
        torch.randn(rows, 3, 32, 32, generator=generator),
        torch.randint(CLASSES, (rows,), generator=generator),
    )


CASES: Mapping[str, Case] = {
    "gpt2": Case(build=gpt2, batch=tokens),
    "llama": Case(build=llama, batch=tokens),
    "bert": Case(build=bert, batch=tokens),
    "conv": Case(build=ConvNet, batch=images, loss_fn=F.cross_entropy),
}


def wanted(ranks: int) -> list[Overrides]:
    """Plans that differ in everything the planner decides."""
    one = {"pp": 1, "recompute": "none"}
    mixed = [
        Overrides(dp=ranks // 2, tp=2, num_microbatches=1, **one),
        Overrides(dp=ranks // 2, tp=1, pp=2, schedule="1f1b", num_microbatches=4, zero=0),
    ]
    return [
        Overrides(dp=ranks, tp=1, num_microbatches=1, zero=0, **one),
        Overrides(dp=ranks, tp=1, num_microbatches=4, zero=0, **one),
        Overrides(dp=ranks, tp=1, num_microbatches=2, zero=1, **one),
        Overrides(dp=1, tp=ranks, num_microbatches=1, **one),
        Overrides(dp=1, tp=ranks, num_microbatches=4, **one),
        Overrides(dp=1, tp=1, pp=ranks, schedule="gpipe", num_microbatches=4, recompute="none"),
        Overrides(dp=1, tp=1, pp=ranks, schedule="1f1b", num_microbatches=8, recompute="none"),
        Overrides(dp=1, tp=1, pp=ranks, schedule="1f1b", num_microbatches=4, recompute="full"),
        *(mixed if ranks > 2 else ()),
    ]


def drawn(ranks: int, count: int) -> list[Overrides]:
    """So many different decisions at random, every time the same; not all of them are legal."""
    draw = random.Random(0)
    powers = [2**k for k in range(ranks.bit_length()) if ranks % 2**k == 0]
    found: dict[str, Overrides] = {}
    while len(found) < count:
        dp, tp = draw.choice(powers), draw.choice(powers)
        if ranks % (dp * tp):
            continue
        one = Overrides(
            dp=dp,
            tp=tp,
            pp=ranks // (dp * tp),
            num_microbatches=draw.choice([1, 2, 4, 8]),
            zero=draw.choice([0, 1, 2, 3]) if dp > 1 else 0,
            recompute=draw.choice(["none", "none", "full"]),
        )
        found[repr(one)] = one
    return list(found.values())


# --- the launch -----------------------------------------------------------------------------------


def run_plans(name: str, folder: Path) -> None:
    """On every rank: build all plans of the folder, take their steps in turns; rank 0 writes."""
    case = CASES[name]
    cluster = Cluster.local(launch.world_size(), "cpu", measure=False)
    batch = case.batch(BATCH)
    running: dict[str, tuple[ParallelModel, torch.optim.Optimizer]] = {}
    for path in sorted(folder.glob("*.plan.json")):
        made = auto_parallelize(
            case.model(),
            cluster,
            example_inputs=case.batch(2),
            global_batch_size=BATCH,
            loss_fn=case.loss_fn,
            precision="fp32",
            plan=path,
        )
        running[path.name] = made, _optimizer(made)
    times: dict[str, list[float]] = {plan: [] for plan in running}
    for _ in range(WARM_UP + TURNS):
        for plan, (model, optimizer) in running.items():
            launch.agree_on(lambda: None)  # all ranks begin together
            started = time.perf_counter()
            optimizer.zero_grad()
            model.train_step(batch)
            optimizer.step()
            times[plan].append(time.perf_counter() - started)
    (folder / f"{launch.rank()}.times.json").write_text(json.dumps(times))


def _optimizer(model: ParallelModel) -> torch.optim.Optimizer:
    """One pass over the states, as the cost model has it; torch's loop on the CPU makes several."""
    return torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)


def measured(name: str, folder: Path, ranks: int) -> dict[str, float]:
    """Seconds of a step of each plan in the folder: median over the turns, of the slowest rank."""
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node",
        str(ranks), "-m", "scripts.predicted_vs_measured", "--worker", name, str(folder),
    ]  # fmt: skip
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    process = subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL)
    try:
        code = process.wait(timeout=LAUNCH_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.terminate()  # torchrun ends its ranks
        code = process.wait()
    if code:
        raise RuntimeError(f"{name}: running the plans failed (exit {code})")
    every = [json.loads((folder / f"{rank}.times.json").read_text()) for rank in range(ranks)]
    slowest = {
        plan: [max(turn) for turn in zip(*(times[plan] for times in every), strict=True)]
        for plan in every[0]
    }
    return {plan: statistics.median(times[WARM_UP:]) for plan, times in slowest.items()}


# --- prediction -----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A plan, what it was predicted to take, and what it took."""

    plan: str
    predicted_s: float
    measured_s: float

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1


def compare(name: str, ranks: int, budget_s: float, *, regret: bool = False) -> list[Row]:
    """Profile, predict, run; for `regret` the search's choice first, then plans that it left."""
    case = CASES[name]
    cluster = Cluster.local(ranks, "cpu")
    summary = profile_model(
        case.model(),
        case.batch(2),
        case.loss_fn,
        cluster,
        batch=BATCH,
        precision="fp32",
        effort=Effort(budget_s=budget_s),
    )
    sys.stderr.write(f"{summary}\n")
    asked = [Overrides(), *drawn(ranks, DRAWN)] if regret else wanted(ranks)
    plans = list(_planned(name, cluster, asked))
    if regret:
        ours, *rest = plans
        rest = [each for each in rest if each[0] != ours[0]]
        best = sorted(rest, key=lambda each: each[1])[:COMPARED]
        others = [each for each in rest if each not in best]
        plans = [ours, *best, *random.Random(0).sample(others, min(COMPARED, len(others)))]
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        for k, (plan, _) in enumerate(plans):
            plan.save(folder / f"{k:02d}.plan.json")
        took = measured(name, folder, ranks)
    return [
        Row(plan=describe(plan), predicted_s=seconds, measured_s=took[f"{k:02d}.plan.json"])
        for k, (plan, seconds) in enumerate(plans)
    ]


def _planned(
    name: str, cluster: Cluster, asked: Sequence[Overrides]
) -> Iterator[tuple[Plan, float]]:
    """A plan for each of the overrides that has one, with its predicted seconds."""
    case = CASES[name]
    for overrides in asked:
        try:
            result = auto_parallelize(
                case.model(),
                cluster,
                example_inputs=case.batch(2),
                global_batch_size=BATCH,
                loss_fn=case.loss_fn,
                precision="fp32",
                overrides=overrides,
            )
        except (InfeasibleError, OverrideError) as error:
            sys.stderr.write(f"{name}: {overrides.given()}: {error}\n")
            continue
        yield result.plan, result.prediction.step_time_s


def show(name: str, rows: Sequence[Row]) -> None:
    print(f"{name}")
    for row in rows:
        print(
            f"  {row.plan:<60} predicted {row.predicted_s * 1e3:8.1f} ms  "
            f"measured {row.measured_s * 1e3:8.1f} ms  {row.error:+7.1%}"
        )
    mean = statistics.fmean(abs(row.error) for row in rows)
    order = spearman([row.predicted_s for row in rows], [row.measured_s for row in rows])
    bias = statistics.fmean(row.error for row in rows)
    print(
        f"  {len(rows)} plans: mean error {mean:.1%}, bias {bias:+.1%}, Spearman {order:.3f}",
        flush=True,
    )


def show_regret(rows: Sequence[Row]) -> float:
    """How much slower the choice, first of the rows, is than the best that was run."""
    best = min(rows, key=lambda row: row.measured_s)
    regret = rows[0].measured_s / best.measured_s - 1
    print(f"  the choice is {regret:.1%} slower than the best measured: {best.plan}", flush=True)
    return regret


def main() -> None:
    if sys.argv[1:2] == ["--worker"]:
        torch.set_num_threads(1)
        with distributed("gloo"):
            run_plans(sys.argv[2], Path(sys.argv[3]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ranks", type=int, default=2, choices=(2, 4))
    parser.add_argument("--models", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--budget", type=float, default=90.0, help="seconds to profile a model")
    parser.add_argument("--regret", action="store_true", help="the choice against what it left")
    args = parser.parse_args()
    torch.set_num_threads(1)
    print(f"load average before: {os.getloadavg()[0]:.2f} (a step waits for whatever else runs)")
    transformers.logging.set_verbosity_error()
    found: list[Row] = []
    for name in args.models:
        rows = compare(name, args.ranks, args.budget, regret=args.regret)
        show(name, rows)
        if args.regret:
            show_regret(rows)
        found += rows
    mean = statistics.fmean(abs(row.error) for row in found)
    print(f"{len(found)} plans on {args.ranks} ranks: mean error {mean:.1%}")


if __name__ == "__main__":
    main()
