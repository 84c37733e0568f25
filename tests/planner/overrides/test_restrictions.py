"""Overrides by block: globs, what is left free or allowed, the stages that may have a value."""

import dataclasses
import re
from collections.abc import Callable
from functools import cache
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from meshwright.costmodel.compressed import COMPRESSED, OFFERED
from meshwright.costmodel.graph import Block, Graph
from meshwright.costmodel.quantized import QUANTIZED
from meshwright.costmodel.recompute import RECOMPUTE
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.planner.decisions import ALLOWABLE, BY_BLOCK, MESH
from meshwright.planner.overrides import OverrideError, allowed_without_effect, check_allow
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.overrides.restrictions import Restrictions, restrict, stage_cuts
from tests.helpers.refusals import refusals, refused
from tests.helpers.tiny import cut, net

REFUSED = Path(__file__).with_name("refused.txt")
few = settings(max_examples=60)


@cache
def model() -> Graph:
    return cut(net())[0]


def blocks(*names: str) -> Graph:
    """A model of which only the names of its blocks are known."""
    nothing = dict.fromkeys(("ops", "inputs", "outputs", "derived", "parameters", "buffers"), ())
    cut = tuple(Block(name=name, class_id="", **nothing) for name in names)
    return dataclasses.replace(model(), blocks=cut, ops=())


LAYERS = ("embed", *(f"enc.layers.{i}" for i in range(3)), *(f"dec.layers.{i}" for i in range(3)))


def layers() -> Graph:
    return blocks(*LAYERS, "head")


@pytest.mark.parametrize(
    ("pattern", "positions"),
    [
        ("enc.layers.0-2", [1, 2, 3]),
        ("*.layers.1-2", [2, 3, 5, 6]),
        ("enc.**", [1, 2, 3]),
        ("*", [0, 7]),
        ("?mbed", [0]),
    ],
)
def test_a_glob_restricts_its_blocks(pattern: str, positions: list[int]) -> None:
    expected = tuple(4 if b in positions else None for b in range(8))
    assert restrict(Overrides(tp={pattern: 4}), layers()).tp == expected


def test_one_value_is_for_all_and_globs_may_share_the_blocks() -> None:
    limits = restrict(Overrides(tp=2, recompute={"enc.**": "full", "dec.**": "none"}), layers())
    assert limits.tp == (2,) * 8
    assert limits.recompute == (None, *["full"] * 3, *["none"] * 3, None)
    assert restrict(Overrides(dp={"**": 2, "head": 2}), layers()).dp == (2,) * 8


@pytest.mark.parametrize("name", ["h.0-3", "a*", "a?b", "x[0]"])
def test_a_block_named_like_a_pattern_answers_to_its_name(name: str) -> None:
    limits = restrict(Overrides(zero={name: 2}), blocks("ab", name, "acb"))
    assert limits.zero == (None, 2, None)


def in_fp16(overrides: dict[str, Any]) -> None:
    restrict(Overrides(**overrides), layers(), allow=ALLOWABLE, precision="fp16")


CHECKS: dict[str, Callable[[Any], Any]] = {
    "restrict": lambda overrides: restrict(Overrides(**overrides), layers()),
    "restrict in fp16": in_fp16,
    "stage_cuts": lambda stages: stage_cuts(Overrides(stages=stages), model()),
}


def test_what_is_allowed_and_fp16_cannot_have_is_told() -> None:
    told = allowed_without_effect(["compressed", "quantized"], "fp16")
    assert [line.split(" in fp16: ")[0] for line in told] == [
        f"allow={name!r} has no effect" for name in ("compressed", "quantized")
    ]
    assert not allowed_without_effect(["compressed", "quantized"], "bf16")


NO_NAMES = (
    "legal: a list of quantized, compressed, stale, post_validation, optimizer_in_backward, "
    "replicas, e.g. allow=['quantized']"
)


