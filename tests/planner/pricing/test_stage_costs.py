"""Costs of stages composed from blocks, against every path through the boundary states and against
the price of the plan made from them."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator

import numpy as np
import pytest

from meshwright.costmodel.blocks.price import price_block
from meshwright.costmodel.blocks.stage import FIELDS, StageCosts, recomputable, stage_costs
from meshwright.costmodel.kernels.collectives import p2p_time
from meshwright.costmodel.memory.states import model_state_bytes
from meshwright.costmodel.operators.cost import Setting
from meshwright.costmodel.sharding.layouts import Assignment, BlockLayouts, Entry, translate
from meshwright.costmodel.sharding.strategies import Placement, R, can_hold
from meshwright.planner.plan.check import check_plan
from meshwright.planner.pricing.chain import Chain
from meshwright.planner.pricing.recompute_levels import Share, ladder
from meshwright.planner.pricing.stage_costs import StageCoster
from meshwright.planner.search.candidates import (
    Candidate,
    PipelineSetup,
    make_candidate,
    make_draft,
)
from meshwright.planner.search.equal_stages import StageDraft, StageSetup
from meshwright.planner.search.space import Mesh
from tests.helpers.planning import Traced, case, cluster, large_gpt2, odd_cluster, problem_of

MODELS = ("gpt2_tied", "llama", "bert", "resnet", "mlp", "plain_gpt")
MICROBATCHES, ROWS = 4, 4


def coster_of(of: Traced, seed: int, **forced: Entry) -> StageCoster:
    return StageCoster(problem_of(of, odd_cluster(seed), "fp32"), forced)


def chain_of(coster: StageCoster, *, dp: int = 2, tp: int = 2, mode: str = "fast") -> Chain:
    setting = coster.setting(Mesh(dp=dp, tp=tp), rows=ROWS / dp, microbatches=MICROBATCHES)
    chain = coster.chain(setting, mode)
    assert chain is not None
    return chain


def stages_of(chain: Chain) -> Iterator[tuple[int, int]]:
    return itertools.combinations(range(len(chain.tables) + 1), 2)


# --- states at cuts ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("tp", [2, 3])
def test_values_cross_cuts_in_every_state_that_ranks_can_hold(name: str, tp: int) -> None:
    coster = coster_of(case(name), 0)
    graph, table = coster.graph, coster.problem.factors
    crossing = [value for block in graph.blocks for value in block.outputs]
    uneven = 0
    for value in crossing:
        found = coster.value_states(value, tp)
        for dim, atoms in enumerate(table.dims[value]):
            if len(atoms) == 1 and atoms[0] != table.batch:
                state = Placement("S", dim, 1)
                assert (state in found) == can_hold(graph, table, value, state, tp)
                uneven += state in found and graph.values[value].shape[dim] % tp != 0
    assert not uneven or tp == 3
    assert uneven or tp == 2 or name not in ("gpt2_tied", "llama")


# --- composition ---------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", [0, 2])
def test_a_stage_costs_its_cheapest_path(name: str, seed: int) -> None:
    coster = coster_of(case(name), seed)
    chain = chain_of(coster)
    for i, j in stages_of(chain):
        inner = [range(len(chain.cuts[k])) for k in range(i + 1, j)]
        paths = ([0, *states, 0] for states in itertools.product(*inner))
        best = min(
            sum(chain.costs[k][a, b] for k, (a, b) in enumerate(itertools.pairwise(path), i))
            for path in paths
        )
        again = repeats(coster, chain, i, j)
        assert chain.seconds[i, j] == pytest.approx(best - again, rel=1e-9)


def repeats(coster: StageCoster, chain: Chain, i: int, j: int) -> float:
    """Seconds of parameters that a stage's blocks read again: gradients and optimizer."""
    pricer, seen, seconds = coster.pricer(chain.setting), set(), 0.0
    for k, table in enumerate(chain.tables[i:j], i):
        for value in coster.graph.blocks[k].parameters:
            if value in seen:
                state = table.stored(next(iter(table.choices)), value)
                seconds += pricer.parameter_cost(value, state).seconds(MICROBATCHES)
            seen.add(value)
    return seconds


