"""Models as users write them: trained on four ranks as plain PyTorch trains them, or refused in one
sentence."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from meshwright import Cluster, Overrides, auto_parallelize
from meshwright.costmodel.graph import Graph
from meshwright.costmodel.operators.problem import Problem
from meshwright.costmodel.sharding.factors import analyse
from meshwright.planner.blocks.cut import cut_blocks
from meshwright.planner.plan.check import check_plan, fingerprint
from meshwright.planner.plan.plan import Plan, PlanError, StagePlan
from meshwright.planner.pricing.evaluate import Evaluation, Evaluator
from meshwright.planner.tracing.trace import trace
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import tiered
from tests.user_code.user_models import USERS, Lora
from tests.user_code.user_parts import VOCAB, Mlp
from tests.user_code.user_runs import (
    LAYOUTS,
    RANKS,
    ROWS,
    batch_of,
    built,
    plan_of,
    prepared,
    train_as_alone,
)

# by model of the change tier, its layout: all layouts meet each kind of models
FIRST = {
    # outputs, inputs, losses; what is trained
    "keywords only": "pp4", "three losses": "pp2×tp2",
    "shared table": "dp2×tp2", "frozen backbone": "zero3", "lora": "dp2×tp2",
    "collections": "pp4", "parametrized": "pp2×tp2",
    # buffers and weights shared; numbers and attributes
    "own statistics": "pp2×tp2", "hidden statistics": "zero3",
    "tied translator": "pp4", "distilled": "pp2×tp2", "centred": "pp4",
    # ways to write layers
    "checkpointed": "pp2×tp2", "autocast": "pp4", "mixed types": "zero3",
    "complex rotary": "dp2×tp2", "torch attention": "zero3",
    "vmapped": "dp2×tp2", "in place": "pp4", "straight through": "dp4",
}  # fmt: skip
REFUSED = (
    ("frozen backbone", "pp4"), ("frozen backbone", "pp2×tp2"), ("einsum attention", "pp4"),
)  # fmt: skip
RUNS = [(name, layout) for name in USERS for layout in LAYOUTS if (name, layout) not in REFUSED]


# --- four ranks -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "run",
    tiered(
        RUNS,
        lambda run: FIRST.get(run[0]) == run[1],
        "every layout trains models of each kind",
        " ".join,
    ),
)
def test_trains_as_plain_pytorch_does(run: tuple[str, str]) -> None:
    on_ranks(RANKS, train_as_alone, *run, prepared(*run))


@pytest.mark.parametrize("run", REFUSED, ids=" ".join)
def test_layout_is_refused(run: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="hold a trained parameter, and every stage needs one"):
        plan_of(*run)


# --- what is frozen -------------------------------------------------------------------------------

WIDE, DEPTH, BATCH, RANK = 256, 4, 64, 128


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp(WIDE) for _ in range(DEPTH))
        self.head = nn.Linear(WIDE, VOCAB)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def _wide(kind: str) -> nn.Module:
    """Trained whole, from the third layer on, by its head alone, or by adapters in every layer,
    with the weights beside them or without."""
    torch.manual_seed(0)
    model = Wide()
    if kind == "upper half":
        model.layers[: DEPTH // 2].requires_grad_(False)
    if kind == "head":
        model.layers.requires_grad_(False)
    if "adapters" in kind:
        model.requires_grad_(False)
        for layer in model.layers:
            layer.up, layer.down = Lora(layer.up, RANK), Lora(layer.down, RANK)
    if kind == "adapters and weights":
        model.requires_grad_(True)
    return model


# beside a bf16 weight, in fp32: gradient, master, Adam's two moments, a bucket of gradients
TRAINED_BYTES = 4 + 4 + 4 + 4 + 4
KINDS = ("whole", "upper half", "head", "adapters", "adapters and weights")


def _wide_batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(BATCH, WIDE), torch.randint(VOCAB, (BATCH,))


@pytest.mark.parametrize(
    "kind",
    tiered(KINDS, lambda kind: kind in ("upper half", "adapters"), "half of the layers, and parts"),
)
def test_runs_the_work_that_plain_pytorch_runs(kind: str) -> None:
    """No weight gradient of a frozen weight, and no backward below the first trained one."""
    batch = _wide_batch()
    model = _wide(kind)
    with FlopCounterMode(display=False) as plain:
        F.cross_entropy(model(batch[0]), batch[1]).backward()
    result = auto_parallelize(
        _wide(kind),
        Cluster.local(1, measure=False),
        example_inputs=batch,
        precision="fp32",
        global_batch_size=BATCH,
        loss_fn=F.cross_entropy,
        overrides=Overrides(num_microbatches=1, recompute="none"),
    )
    with FlopCounterMode(display=False) as ours:
        result.train_step(batch)
    assert ours.get_total_flops() == plain.get_total_flops()
    trained = {n for n, p in model.named_parameters() if p.grad is not None}
    assert {n for n, p in result.named_parameters() if p.grad is not None} == trained


def _priced(kind: str) -> tuple[Graph, Evaluation]:
    """Data parallel on 8 H100, one step of large rows so that products outweigh launches."""
    rows = 1 << 17
    with torch.device("meta"):
        batch = torch.empty(2, WIDE), torch.zeros(2, dtype=torch.long)
    graph = trace(_wide(kind), batch, loss_fn=F.cross_entropy, batch_size=rows, precision="bf16")
    table = analyse(graph)
    graph = cut_blocks(graph, table)
    names = tuple(b.name for b in graph.blocks)
    plan = Plan(
        model=fingerprint(graph),
        global_batch_size=rows,
        precision="bf16",
        schedule="1f1b",
        num_microbatches=1,
        stages=(StagePlan(blocks=names, ranks=tuple(range(8)), dp=8, tp=1, recompute="none"),),
    )
    cluster = Cluster.from_catalog("h100-sxm", num_nodes=1)
    problem = Problem(graph=graph, factors=table, cluster=cluster, precision="bf16")
    priced = Evaluator(problem).price(plan)
    return graph, priced


def test_frozen_parameters_are_priced_so() -> None:
    priced = {kind: _priced(kind)[1].stages[0] for kind in KINDS}
    whole, half, head, adapters, all_of_it = (priced[kind] for kind in KINDS)
    for less, more in ((half, whole), (head, half), (adapters, all_of_it)):
        assert less.reduce_s < more.reduce_s
        assert less.optimizer_s < more.optimizer_s
        assert less.backward_s < more.backward_s
        assert less.activation_bytes < more.activation_bytes  # what only those gradients would read
        assert less.forward_s == pytest.approx(more.forward_s)
    # below the first trained weight there is no backward: half of the layers' is left, or none
    assert head.weight_s <= head.backward_s < 0.1 * whole.backward_s  # the host issues it, at least
    layers = whole.backward_s - head.backward_s
    assert half.backward_s - head.backward_s == pytest.approx(layers / 2, rel=0.02)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_static_bytes_are_those_of_inference(kind: str) -> None:
    """bf16 weights: 2 B each; trained ones also fp32 masters, gradients and Adam's moments."""
    graph, priced = _priced(kind)
    sizes = {v: graph.values[v] for v in graph.parameters}
    count = sum(m.numel for m in sizes.values())
    trained = sum(m.numel for m in sizes.values() if m.requires_grad)
    stage = priced.stages[0]
    assert stage.static_bytes - stage.passing_bytes == 2 * count + TRAINED_BYTES * trained


# --- written buffers and stages -------------------------------------------------------------------


def test_stages_do_not_part_readers_of_a_buffer_from_its_writer() -> None:
    user = USERS["hidden statistics"]
    graph = trace(built(user), batch_of(user, 0), loss_fn=user.loss_fn)
    table = analyse(graph)
    graph = cut_blocks(graph, table)
    names = [b.name for b in graph.blocks]
    ((buffer, value),) = graph.updates.items()
    writer = next(k for k, b in enumerate(graph.blocks) if value in b.outputs)
    reader = max(k for k, b in enumerate(graph.blocks) if buffer in b.buffers)
    assert writer < reader

    def check(cut: int) -> None:
        stages = tuple(
            StagePlan(blocks=tuple(part), ranks=(k,), dp=1, tp=1)
            for k, part in enumerate((names[:cut], names[cut:]))
        )
        plan = Plan(
            model=fingerprint(graph),
            global_batch_size=ROWS,
            precision="fp32",
            schedule="1f1b",
            num_microbatches=1,
            stages=stages,
        )
        check_plan(plan, graph, table)

    check(writer)
    check(reader + 1)
    for cut in range(writer + 1, reader + 1):
        with pytest.raises(PlanError, match="a buffer that the forward writes"):
            check(cut)
