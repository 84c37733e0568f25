"""Sizes that no degree divides: parts of ⌈n/degree⌉, the last smaller, run exactly; where that
can't be, the plan says what runs in full and which degrees would divide.

Four ranks train, save and load models whose vocabulary and inner width are 131 and 67; one and two
ranks go on from what they saved. On two ranks the parts are 66 and 65 (34 and 33), on four three of
33 and 32 (17 and 16).
"""

import math
import sys
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwright import Overrides, ParallelModel
from meshwright.costmodel.operators.flops import op_flops
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.sharding.strategies import (
    Placement,
    can_hold,
    indivisible,
    largest_part,
    splitting_degrees,
    strategies,
)
from meshwright.executor.checkpoint import checkpoint
from meshwright.executor.checkpoint.weights import init_weights, load_weights
from meshwright.executor.parameters.norms import clip_
from meshwright.executor.ranks import launch
from meshwright.executor.runtime.runtime import Runtime
from meshwright.planner.plan.check import check_plan
from meshwright.planner.plan.plan import Plan, PlanError
from meshwright.planner.pricing.evaluate import Evaluator
from meshwright.planner.report.tensor_axis import divided, excluded
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.planning import case, cluster, cut, problem_of, setting_on
from tests.helpers.ranks import on_ranks
from tests.helpers.single_device import initialised
from tests.helpers.stored import stored
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.tiny import planned
from tests.models import architectures, branching_models, models
from tests.models.architectures import gpt2
from tests.models.models import CASES, Case, Traced, adamw, parallelize, sgd, traced, uneven
from tests.parity.parity_cells import Cell
from tests.parity.parity_reference import assert_equal, compare, plain_loop, runtime_loop

TOLERANCE = 1e-5  # fp32: two orders of one sum


def test_a_part_is_nobodys_or_everybodys() -> None:
    """5 words: two ranks hold 3 and 2, three hold 2, 2 and 1; of four one would have nothing."""
    of = cut(nn.Sequential(nn.Embedding(5, 8)), *_words(5))
    op = next(op for op in of.graph.ops if op.short == "embedding")
    able = [
        n for n in range(2, 8)
        if "vocab" in {o.split_factor for o in strategies(of.graph, of.table, op, n)}
    ]  # fmt: skip
    assert able == [2, 3, 5] == list(splitting_degrees(of.graph, of.table, op, "vocab"))
    assert indivisible(of.table, op, 4) == {"vocab": 5}


FIRST, KINDS = {"resnet", "moe"}, "heads, experts and channels are kept"


@pytest.mark.parametrize("name", tiered(sorted(CASES), FIRST.__contains__, KINDS))
@pytest.mark.parametrize("degree", [3, 5, 6])
def test_what_a_strategy_asks_for_can_be_held(name: str, degree: int) -> None:
    of = case(name)
    for op in of.graph.ops:
        for option in strategies(of.graph, of.table, op, degree):
            placed = [*zip(op.operands, option.operands, strict=True)]
            placed += zip(op.results, option.results, strict=True)
            for value, state in placed:
                assert can_hold(of.graph, of.table, value, state, degree), (op.key, option.name)
                if state.sharded:
                    shape = of.graph.values[value].shape
                    assert (degree - 1) * largest_part(shape[state.dim], degree) < shape[state.dim]


def test_heads_are_not_cut() -> None:
    """Five heads of 8: 40 columns could be cut anywhere, but heads only whole."""
    of = _five_heads()
    attention = next(op for op in of.graph.ops if op.short == "scaled_dot_product_attention")
    names = [o.name for o in strategies(of.graph, of.table, attention, 2)]
    assert names == ["replicate"]
    projected = next(op for op in of.graph.ops if op.key.endswith("0.attn.c_attn:addmm"))
    for option in strategies(of.graph, of.table, projected, 3):
        assert option.split_factor != "out" or option.results[0].split == 1  # q, k, v: 3 parts


def test_the_largest_part_is_paid_for() -> None:
    of = cut(nn.Sequential(nn.Embedding(50257, 8)), *_words(50257))
    (value,) = of.graph.parameters
    pricer = Pricer(graph=of.graph, table=of.table, setting=setting_on(cluster(8), tp=8, rows=4))
    assert pricer.numel(value, Placement("S", 0)) == math.ceil(50257 / 8) * 8
    assert pricer.numel(value, Placement("S", 1)) == 50257