@pytest.mark.parametrize("name", MODELS)
def test_the_assignments_of_a_stage_cost_what_the_stage_costs(name: str) -> None:
    """The way back: from every stage's assignments alone to its seconds and parameters."""
    coster = coster_of(case(name), 4)
    chain = chain_of(coster, mode="lean")
    pricer = coster.pricer(chain.setting)
    for i, j in stages_of(chain):
        found = chain.assignments(i, j)
        assert list(found) == [b.name for b in coster.graph.blocks[i:j]]
        at: dict[str, Placement] = {}
        seconds, parameters = -repeats(coster, chain, i, j), {}
        for block in coster.graph.blocks[i:j]:
            assignment = found[block.name]
            layouts = BlockLayouts(coster.graph, coster.problem.factors, block, 2)
            seconds += price_block(pricer, layouts, assignment, at).cost.seconds(MICROBATCHES)
            states = assignment.states
            parameters |= {v: pricer.numel(v, states[v]) for v in block.parameters}
            at |= {v: states[v] for v in block.outputs}
        assert all(at[v] == R for v in coster.graph.blocks[j - 1].outputs)
        assert seconds == pytest.approx(chain.seconds[i, j], rel=1e-9)
        local = stage_costs(chain.sums[i, j], chain.setting, "none").parameters
        assert local == pytest.approx(sum(parameters.values()))


def test_a_run_of_no_blocks_or_backwards_is_illegal() -> None:
    chain = chain_of(coster_of(case("mlp"), 0))
    assert np.isinf(chain.seconds[np.tril_indices(len(chain.seconds))]).all()


# --- stages and plans ----------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """How a stage runs: its way, and the recompute of all its blocks."""

    way: StageSetup
    recompute: str

    def drafted(self, start: int, stop: int) -> StageDraft:
        runs = self.way.chain.runs
        rungs = ladder(runs.sums, self.way.setting, (self.recompute,), runs.blocks)
        none = np.zeros(len(runs.sums), dtype=np.int64)
        chosen = Share(rung=none, share=none * 0.0, fits=none == 0)
        return StageDraft(start=start, stop=stop, setup=self.way, ladder=rungs, chosen=chosen)


def run(
    coster: StageCoster, dp: int, tp: int, zero: int, recompute: str, mode: str = "fast"
) -> Run:
    chain = chain_of(coster, dp=dp, tp=tp, mode=mode)
    way = StageSetup(mesh=Mesh(dp=dp, tp=tp), zero=zero, dp_shard=0, chain=chain)
    return Run(way=way, recompute=recompute)


def candidate(
    coster: StageCoster, cuts: list[int], runs: list[Run]
) -> tuple[Candidate, list[StageCosts]]:
    """The plan of these stages, and what the table says each costs."""
    spans = list(zip(itertools.pairwise(cuts), runs, strict=True))
    step = PipelineSetup(
        global_batch_size=ROWS * MICROBATCHES, num_microbatches=MICROBATCHES, schedule="1f1b"
    )
    made = make_candidate(
        coster, make_draft(coster, [own.drafted(i, j) for (i, j), own in spans], step)
    )
    return made, [
        stage_costs(own.way.chain.sums[i, j], own.way.setting, own.recompute)
        for (i, j), own in spans
    ]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("seed", [1, 24])
def test_the_plan_of_a_stage_is_priced_as_the_table_says(name: str, seed: int) -> None:
    """Components of stages from the table equal those of the plan, evaluated and read back."""
    coster = coster_of(case(name), seed)
    count = len(coster.graph.blocks)
    whole = [run(coster, 2, 4, 1, "full", "lean")]
    lean = [run(coster, 2, 2, 0, "none", "lean")]
    halves = [run(coster, 2, 2, 1, "full"), run(coster, 2, 2, 0, "none", "lean")]
    uneven = [run(coster, 2, 2, 1, "none"), run(coster, 1, 4, 0, "full")]
    for ends, runs in (([], whole), ([], lean), ([2], halves), ([3], uneven)):
        made, expected = candidate(coster, [0, *ends, count], runs)
        for stage, wanted in zip(made.evaluation.stages, expected, strict=True):
            for field, value in dataclasses.asdict(wanted).items():
                assert getattr(stage, field) == pytest.approx(value, rel=1e-9, abs=1e-15), field
        assert check_plan(made.plan, coster.graph, coster.problem.factors) == made.assignments


