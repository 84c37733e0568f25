"""Every plan equals the single device: losses, gradients, final parameters, to rounding.

One launch per world size (`parity_worker.py`) runs the matrix of `parity_matrix.py` and further
checks; each test reads its part of the results. What needs one device only is tested in this
process.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import fx

from meshwright.costmodel.schedules.schedule import SCHEDULES
from meshwright.executor.lowering.lower import Lowered
from meshwright.planner.plan.check import check_plan, check_runs
from meshwright.planner.plan.flow import crossings
from meshwright.planner.plan.plan import PlanError
from meshwright.planner.pricing.evaluate import transfer_seconds
from meshwright.planner.pricing.stage_costs import StageCoster
from tests.helpers.launching import Results, results_of
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.planning import cluster, problem_of
from tests.models.models import CASES, GLOBAL_BATCH, parallelize
from tests.parity.context_cells import context_cells
from tests.parity.copies_cells import copies_cells
from tests.parity.parity_cells import Cell, graph_of, plan_of
from tests.parity.parity_checks import (
    ACCUMULATED,
    CELLS,
    DROPOUT,
    DROPOUT_SEED,
    REPEATED,
    ROUND_TRIPS,
    SHARES,
    STRANGE,
    UNEQUAL,
    train,
)
from tests.parity.parity_matrix import all_cells
from tests.parity.parity_reference import STEPS, difference, plain_loop, store

# fp32: two orders of one sum, of any element. Half precision: 32 roundings of 2^-8 or 2^-11, of the
# norm of a tensor; what a plan loses or counts twice is a micro-batch's or a rank's part of it.
TOLERANCE = {"fp32": 1e-5, "bf16": 32 * 2**-8, "fp16": 32 * 2**-11}
TIMEOUT_S = 600
WORLDS = (2, 4, 8)


Of = Callable[[int], Results]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where graphs and references lie."""
    return tmp_path_factory.mktemp("parity")


@pytest.fixture(scope="module")
def parity(folder: Path) -> Of:
    """The launch of a number of ranks, on first demand."""
    launched: dict[int, Results] = {}

    def of(world: int) -> Results:
        if world not in launched:
            cells = [
                c
                for c in (*all_cells(), *context_cells(), *copies_cells(), *CELLS)
                if c.world == world
            ]
            store(folder, cells)
            if world == 4:
                (folder / "dropout.json").write_text(json.dumps(_dropout_alone()))
            worker = Path(__file__).with_name("parity_worker.py")
            launched[world] = results_of(
                worker, folder, ranks=world, timeout_s=TIMEOUT_S, name=f"{world}"
            )
        return launched[world]

    return of


def _dropout_alone() -> list[float]:
    plan, of = plan_of(DROPOUT["dp4"].alone)
    model = CASES["gpt2_dropout"].model()
    torch.manual_seed(DROPOUT_SEED)
    return train(parallelize(model, plan, of), "gpt2_dropout")


# --- the matrix -----------------------------------------------------------------------------------


@pytest.mark.parametrize("world", WORLDS)
def test_every_rank_ends_in_order(parity: Of, world: int) -> None:
    run = parity(world).run
    assert run.ok, run.tail()
    assert not any(rank.killed or rank.children_left for rank in run.ranks)


@pytest.mark.parametrize(
    "cell", [*all_cells(), *context_cells(), *copies_cells()], ids=lambda cell: cell.name
)
def test_cell_equals_single_device(parity: Of, cell: Cell) -> None:
    found, tolerance = parity(cell.world)[cell.name], TOLERANCE[cell.precision]
    assert found["loss"] <= tolerance
    error, where = found["gradient"]
    assert error <= tolerance, f"gradient of {where}: {error:.1e}"
    error, where = found["state"]
    assert error <= tolerance, f"{where} after {STEPS} steps: {error:.1e}"
    assert found["names"] == [], "names that only one of the two state dicts has"


