"""Two tiers of tests: the change tier (`scripts/test`) and everything (`scripts/test --all`).

A test is in the second tier by one marker, which says why and what the change tier keeps in its
place. Tests that are known to kill a mutant (`scripts/mutation/killers.json`) stay in the change
tier all the same, so that what it finds does not shrink with it. Nothing else decides.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest


def second_tier(reason: str) -> pytest.MarkDecorator:
    """Mark a test, a module (`pytestmark = second_tier(...)`) or a parameter."""
    return pytest.mark.second_tier(reason=reason)


def tiered(
    values: Iterable[Any],
    first: Callable[[Any], bool],
    reason: str,
    name: Callable[[Any], str] = str,
) -> list[Any]:
    """Parameters of a test: those that `first` accepts in the change tier, the others in the
    second."""
    mark = second_tier(reason)
    return [pytest.param(v, id=name(v), marks=() if first(v) else mark) for v in values]
