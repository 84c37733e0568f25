"""Experts shared out, on one rank: every run trains three steps and is compared with the dense
model on a single device, on rank 0."""

from __future__ import annotations

import json
import sys
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache, partial
from itertools import cycle
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import functional as F

from meshwright import Cluster, Overrides, auto_parallelize
from meshwright.costmodel.sharding.factors import analyse
from meshwright.executor.checkpoint import checkpoint
from meshwright.executor.parameters import norms
from meshwright.executor.ranks import launch
from meshwright.executor.runtime.runtime import RunOptions, Runtime
from meshwright.executor.stages import CheckedPlan
from meshwright.planner.blocks.cut import cut_blocks
from meshwright.planner.plan.plan import Plan
from meshwright.planner.tracing.trace import trace
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.single_device import initialised
from tests.models.experts_models import WIDTH, Library, batch, language_model, token_loss
from tests.models.models import Traced, adamw
from tests.parity.parity_reference import Reference, compare, difference

ROWS, STEPS = 8, 3
SPLIT = {  # the matrices
    "layers.*.experts.gate": "S(2)",
    "layers.*.experts.up": "S(2)",
    "layers.*.experts.down": "S(1)",
}
TOKENS = {"layers.*:add": "-> S(1)", "layers.*.experts:dispatch": "s"}  # the sequence


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """A plan on four ranks: `pp` device groups of (dp, tp); `ep` ranks share the experts of each,
    of one after the other where it is several numbers."""

    dp: int
    tp: int = 1
    pp: int = 1
    ep: tuple[int, ...] = (1,)
    microbatches: int = 2
    schedule: str = "1f1b"
    virtual: int = 1
    precision: str = "fp32"
    compile: bool | str = False
    zero: int = 0
    dp_shard: int | None = None
    recompute: str = "none"
    spread: str = "none"
    shardings: Mapping[str, str] = field(default_factory=dict)


RUNS: Mapping[str, Run] = {
    "dp4": Run(dp=4),
    "dp4 skewed": Run(dp=4, spread="one"),
    "tp4 matrices": Run(dp=1, tp=4, shardings=SPLIT),
    "tp4 tokens": Run(dp=1, tp=4, shardings=TOKENS),
    "dp2 tp2": Run(dp=2, tp=2, shardings=SPLIT),
    "dp4 ep2": Run(dp=4, ep=(2,)),
    "dp4 ep4": Run(dp=4, ep=(4,)),
    "dp4 ep4 skewed": Run(dp=4, ep=(4,), spread="one", zero=1),
    "dp4 ep2 skewed": Run(dp=4, ep=(2,), spread="one"),
    "dp4 ep2 zero1": Run(dp=4, ep=(2,), zero=1),
    "dp4 ep2 zero2": Run(dp=4, ep=(2,), zero=2),
    "dp4 ep2 zero3": Run(dp=4, ep=(2,), zero=3),
    "dp4 ep4 zero3": Run(dp=4, ep=(4,), zero=3),
    "dp4 ep2 shard2": Run(dp=4, ep=(2,), zero=1, dp_shard=2),
    "dp4 ep4 shard2": Run(dp=4, ep=(4,), zero=2, dp_shard=2),
    "dp4 ep2 full": Run(dp=4, ep=(2,), recompute="full"),
    "dp4 ep2 selective": Run(dp=4, ep=(2,), recompute="selective"),
    "dp2 pp2 ep2": Run(dp=2, pp=2, ep=(2,), microbatches=4),
    "dp2 pp2 ep2 full zero1": Run(dp=2, pp=2, ep=(2,), microbatches=4, recompute="full", zero=1),
    "dp2 tp2 ep2 matrices": Run(dp=2, tp=2, ep=(2,), shardings=SPLIT),
    "dp2 tp2 ep2 tokens": Run(dp=2, tp=2, ep=(2,), shardings=TOKENS),
    "dp2 tp2 ep2 tokens zero1": Run(dp=2, tp=2, ep=(2,), shardings=TOKENS, zero=1),
    "dp2 tp2 ep4 tokens": Run(dp=2, tp=2, ep=(4,), shardings=TOKENS, zero=1),
    "tp4 ep4 tokens": Run(dp=1, tp=4, ep=(4,), shardings=TOKENS),
    "dp2 pp2 ep2 zb_h1": Run(dp=2, pp=2, ep=(2,), microbatches=4, schedule="zb_h1", zero=1),
    "dp2 pp2 ep2 interleaved": Run(
        dp=2, pp=2, ep=(2,), microbatches=4, schedule="interleaved_1f1b", virtual=2
    ),
    "dp2 pp2 ep2 and 1": Run(dp=2, pp=2, ep=(2, 1), microbatches=4, zero=2),
    "dp4 compiled": Run(dp=4, compile="aot_eager"),
    "dp4 ep2 compiled": Run(dp=4, ep=(2,), compile="aot_eager"),
    "dp4 ep2 bf16": Run(dp=4, ep=(2,), zero=1, precision="bf16", spread="even"),
}
EVEN = Run(dp=4, ep=(4,), spread="even")


