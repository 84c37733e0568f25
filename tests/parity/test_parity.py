"""Every plan equals the single device: losses, gradients, final parameters, to rounding."""

from functools import cache
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from meshwright.costmodel.schedules import SCHEDULES
from meshwright.executor.lowering.lower import Lowered
from meshwright.planner.plan.check import check_plan, check_runs
from meshwright.planner.plan.flow import crossings
from meshwright.planner.plan.plan import PlanError
from meshwright.planner.pricing.evaluate import transfer
from meshwright.planner.pricing.stage_costs import StageCoster
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.planning import cluster, problem_of
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier, tiered
from tests.models.models import CASES, GLOBAL_BATCH, parallelize
from tests.parity import parity_checks
from tests.parity.parity_cells import Cell, graph_of, plan_of
from tests.parity.parity_checks import DROPOUT_SEED
from tests.parity.parity_matrix import ALL, COPIES, MATRIX, cells_in, covering
from tests.parity.parity_reference import (
    TOLERANCE,
    assert_equal,
    difference,
    on_its_ranks,
    plain_loop,
    reference_of,
    train,
)

SAVED = Cell.parse("gpt2_tied pp2xtp2 m2 zero1 front")
HALF = Cell.parse("gpt2_untied dp2xtp2 m2 zero1 bf16")
ROUND_TRIPS = [
    (Cell.parse(f"{name} dp2xtp2 m2 zero1"), Cell.parse(f"{name} pp2xtp2 m2 front"))
    for name in ("gpt2_tied", "resnet", "llama", "bert")
]
REPEATED = cells_in("""
recurrent pp2xdp2 interleaved_1f1b m4 v2 zero1
recurrent pp2xdp2 zb_v m4 zero2
recurrent pp2xtp2 dualpipe_v m4
recurrent pp2xdp2 interleaved_1f1b m4 v2 bf16
recurrent dp4 m2 zero3
""")
ACCUMULATED = cells_in("""
gpt2_tied dp4 m2
gpt2_tied dp2xtp2 m2 zero1
gpt2_tied dp4 m2 zero2
llama dp2xtp2 m2 zero3
gpt2_tied pp2xdp2 m2 front
""")
DROPOUT = cells_in("""
gpt2_dropout dp4 m2
gpt2_dropout tp4 m1
gpt2_dropout pp2xdp2 m4 full front
gpt2_dropout cp4 ring m2
gpt2_dropout cp2xtp2 ulysses m1
gpt2_dropout pp2xdp2 m4 front
gpt2_dropout pp2xdp2 m4 front seg2 full
""")
UNEQUAL = cells_in("""
llama 1|dp3 rows12
llama 1|dp2|1
unet 1|dp2|1 gpipe front
llama dp2|tp2
llama tp2|dp2
unet 1|tp2|1
llama dp2|dp4|dp2
t5 dp2xtp2|tp2|tp2
""")
ZERO = (0, 1, 2, 3)
COVERED = "cells stay of every pair of axis, ZeRO and schedule or recompute, and all other knobs"


def name_of(cell: Cell) -> str:
    return cell.name


def some(cells: tuple[Cell, ...], reason: str, *first: int) -> list[Any]:
    """Cells as parameters, the `first` of them in the change tier."""
    return tiered(cells, [cells[k] for k in first].__contains__, reason, name_of)


# --- the matrix -----------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", tiered(ALL, covering(ALL).__contains__, COVERED, name_of))
def test_cell_equals_single_device(cell: Cell) -> None:
    plan, of = plan_of(cell)
    assert plan.num_ranks == cell.world
    check_plan(plan, of.graph, of.table)
    check_runs(plan)
    assert_equal(on_its_ranks(cell), cell.precision)


def test_matrix_covers_every_legal_pair_of_knobs() -> None:
    knobs = ("case", "schedule", "zero", "recompute", "precision")
    assert len({cell.name for cell in MATRIX}) == len(MATRIX) >= 150
    for a, b in combinations(knobs, 2):
        values = [{getattr(cell, knob) for cell in MATRIX} for knob in (a, b)]
        covered = {(getattr(cell, a), getattr(cell, b)) for cell in MATRIX}
        missing = {pair for pair in product(*values) if _legal({a, b}, pair)} - covered
        assert not missing, f"({a}, {b})"
    once = {cell.schedule for cell in MATRIX}
    twice = {cell.schedule for cell in cells_in(COPIES)}
    assert once == {n for n, s in SCHEDULES.items() if s.copies == 1 and s.flushes}
    assert twice == {n for n, s in SCHEDULES.items() if s.copies > 1}
    assert {cell.zero for cell in MATRIX} == set(ZERO)


def _legal(knobs: set[str], pair: tuple[Any, Any]) -> bool:
    """A split backward and ZeRO-3 exclude each other; some cases run in fp32 only."""
    split = {name for name, schedule in SCHEDULES.items() if schedule.splits_backward}
    if knobs == {"schedule", "zero"}:
        return not (pair[0] in split and pair[1] == 3)
    halves = {cell.case for cell in MATRIX if cell.precision != "fp32"}
    return not (knobs == {"case", "precision"} and pair[0] not in halves and pair[1] != "fp32")


