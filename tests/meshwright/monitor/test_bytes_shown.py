"""Bytes of checkpoints and weights, as a terminal shows them."""

from __future__ import annotations

import logging
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from meshwright import progress_shown
from tests.helpers.tiny import ROWS, batch, net, planned
from tests.meshwright.commands import Terminal, terminal


def shown(stream: Terminal, what: str) -> list[tuple[str, str]]:
    """What was shown, as bytes moved of how many."""
    return re.findall(rf"\r(?:\[[# ]*\] )?{what}: (\S+ \S+) of (\S+ \S+)\x1b", stream.getvalue())


def test_reads_and_writes_are_shown_to_their_end(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    stream = terminal(monkeypatch)
    result = planned(net())
    optimizer = torch.optim.AdamW(result.parameters())
    result.train_step(batch(ROWS))
    optimizer.step()
    result.save_checkpoint(tmp_path / "unseen", optimizer)
    with progress_shown():
        result.save_checkpoint(tmp_path / "a", optimizer)
        result.save_checkpoint(tmp_path / "b", optimizer, asynchronous=True).wait()
    weights = result.full_state_dict()
    parameters = sum(x.nbytes for x in weights.values())
    written = shown(stream, "writing a checkpoint")
    assert [done for done, total in written].count(written[-1][1]) == 2
    assert float(written[-1][1].split()[0]) == pytest.approx(3 * parameters / 1024, rel=0.01)
    torch.save(weights, tmp_path / "weights.pt")
    save_file(weights, tmp_path / "weights.safetensors")
    with progress_shown():
        for name in ("weights.pt", "weights.safetensors"):
            result.load_weights(tmp_path / name)
        result.load_checkpoint(tmp_path / "a", optimizer)
    read = shown(stream, "reading weights")
    assert [done for done, total in read].count(read[-1][1]) == 2
    done, total = shown(stream, "reading a checkpoint")[-1]
    assert done == total
    assert stream.getvalue().endswith("\n")
    assert not logging.getLogger("meshwright.progress").handlers
