"""What users give: JSON and TOML that are taken, what is refused in little time, paths, and the
fields and texts of errors."""

import copy
import os
import pickle
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from meshwright.planner.errors import TraceError
from meshwright.planner.plan import InfeasibleError, Plan, PlanError
from meshwright.profiles.cluster import Cluster
from meshwright.profiles.inputs import (
    ArgumentError,
    MeshwrightError,
    checked_path,
    parse_json,
    read_json,
    read_text,
    read_toml,
    shown,
)
from meshwright.profiles.inputs.files import MAX_BYTES
from meshwright.profiles.inputs.limits import MAX_DEPTH
from meshwright.profiles.inputs.paths import check_writable, write_text

LATE_S = 1.0


def test_json_is_read_up_to_the_limit_of_depth(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('{"a": [1, 2.5, null, true, "ä"], "b": {"a": {}}}', encoding="utf-8")
    assert read_json(path) == {"a": [1, 2.5, None, True, "ä"], "b": {"a": {}}}
    found: Any = parse_json("[" * (MAX_DEPTH - 1) + "1" + "]" * (MAX_DEPTH - 1), place="here")
    for _ in range(MAX_DEPTH - 1):
        (found,) = found
    assert found == 1


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


def test_what_is_no_file_or_can_be_no_path_is_named(tmp_path: Path) -> None:
    for name in ("missing", ".", "\0", "x" * 5000):
        with pytest.raises(MeshwrightError) as caught:
            read_text(os.path.join(tmp_path, name))
        assert caught.value.place and caught.value.legal == "a readable text file in UTF-8"
    odd: list[Any] = [None, 3, b"x", "", "a\0b", "x" * 300, "a/" + "\ud800", ["a"]]
    for given in odd:
        with pytest.raises(MeshwrightError, match=r"^place") as caught:
            checked_path(given, "place")
        assert caught.value.legal and caught.value.way_out


def test_a_file_is_written_and_one_that_cannot_be_is_an_os_error_too(tmp_path: Path) -> None:
    path = write_text(str(tmp_path / "a"), "text", "place")
    check_writable(path, "place")
    assert path.read_text() == "text"
    for write in (lambda p: write_text(p, "", "place"), lambda p: check_writable(p, "place")):
        with pytest.raises(OSError, match="can't be written") as caught:
            write(tmp_path / "no folder" / "a")
        assert isinstance(caught.value, MeshwrightError)
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize(
    "error",
    [
        PlanError("=7", place="plan: zero", legal="0", way_out="change it"),
        InfeasibleError("too large", [1.0], []),
        MeshwrightError("plain"),
    ],
)
@pytest.mark.parametrize("way", [copy.copy, lambda e: pickle.loads(pickle.dumps(e))])
def test_errors_pass_between_ranks(error: MeshwrightError, way: Any) -> None:
    again = way(error)
    assert type(again) is type(error)
    before, after = ((e.with_code(), e.place, e.legal, e.way_out) for e in (error, again))
    assert after == before


def test_values_are_shown_and_texts_made_of_fields() -> None:
    cyclic: list[Any] = []
    cyclic.append(cyclic)
    deep: list[Any] = []
    for _ in range(5000):
        deep = [deep]
    for value in (10**5000, cyclic, deep, "x" * 10**6, {1: list(range(10**5))}, object()):
        assert len(shown(value)) < 200
    assert shown(10**30) == "1" + "0" * 30
    error = PlanError("=7", place="plan: zero", legal=(0, 1, 2, 3), way_out="change it")
    assert str(error) == "plan: zero=7; legal: 0, 1, 2, 3; change it"
    assert (error.place, error.legal, error.way_out) == ("plan: zero", "0, 1, 2, 3", "change it")
    assert str(PlanError("is missing", place="head")) == "head: is missing"
    assert isinstance(error, ValueError)
    legal = ArgumentError(" is 0", place="tp", legal="1 or more")
    assert legal.way_out == ArgumentError.WAY_OUT
    assert str(legal) == "tp is 0; legal: 1 or more"
    assert legal.with_code() == f"{legal}\n(MW101: docs/reference/errors.md#mw101)"
    inner = MeshwrightError("=0", place="tp", legal="1 or more", way_out="raise it")
    outer = PlanError.of(inner, "plan: stage 0")
    assert str(outer) == "plan: stage 0: tp=0; legal: 1 or more; raise it"
    assert (type(outer), outer.place) == (PlanError, "plan: stage 0: tp")
    assert str(PlanError.of(ValueError("no"), "plan")) == "plan: no"
    error = TraceError("no loss")
    assert str(error) == "no loss"
    assert error.place and error.legal and error.way_out
