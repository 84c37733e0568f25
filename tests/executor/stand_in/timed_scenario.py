"""What runs the lines that read clocks, seed generators and copy chunks of a device."""

from __future__ import annotations

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.executor import devices, stand_in
from meshwright.executor.files.chunks import LocalChunks
from meshwright.executor.runtime.timeline import Stopwatch
from meshwright.executor.stages import Phase


def timed(device: torch.device) -> None:
    with stand_in.standing_in(), FakeTensorMode():
        watch = Stopwatch(device)
        watch(Phase.REDUCE, lambda: None)
        ((what, began, ended),) = watch.read()
        assert what is Phase.REDUCE
        assert began <= ended
        ((_, seconds),) = watch.durations()
        assert seconds >= 0
        with devices.seeded(device, 5):
            assert torch.initial_seed() == 5
        devices.random_states(device)()
        chunks = LocalChunks.of(torch.empty(4, device=device))
        assert chunks.copied().local.device == devices.HOST
