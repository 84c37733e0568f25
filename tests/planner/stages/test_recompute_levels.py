"""Time against memory: the least recompute that fits, and what is between two levels."""

import dataclasses

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from meshwright.costmodel.mesh import Batch, Mesh
from meshwright.costmodel.recompute import RECOMPUTE
from meshwright.costmodel.sharing import Sharing
from meshwright.costmodel.stages import InFlight
from meshwright.costmodel.stages.stage import StageCosts, as_rows, of_one, of_rows, stage_costs
from meshwright.costmodel.stages.sums import Floats, Sums
from meshwright.planner.stages import Chain, ChosenLevel, RecomputeLevels, recompute_levels
from tests.helpers.planning import case, odd_cluster, programs_of
from tests.helpers.tiers import tiered

NAMES = [each.name for each in dataclasses.fields(StageCosts)]
POLICIES = ("none", "selective", "full")
SIZES = st.integers(0, 1000)


def level(static: int, passing: int, activation: int, seconds: float) -> StageCosts[Floats]:
    given = {name: 0.0 if name.endswith("bytes") else seconds for name in NAMES} | {"several": 1.0}
    given |= {"fixed_bytes": static, "later_bytes": passing, "activation_bytes": activation}
    return StageCosts(**{name: np.array([float(value)]) for name, value in given.items()})


@st.composite
def levels(draw: st.DrawFn) -> RecomputeLevels:
    """One stage of up to 8 blocks; each level keeps less per micro-batch and holds more during a
    backward."""
    static, kept = draw(SIZES), draw(st.integers(1, 1000))
    passing, seconds = draw(st.integers(0, 100)), draw(st.integers(1, 100))
    costs = [level(static, passing, kept, seconds)]
    for _ in range(draw(st.integers(0, 2))):
        kept, passing = draw(st.integers(0, kept)), passing + draw(st.integers(0, 200))
        seconds += draw(st.integers(0, 100))
        costs.append(level(static, passing, kept, seconds))
    return RecomputeLevels(
        policies=POLICIES[: len(costs)],
        sent=(0.0,) * len(costs),
        costs=tuple(costs),
        blocks=np.array([draw(st.integers(1, 8))]),
    )


def needed(own: RecomputeLevels, k: int, blocks: int, held: int) -> float:
    """Bytes with `blocks` blocks on level k+1 and the rest on level k."""
    low, high = own.costs[k], own.costs[min(k + 1, len(own.costs) - 1)]
    part = blocks / int(own.blocks[0])
    states = float(low.static_bytes[0] - low.passing_bytes[0])
    passing = float(high.passing_bytes[0] if blocks else low.passing_bytes[0])
    kept = (1 - part) * float(low.activation_bytes[0]) + part * float(high.activation_bytes[0])
    return states + passing + held * kept


def least(own: RecomputeLevels, held: int, room: int) -> tuple[int, int] | None:
    """The first (level, blocks of the next one) that fits, one block after the other."""
    for k in range(len(own.costs)):
        last = k + 1 == len(own.costs)
        for blocks in range(1 if last else int(own.blocks[0])):
            if needed(own, k, blocks, held) <= room + 1e-6:
                return k, blocks
    return None


def place(own: RecomputeLevels, chosen: ChosenLevel) -> float:
    """How far up the levels a stage is."""
    return float(chosen.level[0] + chosen.fraction[0]) if chosen.fits[0] else float("inf")


@given(levels(), st.integers(1, 8), st.integers(0, 4000))
def test_no_block_is_recomputed_that_need_not_be(
    own: RecomputeLevels, held: int, room: int
) -> None:
    chosen = own.choose(InFlight(held), float(room))
    expected = least(own, held, room)
    # a level as a whole may fit where none of its mixtures with the one below does
    assert bool(chosen.fits[0]) == (expected is not None)
    if expected is not None:
        blocks = int(own.blocks[0])
        k, more = int(chosen.level[0]), round(float(chosen.fraction[0]) * blocks)
        assert needed(own, k, more, held) <= room + 1e-6
        assert (k, more) in (expected, (expected[0] - 1, blocks)) or more == blocks