def test_products_that_run_in_full_are_named_with_the_degrees_that_divide() -> None:
    of = _five_heads()
    one, *others = excluded(of.graph, of.table, (1, 2, 4, 5))
    assert not others
    assert one.factors == {"heads": 5} and one.degrees == (2, 4) and one.legal == (5,)
    assert one.count == 3 and not one.instead
    head_dim, rows, width, words = 8, 4 * 16, 40, 96
    attention = 3 * 4 * rows * 16 * 5 * head_dim
    products = 3 * 2 * rows * width * (3 + 1 + 4 + 4) * width + 2 * rows * width * words
    assert one.flops == pytest.approx(attention / (attention + products))
    assert str(one).startswith("tp 2 or 4: transformer.h.*.attn:scaled_dot_product_attention, 3 t")
    assert str(one).endswith("runs in full on every rank: heads = 5; degrees that divide: 5")


def test_shared_out_is_what_the_plan_splits() -> None:
    of = _five_heads()
    plan = _split({"transformer.h.*.mlp.c_fc": "colwise"})
    (share,) = divided(Evaluator(problem_of(of, cluster(2))).price(plan).priced)
    work = {op.key: op_flops(of.table, op) for op in of.graph.ops}
    mlp = sum(flops for key, flops in work.items() if ".mlp." in key)
    assert share.flops == pytest.approx(mlp / sum(work.values()))
    inner = 3 * (2 * 4 * 40 * 40 + 4 * 40)  # both weights and the inner bias
    assert share.parameters == pytest.approx(inner / of.graph.num_parameters())


@cache
def _planned(tp: int | None) -> ParallelModel:
    overrides, inputs = Overrides(tp=tp) if tp else Overrides(), CASES["gpt2_tied"].batch(4, 0)
    given = {"example_inputs": inputs, "loss_fn": None, "overrides": overrides}
    return planned(_gpt2_of_five_heads(), 4, global_batch_size=8, **given)


@second_tier("what is excluded, and what a plan splits, are kept without a search")
def test_the_report_says_what_is_excluded_in_three_places() -> None:
    said = "scaled_dot_product_attention, 3 times"
    free, forced = _planned(None).report, _planned(4).report
    assert any(said in note and note.startswith("tp 2 or 4") for note in free.notes)
    (family,) = [row for row in free.alternatives if row["family"] == "tp=4"]
    assert said in family["excluded"][0]
    assert family["excluded"][0] in free.text(full=True)
    assert any(said in note for note in forced.notes)
    (row,) = free.to_dict()["excluded"]
    assert row["factors"] == {"heads": 5} and row["legal"] == [5] and row["degrees"] == [2, 4]
    # a degree that divides nothing is told
    assert [stage["tp_flops"] for stage in forced.stages] == [0.0]
    why = "on these links sharding costs more than it saves"
    assert f"tp 4 divides 0% of the FLOPs and 0% of the parameters: {why}" in forced.notes


def test_a_sharding_that_cannot_be_is_refused_with_the_degrees_that_can() -> None:
    of, plan = _five_heads(), _split({"transformer.h.*.attn:scaled_dot_product_attention": "heads"})
    message = r"not possible with tp=2 \(heads = 5; degrees that divide: 5\); legal: replicate"
    with pytest.raises(PlanError, match=message):
        check_plan(plan, of.graph, of.table)


def _gpt2_of_five_heads() -> nn.Module:
    return gpt2(tied=True, n_embd=40, n_head=5)


@cache
def _five_heads() -> Traced:
    return cut(_gpt2_of_five_heads(), CASES["gpt2_tied"].batch(4, 0), precision="fp32")


def _split(shardings: dict[str, str]) -> Plan:
    knobs = Knobs(meshes=((1, 2),), rows=4, num_microbatches=1, shardings=shardings)
    return build_plan(_five_heads().graph, knobs)


def _words(count: int) -> tuple[tuple[torch.Tensor, ...], Callable[..., torch.Tensor]]:
    """A batch of words and a loss of their vectors."""
    ids = torch.zeros(4, 8, dtype=torch.long)
    return (ids, torch.zeros(4, 8, 8)), F.mse_loss


# --- models ---------------------------------------------------------------------------------------

WORDS, INNER, SEQUENCE, ROWS = 131, 67, 16, 8