@pytest.mark.parametrize(
    ("check", "overrides", "says"),
    [
        *(
            (check, *case.values)
            for name, check in CHECKS.items()
            for case in refusals(REFUSED, name)
        ),
        *(
            (check_allow, wrong, f"allow={wrong!r}; {NO_NAMES}")
            for wrong in ("quantized", ["fp4"], None, [1])
        ),
    ],
)
def test_what_cannot_be_is_refused(check: Callable[[Any], Any], overrides: Any, says: str) -> None:
    with refused(OverrideError, says):
        check(overrides)


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            {"virtual_stages": 3, "forbid": ["interleaved_1f1b"]},
            "forbid=['interleaved_1f1b'] with virtual_stages=3 leaves no schedule; legal: "
            "interleaved_1f1b",
        ),
        ({"forbid": SCHEDULES}, f"leaves no schedule; legal: {', '.join(SCHEDULES)}"),
    ],
)
def test_a_forbidden_schedule_may_be_the_only_one(overrides: dict[str, Any], says: str) -> None:
    with pytest.raises(OverrideError, match=re.escape(says)):
        restrict(Overrides(**overrides), layers())


def test_nothing_given_leaves_everything() -> None:
    limits = restrict(Overrides(), layers())
    assert all(getattr(limits, name) == (None,) * 8 for name in BY_BLOCK)
    assert (limits.zeros, limits.policies) == ({0, 1, 2, 3}, RECOMPUTE)
    assert limits.schedules == tuple(s for s, record in SCHEDULES.items() if record.flushes)
    assert limits.placements == ("tp,dp,pp", "tp,pp,dp")
    assert (limits.pp, limits.virtual_stages, limits.cuts) == (None, None, None)
    assert limits.unequal_meshes and limits.partial_shards


def test_forbidding_leaves_the_rest() -> None:
    forbid = ["tp", "cp", "ep", "zero-3", "full", "zb_h2", "placement", "dp_shard"]
    limits = restrict(Overrides(forbid=[*forbid, "unequal_meshes"], recompute=None), layers())
    assert limits.tp == limits.cp == limits.ep == (1,) * 8
    assert limits.dp == limits.zero == limits.recompute == (None,) * 8
    assert (limits.zeros, limits.policies) == ({0, 1, 2}, RECOMPUTE[:-1])
    flushing = [s for s, record in SCHEDULES.items() if record.flushes]
    assert limits.schedules == tuple(s for s in flushing if s != "zb_h2")
    assert limits.placements == ("tp,dp,pp",)
    assert not limits.unequal_meshes and not limits.partial_shards


def test_what_forbidding_leaves_one_value_of_is_restricted_to_it() -> None:
    limits = restrict(Overrides(forbid=["zero-1", "zero-2", "zero-3", "recompute", "pp"]), layers())
    assert limits.zero == (0,) * 8 and limits.recompute == ("none",) * 8
    assert (limits.pp, limits.virtual_stages) == (1, 1)


def test_with_equal_meshes_one_block_speaks_for_all() -> None:
    rules = Overrides(tp={"head": 4}, zero={"head": 1}, forbid=["unequal_meshes"])
    limits = restrict(rules, layers())
    assert limits.tp == (4,) * 8 and limits.zero == (None,) * 7 + (1,)


