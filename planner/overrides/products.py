"""Products of degrees against what they must divide."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping

from meshwright.planner.overrides.values import OverrideError
from meshwright.planner.plan import divisors

WAY_OUT = "change or drop one of them, or what they must fit"


def check_product(
    factors: Mapping[str, int | None],
    total: int,
    what: str,
    forbidden: Collection[str],
    *,
    free: bool,
) -> None:
    """Raise unless the product of the given factors divides `total`, or where no factor is left
    `free`, equals it."""
    given = {name: value for name, value in factors.items() if value is not None}
    product = math.prod(given.values())
    if product == total or (free and total % product == 0):
        return
    legal = ", ".join(map(str, divisors(total))) if free else total
    raise OverrideError(
        f"{('the product ' if len(given) > 1 else '')}{product} "
        f"{('does not divide' if free else 'is not')} {what}",
        place=f"override {spelled_all(given, forbidden)}",
        legal=legal,
        way_out=WAY_OUT,
    )


def spelled_all(given: Mapping[str, int], forbidden: Collection[str]) -> str:
    """Several overrides, those that `forbid` gives marked."""
    return ", ".join(
        f"{name}={value}" + (f" (forbid={name!r})" if name in forbidden else "")
        for name, value in given.items()
    )