@pytest.mark.parametrize("schedule", [n for n, s in SCHEDULES.items() if s.splits_backward])
def test_zero3_with_a_split_backward_is_refused(schedule: str) -> None:
    plan, _ = plan_of(Cell.parse(f"gpt2_tied pp2xdp2 {schedule} zero3"))
    with pytest.raises(PlanError, match=rf"zero=3 with schedule='{schedule}'.*legal: zero 0, 1"):
        check_runs(plan)


# --- further checks on four ranks -----------------------------------------------------------------


@second_tier("a plan that is read equals the one that was saved (test_plan.py)")
def test_saved_plan_runs_bit_for_bit(tmp_path: Path) -> None:
    on_ranks(4, parity_checks.saved_plan, SAVED, tmp_path / "plan.json")


@cache
def _dropout_alone() -> list[float]:
    plan, of = plan_of(DROPOUT[0].alone)
    model = CASES["gpt2_dropout"].model()
    torch.manual_seed(DROPOUT_SEED)
    return train(parallelize(model, plan, of), "gpt2_dropout")


@pytest.mark.parametrize(
    "cell", some(DROPOUT, "tensor, context and pipeline axes stay", 1, 3, 5), ids=name_of
)
def test_dropout_is_the_same_under_every_plan(cell: Cell) -> None:
    alone, _ = _dropout_alone(), plan_of(cell)
    without = plain_loop(CASES["gpt2_tied"], GLOBAL_BATCH).losses
    assert abs(alone[0] - without[0]) > 100 * TOLERANCE["fp32"]
    on_ranks(cell.world, parity_checks.dropout, cell, alone)


def test_a_buffer_that_holds_the_batch_is_whole_on_data_ranks() -> None:
    on_ranks(4, parity_checks.carried_rows)


def test_bf16_trains_on_fp32_master_weights() -> None:
    fp32 = plain_loop(CASES[HALF.case], GLOBAL_BATCH).losses
    on_ranks(4, parity_checks.half_precision, HALF, fp32)


@pytest.mark.parametrize(
    "pair",
    tiered(
        ROUND_TRIPS,
        lambda p: p[0].case == "resnet",
        "weights and buffers of one stay; tied weights move in test_objects.py",
        lambda p: p[0].case,
    ),
)
def test_state_moves_between_plans_and_the_model(pair: tuple[Cell, Cell]) -> None:
    on_ranks(4, parity_checks.state_round_trip, *pair)


@pytest.mark.parametrize("zero", ZERO)
def test_a_step_is_skipped_for_a_number_that_is_none_in_any_micro_batch(zero: int) -> None:
    on_ranks(4, parity_checks.strange, Cell.parse(f"mlp dp4 m2 zero{zero}"))


@pytest.mark.parametrize("zero", ZERO)
def test_zero_divides_what_the_optimizer_holds(zero: int) -> None:
    on_ranks(4, parity_checks.zero_shares, Cell.parse(f"gpt2_untied dp4 m2 zero{zero}"))


@pytest.mark.parametrize("cell", some(REPEATED, "stages of one rank and of others stay", 0))
def test_a_layer_on_several_stages_trains_as_one(cell: Cell) -> None:
    reference_of(cell)
    assert_equal(on_ranks(cell.world, parity_checks.repeated_layer, cell), cell.precision)


@pytest.mark.parametrize("cell", some(ACCUMULATED, "divided gradients, and stages, stay", 2, 4))
def test_gradients_add_up_and_are_the_users(cell: Cell) -> None:
    on_ranks(cell.world, parity_checks.accumulated, cell)


@pytest.mark.parametrize("cell", some(UNEQUAL, "stages of fewer ranks, and of others, stay", 2, 3))
def test_unequal_stages_send_what_the_other_side_needs(cell: Cell) -> None:
    """Every rank of a stage gets its own rows of each tensor once, and nothing else travels; at a
    byte per second the busiest rank of an edge takes the predicted seconds, on average of both
    ways."""
    found = on_ranks(cell.world, parity_checks.transfers, cell)
    wanted = _wanted_bytes(cell)
    totals = dict.fromkeys(wanted, 0)
    for channels in found["channels"]:
        for edge, nbytes in channels.items():
            totals[edge] += nbytes
    assert totals == wanted
    assert found["sent"] == [cell.microbatches * sum(c.values()) for c in found["channels"]]

    plan, of = plan_of(cell)
    slow = cluster(cell.world, bandwidth=1.0)
    coster = StageCoster(problem_of(of, slow, "fp32", optimizer="sgd"))
    for edge, values in crossings(plan, of.graph).items():
        both = []
        for source, target in (edge, edge[::-1]):
            way = f"{source}->{target}"
            sent = max(channels.get(way, 0) for channels in found["channels"])
            both.append(max(sent, wanted[way] / len(plan.stages[target].ranks)))
        seconds = transfer(plan, coster, edge, values).seconds
        assert seconds == pytest.approx(sum(both) / 2, rel=1e-6)


