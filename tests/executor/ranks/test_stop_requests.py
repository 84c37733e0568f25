"""Signals that ask a run to save; among ranks in tests/meshwright/training."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from meshwright.executor.ranks import StopRequests, stop_requests


@pytest.mark.parametrize(
    ("number", "asked"), [(signal.SIGTERM, (True, True)), (signal.SIGUSR1, (False, True))]
)
def test_a_signal_is_acted_on_once_one_step_later(number: int, asked: tuple[bool, bool]) -> None:
    requests, before = StopRequests(), signal.getsignal(number)
    with requests.listening():
        assert requests.agreed() == (False, False)
        os.kill(os.getpid(), number)
        assert requests.agreed() == (False, False)
        assert requests.agreed() == asked
        assert requests.agreed() == (False, False)
    assert signal.getsignal(number) is before


def test_another_thread_than_the_main_one_takes_no_signals() -> None:
    before = signal.getsignal(signal.SIGTERM)
    found = []

    def listen() -> None:
        with StopRequests().listening():
            found.append(signal.getsignal(signal.SIGTERM))

    thread = threading.Thread(target=listen)
    thread.start()
    thread.join()
    assert found == [before]


def test_a_rank_that_others_told_to_end_waits_for_its_own_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SIGTERM comes while it waits; without an agent of its own there is nobody to wait for."""
    waits = []

    def sleep(_: float) -> None:
        waits.append(1)
        if len(waits) == 3:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(stop_requests.time, "sleep", sleep)
    requests = StopRequests()
    with requests.listening():
        requests.await_signal()
        assert not waits
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
        monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
        requests.await_signal()
        assert len(waits) == 3
        requests.await_signal()
        assert len(waits) == 3


def test_an_agent_that_sends_no_signal_is_not_waited_for_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(stop_requests, "AGENTS_S", 0.1)
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    monkeypatch.setenv("GROUP_WORLD_SIZE", "2")
    StopRequests().await_signal()
