"""A working folder with models for commands, which are called in this process."""

import io
import sys
from typing import Any

import pytest

from meshwright.cli import main
from meshwright.profiles.timings import CollectiveTiming

TARGETS = """
import torch
from torch import nn
from torch.nn import functional as F

def mlp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    return model, (torch.randn(4, 16), torch.randint(0, 8, (4,))), F.cross_entropy

class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(16, 4)

    def forward(self, x, scale=1.0):
        return {"loss": self.up(x).square().mean() * scale}

def own():
    torch.manual_seed(0)
    return Own(), {"x": torch.randn(3, 16), "scale": 2.0}

def texts():
    model = nn.Sequential(nn.Embedding(24, 16), nn.Linear(16, 24))
    return model, (torch.zeros(4, 6).long(), torch.zeros(4, 6).long()), lambda y, t: (
        F.cross_entropy(y.flatten(0, 1), t.flatten())
    )

def alone():
    return nn.Linear(2, 2)

def raises():
    raise KeyError("the user's own")

value = 3
"""
TINY = """
base = "local-host"
devices_per_node = 2

[device]
memory_bytes = 536_872_000
"""

PLAN = ["plan", "cli_targets:mlp", "--batch", "16", "--precision", "fp32"]
FOUR = [*PLAN, "--cluster", "dgx-a100"]

Captured = pytest.CaptureFixture[str]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def terminal(monkeypatch: pytest.MonkeyPatch) -> Terminal:
    """What takes the place of stderr."""
    monkeypatch.setattr(sys, "stderr", stream := Terminal())
    return stream


def timing(**changes: Any) -> CollectiveTiming:
    """Of an all-reduce of two ranks, with changes."""
    given = {
        "backend": "gloo", "kind": "all_reduce", "ranks": 2, "size": 2, "per_node": 2,
        "nbytes": 1024, "seconds": 0.5, "repetitions": 5, "spread": 0.0,
    }  # fmt: skip
    return CollectiveTiming(**{**given, **changes})


def failed(capsys: Captured, arguments: list[str], code: int = 1) -> str:
    """The one error on stderr, with nothing on stdout."""
    assert main(arguments) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert "Traceback" not in err
    return err


def printed(capsys: Captured, *arguments: str, code: int = 0) -> str:
    """What a command writes to stdout."""
    capsys.readouterr()
    assert main([*arguments]) == code
    return capsys.readouterr().out
