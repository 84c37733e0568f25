"""The reader of JSON and TOML: what it takes, and what it refuses in little time."""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.plan import Plan, PlanError
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.inputs import MeshwrightError, parse_json, read_json, read_text, read_toml
from meshwright.profiles.inputs.files import MAX_BYTES
from meshwright.profiles.inputs.limits import MAX_DEPTH

LATE_S = 1.0


def test_json_is_read(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, 2.5, null, true, "ä"], "b": {"a": {}}}', encoding="utf-8")
    assert read_json(path) == {"a": [1, 2.5, None, True, "ä"], "b": {"a": {}}}


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "line 1 is not JSON"),
        ('{"a": 1,\n "b": {"c": 1, "c": 2}}', "key 'c' is there twice"),
        ("[NaN]", "NaN is no number"),
        ("[1e999]", "inf is no finite number"),
        (f"[{10**400}]", "a number has 1329 bits"),
        ("9" * 5000, "not JSON"),
        ("[" * 100_000, "nested too deeply"),
        ("[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1), "nested too deeply"),
        ('{"a":' * 900 + "1" + "}" * 900, "nested too deeply"),
        ("[" + "0," * MAX_BYTES + "0]", "bytes"),
        ("{" + ",".join(f'"{k}":[' + "]" for k in range(60_000)) + "}" * 9, "not JSON"),
    ],
)
def test_json_that_is_none_is_refused_in_time(text: str, says: str) -> None:
    before = time.process_time()
    with pytest.raises(PlanError, match=says) as caught:
        parse_json(text, place="here", error=PlanError)
    assert time.process_time() - before < LATE_S
    assert caught.value.place == "here" and caught.value.legal and caught.value.way_out


def test_depth_up_to_the_limit_is_read() -> None:
    found: Any = parse_json("[" * (MAX_DEPTH - 1) + "1" + "]" * (MAX_DEPTH - 1), place="here")
    for _ in range(MAX_DEPTH - 1):
        (found,) = found
    assert found == 1


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (b"a = ", "not TOML"),
        (b"a = 1\na = 2", "not TOML"),
        (b"a = nan", "no finite number"),
        (b"a = " + b"[" * 50_000, "nested too deeply"),
        (b"a." * 50_000 + b"a = 1", "nested too deeply"),
        (b"\xff", "not a text file in UTF-8"),
    ],
)
def test_toml_that_is_none_is_refused_in_time(tmp_path: Path, text: bytes, says: str) -> None:
    path = tmp_path / "a.toml"
    path.write_bytes(text)
    before = time.process_time()
    with pytest.raises(MeshwrightError, match=says) as caught:
        read_toml(path)
    assert time.process_time() - before < LATE_S
    assert caught.value.place == str(path)


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    with path.open("wb") as file:
        file.truncate(10**9)
    before = time.process_time()
    with pytest.raises(PlanError, match="1,000,000,000 bytes; legal: up to"):
        Plan.load(path)
    assert time.process_time() - before < LATE_S


def test_what_would_block_is_not_opened(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "link").symlink_to(tmp_path / "pipe")
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(tmp_path / "socket"))
    kinds = {"pipe": "a pipe", "link": "a pipe", "socket": "a socket", "/dev/zero": "a device"}
    for name, kind in (kinds | {".": "a folder"}).items():
        for read in (Plan.load, Cluster.load, read_toml, read_json, read_text):
            with pytest.raises(MeshwrightError, match=f" is {kind}; legal: a readable") as caught:
                read(tmp_path / name)
            assert str(tmp_path / name) in caught.value.place and caught.value.way_out
    listener.close()


@pytest.mark.parametrize("name", ["missing", ".", "\0", "x" * 5000])
def test_what_is_no_file_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        read_text(os.path.join(tmp_path, name))
    assert caught.value.place and caught.value.legal == "a readable text file in UTF-8"