def test_states_are_those_of_all_parameters_once() -> None:
    """Tied weights are held once in the stage that reads them twice, and in each of two stages."""
    of = case("gpt2_tied")
    coster, count = coster_of(of, 0), len(of.graph.blocks)
    alone = run(coster, 1, 1, 0, "none")
    made, _ = candidate(coster, [0, count], [alone])
    total = of.graph.num_parameters()
    assert made.evaluation.stages[0].parameters == total
    (stage,) = made.evaluation.stages
    assert stage.static_bytes == 16 * total + stage.passing_bytes
    split, _ = candidate(coster, [0, 2, count], [alone, alone])
    tied = next(v for v, fqn in of.graph.parameters.items() if "wte" in fqn)
    assert sum(s.parameters for s in split.evaluation.stages) == (
        total + of.graph.values[tied].numel
    )


def test_a_backward_holds_the_gradients_of_one_operator_besides() -> None:
    of = case("gpt2_tied")
    coster = coster_of(of, 0)
    whole = stage_costs(chain_of(coster, dp=1, tp=1).sums[0, -1], setting_of(coster), "none")
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


def setting_of(coster: StageCoster) -> Setting:
    return coster.setting(Mesh(dp=1, tp=1), rows=ROWS, microbatches=MICROBATCHES)


@pytest.mark.parametrize("mode", ["fast", "lean"])
@pytest.mark.parametrize("name", ["gpt2_tied", "bert"])
def test_tied_parameters_are_stored_alike(name: str, mode: str) -> None:
    """In every stage, whatever the boundary states."""
    for seed in (0, 1, 3, 17):
        coster = coster_of(case(name), seed)
        shared = coster._shared
        assert shared
        chain = chain_of(coster, tp=4, mode=mode)
        stored = {
            (value, table.stored(index, value))
            for block, table in zip(coster.graph.blocks, chain.tables, strict=True)
            for value in shared.intersection(block.parameters)
            for index in table.choices
        }
        assert len(stored) == len(shared)


# --- components ----------------------------------------------------------------------------------


def at(chain: Chain, start: int, stop: int, name: str) -> float:
    return float(chain.sums[start, stop, FIELDS.index(name)])


def test_recompute_trades_the_forward_for_what_it_saves() -> None:
    chain = chain_of(coster_of(case("llama"), 0))
    keep = stage_costs(chain.sums[0, 3], chain.setting, "none")
    again = stage_costs(chain.sums[0, 3], chain.setting, "full")
    assert again.backward_s == pytest.approx(keep.backward_s + keep.forward_s)
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
    chain = chain_of(coster_of(of, 0))
    keep = stage_costs(chain.sums[1, 3], chain.setting, "none")
    assert stage_costs(chain.sums[1, 3], chain.setting, "full") == keep


def test_zero_divides_states_and_the_optimizer_step() -> None:
    chain = chain_of(coster_of(case("llama"), 0), dp=4)
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
    chain = chain_of(coster_of(case("llama"), 0))
    costs = stage_costs(chain.sums, chain.setting, "none")
    legal = np.isfinite(chain.seconds)
    spread = costs.amortised_s(MICROBATCHES)
    np.testing.assert_allclose(spread[legal], chain.seconds[legal], rtol=1e-9)
    assert costs.amortised_s(1)[0, 5] - spread[0, 5] == pytest.approx(
        (costs.reduce_s + costs.optimizer_s)[0, 5] * (1 - 1 / MICROBATCHES)
    )


