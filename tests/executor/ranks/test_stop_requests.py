"""Signals that ask a run to save; among ranks in tests/meshwright/training."""

from __future__ import annotations

import os
import signal
import threading

import pytest

from meshwright.executor.ranks import StopRequests


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
