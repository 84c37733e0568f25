"""Choices of serving plans, beside all that there are."""

from __future__ import annotations

import dataclasses
from itertools import combinations, pairwise
from typing import Any

import pytest

from meshwright.planner.errors import ServingError
from meshwright.planner.serving import Asked, ServingPlan, Servings
from meshwright.planner.serving.choice import _evenly
from meshwright.profiles.cluster import Cluster
from tests.planner.serving.served import forwards

TINY = 1 << 24  # bytes of a device


def served(asked: Asked, *, nodes: int = 1, room: int | None = None, **given: Any) -> Servings:
    on = Cluster.from_catalog("h100-sxm", devices_per_node=4, num_nodes=nodes)
    if room is not None:
        small = dataclasses.replace(
            on.device, memory_bytes=room, reserved_bytes=0, communicator_bytes=0
        )
        on = dataclasses.replace(on, device=small)
    return Servings(forwards("grouped", on), asked, **given)


def every(of: Servings) -> list[ServingPlan]:
    """All plans of up to 2,000 rows that fit, one by one."""
    found = []
    for tp in (1, 2, 4):
        for pp in (1, 2, 4):
            if tp * pp > of.cluster.num_devices:
                continue
            for rows in (pp << k for k in range(11)):
                plan = of.priced(tp, pp, rows)
                if plan.peak_bytes <= of.room_bytes:
                    found.append(plan)
    return found


def test_the_best_makes_most_tokens_of_all_that_fit() -> None:
    of = served(Asked(prompt=64, new=16), room=TINY)
    found, best = every(of), of.served().best
    assert best.peak_bytes <= of.room_bytes
    assert best.tokens_per_s >= max(plan.tokens_per_s for plan in found)
    assert best.devices == best.tp * best.pp * best.replicas == 4


def test_bounds_are_kept_by_the_best_that_keep_them() -> None:
    of = served(Asked(prompt=64, new=16), room=TINY)
    seconds = sorted(plan.token_s for plan in every(of))
    bound = seconds[len(seconds) // 2]
    kept = served(Asked(prompt=64, new=16, token_s=bound), room=TINY).served()
    wanted = max(p.tokens_per_s for p in every(of) if p.token_s <= bound)
    best = kept.best  # one more group of rows keeps them no more, or does not fit
    more = of.priced(best.tp, best.pp, best.rows + best.pp)
    assert more.token_s > bound or more.peak_bytes > of.room_bytes
    assert kept.best.token_s <= bound
    assert kept.best.tokens_per_s >= wanted
    assert all(plan.token_s <= bound for plan in kept.plans)
    with pytest.raises(ServingError, match=r"no plan keeps.*least between tokens is .*tp="):
        served(Asked(prompt=64, new=16, token_s=1e-9), room=TINY).served()


def test_wanted_tokens_take_the_fewest_devices() -> None:
    of = served(Asked(prompt=64, new=16), room=TINY)
    best = of.served().best
    wanted = best.tokens_per_s / best.replicas / 2
    found = served(Asked(prompt=64, new=16, tokens_per_s=wanted), room=TINY).served().best
    assert found.tokens_per_s >= wanted
    assert found.devices == min(
        plan.tp * plan.pp for plan in every(of) if plan.tokens_per_s / plan.replicas >= wanted
    )
    with pytest.raises(ServingError, match=r"tokens_per_s=.*the most that keeps the bounds is"):
        served(Asked(prompt=64, new=16, tokens_per_s=1e12), room=TINY).served()


def test_rows_fill_what_weights_and_passing_values_leave() -> None:
    of = served(Asked(prompt=64, new=16), room=TINY)
    for tp, pp in ((1, 1), (2, 2), (4, 1)):
        most = of.most_rows(tp, pp)
        assert most % pp == 0
        assert of.priced(tp, pp, most).peak_bytes <= of.room_bytes
        assert of.priced(tp, pp, most + pp).peak_bytes > of.room_bytes


def test_stages_take_all_blocks_once_and_as_long() -> None:
    of = served(Asked(prompt=64, new=16))
    for pp in (1, 2, 4):
        cuts = of.cuts(1, pp)
        assert [start for start, _ in cuts] == [0, *(stop for _, stop in cuts[:-1])]
        assert cuts[-1][1] == len(of.forwards.graph.blocks)
        assert len(cuts) == pp
    # a token goes through all stages; groups follow each other
    alone, four = of.priced(1, 1, 4), of.priced(1, 4, 4)
    assert four.token_s > 0.99 * of.priced(1, 1, 1).token_s
    assert four.weight_bytes < alone.weight_bytes / 2


def test_the_length_that_was_traced_changes_no_price() -> None:
    on = Cluster.from_catalog("h100-sxm", devices_per_node=4)
    asked = Asked(prompt=64, new=16)
    short, long = (
        Servings(forwards("grouped", on, length=length), asked).priced(4, 1, 8)
        for length in (64, 192)
    )
    assert short == long


def test_stages_are_as_even_as_may_be() -> None:
    """All cuts of nine numbers in parts, one by one."""
    seconds = [5.0, 1.0, 1.0, 7.0, 2.0, 2.0, 3.0, 1.0, 9.0]
    for parts in range(1, 10):
        found = _evenly(seconds, parts)
        assert len(found) == parts and found[0][0] == 0 and found[-1][1] == len(seconds)
        assert all(start < stop for start, stop in found)
        worst = max(sum(seconds[start:stop]) for start, stop in found)
        least = min(
            max(sum(seconds[a:b]) for a, b in pairwise((0, *inner, len(seconds))))
            for inner in combinations(range(1, len(seconds)), parts - 1)
        )
        assert worst == least


def test_a_row_goes_through_all_stages_whole() -> None:
    of = served(Asked(prompt=64, new=16))
    assert of.priced(1, 4, 1).first_s > 0.99 * of.priced(1, 1, 1).first_s


def test_what_is_decided_is_taken_or_refused() -> None:
    found = served(Asked(prompt=64, new=16, tp=2, pp=2)).served()
    assert [(plan.tp, plan.pp) for plan in found.plans] == [(2, 2)]
    with pytest.raises(ServingError, match=r"serving: tp=3; legal: 1, 2, 4"):
        served(Asked(prompt=64, new=16, tp=3)).served()
    only = served(Asked(prompt=64, new=16, rows=8)).served()
    assert {plan.rows for plan in only.plans} == {8}


def test_what_does_not_fit_says_the_least_that_a_row_needs() -> None:
    with pytest.raises(ServingError, match=r"do not fit: one needs .* with tp=2, pp=2"):
        served(Asked(prompt=64, new=16), room=100_000).served()
    with pytest.raises(ServingError, match="rows=999999 of 80 tokens do not fit"):
        served(Asked(prompt=64, new=16, rows=999_999), room=TINY).served()


def test_texts_have_the_numbers_and_data_all_of_them() -> None:
    found = served(Asked(prompt=64, new=16), nodes=2).served()
    text, data = str(found), found.as_dict()
    assert f"{found.best.tokens_per_s:,.0f} new tokens/s" in text
    assert "25% of the keys and values of all heads" in text
    assert len(data["plans"]) == len(found.plans) == text.count("\n") - 6
    per_million = found.price_per_million(3.6)
    assert per_million == pytest.approx(1e6 * 3.6 / 3600 / found.best.tokens_per_device_s)
