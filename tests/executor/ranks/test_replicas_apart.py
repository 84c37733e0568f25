"""Replicas that train apart wait for one that is slow, longer than any timeout, as long as it makes
steps; and end, with a line that says why, with one that is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from meshwright.executor.ranks import launch as process_group
from tests.helpers.launching import launch
from tests.helpers.tiers import second_tier

WORKER = Path(__file__).with_name("replica_worker.py")


@second_tier("longer than a timeout")
def test_a_slow_replica_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three steps of six seconds, where one may take two and the watchdog's grace: 18 in all."""
    monkeypatch.setenv(process_group.TIMEOUT_VARIABLE, "4")
    ended = launch(WORKER, "slow", "5", ranks=2, timeout_s=120)
    assert ended.ok, [rank.stderr for rank in ended.ranks]
    assert all("met at [4]" in rank.stdout for rank in ended.ranks)


def test_a_lost_replica_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(process_group.TIMEOUT_VARIABLE, "60")
    ended = launch(WORKER, "killed", "0.1", ranks=2, timeout_s=120, grace_s=40)
    first, second = ended.ranks
    assert second.returncode == -signal.SIGKILL
    assert first.returncode == 1 and not first.killed and first.wall_s < 60
    assert "rank 1 (stage 0) ended without a word: killed" in first.stderr
