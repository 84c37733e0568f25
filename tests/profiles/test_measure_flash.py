"""The speed of files in a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from meshwright.profiles.host import Host
from meshwright.profiles.measure import measure_flash


def test_a_folder_has_two_bandwidths_and_nothing_is_left(tmp_path: Path) -> None:
    read, written = measure_flash(tmp_path, nbytes=2**20 + 1)
    host = Host(
        memory_bytes=1, memory_bandwidth=1.0, link_bandwidth=1.0, nvme_bytes=2**20,
        nvme_read_bandwidth=read, nvme_write_bandwidth=written,
    )  # fmt: skip
    assert host.has_flash
    assert max(read, written) < 1e12
    assert not list(tmp_path.iterdir())


def test_a_folder_that_is_none_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"nowhere.*No such file.*legal: a folder"):
        measure_flash(tmp_path / "nowhere")