class Odd(nn.Module):
    """Every width prime; a mean over a split dim, dropout, norms over whole and split dims, and
    a table that is read and multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 29, padding_idx=100)
        self.conv = nn.Conv1d(29, 23, 3, padding=1)
        self.norm = nn.BatchNorm1d(23)
        self.up, self.down = nn.Linear(23, INNER), nn.Linear(INNER, 29, bias=False)
        self.scale = nn.Parameter(torch.rand(INNER))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        y = self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
        y = F.dropout(F.silu(self.up(y)) * self.scale, 0.0)
        x = x + self.down(y) * y.mean(-1, keepdim=True)
        return (F.linear(F.layer_norm(x, (29,)), self.table.weight)).flatten(0, 1)


def _ids(rows: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1, WORDS, (rows, SEQUENCE), generator=generator)


def causal_batch(rows: int, step: int) -> dict[str, torch.Tensor]:
    ids = _ids(rows, step)
    return {"input_ids": ids, "labels": uneven(ids)}


def pair_batch(rows: int, step: int) -> dict[str, torch.Tensor]:
    ids = _ids(rows, step)
    return {"input_ids": ids[:, :12], "labels": uneven(ids.flip(1))}


def odd_batch(rows: int, step: int) -> tuple[torch.Tensor, ...]:
    ids = _ids(rows, step)
    return ids, ids.roll(-1, 1)


def odd_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, target.flatten())


ODD: Mapping[str, Case] = {
    "gpt2": Case(
        build=lambda: architectures.gpt2(tied=True, layers=2, n_inner=INNER, vocab_size=WORDS),
        batch=causal_batch, optimizer=adamw, shardings=CASES["gpt2_tied"].shardings
    ),
    "bert": Case(
        # its decoder has a bias of the vocabulary's size
        build=lambda: architectures.bert(
            num_hidden_layers=2, intermediate_size=INNER, vocab_size=WORDS, pad_token_id=101
        ),
        batch=causal_batch, optimizer=sgd,
        shardings=CASES["bert"].shardings | {"bert.embeddings.word_embeddings": "vocab"},
    ),
    "t5": Case(
        build=lambda: branching_models.t5(vocab=WORDS, inner=INNER),
        batch=pair_batch, optimizer=adamw,
        shardings=CASES["t5"].shardings | {"lm_head": "colwise", "*.embed_tokens": "vocab"},
    ),
    "odd": Case(
        build=Odd, batch=odd_batch, optimizer=sgd, loss_fn=odd_loss, batch_statistics=True,
        shardings={"table": "vocab", ":linear": "colwise", "up": "colwise", "conv": "o"},
    ),
}  # fmt: skip
MICROBATCHES = 2


def graph_of(case: str) -> Traced:
    rows = ROWS // MICROBATCHES
    return stored(
        "uneven", case, rows, make=lambda: traced(ODD[case], rows),
        models=(sys.modules[__name__], architectures, branching_models, models),
    )  # fmt: skip


def plan_of(case: str, plan: str) -> tuple[Plan, Traced]:
    """Of the meshes and the stage of ZeRO that a line of the parity matrix says."""
    of, cell = graph_of(case), Cell.parse(f"mlp {plan}")
    knobs = Knobs(
        meshes=cell.meshes, zero=cell.zero, rows=ROWS, num_microbatches=MICROBATCHES,
        shardings=ODD[case].shardings,
    )  # fmt: skip
    return build_plan(of.graph, knobs), of


# --- ranks ----------------------------------------------------------------------------------------

FIRST_TRAINED = {("gpt2", "dp2xtp2 zero3"), ("odd", "tp4")}
TRAINED = (
    ("gpt2", "dp2xtp2 zero3"), ("gpt2", "tp2|dp2"), ("bert", "tp4"), ("t5", "dp2xtp2 zero3"),
    ("odd", "tp4"), ("gpt2", "dp2xtp2 zero1"), ("gpt2", "pp2xtp2"), ("gpt2", "tp4"),
    ("gpt2", "dp2xtp2 zero2"), ("bert", "dp2xtp2 zero1"), ("t5", "tp4"),
)  # fmt: skip


def built(case: str, plan: str, model: nn.Module | None = None) -> Runtime:
    return parallelize(model or ODD[case].model(), *plan_of(case, plan))


def trains(case: str, plan: str) -> dict[str, Any]:
    found = runtime_loop(ODD[case], *plan_of(case, plan))
    parts = MICROBATCHES if ODD[case].batch_statistics else 1
    return {} if launch.rank() else compare(found, plain_loop(ODD[case], ROWS, parts=parts))


@pytest.mark.parametrize(
    "run",
    tiered(
        TRAINED,
        FIRST_TRAINED.__contains__,
        "uneven words on both axes, and a model of prime widths, are kept",
        " ".join,
    ),
)
def test_parts_of_unequal_size_train_as_one_device(run: tuple[str, str]) -> None:
    plan_of(*run)
    assert_equal(on_ranks(4, trains, *run), "fp32")


def clipped(plan: str) -> None:
    """The norm of all gradients, and of those that are clipped to 0.1; parts are as torch
    cuts them."""
    case, runtime = ODD["gpt2"], built("gpt2", plan)
    model = case.model()
    wte = dict(runtime.named_parameters())["transformer.wte.weight"]
    assert isinstance(wte, DTensor) and wte.shape == (WORDS, 32)
    if plan == "tp4":
        assert wte.to_local().shape[0] == (33, 33, 33, 32)[launch.rank()]
    assert torch.equal(wte.full_tensor(), model.transformer.wte.weight)
    runtime.train_step(case.batch(ROWS, 0))
    norm = float(clip_(runtime.stage_parameters, runtime.place, 0.1))
    case.loss(model, case.batch(ROWS, 0)).backward()
    wanted = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    assert norm == pytest.approx(wanted, rel=TOLERANCE)
    gradients = torch.cat([g.flatten() for g in runtime.full_gradients().values()])
    assert float(gradients.norm()) == pytest.approx(0.1, rel=1e-4)


@pytest.mark.parametrize(
    "plan",
    tiered(
        ["tp4", "dp2xtp2 zero2", "dp2xtp2 zero3"],
        "tp4".__eq__,
        "parts of four tensor ranks are kept",
    ),
)
def test_the_norm_counts_every_element_once(plan: str) -> None:
    on_ranks(4, clipped, plan)


def initialised_by_parts(plan: str) -> Runtime:
    with torch.device("meta"):
        empty = ODD["gpt2"].build()
    runtime = built("gpt2", plan, empty)
    init_weights(runtime, 11)
    assert holds(runtime, initialised(ODD["gpt2"].model(), 11))
    return runtime


def holds(runtime: Runtime, wanted: Mapping[str, torch.Tensor]) -> bool:
    state = runtime.full_state_dict()
    return all(torch.equal(state[name], x) for name, x in wanted.items())


def saves(folder: Path, weights: Path) -> tuple[dict[str, Any], float]:
    """Weights are read from a file. A checkpoint after two steps: what it holds, and the loss of
    the third."""
    case, runtime = ODD["gpt2"], initialised_by_parts("tp4")
    load_weights(runtime, weights)
    assert holds(runtime, torch.load(weights))
    optimizer = case.optimize(runtime)
    for step in range(2):
        optimizer.zero_grad()
        runtime.train_step(case.batch(ROWS, step))
        optimizer.step()
    checkpoint.save(runtime, folder, optimizer)
    state = {name: x.numpy() for name, x in runtime.full_state_dict().items()}
    return state, float(runtime.train_step(case.batch(ROWS, 2)))


def goes_on(
    folder: Path, plan: str, state: dict[str, Any], loss: float, again: Path | None = None
) -> float:
    """A checkpoint of other ranks under a plan: the state, bit for bit, and its loss, of one more
    step of its optimizer, too, which is returned; saved `again`."""
    case, runtime = ODD["gpt2"], initialised_by_parts(plan)
    optimizer = case.optimize(runtime)
    checkpoint.load(runtime, folder, optimizer)
    assert runtime.full_state_dict().keys() == state.keys()
    assert holds(runtime, {name: torch.from_numpy(x) for name, x in state.items()})
    if again is not None:
        checkpoint.save(runtime, again, optimizer)
    assert float(runtime.train_step(case.batch(ROWS, 2))) == pytest.approx(loss, rel=TOLERANCE)
    optimizer.step()
    optimizer.zero_grad()
    return float(runtime.train_step(case.batch(ROWS, 3)))


@second_tier("boxes of uneven parts in files are kept (tests/executor/files)")
def test_a_checkpoint_of_four_ranks_goes_to_one_and_two_and_other_plans(tmp_path: Path) -> None:
    saved, again, weights = (tmp_path / name for name in ("saved", "again", "weights.pt"))
    torch.save(ODD["gpt2"].model(seed=3).state_dict(), weights)
    plan_of("gpt2", "tp4")
    known = on_ranks(4, saves, saved, weights)
    after = goes_on(saved, "1", *known, again)
    zero3 = on_ranks(4, goes_on, saved, "dp2xtp2 zero3", *known)
    assert zero3 == pytest.approx(after, rel=TOLERANCE)
    assert on_ranks(2, goes_on, again, "tp2", *known) == pytest.approx(after, rel=TOLERANCE)