@pytest.mark.parametrize(
    ("overrides", "per_device", "schedules"),
    [
        ({"virtual_stages": 1}, 1, "gpipe 1f1b eager_1f1b zb_h1 zb_h2"),
        ({"virtual_stages": 2}, 2, "interleaved_1f1b zb_v dualpipe_v chimera dualpipe"),
        ({"virtual_stages": 3}, 3, "interleaved_1f1b"),
        ({"schedule": "zb_v"}, 2, "zb_v"),
        ({"schedule": "gpipe", "pp": 4}, 1, "gpipe"),
        ({"schedule": "interleaved_1f1b"}, None, "interleaved_1f1b"),
        ({"schedule": "interleaved_1f1b", "virtual_stages": 1}, 1, "interleaved_1f1b"),
        ({"forbid": ["virtual_stages", "1f1b", "zb_h1", "zb_h2"]}, 1, "gpipe eager_1f1b"),
    ],
)
def test_virtual_stages_fit_schedules(
    overrides: Any, per_device: int | None, schedules: str
) -> None:
    limits = restrict(Overrides(**overrides), layers())
    assert (limits.pp, limits.virtual_stages) == (overrides.get("pp"), per_device)
    assert set(limits.schedules) == set(schedules.split())


@pytest.mark.parametrize(
    ("overrides", "pp", "per_device"),
    [
        ({}, None, None),
        ({"pp": 4}, 4, 1),
        ({"pp": 2}, 2, 2),
        ({"virtual_stages": 4}, 1, 4),
        ({"schedule": "zb_v"}, 2, 2),
        ({"schedule": "1f1b"}, 4, 1),
        ({"schedule": "chimera"}, 4, 2),  # each group has a stage of either copy
    ],
    ids=str,
)
def test_stages_are_groups_times_each(
    overrides: Any, pp: int | None, per_device: int | None
) -> None:
    stages = [LAYERS[:2], LAYERS[2:4], LAYERS[4:6], (*LAYERS[6:], "head")]
    limits = restrict(Overrides(stages=stages, **overrides), layers())
    assert (limits.pp, limits.virtual_stages, limits.cuts) == (pp, per_device, (2, 4, 6, 8))


def test_values_have_stages_of_their_own_where_groups_times_each_are_enough() -> None:
    tp = {LAYERS[0]: 2, LAYERS[1]: 4, "head": 2}
    limits = restrict(Overrides(tp=tp, pp=2, virtual_stages=2), layers())
    assert (limits.pp, limits.virtual_stages) == (2, 2)
    with pytest.raises(OverrideError, match="need at least 3 stages; legal: pp from 2"):
        restrict(Overrides(tp=tp, pp=1, virtual_stages=2), layers())


VALUES: dict[str, tuple[Any, ...]] = {name: (1, 2, 4) for name in MESH} | {
    "zero": (0, 1, 2, 3), "dp_shard": (1, 2, 4), "hpz": (1, 2, 4), "quantized": QUANTIZED,
    "compressed": COMPRESSED, "segments": (1, 2, 4), "recompute": RECOMPUTE,
}  # fmt: skip


Case = tuple[Restrictions, str, list[Any]]


@st.composite
def restricted(draw: st.DrawFn) -> Case:
    """Restrictions of one name over a few blocks, and each block's own value."""
    name = draw(st.sampled_from([n for n in BY_BLOCK if n != "ep"]))
    asked = draw(st.lists(st.none() | st.sampled_from(VALUES[name]), min_size=1, max_size=9))
    by_block = {f"layers.{b}": value for b, value in enumerate(asked) if value is not None}
    forbid = draw(st.sets(st.sampled_from(["zero-1", "zero-2", *RECOMPUTE[1:]])))
    allowed = [f for f in forbid if f not in {f"zero-{v}" for v in asked} | {str(v) for v in asked}]
    graph = blocks(*(f"layers.{b}" for b in range(len(asked))))
    overrides: dict[str, Any] = {name: by_block or None, "forbid": allowed}
    limits = restrict(Overrides(**overrides), graph, allow=ALLOWABLE)
    return limits, name, asked