@pytest.mark.parametrize("world", WORLDS)
def test_cells_are_legal_plans_of_their_world(folder: Path, world: int) -> None:
    cells = [
        cell for cell in (*all_cells(), *context_cells(), *copies_cells()) if cell.world == world
    ]
    for cell in cells:
        plan, of = plan_of(cell)
        assert plan.num_ranks == world
        check_plan(plan, of.graph, of.table)
        check_runs(plan)


def test_matrix_covers_every_legal_pair_of_knobs() -> None:
    knobs = ("case", "schedule", "zero", "recompute", "precision")
    cells = all_cells()
    assert len({cell.name for cell in cells}) == len(cells) >= 150
    for a, b in combinations(knobs, 2):
        values = [{getattr(cell, knob) for cell in cells} for knob in (a, b)]
        covered = {(getattr(cell, a), getattr(cell, b)) for cell in cells}
        missing = {pair for pair in product(*values) if _legal({a, b}, pair)} - covered
        assert not missing, f"({a}, {b})"
    assert {cell.schedule for cell in cells} == {n for n, s in SCHEDULES.items() if s.copies == 1}
    twice = {cell.schedule for cell in copies_cells()}
    assert twice == {n for n, s in SCHEDULES.items() if s.copies > 1}
    assert {cell.zero for cell in cells} == {0, 1, 2, 3}


def _legal(knobs: set[str], pair: tuple[Any, Any]) -> bool:
    """A split backward and ZeRO-3 exclude each other; some cases run in fp32 only."""
    split = {name for name, schedule in SCHEDULES.items() if schedule.splits_backward}
    if knobs == {"schedule", "zero"}:
        return not (pair[0] in split and pair[1] == 3)
    halves = {cell.case for cell in all_cells() if cell.precision != "fp32"}
    return not (knobs == {"case", "precision"} and pair[0] not in halves and pair[1] != "fp32")


@pytest.mark.parametrize("schedule", [n for n, s in SCHEDULES.items() if s.splits_backward])
def test_zero3_with_a_split_backward_is_refused(schedule: str) -> None:
    plan, _ = plan_of(Cell.parse(f"gpt2_tied pp2xdp2 {schedule} zero3"))
    with pytest.raises(PlanError, match=rf"zero=3 with schedule='{schedule}'.*legal: zero 0, 1"):
        check_runs(plan)


# --- further checks on four ranks -----------------------------------------------------------------


def test_saved_plan_runs_bit_for_bit(parity: Of) -> None:
    result = parity(4)["saved_plan"]
    assert result["equal"]
    before, after = result["losses"]
    assert len(before) == STEPS
    assert before == after


@pytest.mark.parametrize("mesh", DROPOUT)
def test_dropout_is_the_same_under_every_plan(parity: Of, mesh: str) -> None:
    result = parity(4)["dropout"]
    assert result["losses"][mesh] == pytest.approx(result["reference"], rel=TOLERANCE["fp32"])
    without = plain_loop(CASES["gpt2_tied"], GLOBAL_BATCH).losses
    assert abs(result["reference"][0] - without[0]) > 100 * TOLERANCE["fp32"]
    assert result["evaluated"][mesh] == pytest.approx(result["plain"], rel=TOLERANCE["fp32"])


def test_a_buffer_that_holds_the_batch_is_whole_on_data_ranks(parity: Of) -> None:
    result = parity(4)["carried_rows"]
    assert result["losses"] == pytest.approx(result["plain losses"], rel=TOLERANCE["fp32"])
    states, plain = (torch.tensor(result[name]) for name in ("states", "plain states"))
    torch.testing.assert_close(states, plain)


def test_bf16_trains_on_fp32_master_weights(parity: Of) -> None:
    result = parity(4)["half_precision"]
    assert result["losses"] == pytest.approx(result["reference"], rel=0.02)
    assert result["losses"] != result["reference"]
    assert result["compute"] == ["torch.bfloat16"]
    assert result["master"] == ["torch.float32"]