@given(levels(), st.integers(1, 8), st.integers(0, 4000), st.integers(0, 500), st.integers(0, 3))
def test_more_room_never_takes_more(
    own: RecomputeLevels, held: int, room: int, extra: int, more: int
) -> None:
    here = place(own, own.choose(InFlight(held), float(room)))
    assert place(own, own.choose(InFlight(held), float(room + extra))) <= here
    assert place(own, own.choose(InFlight(held + more), float(room))) >= here


@given(levels(), st.integers(1, 8), st.integers(0, 4000))
def test_levels_are_blended(own: RecomputeLevels, held: int, room: int) -> None:
    chosen = own.choose(InFlight(held), float(room))
    assume(chosen.fits[0])
    k, part = int(chosen.level[0]), float(chosen.fraction[0])
    low, high = own.costs[k], own.costs[min(k + 1, len(own.costs) - 1)]
    at, everywhere = own.at(0, chosen), own.everywhere(chosen)
    for name in NAMES:
        wanted = (1 - part) * getattr(low, name)[0] + part * getattr(high, name)[0]
        assert getattr(at, name) == pytest.approx(wanted, rel=1e-12)
        assert getattr(everywhere, name)[0] == pytest.approx(wanted, rel=1e-12)


@given(levels(), st.integers(1, 8))
def test_with_room_enough_a_stage_is_on_the_first_level(own: RecomputeLevels, held: int) -> None:
    assert own.at(0, own.choose(InFlight(held), np.inf)) == StageCosts(
        **{name: float(getattr(own.costs[0], name)[0]) for name in NAMES}
    )


def chain_of(name: str) -> Chain:
    programs = programs_of(case(name), odd_cluster(1))
    return programs.chain(programs.coster.setting(Mesh(dp=2, tp=2), Batch(rows=2, microbatches=2)))


def test_a_policy_that_frees_nothing_is_no_level() -> None:
    """Blocks that update running statistics keep everything under any policy."""
    for name, left in (("resnet", ("none",)), ("llama", POLICIES)):
        chain = chain_of(name)
        found = recompute_levels(chain.sums[1, 3], chain.setting, POLICIES, np.array(2))
        assert found.policies == left


@pytest.mark.parametrize("policy", RECOMPUTE)
@pytest.mark.parametrize(
    "name", tiered(["llama", "gpt2_tied", "resnet"], "llama".__eq__, "blocks of a decoder stay")
)
def test_a_block_with_a_policy_costs_what_its_policy_costs(name: str, policy: str) -> None:
    """Whatever level its stage is on."""
    chain = chain_of(name)
    for start in range(len(chain.blocks)):
        (part,) = chain.block_sums(start, start + 1)
        own = part.with_policy(policy)
        wanted = stage_costs(part, chain.setting, policy)
        for later in RECOMPUTE:
            found = stage_costs(own, chain.setting, later)
            for each in NAMES:
                value = float(getattr(wanted, each))
                assert float(getattr(found, each)) == pytest.approx(value, rel=1e-12, abs=1e-18)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_all_policies_at_once_cost_what_each_costs(zero: int) -> None:
    """And an equal part of a run what a stage of that part costs."""
    programs = programs_of(case("llama"), odd_cluster(5))
    setting = programs.coster.setting(
        Mesh(dp=2, tp=2), Batch(rows=2, microbatches=2), Sharing(zero=zero)
    )
    whole = programs.chain(setting).typical()
    parts = Sums.shared_out([whole] * 3, np.array([1, 2, 4]))
    together = stage_costs(parts, setting, parts.recompute_by(RECOMPUTE))
    for k, policy in enumerate(RECOMPUTE):
        for j, number in enumerate((1, 2, 4)):
            alone = stage_costs(whole.times(1 / number), setting, policy)
            assert of_one(of_rows(as_rows(together)[:, k]), j) == of_one(alone), (policy, number)
