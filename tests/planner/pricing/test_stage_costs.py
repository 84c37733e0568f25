"""Costs of stages against the price of the plan made from them."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from meshwright.costmodel.blocks.policies import recomputable
from meshwright.costmodel.kernels.collectives import p2p_time
from meshwright.costmodel.memory.states import model_state_bytes
from meshwright.costmodel.operators.cost import Setting
from meshwright.costmodel.stages.stage import StageCosts, stage_costs
from meshwright.costmodel.target import Target
from meshwright.planner.drafts.candidates import (
    Candidate,
    PipelineSetup,
    make_candidate,
    make_draft,
)
from meshwright.planner.drafts.combinations import StageDraft, StageSetup
from meshwright.planner.drafts.mesh import Mesh
from meshwright.planner.plan.check import check_plan
from meshwright.planner.pricing.stage_costs import StageCoster
from meshwright.planner.stages.chain import Chain
from meshwright.planner.stages.programs import BlockPrograms
from meshwright.planner.stages.recompute_levels import ChosenLevel, recompute_levels
from tests.helpers.planning import case, cluster, odd_cluster, problem_of, programs_of
from tests.helpers.tiers import tiered

MODELS = ("gpt2_tied", "llama", "bert", "resnet", "mlp", "plain_gpt")
MICROBATCHES, ROWS = 4, 4

AMPLE = 2.0**60  # bytes


def chain_of(programs: BlockPrograms, *, dp: int = 2, tp: int = 2, mode: str = "fast") -> Chain:
    setting = programs.coster.setting(Mesh(dp=dp, tp=tp), rows=ROWS / dp, microbatches=MICROBATCHES)
    return programs.chain(setting, mode)


# --- stages and plans ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a stage runs: its way, and the recompute of all its blocks."""

    way: StageSetup
    recompute: str

    def drafted(self, start: int, stop: int) -> StageDraft:
        runs = self.way.chain.runs
        levels = recompute_levels(runs.sums, self.way.setting, (self.recompute,), runs.blocks)
        none = np.zeros(len(runs.sums), dtype=np.int64)
        chosen = ChosenLevel(level=none, fraction=none * 0.0, fits=none == 0)
        return StageDraft(
            start=start, stop=stop, setup=self.way, levels=levels, chosen=chosen, in_flight=1
        )


def run(
    programs: BlockPrograms, dp: int, tp: int, zero: int, recompute: str, mode: str = "fast"
) -> Run:
    chain = chain_of(programs, dp=dp, tp=tp, mode=mode)
    way = StageSetup(mesh=Mesh(dp=dp, tp=tp), zero=zero, dp_shard=0, chain=chain)
    return Run(way=way, recompute=recompute)


