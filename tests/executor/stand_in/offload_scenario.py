"""What runs the lines that bring tensors to host memory and back, on GPUs' stand-in."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from meshwright.executor import devices, stand_in, states_in_files
from meshwright.executor.host_memory import Aside, fill
from meshwright.executor.parameters import parameters, whole_of
from meshwright.executor.rehearsal import Rehearsal

rehearsing = importlib.import_module("meshwright.executor.rehearsal.steps")


def offloaded(run: Callable[[str], Rehearsal], monkeypatch: pytest.MonkeyPatch) -> None:
    """States in host memory: whole weights and parts of them, cast on the way and as they are.
    Weights of blocks, activations there; states in files."""
    with monkeypatch.context() as patch:
        patch.setattr("os.cpu_count", lambda: 2 * torch.get_num_threads())
        patch.setattr(torch, "set_num_threads", lambda count: None)
        for line in ("", "bf16", "zero2 bf16", "zero3", "bf16 weights100", "nvme100"):
            assert run(f"mlp dp2 1f1b m2 {line} host100").mismatches == ()
    for line in ("m2 bf16", "m2 zero3 full"):
        assert run(f"gpt2_deep dp2 1f1b {line} away100").mismatches == ()
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