@pytest.mark.parametrize("case", ROUND_TRIPS)
def test_state_moves_between_plans_and_the_model(parity: Of, case: str) -> None:
    result = parity(4)["state_round_trip"][case]
    assert "All keys matched" in result["strict"]
    for target in ("other_plan", "meta"):
        assert result[target]["same"]
        assert result[target]["loss"] == pytest.approx(result["loss"], rel=TOLERANCE["fp32"])


@pytest.mark.parametrize("zero", STRANGE)
def test_a_step_is_skipped_for_a_number_that_is_none_in_any_micro_batch(
    parity: Of, zero: int
) -> None:
    found = parity(4)["strange"][str(zero)]
    assert found == {"skipped": [1, 1], "delivered": 0, "afterwards": True}


@pytest.mark.parametrize("kind", ["parameters", "gradients", "moments"])
@pytest.mark.parametrize("zero", SHARES)
def test_zero_divides_what_the_optimizer_holds(parity: Of, zero: int, kind: str) -> None:
    share = parity(4)["zero_shares"][str(zero)]
    assert share[kind] * (4 if zero else 1) == share["all"]


@pytest.mark.parametrize("cell", REPEATED, ids=lambda cell: cell.name)
def test_a_layer_on_several_stages_trains_as_one(parity: Of, cell: Cell) -> None:
    found = parity(cell.world)["repeated_layer"][cell.name]
    for what in ("gradient", "state"):
        error, where = found[what]
        assert error <= TOLERANCE[cell.precision], f"{what} of {where}: {error:.1e}"
    # as on one device, what the loss does not depend on has no gradient, rather than zero
    assert {"detached", "frozen"}.isdisjoint(found["gradients"])


@pytest.mark.parametrize("cell", ACCUMULATED, ids=lambda cell: cell.name)
def test_gradients_add_up_and_are_the_users(parity: Of, cell: Cell) -> None:
    found = parity(cell.world)["accumulated"][cell.name]
    assert found["kept"], "gradients that were kept changed in a later step"
    assert max(found["again"], found["twice"]) <= TOLERANCE["fp32"]
    assert found["evaluated"] == pytest.approx(found["trained"], rel=1e-6)


@pytest.mark.parametrize("cell", UNEQUAL, ids=lambda cell: cell.name)
def test_unequal_stages_send_what_the_other_side_needs(parity: Of, cell: Cell) -> None:
    """Every rank of a stage gets its own rows of each tensor once, and nothing else travels."""
    found = parity(cell.world)["transfers"][cell.name]
    wanted = _wanted_bytes(cell)
    totals = dict.fromkeys(wanted, 0)
    for channels in found["channels"]:
        for edge, nbytes in channels.items():
            totals[edge] += nbytes
    assert totals == wanted
    assert found["sent"] == [cell.microbatches * sum(c.values()) for c in found["channels"]]


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


@pytest.mark.parametrize("cell", UNEQUAL, ids=lambda cell: cell.name)
def test_unequal_stages_send_what_the_plan_was_priced_for(parity: Of, cell: Cell) -> None:
    """At a byte per second, the busiest rank of an edge takes the predicted seconds, on average of
    both ways."""
    found = parity(cell.world)["transfers"][cell.name]
    plan, of = plan_of(cell)
    slow = cluster(cell.world, bandwidth=1.0)
    coster = StageCoster(problem_of(of, slow, "fp32", optimizer="sgd"))
    for edge, values in crossings(plan, of.graph).items():
        both = []
        for source, target in (edge, edge[::-1]):
            way = f"{source}->{target}"
            sent = max(channels.get(way, 0) for channels in found["channels"])
            both.append(max(sent, _wanted_bytes(cell)[way] / len(plan.stages[target].ranks)))
        seconds = transfer_seconds(plan, coster, edge, values)
        assert seconds == pytest.approx(sum(both) / 2, rel=1e-6)


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
@pytest.mark.parametrize("parts", [1, 4])
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
