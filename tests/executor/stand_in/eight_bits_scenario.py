"""What runs the lines that ask a device for units of 8-bit products."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from meshwright.executor import stand_in
from meshwright.executor.backward import eight_bits


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
