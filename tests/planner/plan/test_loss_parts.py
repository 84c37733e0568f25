"""A loss in parts of its rows: where it can be, what it holds, when it is chosen."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import Gemma2Config, Gemma2ForCausalLM, LlamaConfig, LlamaForCausalLM

from meshwright import Cluster, Overrides, Plan, auto_parallelize
from meshwright.costmodel.graph import verify_graph
from meshwright.costmodel.mesh import Batch, Mesh
from meshwright.costmodel.operators import Pricer, Setting, op_flops
from meshwright.costmodel.operators.cost import PASS_COLUMNS
from meshwright.costmodel.sharding import Run
from meshwright.costmodel.sharding.strategies import replicated
from meshwright.executor.errors import BatchError, StateError
from meshwright.model import ParallelModel
from meshwright.planner.alternatives import instead
from meshwright.planner.overrides import OverrideError, making_logits
from meshwright.planner.plan import InfeasibleError, PlanError, fingerprint, in_parts
from tests.helpers.planning import cut, problem_of
from tests.helpers.tiers import second_tier, tiered
from tests.models.models import Traced

ROWS, TOKENS, WIDTH, CLASSES = 4, 16, 32, 96
SIZES: dict[str, Any] = {
    "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


class Head(nn.Module):
    """A layer, a product with a matrix of weights, and what a test does with its logits."""

    def __init__(self, ends: Callable[..., torch.Tensor]) -> None:
        super().__init__()
        self.ends, self.body = ends, nn.Linear(WIDTH, WIDTH)
        self.out = nn.Linear(WIDTH, CLASSES)
        self.other = nn.Linear(WIDTH, CLASSES)
        self.matrix = nn.Parameter(torch.randn(WIDTH, CLASSES) / 8)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.ends(self, self.body(x).tanh(), y)


def batch(seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    made = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (ROWS, TOKENS), generator=made)
    y[0, :3] = -100
    return torch.randn(ROWS, TOKENS, WIDTH, generator=made), y


def _flat(self: Head, h: torch.Tensor, y: torch.Tensor, **how: Any) -> torch.Tensor:
    return F.cross_entropy(self.out(h).float().view(-1, CLASSES), y.view(-1), **how)


def _shifted(self: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = self.out(h)[:, :-1].contiguous()
    return F.cross_entropy(logits.view(-1, CLASSES), y[:, 1:].reshape(-1))


def _capped(self: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = 3.0 * (self.out(h) / 3.0).tanh()
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def _by_hand(self: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = torch.addmm(self.out.bias, h.flatten(0, 1), self.matrix)
    return F.cross_entropy(logits, y.flatten())


def _multiplied(self: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy((h @ self.matrix).flatten(0, 1), y.flatten())


def _smooth(self: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _flat(self, h, y, label_smoothing=0.1)


def _summed(self: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _flat(self, h, y, reduction="sum") / 64


ENDS = (_flat, _shifted, _capped, _by_hand, _multiplied, _smooth, _summed)


@pytest.mark.parametrize(
    "ends",
    tiered(
        ENDS,
        lambda ends: ends is _smooth,
        "other logits and means; a smoothed mean over rows of which some are ignored stays",
        lambda ends: ends.__name__,
    ),
)
@pytest.mark.parametrize(
    "precision", tiered(("fp32", "bf16_pure"), "fp32".__eq__, "fp32 is compared more closely")
)
def test_training_is_the_same(ends: Callable[..., torch.Tensor], precision: str) -> None:
    """Losses and gradients in 1 and in 3 parts, of which one has other sizes."""
    found = []
    for parts in (1, 3):
        torch.manual_seed(1)
        model = Head(ends)
        ours = auto_parallelize(
            model,
            Cluster.local(1, measure=False),
            example_inputs=batch(),
            global_batch_size=ROWS,
            precision=precision,
            overrides=Overrides(chunked_loss=parts, num_microbatches=2),
        )
        assert ours.plan.chunked_loss == parts
        losses = [float(ours.train_step(batch(seed)).detach()) for seed in (1, 2)]
        grads = {n: p.grad.float() for n, p in model.named_parameters() if p.grad is not None}
        found.append((losses, grads))
    (losses, grads), (others, changed) = found
    close = {"rtol": 1e-5, "atol": 1e-6} if precision == "fp32" else {"rtol": 0.02, "atol": 2e-3}
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(others), **close)
    assert grads.keys() == changed.keys() and len(grads) >= 3
    torch.testing.assert_close(grads, changed, **close)


def _weighed(self: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _flat(self, h, y, weight=self.other.bias.detach())


def _read_twice(self: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = self.out(h).flatten(0, 1)
    return F.cross_entropy(logits, y.flatten()) + logits.logsumexp(-1).square().mean()


def _adapted(self: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    logits = self.out(h) + self.other(h)
    return F.cross_entropy(logits.flatten(0, 1), y.flatten())


def _dropped(self: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(F.dropout(self.out(h), 0.1).flatten(0, 1), y.flatten())


def _two(self: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return _flat(self, h, y) + F.cross_entropy(self.other(h).flatten(0, 1), y.flatten())


def _squared(self: Head, h: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return self.out(h).square().mean() * (y.float().mean() * 0 + 1)


ALIKE = second_tier("refused alike; logits that are read twice, and a dropout, stay")


@pytest.mark.parametrize(
    ("ends", "why"),
    [
        pytest.param(_weighed, "weighs its classes", marks=ALIKE),
        (_read_twice, "something else than the loss reads"),
        pytest.param(_adapted, r"add \(aten.add.Tensor\) lies between", marks=ALIKE),
        (_dropped, r"dropout \(aten.dropout.default\) lies between"),
        pytest.param(_two, "2 cross-entropies", marks=ALIKE),
        pytest.param(_squared, "0 cross-entropies", marks=ALIKE),
    ],
)
def test_other_losses_are_refused(ends: Callable[..., torch.Tensor], why: str) -> None:
    of = cut(Head(ends), batch(), precision="fp32")
    with pytest.raises(PlanError, match=f"{why}.*legal: 1; or more, where.*leave chunked_loss"):
        in_parts(of.graph, of.table, 4)
    with pytest.raises(OverrideError, match=f"override: chunked_loss.*{why}"):
        auto_parallelize(
            Head(ends),
            Cluster.local(1, measure=False),
            example_inputs=batch(),
            global_batch_size=ROWS,
            overrides=Overrides(chunked_loss=4),
        )


def test_a_graph_in_parts() -> None:
    """It is one, of the same model, does a product more, and comes back."""
    with torch.device("meta"):
        model = Gemma2ForCausalLM(Gemma2Config(vocab_size=CLASSES, head_dim=8, **SIZES))
        ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    of = cut(model, {"input_ids": ids, "labels": ids})
    graph, table = in_parts(of.graph, of.table, 4)
    verify_graph(graph)
    assert [b.name for b in graph.blocks] == [b.name for b in of.graph.blocks]
    assert fingerprint(graph) == fingerprint(of.graph)
    loss = graph.ops[-1]
    product = next(op for op in of.graph.ops if op.module == "lm_head")
    assert loss.short == "loss_in_parts" and loss.module == "lm_head"
    assert op_flops(table, loss) == op_flops(of.table, product)
    assert max(graph.values[v].numel for op in graph.ops for v in op.results) < (
        of.graph.values[product.results[0]].numel
    )
    assert of.graph.outputs is not None and "logits" in of.graph.outputs.known
    assert graph.outputs is not None and "logits" not in graph.outputs.known
    again, _ = in_parts(graph, table, 2)
    assert again.loss_parts == 2 and again.whole is of.graph
    assert in_parts(graph, table, 1)[0] is of.graph


# --- what it holds, when it is chosen -------------------------------------------------------------


def wide(
    on: Cluster, rows: int = 8, *, precision: str = "bf16", classes: int = 32_000, **given: Any
) -> ParallelModel:
    """A plan for a model of many classes beside its layers."""
    sizes = SIZES | {"hidden_size": 256, "intermediate_size": 512}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=classes, **sizes))
        ids = torch.zeros(rows, 512, dtype=torch.long)
    return auto_parallelize(
        model,
        on,
        example_inputs={"input_ids": ids, "labels": ids},
        global_batch_size=rows,
        precision=precision,
        overrides=Overrides(num_microbatches=1, recompute="none", **given),
        memory_margin=0.0,
    )


def with_memory(nbytes: float) -> Cluster:
    h100 = Cluster.from_catalog("h100-sxm", devices_per_node=1)
    device = replace(h100.device, memory_bytes=int(nbytes))
    return replace(h100, device=device, host=None)


@second_tier("the other prices of memory are held against rehearsals in tests/executor/rehearsal")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_pure"])
def test_memory_is_what_a_rehearsal_holds(precision: str) -> None:
    peaks = {}
    for parts in (1, 2, 16):
        ours = wide(with_memory(80e9), precision=precision, chunked_loss=parts)
        made = torch.optim.AdamW if precision == "bf16_pure" else None
        rehearsed = ours.rehearse(optimizer=made)
        (peaks[parts],), (priced,) = rehearsed.peak_bytes, rehearsed.priced_bytes
        assert priced == pytest.approx(peaks[parts], rel=0.04)
    assert peaks[16] < peaks[2] < 0.6 * peaks[1]


@second_tier("the recorded plan of a small llama in host memory has the loss in parts")
def test_parts_are_chosen_where_logits_bind() -> None:
    free = wide(with_memory(80e9))
    assert free.plan.chunked_loss == 1
    needs = [
        wide(with_memory(80e9), chunked_loss=parts).prediction.fullest_bytes for parts in (1, 8)
    ]
    assert needs[1] < 0.8 * needs[0]
    between = with_memory(sum(needs) / 2)
    chosen = wide(between)
    assert chosen.plan.chunked_loss == 8
    assert "loss in 8 parts" in str(chosen.report).splitlines()[1]
    assert any("no plan fits with the loss in one part" in note for note in chosen.report.notes)
    for never in ({"chunked_loss": 1}, {"forbid": ["chunked_loss"]}):
        with pytest.raises(InfeasibleError, match="does not fit"):
            wide(between, **never)


@second_tier("a recorded plan with parts is compared as it is written (test_recorded)")
def test_a_file_has_the_parts(tmp_path: Any) -> None:
    ours = wide(with_memory(80e9), chunked_loss=5)
    ours.plan.save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    assert plan == ours.plan and plan.chunked_loss == 5


@second_tier("that metrics of logits keep them stays")
def test_logits_need_a_plan_that_makes_them() -> None:
    """What an evaluation counts does not; plans with and without parts follow each other."""
    sizes = SIZES | {"vocab_size": CLASSES}
    ids = torch.arange(ROWS * TOKENS).view(ROWS, TOKENS) % CLASSES
    given = {"input_ids": ids, "labels": ids}
    whole = auto_parallelize(
        LlamaForCausalLM(LlamaConfig(**sizes)),
        Cluster.local(1, measure=False),
        example_inputs=given,
        global_batch_size=ROWS,
    )
    before, logits = whole.evaluate([given]), whole.forward(given).logits
    assert whole.plan.chunked_loss == 1 and logits.shape == (ROWS, TOKENS, CLASSES)
    parted = whole.replan(Overrides(chunked_loss=3))
    assert parted.plan.chunked_loss == 3
    assert parted.evaluate([given]).loss == pytest.approx(before.loss, rel=1e-6)
    for asks in (lambda: parted.forward(given), lambda: parted.generate(ids[:2, :5], 3)):
        with pytest.raises(StateError, match=r"runs in 3; legal: .*chunked_loss=1; .*replan"):
            asks()
    again = parted.replan(Overrides(forbid=["chunked_loss"]))
    torch.testing.assert_close(again.forward(given).logits, logits)


def test_a_backward_makes_logits_again() -> None:
    """A product more, in as many launches as parts."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=CLASSES, **SIZES))
        ids = torch.zeros(ROWS, TOKENS, dtype=torch.long)
    of = cut(model, {"input_ids": ids, "labels": ids})
    flops = {}
    for parts in (1, 4):
        graph, table = in_parts(of.graph, of.table, parts)
        problem = problem_of(Traced(graph=graph, table=table), with_memory(80e9))
        setting = Setting(problem=problem, mesh=Mesh(dp=1, tp=1), batch=Batch(rows=ROWS))
        pricer = Pricer(graph=graph, table=table, setting=setting)
        entries = [
            entry
            for op in graph.ops
            if op.module == "lm_head"
            for entry in pricer.step_entries(Run(op, replicated(op)))
        ]
        flops[parts] = [
            sum(e.flops for e in entries if e.column == column) for column in PASS_COLUMNS
        ]
    product = 2 * ROWS * TOKENS * WIDTH * CLASSES
    assert flops == {1: [product, 2 * product], 4: [product, 3 * product]}