@few
@given(restricted())
def test_a_stage_may_have_a_value_that_all_its_blocks_may(case: Case) -> None:
    limits, name, asked = case
    free = {"zero": limits.zeros, "recompute": limits.policies, "compressed": limits.compressions}
    others = free.get(name, VALUES[name])
    for value in VALUES[name]:
        mask = limits.stage_mask(name, value)
        assert mask.dtype == bool
        beside = name == "compressed"  # free blocks may have what one of their stage asks for
        expected = [
            [i < j and all(v == value or v is None for v in asked[i:j])
             and (value in others or None not in asked[i:j] or (beside and value in asked[i:j]))
             for j in range(len(asked) + 1)]
            for i in range(len(asked) + 1)
        ]  # fmt: skip
        assert np.array_equal(mask, expected)


@few
@given(restricted())
def test_uniform_is_what_every_block_is_restricted_to(case: Case) -> None:
    limits, name, asked = case
    others = {"zero": limits.zeros, "recompute": limits.policies}.get(name, ())
    rest = next(iter(others)) if len(others) == 1 else None  # what `forbid` leaves the free blocks
    filled = tuple(rest if value is None else value for value in asked)
    assert getattr(limits, name) == filled
    assert limits.uniform(name) == (filled[0] if len(set(filled)) == 1 else None)


@few
@given(
    st.lists(st.tuples(*[st.sampled_from((None, 1, 2))] * 2), min_size=1, max_size=6),
    st.integers(1, 4),
)
def test_too_few_stages_are_refused(asked: list[tuple[Any, Any]], pp: int) -> None:
    def fits(cuts: tuple[int, ...]) -> bool:
        """Whether each run of blocks has one tp and one ZeRO stage."""
        ends = zip((0, *cuts), (*cuts, len(asked)), strict=True)
        return all(
            len({pair[k] for pair in asked[i:j]} - {None}) <= 1 for i, j in ends for k in (0, 1)
        )

    inner = range(1, len(asked))
    exists = any(fits(cuts) for n in range(pp) for cuts in combinations(inner, n))
    values = [
        {f"h.{b}": pair[k] for b, pair in enumerate(asked) if pair[k] is not None} for k in (0, 1)
    ]
    overrides = Overrides(tp=values[0] or None, zero=values[1] or None, pp=pp, virtual_stages=1)  # type: ignore[arg-type]
    try:
        restrict(overrides, blocks(*(f"h.{b}" for b in range(len(asked)))))
    except OverrideError as error:
        assert not exists and "contradicts" in str(error) and f"pp={pp}" in str(error)
    else:
        assert exists


def test_stages_are_cuts_and_may_be_ranges() -> None:
    graph = model()
    for stages, cuts in (
        ([["embed", "layers.0-2", "head"]], [5]),
        ([["embed", "layers.0"], ["layers.1-2"], ["head"]], [2, 4, 5]),
        ([["embed"], ["layers.0", "layers.1", "layers.2", "head"]], [1, 5]),
    ):
        assert stage_cuts(Overrides(stages=stages), graph) == cuts
    assert stage_cuts(Overrides(), graph) is None


@pytest.mark.parametrize("options", [{}, {"allow": ALLOWABLE, "precision": "fp16"}], ids=str)
def test_what_is_not_allowed_is_left_out(options: dict[str, Any]) -> None:
    assert restrict(Overrides(), layers(), **options).quantizations == ("none",)
    assert restrict(Overrides(quantized="none"), layers(), **options).quantized == ("none",) * 8
    assert restrict(Overrides(), layers(), allow=ALLOWABLE).quantizations == QUANTIZED
    assert restrict(Overrides(), layers(), **options).compressions == ("none",)
    assert restrict(Overrides(), layers(), allow=["quantized"]).compressions == ("none",)
    assert restrict(Overrides(), layers(), allow=["compressed"]).compressions == OFFERED
    asked = restrict(Overrides(compressed={"head": "topk-10"}), layers(), allow=["compressed"])
    assert asked.compressions == OFFERED
    mask = asked.stage_mask("compressed", "topk-10")
    assert (mask[:, -1][:-1].all(), mask[:, :-1].any()) == (True, False)  # stages with the head
    assert check_allow(["quantized", "quantized"]) == ("quantized",)