def test_what_crosses_a_cut_is_sent() -> None:
    coster = coster_of(case("llama"), 0)
    chain = chain_of(coster)
    assert chain.send_s[0] == chain.send_s[-1] == 0
    hidden = ROWS / 2 * 16 * 32 * 4
    assert chain.send_s[1:-1] == pytest.approx(
        [p2p_time(hidden, coster.cluster, crosses_node=False, concurrent=4)] * 4
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


@pytest.mark.parametrize("name", ["llama", "resnet"])
def test_prices_do_not_depend_on_what_was_priced_before(name: str) -> None:
    """Equal rows on equal tensor axes share programs and caches, whatever the data axis and the
    number of micro-batches."""
    of, on = case(name), odd_cluster(3)
    shared = StageCoster(problem_of(of, on, "fp32"))
    for dp, microbatches in ((1, 4), (4, 1), (2, 2), (1, 1), (2, 8)):
        fresh = StageCoster(problem_of(of, on, "fp32"))
        chains = []
        for coster in (shared, fresh):
            setting = coster.setting(Mesh(dp=dp, tp=2), rows=1, microbatches=microbatches)
            chain = coster.chain(setting)
            assert chain is not None
            chains.append(chain)
        np.testing.assert_array_equal(chains[0].seconds, chains[1].seconds)
        np.testing.assert_array_equal(chains[0].sums, chains[1].sums)
        for found, expected in zip(chains[0].tables, chains[1].tables, strict=True):
            np.testing.assert_array_equal(found.costs, expected.costs)


def test_only_one_value_may_cross_in_pieces() -> None:
    coster = coster_of(case("llama"), 0)
    assert coster.cut_states(2, 1) == [R]
    assert coster.cut_states(0, 2) == coster.cut_states(5, 2) == [R]
    assert set(coster.cut_states(2, 2)) == {R, Placement("S", 1), Placement("S", 2)}
    assert set(coster.cut_states(2, 3)) == {R, Placement("S", 2)}  # 32 as 11, 11 and 10


# --- repeats and overrides -----------------------------------------------------------------------


def test_an_assignment_moves_to_a_repeat_by_position() -> None:
    of = large_gpt2()
    first, second = of.graph.blocks[1:3]
    assert first.class_id == second.class_id
    coster = StageCoster(problem_of(of, odd_cluster(0)))
    setting = coster.setting(Mesh(dp=1, tp=8), rows=2, microbatches=MICROBATCHES)
    chain = coster.chain(setting)
    assert chain is not None
    assert chain.tables[1] is chain.tables[2]
    here = chain.tables[1].program.assignment(chain.tables[1], (0, 0))
    there = translate(here, first, second)
    assert translate(here, first, first) is here
    assert translate(there, second, first) == here
    assert set(there.strategies) == {op.name for op in second.ops}
    results = {r for op in second.ops for r in op.results}
    assert set(there.states) == results | set(second.parameters)
    pricer = coster.pricer(setting)

    def price(block: int, assignment: Assignment) -> float:
        layouts = BlockLayouts(of.graph, of.table, of.graph.blocks[block], 8)
        return price_block(pricer, layouts, assignment, {}).cost.seconds(MICROBATCHES)

    assert price(2, there) == pytest.approx(price(1, here), rel=1e-12)


def test_decisions_of_the_user_hold_in_every_stage() -> None:
    of = case("llama")
    up = next(o for o in of.graph.ops if o.key == "model.layers.1.mlp.up_proj:linear")
    forced = Entry(strategy="rowwise", state=R)
    coster = coster_of(of, 0, **{up.name: forced})
    chain = chain_of(coster)
    for i, j in stages_of(chain):
        found = chain.assignments(i, j).get("model.layers.1")
        if found is not None:
            assert found.strategies[up.name].name == "rowwise"
            assert found.states[up.results[0]] == R
    free = chain_of(coster_of(of, 0))
    legal = np.isfinite(free.seconds)
    assert (chain.seconds[legal] >= free.seconds[legal] * (1 - 1e-12)).all()
    assert chain.seconds[2, 3] > free.seconds[2, 3]
    assert chain.seconds[1, 2] == free.seconds[1, 2]


def test_a_decision_that_cannot_hold_names_the_legal_ones() -> None:
    of = case("llama")
    up = next(o for o in of.graph.ops if o.key == "model.layers.1.mlp.up_proj:linear")
    coster = coster_of(of, 0, **{up.name: Entry(strategy="heads")})
    chain = chain_of(coster)
    assert (
        "sharding 'heads' of model.layers.1.mlp.up_proj:linear: not possible" in coster.refused[2]
    )
    assert np.isinf(chain.seconds[:3, 3:]).all()  # layer 1 is block 2
    assert np.isfinite(chain.seconds[0, 2])
    assert np.isfinite(chain.seconds[3, 5])