def candidate(
    programs: BlockPrograms, cuts: list[int], runs: list[Run]
) -> tuple[Candidate, list[StageCosts]]:
    """The plan of these stages, and what the table says each costs."""
    spans = list(zip(itertools.pairwise(cuts), runs, strict=True))
    step = PipelineSetup(
        global_batch_size=ROWS * MICROBATCHES, num_microbatches=MICROBATCHES, schedule="1f1b"
    )
    made = make_candidate(
        programs.coster,
        make_draft(programs.coster, [own.drafted(i, j) for (i, j), own in spans], step, AMPLE),
        AMPLE,
    )
    return made, [
        stage_costs(own.way.chain.sums[i, j], own.way.setting, own.recompute)
        for (i, j), own in spans
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", tiered([1, 24], (24).__eq__, "another draw of plans"))
def test_the_plan_of_a_stage_is_priced_as_the_table_says(name: str, seed: int) -> None:
    """Components of stages from the table equal those of the plan, evaluated and read back."""
    programs = programs_of(case(name), odd_cluster(seed), "fp32")
    count = len(programs.graph.blocks)
    whole = [run(programs, 2, 4, 1, "full", "lean")]
    lean = [run(programs, 2, 2, 0, "none", "lean")]
    halves = [run(programs, 2, 2, 1, "full"), run(programs, 2, 2, 0, "none", "lean")]
    uneven = [run(programs, 2, 2, 1, "none"), run(programs, 1, 4, 0, "full")]
    for ends, runs in (([], whole), ([], lean), ([2], halves), ([3], uneven)):
        made, expected = candidate(programs, [0, *ends, count], runs)
        for stage, wanted in zip(made.evaluation.stages, expected, strict=True):
            for field, value in dataclasses.asdict(wanted).items():
                assert getattr(stage, field) == pytest.approx(value, rel=1e-9, abs=1e-15), field
        assert (
            check_plan(made.plan, programs.graph, programs.coster.problem.factors)
            == made.assignments
        )


def test_states_are_those_of_all_parameters_once() -> None:
    """Tied weights are held once in the stage that reads them twice, and in each of two stages."""
    of = case("gpt2_tied")
    programs, count = programs_of(of, odd_cluster(0), "fp32"), len(of.graph.blocks)
    alone = run(programs, 1, 1, 0, "none")
    made, _ = candidate(programs, [0, count], [alone])
    total = of.graph.num_parameters()
    assert made.evaluation.stages[0].parameters == total
    (stage,) = made.evaluation.stages
    assert stage.static_bytes == 16 * total + stage.passing_bytes
    split, _ = candidate(programs, [0, 2, count], [alone, alone])
    tied = next(v for v, fqn in of.graph.parameters.items() if "wte" in fqn)
    assert sum(s.parameters for s in split.evaluation.stages) == (
        total + of.graph.values[tied].numel
    )


def test_a_backward_holds_the_gradients_of_one_operator_besides() -> None:
    of = case("gpt2_tied")
    programs = programs_of(of, odd_cluster(0), "fp32")
    whole = stage_costs(chain_of(programs, dp=1, tp=1).sums[0, -1], setting_of(programs), "none")
    values = of.graph.values
    gradients = [
        sum(
            4 * values[v].numel
            for v in (*op.operands, *op.results)
            if values[v].requires_grad and v not in of.graph.parameters
        )
        for op in of.graph.ops
    ]
    assert whole.passing_bytes == max(gradients)


def setting_of(programs: BlockPrograms) -> Setting:
    return programs.coster.setting(Mesh(dp=1, tp=1), rows=ROWS, microbatches=MICROBATCHES)


# --- components ----------------------------------------------------------------------------------


def at(chain: Chain, start: int, stop: int, name: str) -> float:
    return float(getattr(chain.sums[start, stop], name))


def test_recompute_trades_the_forward_for_what_it_saves() -> None:
    chain = chain_of(programs_of(case("llama"), odd_cluster(0), "fp32"))
    keep = stage_costs(chain.sums[0, 3], chain.setting, "none")
    again = stage_costs(chain.sums[0, 3], chain.setting, "full")
    repeated_s = again.backward_s - keep.backward_s  # all but what no backward reads
    assert 0.8 * keep.forward_s < repeated_s <= keep.forward_s * (1 + 1e-9)
    assert again.backward_comm_s == pytest.approx(keep.backward_comm_s + keep.forward_comm_s)
    assert again.forward_s == keep.forward_s
    inputs = at(chain, 0, 3, "input_bytes")
    assert 0 < again.activation_bytes == pytest.approx(inputs)
    saved = [at(chain, k, k + 1, "saved_bytes") for k in range(3)]
    assert keep.activation_bytes == pytest.approx(inputs + sum(saved))
    assert again.static_bytes == pytest.approx(keep.static_bytes + max(saved))


def test_blocks_that_update_statistics_are_not_run_again() -> None:
    of = case("resnet")
    assert not any(recomputable(b) for b in of.graph.blocks if "layer" in b.name)
    assert all(recomputable(b) for b in case("llama").graph.blocks)
    chain = chain_of(programs_of(of, odd_cluster(0), "fp32"))
    keep = stage_costs(chain.sums[1, 3], chain.setting, "none")
    assert stage_costs(chain.sums[1, 3], chain.setting, "full") == keep


def test_zero_divides_states_and_the_optimizer_step() -> None:
    chain = chain_of(programs_of(case("llama"), odd_cluster(0), "fp32"), dp=4)
    sharded = dataclasses.replace(chain.setting, zero=1)
    whole = stage_costs(chain.sums[0, 5], chain.setting, "none")
    parts = stage_costs(chain.sums[0, 5], sharded, "none")
    assert parts.optimizer_s == pytest.approx(whole.optimizer_s / 4)
    # an all-reduce is a reduce-scatter and an all-gather, but for starting once more
    starts = 1 + 1e-3
    assert whole.reduce_s <= parts.reduce_s <= whole.reduce_s * starts
    states = [
        model_state_bytes(whole.parameters, precision="fp32", zero=z, dp=4, optimizer="adamw")
        for z in (0, 1)
    ]
    assert whole.static_bytes - parts.static_bytes == pytest.approx(states[0] - states[1])
    assert states[0] > states[1]


def test_once_per_step_is_spread_over_the_microbatches() -> None:
    """By a target that hides nothing of it."""
    problem = problem_of(case("llama"), odd_cluster(0), "fp32", target=Target(name="plain"))
    chain = chain_of(BlockPrograms(StageCoster(problem), {}))
    costs = stage_costs(chain.sums, chain.setting, "none")
    legal = np.isfinite(chain.seconds)
    spread = costs.amortised_s(MICROBATCHES)
    np.testing.assert_allclose(spread[legal], chain.seconds[legal], rtol=1e-9)
    assert costs.amortised_s(1)[0, 5] - spread[0, 5] == pytest.approx(
        (costs.reduce_s + costs.optimizer_s)[0, 5] * (1 - 1 / MICROBATCHES)
    )


def test_what_crosses_a_cut_is_sent() -> None:
    programs = programs_of(case("llama"), odd_cluster(0), "fp32")
    chain = chain_of(programs)
    assert chain.send_s[0] == chain.send_s[-1] == 0
    hidden = ROWS / 2 * 16 * 32 * 4
    assert chain.send_s[1:-1] == pytest.approx(
        [p2p_time(hidden, programs.coster.cluster, crosses_node=False, concurrent=4)] * 4
    )


def test_stages_smaller_than_a_node_cross_nodes_in_proportion() -> None:
    """Of two stages that fill a node one sends to the next node; a stage of a node always does."""
    of, on = case("llama"), cluster(4, nodes=2, bandwidth=1e10, node_bandwidth=1e8)
    coster = StageCoster(problem_of(of, on, "fp32"))
    for devices, share in ((1, 0.25), (2, 0.5), (4, 1.0), (8, 1.0)):
        setting = coster.setting(Mesh(dp=devices, tp=1), rows=1, microbatches=MICROBATCHES)
        far, near = (
            p2p_time(16 * 32 * 4, on, crosses_node=crosses, concurrent=min(devices, 4))
            for crosses in (True, False)
        )
        sent = coster.send_seconds(setting)[2]
        assert sent == pytest.approx(share * far + (1 - share) * near)
