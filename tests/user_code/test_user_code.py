"""Models as users write them: trained on four ranks as plain PyTorch trains them, or refused."""

from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from meshwright import Cluster, Overrides
from meshwright.costmodel.graph import Graph
from meshwright.costmodel.operators import Problem
from meshwright.costmodel.sharding.factors import analyse
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.plan.check import check_plan, fingerprint
from meshwright.planner.plan.plan import Plan, PlanError, StagePlan
from meshwright.planner.pricing.evaluate import Evaluation, Evaluator
from meshwright.planner.tracing.trace import TraceError, trace
from tests.helpers import tiny
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import tiered
from tests.user_code import user_models, user_runs
from tests.user_code.user_models import LENGTH, USERS, VOCAB, WIDTH, Stack, UserModel, lora, vectors
from tests.user_code.user_runs import LAYOUTS, RANKS, ROWS, batch_of, built, plan_of

# by model of the change tier, its layout: all layouts meet each kind of models
FIRST = {
    # outputs, inputs, losses; what is trained
    "keywords only": "pp4", "shared table": "dp2×tp2",
    "frozen backbone": "zero3", "lora": "dp2×tp2", "collections": "pp2×tp2",
    # buffers; layers that are read twice
    "hidden statistics": "zero3", "distilled": "pp2×tp2",
    # ways to write layers
    "autocast": "pp4", "einsum attention": "dp2×tp2", "torch attention": "zero3",
    "vmapped": "dp4", "in place": "pp4",
}  # fmt: skip
REFUSED = [("frozen backbone", "pp4"), ("frozen backbone", "pp2×tp2"), ("einsum attention", "pp4")]
RUNS = [(name, layout) for name in USERS for layout in LAYOUTS if (name, layout) not in REFUSED]


# --- four ranks -----------------------------------------------------------------------------------


def in_first_tier(run: tuple[str, str]) -> bool:
    return FIRST.get(run[0]) == run[1]


MORE = "each layout trains some of these; tied and checkpointed layers are of parity and tracing"


@pytest.mark.parametrize("run", tiered(RUNS, in_first_tier, MORE, " ".join))
def test_trains_as_plain_pytorch_does(run: tuple[str, str]) -> None:
    on_ranks(RANKS, user_runs.train_as_alone, *run, user_runs.prepared(*run))


@pytest.mark.parametrize("run", REFUSED, ids=" ".join)
def test_layout_is_refused(run: tuple[str, str]) -> None:
    with pytest.raises(ValueError, match="hold a trained parameter, and every stage needs one"):
        plan_of(*run)


# --- what is frozen -------------------------------------------------------------------------------

WIDE, BATCH, RANK = 256, 64, 128