def _wanted_bytes(cell: Cell) -> dict[str, int]:
    """Bytes per micro-batch that the ranks of each stage receive from another, by "from->to": a
    tensor of the batch goes to the tp ranks of each row group, and what has no batch dim to all."""
    plan, of = plan_of(cell)
    found: dict[str, int] = {}
    for (source, target), values in crossings(plan, of.graph).items():
        for way, stage in (((source, target), target), ((target, source), source)):
            mesh, forward = plan.stages[stage], way[0] == source
            sizes = [of.graph.values[v] for v in values]
            split = [of.table.find(v, of.table.batch) is not None for v in values]
            found[f"{way[0]}->{way[1]}"] = sum(
                meta.nbytes * mesh.tp * (1 if rows else mesh.dp)
                for meta, rows in zip(sizes, split, strict=True)
                if forward or meta.requires_grad
            )
    return found


# --- one device, no process group -----------------------------------------------------------------


def _operators(block: Lowered) -> list[str]:
    assert isinstance(block.module, fx.GraphModule)
    nodes = block.module.graph.nodes
    return [str(n.target) for n in nodes if isinstance(n.target, torch._ops.OpOverload)]


@pytest.mark.parametrize("case", ["gpt2_tied", "bert", "plain_gpt"])
def test_one_device_runs_the_traced_operators_only(case: str) -> None:
    plan, of = plan_of(Cell.parse(f"{case} 1 m1"))
    runtime = parallelize(CASES[case].model(), plan, of)
    lowered = runtime.stages[0].program.blocks
    for block, made in zip(of.graph.blocks, lowered, strict=True):
        assert not list(made.lowered.module.children())
        # a shard's memory may not allow a view
        same = {"aten.view.default": "aten.reshape.default"}
        assert _operators(made.lowered) == [same.get(op.target, op.target) for op in block.ops]


def test_equal_layers_are_lowered_once() -> None:
    plan, of = plan_of(Cell.parse("llama 1 m2"))
    blocks = parallelize(CASES["llama"].model(), plan, of).stages[0].program.blocks
    layers = [b.lowered for b in blocks if b.lowered.name.startswith("model.layers.")]
    assert len(layers) == 3
    assert len({id(block.module) for block in layers}) == 1


@pytest.mark.parametrize("case", ["gpt2_tied", "llama", "bert", "plain_gpt", "mlp", "t5", "unet"])
@pytest.mark.parametrize(
    "parts", tiered([1, 4], (4).__eq__, "four do all that one does, and add up")
)
def test_one_device_trains_like_the_model(case: str, parts: int) -> None:
    plan, of = plan_of(Cell.parse(f"{case} 1 m{parts}"))
    runtime = parallelize(CASES[case].model(), plan, of)
    wanted = plain_loop(CASES[case], GLOBAL_BATCH)
    assert train(runtime, case) == pytest.approx(wanted.losses, rel=TOLERANCE["fp32"])
    error, where = difference(runtime.full_state_dict(), wanted.state)
    assert error <= TOLERANCE["fp32"], where


def test_gradients_of_two_steps_add_up() -> None:
    plan, of = plan_of(Cell.parse("mlp 1 m1"))
    case = CASES["mlp"]
    runtime = parallelize(case.model(), plan, of)
    runtime.train_step(case.batch(GLOBAL_BATCH, 0))
    once = {n: g.clone() for n, g in runtime.full_gradients().items()}
    runtime.train_step(case.batch(GLOBAL_BATCH, 0))
    error, where = difference(runtime.full_gradients(), {n: 2 * g for n, g in once.items()})
    assert error <= TOLERANCE["fp32"], where


def test_model_without_weights_says_what_it_lacks() -> None:
    case = CASES["llama"]
    plan, of = plan_of(Cell.parse("llama 1 m1"))
    runtime = parallelize(case.model().to("meta"), plan, of)
    with pytest.raises(ValueError, match=r"meta device.*load_state_dict"):
        runtime.train_step(case.batch(GLOBAL_BATCH, 0))
    state = case.model().state_dict()
    with pytest.raises(ValueError, match=r"model\.rotary_emb\.inv_freq.*persistent=False"):
        runtime.load_state_dict(state)
    runtime.load_state_dict({**state, **dict(case.model().named_buffers())})
    wanted = plain_loop(case, GLOBAL_BATCH).losses
    assert train(runtime, "llama") == pytest.approx(wanted, rel=TOLERANCE["fp32"])


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2)])
def test_plan_of_many_ranks_needs_them(dp: int, tp: int) -> None:
    of = graph_of("mlp", GLOBAL_BATCH)
    shardings = CASES["mlp"].shardings
    knobs = Knobs(meshes=((dp, tp),), rows=GLOBAL_BATCH, num_microbatches=1, shardings=shardings)
    plan = build_plan(of.graph, knobs)
    says = rf"{dp * tp} ranks, but 1 .*launch {dp * tp} with torchrun"
    with pytest.raises(PlanError, match=says):
        parallelize(CASES["mlp"].model(), plan, of)
