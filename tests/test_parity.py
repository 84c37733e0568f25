"""Every plan equals the single device: losses, gradients, final parameters, to rounding.

One launch of four ranks (`parity_worker.py`) runs the whole matrix; each test reads its cell of the
results. What needs one device only is tested in this process.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from launching import Launch, launch
from models import CASES, GLOBAL_BATCH, make_plan, parallelize
from parity_worker import (
    DROPOUT_SEED,
    STEPS,
    Cell,
    cells,
    difference,
    graph_of,
    plan_of,
    reference,
    train,
)
from torch import fx

from executor.lower import Lowered
from planner.plan import PlanError

TOLERANCE = 1e-5
TIMEOUT_S = 900
MESHES = ("dp4", "tp4", "pp2dp2")


@dataclass(frozen=True, slots=True, kw_only=True)
class Parity:
    """Results of the launch by cell or check."""

    results: dict[str, Any]
    run: Launch

    def __getitem__(self, name: str) -> Any:
        if name not in self.results:
            pytest.fail(f"{name}: the launch ended before its result\n{self.run.tail()}")
        if refused := self.results[name].get("refused"):
            pytest.fail(f"{name}: the plan was refused: {refused}")
        return self.results[name]


def _alone(case: str, num_microbatches: int) -> Cell:
    return Cell(
        case=case, pp=1, dp=1, tp=1, schedule="gpipe", num_microbatches=num_microbatches,
        recompute="none", zero=0, heavy="first",
    )  # fmt: skip


@pytest.fixture(scope="module")
def parity(tmp_path_factory: pytest.TempPathFactory) -> Parity:
    folder = tmp_path_factory.mktemp("parity")
    plan, of = plan_of(_alone("gpt2_dropout", 1))
    model = CASES["gpt2_dropout"].model()
    torch.manual_seed(DROPOUT_SEED)
    alone = train(parallelize(model, plan, of), "gpt2_dropout")
    (folder / "dropout.json").write_text(json.dumps(alone))
    worker = Path(__file__).with_name("parity_worker.py")
    run = launch(worker, str(folder), ranks=4, timeout_s=TIMEOUT_S)
    written = folder / "results.json"
    return Parity(results=json.loads(written.read_text()) if written.exists() else {}, run=run)


# --- four ranks -----------------------------------------------------------------------------------


def test_every_rank_ends_in_order(parity: Parity) -> None:
    assert parity.run.ok, parity.run.tail()
    assert not any(rank.killed or rank.children_left for rank in parity.run.ranks)


@pytest.mark.parametrize("name", [cell.name for cell in cells()])
def test_cell_equals_single_device(parity: Parity, name: str) -> None:
    cell = parity[name]
    assert cell["loss"] <= TOLERANCE
    error, where = cell["gradient"]
    assert error <= TOLERANCE, f"gradient of {where}: {error:.1e}"
    error, where = cell["state"]
    assert error <= TOLERANCE, f"{where} after {STEPS} steps: {error:.1e}"
    assert cell["names"] == [], "names that only one of the two state dicts has"


def test_matrix_covers_every_knob_on_every_mesh() -> None:
    """Recompute, ZeRO and schedules are spread so that every mesh sees each of them."""
    for mesh in {(c.pp, c.dp, c.tp) for c in cells()}:
        here = [c for c in cells() if (c.pp, c.dp, c.tp) == mesh]
        assert {c.recompute for c in here} >= {"none", "full"}
        assert {c.zero for c in here} == {0, 1}
        assert {c.schedule for c in here} == {"gpipe", "1f1b"}
        assert {c.num_microbatches for c in here} == {2, 4}
    assert "some" in {c.recompute for c in cells()}  # by block
    assert len({c.name for c in cells()}) == len(cells())


def test_saved_plan_runs_bit_for_bit(parity: Parity) -> None:
    result = parity["saved_plan"]
    assert result["equal"]
    before, after = result["losses"]
    assert len(before) == STEPS
    assert before == after


@pytest.mark.parametrize("mesh", MESHES)
def test_dropout_is_the_same_under_every_plan(parity: Parity, mesh: str) -> None:
    result = parity["dropout"]
    assert result["losses"][mesh] == pytest.approx(result["reference"], rel=TOLERANCE)
    without = reference("gpt2_tied", 1).losses
    assert abs(result["reference"][0] - without[0]) > 100 * TOLERANCE


def test_bf16_trains_on_fp32_master_weights(parity: Parity) -> None:
    result = parity["half_precision"]
    assert result["losses"] == pytest.approx(result["reference"], rel=0.02)
    assert result["losses"] != result["reference"]
    assert result["compute"] == ["torch.bfloat16"]
    assert result["master"] == ["torch.float32"]


@pytest.mark.parametrize("case", ["gpt2_tied", "resnet", "llama", "bert"])
def test_state_moves_between_plans_and_the_model(parity: Parity, case: str) -> None:
    result = parity["state_round_trip"][case]
    assert "All keys matched" in result["strict"]
    for target in ("other_plan", "meta"):
        assert result[target]["same"]
        assert result[target]["loss"] == pytest.approx(result["loss"], rel=TOLERANCE)


@pytest.mark.parametrize("kind", ["parameters", "gradients", "moments"])
def test_zero1_divides_what_the_optimizer_holds(parity: Parity, kind: str) -> None:
    shares = parity["zero_shares"]
    assert shares["0"][kind] == shares["0"]["all"]
    assert shares["1"][kind] * 4 == shares["1"]["all"]


def test_equal_layers_are_lowered_once(parity: Parity) -> None:
    assert parity["shared_modules"] == {"layers": 3, "modules": 1}


# --- one device, no process group -----------------------------------------------------------------


def _operators(block: Lowered) -> list[str]:
    assert isinstance(block.module, fx.GraphModule)
    nodes = block.module.graph.nodes
    return [str(n.target) for n in nodes if isinstance(n.target, torch._ops.OpOverload)]


@pytest.mark.parametrize("case", ["gpt2_tied", "bert", "plain_gpt"])
def test_one_device_runs_the_traced_operators_only(case: str) -> None:
    plan, of = plan_of(_alone(case, 1))
    runtime = parallelize(CASES[case].model(), plan, of)
    for block, lowered in zip(of.graph.blocks, runtime.stage.program.blocks, strict=True):
        assert not list(lowered.module.children())
        same = {
            "aten.view.default": "aten.reshape.default"
        }  # a shard's memory may not allow a view
        assert _operators(lowered) == [same.get(op.target, op.target) for op in block.ops]


@pytest.mark.parametrize("case", ["gpt2_tied", "llama", "bert", "plain_gpt", "mlp"])
@pytest.mark.parametrize("num_microbatches", [1, 4])
def test_one_device_trains_like_the_model(case: str, num_microbatches: int) -> None:
    plan, of = plan_of(_alone(case, num_microbatches))
    runtime = parallelize(CASES[case].model(), plan, of)
    wanted = reference(case, 1)
    assert train(runtime, case) == pytest.approx(wanted.losses, rel=TOLERANCE)
    error, where = difference(runtime.full_state_dict(), wanted.state)
    assert error <= TOLERANCE, where


def test_gradients_of_two_steps_add_up() -> None:
    plan, of = plan_of(_alone("mlp", 1))
    case = CASES["mlp"]
    runtime = parallelize(case.model(), plan, of)
    runtime.train_step(case.batch(GLOBAL_BATCH, 0))
    once = {n: g.clone() for n, g in runtime.full_gradients().items()}
    runtime.train_step(case.batch(GLOBAL_BATCH, 0))
    error, where = difference(runtime.full_gradients(), {n: 2 * g for n, g in once.items()})
    assert error <= TOLERANCE, where


def test_model_without_weights_says_what_it_lacks() -> None:
    case = CASES["llama"]
    plan, of = plan_of(_alone("llama", 1))
    runtime = parallelize(case.model().to("meta"), plan, of)
    with pytest.raises(ValueError, match=r"meta device.*load_state_dict"):
        runtime.train_step(case.batch(GLOBAL_BATCH, 0))
    state = case.model().state_dict()
    with pytest.raises(ValueError, match=r"model\.rotary_emb\.inv_freq.*persistent=False"):
        runtime.load_state_dict(state)
    runtime.load_state_dict({**state, **dict(case.model().named_buffers())})
    assert train(runtime, "llama") == pytest.approx(reference("llama", 1).losses, rel=TOLERANCE)


@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2)])
def test_plan_of_many_ranks_needs_them(dp: int, tp: int) -> None:
    of = graph_of("mlp", GLOBAL_BATCH)
    plan = make_plan(
        of.graph, pp=1, dp=dp, tp=tp, num_microbatches=1, shardings=CASES["mlp"].shardings
    )  # fmt: skip
    with pytest.raises(PlanError, match=rf"{dp * tp} ranks, but 1 .*torchrun --nproc-per-node"):
        parallelize(CASES["mlp"].model(), plan, of)