# --- where only one of the two graphs will do -----------------------------------------------------


class Outputs(Head):
    """It returns logits as its loss takes them: rows of the batch and of tokens in one."""

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        logits = self.out(self.body(x).tanh()).view(-1, CLASSES)
        return {"loss": F.cross_entropy(logits, y.view(-1)), "logits": logits}


def small(model: nn.Module, **given: Any) -> ParallelModel:
    return auto_parallelize(
        model,
        Cluster.local(1, measure=False),
        example_inputs=batch(),
        global_batch_size=ROWS,
        precision="fp32",
        overrides=Overrides(num_microbatches=1, **given),
    )


@second_tier("that metrics of logits keep them stays")
def test_rows_of_x_are_not_taken_for_logits() -> None:
    x, y = batch()
    whole, parted = (small(Outputs(_flat), chunked_loss=n) for n in (1, 3))
    assert whole.forward((x, y))["logits"].shape == (ROWS * TOKENS, CLASSES)
    with pytest.raises(StateError, match="logits are asked for"):
        parted.forward((x, y))


@second_tier("training with ignored rows stays")
def test_labels_out_of_range_are_refused_and_ignored_rows_may_hold_anything() -> None:
    torch.manual_seed(1)
    x, y = batch()
    for label in (-1, CLASSES):
        wrong = y.clone()
        wrong[1, 1] = label
        with pytest.raises(BatchError, match="index that is not there"):
            small(Head(_flat), chunked_loss=3).train_step((x, wrong))
    broken = x.clone()
    broken[0, :3] = math.nan  # whose labels are ignored
    losses, grads = [], []
    for parts in (1, 3):
        torch.manual_seed(1)
        model = Head(_flat)
        with torch.no_grad():
            model.out.bias[0] = -math.inf
        y[y == 0] = 1
        ours = small(model, chunked_loss=parts)
        losses.append(ours.evaluate([(broken, y)]).loss)
        ours.train_step((x, y))
        assert model.out.weight.grad is not None
        grads.append(model.out.weight.grad)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6) and math.isfinite(losses[0])
    torch.testing.assert_close(*grads)