def _wide(kind: str) -> nn.Module:
    """Trained whole, from the third layer on, by its head alone, or by adapters in every layer,
    with the weights beside them or without."""
    torch.manual_seed(0)
    sizes = {"outputs": VOCAB, "width": WIDE}
    if "adapters" in kind:
        return (
            lora(RANK, **sizes).requires_grad_(True) if "weights" in kind else lora(RANK, **sizes)
        )
    model = Stack(**sizes)
    if kind == "upper half":
        model.layers[: user_models.LAYERS // 2].requires_grad_(False)
    if kind == "head":
        model.layers.requires_grad_(False)
    return model


# beside a bf16 weight, in fp32: gradient, master, Adam's two moments, a bucket of gradients
TRAINED_BYTES = 4 + 4 + 4 + 4
KINDS = ("whole", "upper half", "head", "adapters", "adapters and weights")


@pytest.mark.parametrize(
    "kind",
    tiered(KINDS, lambda kind: kind in ("upper half", "adapters"), "half of the layers, and parts"),
)
def test_runs_the_work_that_plain_pytorch_runs(kind: str) -> None:
    """No weight gradient of a frozen weight, and no backward below the first trained one."""
    batch = torch.randn(BATCH, WIDE), torch.randint(VOCAB, (BATCH,))
    model = _wide(kind)
    with FlopCounterMode(display=False) as plain:
        F.cross_entropy(model(batch[0]), batch[1]).backward()
    once = Overrides(num_microbatches=1, recompute="none")
    given = {"example_inputs": batch, "global_batch_size": BATCH, "overrides": once}
    result = tiny.planned(_wide(kind), loss_fn=F.cross_entropy, **given)
    assert result.runtime is not None  # lowered, which traces, before FLOPs are counted
    with FlopCounterMode(display=False) as ours:
        result.train_step(batch)
    assert ours.get_total_flops() == plain.get_total_flops()
    trained = {n for n, p in model.named_parameters() if p.grad is not None}
    assert {n for n, p in result.named_parameters() if p.grad is not None} == trained


def _plan(graph: Graph, stages: tuple[StagePlan, ...], *, rows: int, precision: str) -> Plan:
    return Plan(
        model=fingerprint(graph), global_batch_size=rows, precision=precision, schedule="1f1b",
        num_microbatches=1, stages=stages,
    )  # fmt: skip


@cache
def _priced(kind: str) -> tuple[Graph, Evaluation]:
    """Data parallel on 8 H100, one step of large rows so that products outweigh launches."""
    rows = 1 << 17
    with torch.device("meta"):
        batch = torch.empty(2, WIDE), torch.zeros(2, dtype=torch.long)
    graph = trace(_wide(kind), batch, loss_fn=F.cross_entropy, batch_size=rows, precision="bf16")
    table = analyse(graph)
    graph = cut_blocks(graph, table)
    names = tuple(b.name for b in graph.blocks)
    stage = StagePlan(blocks=names, ranks=tuple(range(8)), dp=8, tp=1, recompute="none")
    plan = _plan(graph, (stage,), rows=rows, precision="bf16")
    cluster = Cluster.from_catalog("h100-sxm", num_nodes=1)
    problem = Problem(graph=graph, factors=table, cluster=cluster, precision="bf16")
    return graph, Evaluator(problem).price(plan)


def test_frozen_parameters_are_priced_so() -> None:
    whole, half, head, adapters, all_of_it = (_priced(kind)[1].stages[0] for kind in KINDS)
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
    """bf16 weights: 2 B each; trained ones also fp32 masters, gradients and Adam's moments, frozen
    ones also what the model has, in fp32."""
    graph, priced = _priced(kind)
    sizes = [graph.values[v] for v in graph.parameters]
    count, trained = (sum(m.numel for m in sizes if m.requires_grad >= least) for least in (0, 1))
    stage = priced.stages[0]
    held = stage.fixed_bytes + stage.gradient_bytes
    assert held == 2 * count + TRAINED_BYTES * trained + 4 * (count - trained)


# --- written buffers and stages -------------------------------------------------------------------


def test_stages_do_not_part_readers_of_a_buffer_from_its_writer() -> None:
    of = user_runs.traced_at("hidden statistics", ROWS)
    graph, table = of.graph, of.table
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
        check_plan(_plan(graph, stages, rows=ROWS, precision="fp32"), graph, table)

    check(writer)
    check(reader + 1)
    for cut in range(writer + 1, reader + 1):
        with pytest.raises(PlanError, match="a buffer that the forward writes"):
            check(cut)


# --- refused --------------------------------------------------------------------------------------


class SparseTable(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(VOCAB, WIDTH, **options), nn.Linear(WIDTH, VOCAB)

    def forward(self, ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.embed(ids)).flatten(0, 1), labels.flatten())


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.head = nn.LSTM(WIDTH, WIDTH, batch_first=True), nn.Linear(WIDTH, 20)

    def forward(self, x: torch.Tensor, lengths: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, True, False)
        out, _ = nn.utils.rnn.pad_packed_sequence(self.inner(packed)[0], True)
        return F.cross_entropy(self.head(out[:, 0]), labels)


class HiddenWrite(Stack):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        x = self.layers[0](x)
        with torch.no_grad():
            x.clamp_(-1, 1)
        return F.cross_entropy(self.head(x), labels)


class NormedWeights(Stack):
    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.head.weight.div_(self.head.weight.norm())
        return F.cross_entropy(super().forward(x), labels)


def _dict_loss(output: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"main": F.cross_entropy(output, labels), "z": output.square().mean()}


def _packed_batch(rows: int) -> tuple[torch.Tensor, ...]:
    x, labels = user_models.sequences(rows)
    return x, torch.full((rows,), LENGTH), labels


REFUSALS: dict[str, tuple[UserModel, str]] = {
    "sparse table": (
        UserModel(build=lambda: SparseTable(sparse=True), batch=user_models.tokens),
        "sparse=True: .* drop it, and take a dense optimizer",
    ),
    "table with max_norm": (
        UserModel(build=lambda: SparseTable(max_norm=1.0), batch=user_models.tokens),
        "changed in place .* write other tensors out of place",
    ),
    "several losses": (
        UserModel(build=Stack, batch=vectors, loss_fn=_dict_loss),
        r"loss_fn gives a dict of \['main', 'z'\] where a scalar loss is needed",
    ),
    "packed sequence": (
        UserModel(build=Packed, batch=_packed_batch), "can't be traced: at .*test_user_code.py",
    ),
    "write under no_grad": (
        UserModel(build=HiddenWrite, batch=vectors), r"clamp_.* under no_grad .* write x = x \+",
    ),
    "weights normed in forward": (
        UserModel(build=NormedWeights, batch=vectors),
        "changes parameter head.weight in place, .* make it a buffer, or change it between steps",
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    "name",
    tiered(
        REFUSALS,
        lambda name: name not in ("packed sequence", "table with max_norm"),
        "a line that can't be traced, and a weight that is changed, are refused elsewhere, too",
    ),
)
def test_refused_with_the_way_out(name: str) -> None:
    user, message = REFUSALS[name]
    with pytest.raises(TraceError, match=message):
        trace(built(user), batch_of(user, 0), loss_fn=user.loss_fn)
