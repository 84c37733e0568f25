"""Costs of stages against the price of the plan made from them."""

import dataclasses
import itertools

import numpy as np
import pytest

from meshwright.costmodel.kernels.collectives import p2p_time
from meshwright.costmodel.mesh import Batch, Mesh
from meshwright.costmodel.schedules import Pipeline
from meshwright.costmodel.sharing import Sharing
from meshwright.costmodel.stages import InFlight
from meshwright.costmodel.stages.stage import StageCosts, stage_costs
from meshwright.costmodel.stages.stage_memory import StageMemory
from meshwright.costmodel.target import Target
from meshwright.planner.drafts import Candidate, StageDraft, StageSetup
from meshwright.planner.drafts.candidates import make_candidate, make_draft
from meshwright.planner.plan.check import check_plan
from meshwright.planner.pricing.stage_costs import StageCoster
from meshwright.planner.stages.programs import BlockPrograms
from meshwright.planner.stages.recompute import ChosenLevel, recompute_levels
from tests.helpers.planning import case, cluster, odd_cluster, problem_of, programs_of
from tests.helpers.tiers import tiered
from tests.planner.stages.test_chain import MICROBATCHES, MODELS, ROWS, chain_of

AMPLE = 2.0**60  # bytes


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
            start=start, stop=stop, setup=self.way, levels=levels, chosen=chosen,
            in_flight=InFlight(active=1, first=1),
        )  # fmt: skip


def run(
    programs: BlockPrograms, dp: int, tp: int, zero: int, recompute: str, mode: str = "fast"
) -> Run:
    chain = chain_of(programs, dp=dp, tp=tp, mode=mode)
    way = StageSetup(mesh=Mesh(dp=dp, tp=tp), sharing=Sharing(zero=zero), chain=chain)
    return Run(way=way, recompute=recompute)


def candidate(
    programs: BlockPrograms, cuts: list[int], runs: list[Run]
) -> tuple[Candidate, list[StageCosts]]:
    """The plan of these stages, and what the table says each costs."""
    spans = list(zip(itertools.pairwise(cuts), runs, strict=True))
    pipeline = Pipeline("1f1b", len(spans), MICROBATCHES, len(spans))
    drafted = [own.drafted(i, j) for (i, j), own in spans]
    made = make_candidate(
        programs.coster, make_draft(programs.coster, drafted, pipeline, ROWS * MICROBATCHES, AMPLE)
    )
    return made, [
        stage_costs(own.way.chain.sums[i, j], own.way.setting, own.recompute)
        for (i, j), own in spans
    ]


# what a written plan's blocks say more exactly
WALKED = {each.name for each in dataclasses.fields(StageMemory)} | {"activation_bytes"}


@pytest.mark.parametrize(
    "name", tiered(MODELS, ("gpt2_tied", "resnet").__contains__, "ties, and statistics, stay")
)
@pytest.mark.parametrize("seed", tiered([1, 24], (24).__eq__, "another draw of plans"))
def test_the_plan_of_a_stage_is_priced_as_the_table_says(name: str, seed: int) -> None:
    """Components of stages from the table equal those of the plan, evaluated and read back; of
    stages with other tensor-parallel degrees beside them, where they get and send the same."""
    programs = programs_of(case(name), odd_cluster(seed), "fp32")
    count = len(programs.graph.blocks)
    whole = [run(programs, 2, 4, 1, "full", "lean")]
    lean = [run(programs, 2, 2, 0, "none", "lean")]
    halves = [run(programs, 2, 2, 1, "full"), run(programs, 2, 2, 0, "none", "lean")]
    uneven = [run(programs, 2, 2, 1, "none"), run(programs, 1, 4, 0, "full")]
    for ends, runs in (([], whole), ([], lean), ([2], halves), ([3], uneven)):
        made, expected = candidate(programs, [0, *ends, count], runs)
        chains = [each.way.chain for each in runs]
        states = [{c.cuts[end][c.states[end]] for c in chains} for end in ends]
        if any(len(of) > 1 or (runs is uneven and min(of).sharded) for of in states):
            continue  # a written plan gathers what one leaves split and the other takes whole
        for stage, wanted in zip(made.evaluation.stages, expected, strict=True):
            for field, value in dataclasses.asdict(wanted).items():
                if field not in WALKED:
                    assert getattr(stage, field) == pytest.approx(value, rel=1e-9, abs=1e-15), field
        factors = programs.coster.problem.factors
        assert check_plan(made.plan, programs.graph, factors) == made.assignments


def test_states_are_those_of_all_parameters_once() -> None:
    """Tied weights are held once in the stage that reads them twice, and in each of two stages."""
    of = case("gpt2_tied")
    programs, count = programs_of(of, odd_cluster(0), "fp32"), len(of.graph.blocks)
    alone = run(programs, 1, 1, 0, "none")
    made, _ = candidate(programs, [0, count], [alone])
    total, (stage,) = of.graph.num_parameters(), made.evaluation.stages
    assert stage.parameters == total
    assert stage.fixed_bytes + stage.gradient_bytes == 16 * total
    split, _ = candidate(programs, [0, 2, count], [alone, alone])
    tied = next(v for v, fqn in of.graph.parameters.items() if "wte" in fqn)
    held = sum(stage.parameters for stage in split.evaluation.stages)
    assert held == total + of.graph.values[tied].numel


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
        setting = coster.setting(Mesh(dp=devices, tp=1), Batch(rows=1, microbatches=MICROBATCHES))
        far, near = (
            p2p_time(16 * 32 * 4, on, crosses_node=crosses, concurrent=min(devices, 4))
            for crosses in (True, False)
        )
        sent = coster.send_seconds(setting, [False] * (len(of.graph.blocks) + 1))[0][2]
        assert sent == pytest.approx(share * far + (1 - share) * near)


def test_stages_smaller_than_a_pool_cross_pools_in_proportion() -> None:
    """Four nodes of four devices in two pools: of the stages of a pool one sends to the other."""
    of, on = case("llama"), cluster(4, nodes=4, bandwidth=1e10, node_bandwidth=1e8)
    link = dataclasses.replace(on.inter_link, bandwidth=1e6, latency_s=0.01)
    on = dataclasses.replace(on, num_pools=2, pool_link=link)
    coster = StageCoster(problem_of(of, on, "fp32"))
    nbytes, not_split = 16 * 32 * 4, [False] * (len(of.graph.blocks) + 1)
    for devices, node, pool in ((1, 1 / 4, 1 / 8), (2, 1 / 2, 1 / 4), (4, 1, 1 / 2), (8, 1, 1)):
        setting = coster.setting(Mesh(dp=devices, tp=1), Batch(rows=1, microbatches=MICROBATCHES))
        inside, near, far = (
            p2p_time(
                nbytes, on, crosses_node=crosses, concurrent=min(devices, 4),
                over_pools=devices * leaves,
            )
            for crosses, leaves in ((False, False), (True, False), (True, True))
        )  # fmt: skip
        mean_s, longest_s = coster.send_seconds(setting, not_split)
        shared_out = (1 - node) * inside + (node - pool) * near + pool * far
        assert mean_s[2] == pytest.approx(shared_out)
        assert longest_s[2] == pytest.approx(far)
