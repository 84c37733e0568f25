"""What runs the lines that depend on the device, on GPUs' stand-in: clocks, generators and chunks,
units of 8-bit products, the ways to host memory and back."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.executor import devices, stand_in, states_in_files
from meshwright.executor.backward import eight_bits
from meshwright.executor.files.chunks import LocalChunks
from meshwright.executor.host_memory import Aside, fill
from meshwright.executor.parameters import parameters, whole_of
from meshwright.executor.rehearsal import Rehearsal
from meshwright.executor.runtime.timeline import Stopwatch
from meshwright.executor.stages import Phase

rehearsing = importlib.import_module("meshwright.executor.rehearsal.steps")


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


def eight_bits_by_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units for 8-bit products by device."""
    gpu = torch.device("cuda", 0)
    assert eight_bits.has_units(stand_in.device_for("nccl")[0])
    with monkeypatch.context() as patch:
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 9))
        assert eight_bits.has_units(gpu)
        patch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
        assert not eight_bits.has_units(gpu)
        assert eight_bits.formats(gpu, rowwise=False)[0] == torch.float8_e4m3fn
        mi300 = SimpleNamespace(gcnArchName="gfx942")
        patch.setattr(torch.version, "hip", "6")
        patch.setattr(torch.cuda, "get_device_properties", lambda device: mi300)
        assert eight_bits.has_units(gpu)
        assert eight_bits.formats(gpu, rowwise=False)[0] == torch.float8_e4m3fnuz


def offloaded(
    run: Callable[[str], Rehearsal], lines: Sequence[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """States in host memory: whole weights and parts of them, cast on the way and as they are.
    Weights of blocks, activations there; states in files."""
    with monkeypatch.context() as patch:
        patch.setattr("os.cpu_count", lambda: 2 * torch.get_num_threads())
        patch.setattr(torch, "set_num_threads", lambda count: None)
        for line in lines:
            assert run(line).mismatches == ()
    there: list[torch.device] = []

    def gather(runtime: Any, *_: Any, **__: Any) -> None:
        found = (p.api.detach() for p in runtime.stage_parameters)
        there.extend(device for x in found for device in (x.device, whole_of(x).device))

    with monkeypatch.context() as patch:
        patch.setattr(rehearsing, "run_steps", gather)
        run("mlp dp2 1f1b m2 zero1 host100")
    assert [device.type for device in there[:2]] == ["cpu", stand_in.NAME]
    device = stand_in.device_for("nccl")[0]
    with stand_in.standing_in(), FakeTensorMode(), torch.no_grad():
        aside = Aside(device)
        with aside.entered():
            leaf = torch.empty(4, device=device)
            fill(leaf, torch.empty(4))
        aside.wait(aside.mark())
        waits = SimpleNamespace(offload=True, gradient=torch.empty(4, device=device))
        parameters._to_host([waits], device)  # type: ignore[list-item]
        assert waits.gradient.device == devices.HOST
        with monkeypatch.context() as patch:  # fake tensors lie in no file
            patch.setattr(states_in_files, "lies_in_file", lambda x: True)
            patch.setattr(states_in_files, "let_go", lambda x: None)
            mapped = torch.empty(4)
            staging = states_in_files.Staging()
            staging.last = aside.mark()
            (copy,) = staging.bring([mapped], device)
        assert copy is not mapped and copy.device == devices.HOST
        assert staging.last is None
