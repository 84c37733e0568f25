"""Replicas that train apart wait for one that is slow, longer than any timeout, as long as it makes
steps; and end, with a line that says why, with one that is lost."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from meshwright.executor.ranks import launch as process_group
from meshwright.executor.ranks.watchdog import Progress
from tests.helpers.launching import launch
from tests.helpers.tiers import second_tier

WORKER = Path(__file__).with_name("replica_worker.py")


@second_tier("longer than a timeout")
@pytest.mark.parametrize("fault", ["slow", "evaluates"])
def test_a_slow_replica_is_waited_for(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps, or batches of an evaluation, of five seconds: all take longer than one may, and the
    watchdog's grace."""
    monkeypatch.setenv(process_group.TIMEOUT_VARIABLE, "4")
    ended = launch(WORKER, fault, "5", ranks=2, timeout_s=120)
    assert ended.ok, [rank.stderr for rank in ended.ranks]
    assert all("met at [4]" in rank.stdout for rank in ended.ranks)


def test_waiting_is_no_phase_of_its_own() -> None:
    """A wait that begins anew has its time again, and others don't take it for progress."""
    progress = Progress()
    with progress.during("waiting", waits=True):
        begun, since_s = progress.phases_begun, progress.activity.since_s
        progress.wait_anew()
        assert (progress.phases_begun, str(progress.activity)) == (begun, "waiting, step 1")
        assert progress.activity.since_s > since_s
    progress.enter("evaluating")
    assert progress.phases_begun == begun + 1


@second_tier("a lost rank of one group ends the others in test_faults")
def test_a_lost_replica_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(process_group.TIMEOUT_VARIABLE, "60")
    ended = launch(WORKER, "killed", "0.1", ranks=2, timeout_s=120, grace_s=40)
    first, second = ended.ranks
    assert second.returncode == -signal.SIGKILL
    assert first.returncode == 1 and not first.killed and first.wall_s < 60
    assert "rank 1 (stage 0) ended without a word: killed" in first.stderr