def loss_fn(made: tuple[torch.Tensor, torch.Tensor], targets: torch.Tensor) -> torch.Tensor:
    logits, balance = made
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten()) + 0.1 * balance


@cache
def graph_of(rows: int, precision: str) -> Traced:
    model = language_model("routed", "none")
    graph = trace(model, batch(4, 0), batch_size=rows, loss_fn=loss_fn, precision=precision)
    table = analyse(graph)
    return Traced(graph=cut_blocks(graph, table), table=table)


def plan_of(run: Run, of: Traced) -> Plan:
    plan = build_plan(
        of.graph,
        Knobs(
            meshes=((run.dp, run.tp),) * run.pp,
            rows=ROWS,
            num_microbatches=run.microbatches,
            zero=run.zero,
            dp_shard=run.dp_shard,
            recompute=run.recompute,
            shardings=run.shardings,
            schedule=run.schedule,
            virtual=run.virtual,
            precision=run.precision,
        ),
    )
    stages = zip(plan.stages, cycle(run.ep), strict=False)
    return replace(plan, stages=tuple(replace(stage, ep=ep) for stage, ep in stages))


def dense_loop(run: Run) -> Reference:
    """The dense model on one device, in the same micro-batches (the balance is no mean over
    tokens)."""
    model = language_model("dense", run.spread)
    optimizer = adamw(model.parameters())
    losses: list[float] = []
    gradients: list[dict[str, torch.Tensor]] = []
    for step in range(STEPS):
        optimizer.zero_grad()
        ids, targets = batch(ROWS, step)
        total = 0.0
        for part in zip(ids.chunk(run.microbatches), targets.chunk(run.microbatches), strict=True):
            loss = loss_fn(model(part[0]), part[1]) / run.microbatches
            loss.backward()
            total += float(loss.detach())
        losses.append(total)
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters()})
        optimizer.step()
    state = {name: x.detach().clone() for name, x in model.state_dict().items()}
    return Reference(losses=losses, gradients=gradients, state=state)