@second_tier("two decisions at once; that parts are chosen stays (test_recorded)")
def test_a_sharding_that_names_the_product_keeps_the_loss_in_one_part() -> None:
    needs = wide(with_memory(80e9), chunked_loss=1).prediction.fullest_bytes
    chosen = wide(with_memory(1.03 * needs), shardings={"lm_head:linear": "replicate"})
    assert chosen.plan.chunked_loss == 1


@second_tier("parts in a given plan; ledgers are summed over plans with parts, too")
def test_a_given_plan_is_explained_on_its_own_graph() -> None:
    two = Cluster.from_catalog("h100-sxm", devices_per_node=2)
    asked = wide(two, chunked_loss=4, tp=2)
    sizes = SIZES | {"hidden_size": 256, "intermediate_size": 512}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(vocab_size=32_000, **sizes))
        ids = torch.zeros(8, 512, dtype=torch.long)
    given = auto_parallelize(
        model,
        two,
        example_inputs={"input_ids": ids, "labels": ids},
        global_batch_size=8,
        plan=asked.plan,
    )
    details = given.report.details
    assert details is not None and details.problem.graph.loss_parts == 4
    assert instead(details.evaluation, details.problem, "lm_head")


@second_tier("overrides of other decisions are priced in test_alternatives")
def test_an_override_of_parts_is_priced_against_one_part() -> None:
    free, forced = wide(with_memory(80e9)), wide(with_memory(80e9), chunked_loss=64)
    rows = forced.report.overrides
    row = next(row for row in rows if "chunked_loss" in row["override"])
    assert "cost nothing" not in row["effect"] and row["cost"] > 0.1
    assert forced.prediction.step_time_s > 1.1 * free.prediction.step_time_s


@second_tier("a number beyond the rows; numbers within them stay")
def test_more_parts_than_rows_are_as_many_as_rows() -> None:
    steps = [small(Head(_flat), chunked_loss=n).prediction.step_time_s for n in (64, 10**9)]
    assert steps[0] == pytest.approx(steps[1])


def test_metrics_of_logits_keep_them() -> None:
    assert making_logits(Overrides(tp=2)).given() == {"tp": 2, "chunked_loss": 1}
    assert making_logits(Overrides(forbid=["chunked_loss"])).chunked_loss == 1
    with pytest.raises(OverrideError, match=r"chunked_loss=4: logits are read.*legal: 1"):
        making_logits(Overrides(chunked_loss=4))
