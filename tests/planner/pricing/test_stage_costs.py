"""Costs of stages against the price of the plan made from them."""

import dataclasses
import itertools

import numpy as np
import pytest

from meshwright.costmodel.kernels import Hop
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


def test_of_stages_that_fill_nodes_the_last_sends_to_the_next_node() -> None:
    """Between eight stages on two nodes one of seven messages crosses, between two the only one."""
    of, on = case("llama"), cluster(4, nodes=2, bandwidth=1e10, node_bandwidth=1e8)
    coster, not_split = StageCoster(problem_of(of, on, "fp32")), [False] * 6
    for devices, share in ((1, 1 / 7), (2, 1 / 3), (4, 1.0)):
        setting = coster.setting(Mesh(dp=devices, tp=1), Batch(rows=1, microbatches=MICROBATCHES))
        far, near = (
            p2p_time(16 * 32 * 4, on, crosses_node=crosses, concurrent=devices)
            for crosses in (True, False)
        )
        sent = coster.send_seconds(setting, not_split)[2]
        assert sent == pytest.approx(share * far + (1 - share) * near)
    alone = coster.setting(Mesh(dp=8, tp=1), Batch(rows=1, microbatches=MICROBATCHES))
    assert not coster.send_seconds(alone, not_split).any()


def test_of_stages_that_fill_pools_one_sends_to_the_other_pool() -> None:
    """Four nodes of four devices in two pools."""
    of, on = case("llama"), cluster(4, nodes=4, bandwidth=1e10, node_bandwidth=1e8)
    link = dataclasses.replace(on.inter_link, bandwidth=1e6, latency_s=0.01)
    on = dataclasses.replace(on, num_pools=2, pool_link=link)
    coster, not_split = StageCoster(problem_of(of, on, "fp32")), [False] * 6
    for devices, inside, near, far in ((1, 12, 2, 1), (2, 4, 2, 1), (4, 0, 2, 1), (8, 0, 0, 1)):
        setting = coster.setting(Mesh(dp=devices, tp=1), Batch(rows=1, microbatches=MICROBATCHES))
        seconds = {
            Hop(*hop): p2p_time(
                16 * 32 * 4, on, crosses_node=hop[0], concurrent=min(devices, 4),
                over_pools=devices * hop[1],
            )
            for hop in ((False, False), (True, False), (True, True))
        }  # fmt: skip
        counts = zip(seconds.values(), (inside, near, far), strict=True)
        mean_s = sum(each * count for each, count in counts) / (inside + near + far)
        assert coster.send_seconds(setting, not_split)[2] == pytest.approx(mean_s)
        hops = coster.hops(setting.mesh, Pipeline("1f1b", 16 // devices, 4, 16 // devices))
        assert [*map(hops.count, seconds)] == [inside, near, far]
        for hop in filter(None, {*hops}):
            sent = coster.send_seconds(setting, not_split, hop)[2]
            assert sent == pytest.approx(seconds[hop])


def test_messages_of_spread_stages_stay_in_their_nodes() -> None:
    """Two nodes of four; each of four stages has a device on both."""
    on = cluster(4, nodes=2, node_bandwidth=1e6)
    coster = StageCoster(problem_of(case("llama"), on, "fp32"))
    pipeline = Pipeline("interleaved_1f1b", 8, 4, 4)
    assert coster.hops(Mesh(dp=2, tp=1, spread=4), pipeline) == (Hop(False, False),) * 7
    assert coster.hops(Mesh(dp=2, tp=1), pipeline)[1:4] == (
        Hop(True, False),
        Hop(False, False),
        Hop(True, False),
    )
    turned = coster.hops(Mesh(dp=2, tp=1), Pipeline("zb_v", 8, 4, 4))
    assert [hop and hop.over_nodes for hop in turned] == [
        False,
        True,
        False,
        None,
        False,
        True,
        False,
    ]


def test_what_skips_a_stage_is_not_sent_between_neighbours() -> None:
    """Of a cut, what the block before makes and the next one reads is sent at least."""
    coster = StageCoster(problem_of(case("t5"), cluster(4), "fp32"))
    setting = coster.setting(Mesh(dp=2, tp=1), Batch(rows=1, microbatches=MICROBATCHES))
    not_split = [False] * (len(coster.graph.blocks) + 1)
    least_s = coster.send_seconds(setting, not_split, Hop(False, False))
    all_s = coster.send_seconds(setting, not_split)
    assert (least_s <= all_s).all() and (least_s < all_s).any()
    assert not (least_s[0] or least_s[-1])