def build(run: Run) -> Runtime:
    of = graph_of(ROWS // run.microbatches, run.precision)
    plan = plan_of(run, of)
    checked = CheckedPlan.of(plan, of.graph, of.table)
    model = language_model("routed", run.spread)
    return Runtime(checked, model, options=RunOptions(compile=run.compile))


def train(runtime: Runtime, optimizer: torch.optim.Optimizer, steps: int = STEPS) -> Reference:
    losses, gradients = [], []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(float(runtime.train_step(batch(ROWS, step))))
        gradients.append(runtime.full_gradients())
        optimizer.step()
    return Reference(losses=losses, gradients=gradients, state=runtime.full_state_dict())


def parity(run: Run) -> dict[str, Any]:
    """Differences from the dense model; the norm of the last gradients, as the runtime and one
    device find it; and elements of each expert weight on this rank."""
    runtime = build(run)
    found = train(runtime, adamw(runtime.parameters()))
    norm = norms.clip_(runtime.stage_parameters, runtime.place, float("inf"))
    whole = torch.stack([g.double().norm() for g in found.gradients[-1].values()]).norm()
    held = {p.fqn: p.stored.numel() for p in runtime.stage_parameters if p.experts}
    result: dict[str, Any] = {"norm": [float(norm), float(whole)], "held": held}
    if launch.rank() == 0:
        result |= compare(found, dense_loop(run))
    return result


def exchanged(_: Path) -> dict[str, Any]:
    """Bytes of tokens' copies that a rank sends to others in one step with evenly spread tokens."""
    runtime = build(EVEN)
    sent = 0
    plain = dist.all_to_all_single

    def counting(out: torch.Tensor, rows: torch.Tensor, *sizes: list[int], **more: Any) -> Any:
        nonlocal sent
        if sizes and rows.shape[1] == WIDTH:
            leaving = len(rows) - sizes[1][launch.rank()]
            sent += leaving * WIDTH * rows.element_size()
        return plain(out, rows, *sizes, **more)

    dist.all_to_all_single = counting
    try:
        runtime.train_step(batch(ROWS, 0))
    finally:
        dist.all_to_all_single = plain
    return {"sent": sent}


def checkpoints(folder: Path) -> dict[str, Any]:
    """A run saved with its optimizer, gone on with under other plans: losses of what follows."""
    runtime = build(RUNS["dp4 ep2 zero1"])
    optimizer = adamw(runtime.parameters())
    train(runtime, optimizer)
    path = folder / "checkpoint"
    checkpoint.save(runtime, path, optimizer)
    state = runtime.full_state_dict()
    if launch.rank() == 0:
        torch.save(state, folder / "state.pt")
    found: dict[str, Any] = {"on": train(runtime, optimizer).losses}
    for name in ("dp4 ep2 zero1", "dp4", "dp4 ep2 zero3", "dp2 tp2 ep4 tokens"):
        second = build(RUNS[name])
        again = adamw(second.parameters())
        checkpoint.load(second, path, again)
        read = second.full_state_dict()
        same = set(read) == set(state) and all(torch.equal(read[n], x) for n, x in state.items())
        found[name] = {"same": same, "losses": train(second, again).losses}
    return found


def library(_: Path) -> dict[str, Any]:
    """The library's layer on meta, planned by the search, initialised by shards, trained a step."""
    with torch.device("meta"):
        model = Library()
    cluster = Cluster.local(4, "cpu", measure=False)
    made = auto_parallelize(
        model,
        cluster,
        example_inputs=batch(2, 0),
        global_batch_size=ROWS,
        loss_fn=token_loss,
        precision="fp32",
        overrides=Overrides(ep=2, dp=4, zero=1),
        profile=False,
    )
    made.init_weights(seed=5)
    alone = Library()
    started = initialised(alone, 5)
    alone.load_state_dict(started)
    found = made.full_state_dict()
    same = set(found) == set(started) and all(torch.equal(found[n], x) for n, x in started.items())
    ids, targets = batch(ROWS, 0)
    loss = token_loss(alone(ids), targets)
    loss.backward()
    made.train_step((ids, targets))
    wanted = {name: p.grad for name, p in alone.named_parameters()}
    gradient = difference(made.runtime.full_gradients(), wanted)
    return {"same": same, "gradient": gradient, "ep": [s.ep for s in made.plan.stages]}


def attempt(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """The result, or the first rank's failure; where a rank is left out, the others' groups time
    out."""
    try:
        result = work()
    except Exception:  # noqa: BLE001 - whatever it is belongs to this run
        result = {"failed": traceback.format_exc()}
    everywhere: list[Any] = [None] * launch.world_size()
    dist.all_gather_object(everywhere, result)
    failed = [r["failed"] for r in everywhere if "failed" in r]
    return {"failed": failed[0]} if failed else {**everywhere[0], "ranks": everywhere}


def main(folder: Path, only: str = "") -> None:
    work: dict[str, Callable[[], dict[str, Any]]] = {
        **{name: partial(parity, run) for name, run in RUNS.items()},
        **{check.__name__: partial(check, folder) for check in (exchanged, checkpoints, library)},
    }
    results = {}
    for name, run in work.items():
        if only in name:
            results[name] = attempt(run)
            if launch.rank() == 0:
                (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    with launch.distributed("gloo"):
        main(Path(sys.argv[1]), *sys.argv[2:])
