"""Ranks that wait for each other in different places, as where one was given fewer batches."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

OUTSIDE = ("leaving the process group", "checkpoint", "checking the optimizer", "user code")
UNEQUAL = (
    "ranks that were given other numbers of batches wait for each other so: give as many on every "
    "rank (data_loader does)"
)


def waits_elsewhere(here: str, answers: Sequence[Any], shown: int) -> str:
    """Of the answers of ranks (name, activity, seconds in it, whether they wait), those that wait
    elsewhere than `here`, `shown` at most; text to append to a cause."""
    apart = [(name, activity) for name, activity, _, waits in answers if waits and activity != here]
    text = "".join(f"; {name} waits in {activity}" for name, activity in apart[:shown])
    unequal = any(_in_step(activity) != _in_step(here) for _, activity in apart)
    return f"{text}; {UNEQUAL}" if unequal else text


def _in_step(activity: str) -> bool:
    """Whether a rank is in a step, which others may have had one less of."""
    return not any(words in activity for words in OUTSIDE)
