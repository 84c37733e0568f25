"""The cache of measurements: what goes in comes out, and a bad file is never believed."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshwright.profiles.op_signature import OpSignature
from meshwright.profiles.steps import BACKWARD, FORWARD, STEP, StepTiming
from meshwright.profiles.store import (
    DeviceId,
    Measurements,
    Store,
    default_path,
    export_json,
    import_json,
)
from meshwright.profiles.timings import CollectiveTiming, CpuRates, Timing

HERE = DeviceId(name="a chip", driver="1.0", torch="2.13.0")
RATES = CpuRates(
    fp32_flops=1e11,
    bf16_flops=5e10,
    copy_bandwidth=1e10,
    stream_bandwidth=5e9,
    launch_overhead_s=5e-6,
    date="2026-11-26",
)
OTHER = DeviceId(name="another chip", driver="1.0", torch="2.13.0")


def call(rows: int = 4) -> str:
    return OpSignature(
        target="aten.relu.default",
        operands=(("float32", (rows, 8), True),),
        arguments='{"args":[{"$operand":0}],"kwargs":{}}',
    ).text


def timing(forward_s: float = 1e-3, backward_s: float = 2e-3) -> Timing:
    return Timing(forward_s=forward_s, backward_s=backward_s, repetitions=9, spread=0.1)


def collective(nbytes: int = 1024, seconds: float = 1e-4) -> CollectiveTiming:
    return CollectiveTiming(
        backend="gloo", kind="all_reduce", ranks=2, size=2, per_node=2, nbytes=nbytes,
        seconds=seconds, repetitions=7, spread=0.2,
    )  # fmt: skip


def step(plan: str = "a plan", **changes: Any) -> StepTiming:
    given: dict[str, Any] = {
        "backend": "gloo", "precision": "fp32", "target": "eager", "basis": "modelled",
        "plan": plan, "term": STEP, "measured_s": 0.5, "predicted_s": 0.25,
        "parts": {FORWARD: 0.125, BACKWARD: -0.0625}, "samples": 15,
    }  # fmt: skip
    return StepTiming(**given | changes)


def some(device: DeviceId = HERE) -> Measurements:
    return Measurements(
        device=device,
        operators={call(4): timing(), call(8): timing(2e-3)},
        collectives=(collective(), collective(4096)),
        steps=(step(term="forward"), step(), step("another")),
    )


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path / "deep", lock_timeout_s=0.05)


def aside(store: Store) -> list[Path]:
    return sorted(store.path.glob("*.unusable-*"))


@pytest.mark.parametrize("field", ["name", "driver", "torch"])
def test_each_part_of_the_device_keeps_measurements_apart(store: Store, field: str) -> None:
    parts = {"name": HERE.name, "driver": HERE.driver, "torch": HERE.torch, field: "other"}
    store.add(some())
    found = store.read(DeviceId(**parts))
    assert found.operators == {} and found.collectives == ()


def test_what_is_added_is_read_and_replaces_the_old(store: Store) -> None:
    store.add(Measurements(device=HERE, operators={}, collectives=()))
    assert store.read(HERE).operators == {}
    assert not aside(store)
    store.add(some())
    assert store.read(HERE) == some()
    assert store.devices() == [HERE]
    store.add(some())
    again = Measurements(
        device=HERE, operators={call(4): timing(5e-3)}, collectives=(collective(1024, 3e-4),)
    )
    store.add(again)
    found = store.read(HERE)
    assert found.operators == {call(4): timing(5e-3), call(8): timing(2e-3)}
    assert {c.nbytes: c.seconds for c in found.collectives} == {1024: 3e-4, 4096: 1e-4}


WRONG = {
    ("operators", "forward_s"): (-1.0, 0.0, "fast", None),
    ("operators", "backward_s"): (-1.0,),
    ("operators", "repetitions"): (0,), ("operators", "spread"): (-0.5,),
    ("operators", "signature"): ("relu",),
    ("collectives", "seconds"): (0.0,), ("collectives", "nbytes"): (0,),
    ("collectives", "size"): ("two",), ("collectives", "ranks"): (-1,),
    ("steps", "parts"): ("not JSON", [], {"nonsense": 1}), ("rates", "fp32_flops"): (0.0, "fast"),
    ("rates", "busy"): ("no",),
}  # fmt: skip


@pytest.mark.parametrize(
    ("at", "value"), [(at, value) for at, values in WRONG.items() for value in values]
)
def test_a_number_that_no_clock_read_condemns_the_file(
    store: Store, at: tuple[str, str], value: Any, caplog: pytest.LogCaptureFixture
) -> None:
    table, column = at
    store.add(replace(some(), rates=RATES))
    data = json.loads(store.file_of(HERE).read_text())
    (data[table] if table == "rates" else data[table][0])[column] = value
    store.file_of(HERE).write_text(json.dumps(data))
    assert store.read(HERE) == Measurements(device=HERE)
    assert len(aside(store)) == 1 and "can't be used" in caplog.text


def test_what_was_not_measured_or_is_of_another_format_is_not_taken(store: Store) -> None:
    wrong = Measurements(device=HERE, operators={call(): timing(0.0)}, collectives=())
    with pytest.raises(ValueError, match=r"forward_s is 0\.0; legal: above 0"):
        store.add(wrong)
    store.add(some())
    text = store.file_of(HERE).read_text()
    store.file_of(HERE).write_text(text.replace('"format": 1', '"format": 99'))
    assert store.read(HERE).operators == {}


def test_the_cache_folder_can_be_chosen(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("MESHWRIGHT_CACHE", str(tmp_path))
    assert Store().path == default_path() == tmp_path


seconds = st.floats(min_value=1e-9, max_value=1e3)


def test_rates_of_a_cpu_stay_until_newer_ones_come(store: Store) -> None:
    store.add(Measurements(device=HERE, rates=RATES))
    store.add(some())
    assert store.read(HERE) == replace(some(), rates=RATES)
    newer = replace(RATES, busy=True)
    store.add(Measurements(device=HERE, rates=newer))
    assert store.read(HERE).rates == newer


@given(st.dictionaries(st.integers(1, 999), st.tuples(seconds, seconds), max_size=5))
def test_json_keeps_every_digit(
    tmp_path_factory: pytest.TempPathFactory, found: dict[int, tuple[float, float]]
) -> None:
    path = tmp_path_factory.mktemp("json") / "profile.json"
    made = Measurements(
        device=HERE,
        operators={call(rows): timing(*pair) for rows, pair in found.items()},
        collectives=tuple(collective(rows, pair[0]) for rows, pair in sorted(found.items())),
    )
    export_json(made, path)
    assert import_json(path, accepts=HERE.name.__eq__, expected=HERE.name) == made


def test_exports_of_others_and_without_steps(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    export_json(some(OTHER), path)
    with pytest.raises(ValueError, match=r"another chip.*'a chip'") as error:
        import_json(path, accepts=HERE.name.__eq__, expected=HERE.name)
    assert str(path) in str(error.value)
    path = tmp_path / "old.json"
    export_json(some(), path)
    data = json.loads(path.read_text())
    assert len(data.pop("steps")) == 3
    path.write_text(json.dumps(data))
    found = import_json(path, accepts=lambda name: True, expected="any")
    assert found.steps == () and found.operators == some().operators


def _without(key: str) -> Callable[[dict[str, Any]], object]:
    return lambda data: data.pop(key)


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (_without("kind"), "legal: a meshwright profile"),
        (_without("operators"), "no key 'operators'"),
        (lambda d: d.update(format=2), "legal: a meshwright profile of format 1"),
        (lambda d: d["operators"][0].pop("spread"), "no key 'spread'"),
        (lambda d: d["operators"][0].update(forward_s=-1.0), r"forward_s is -1\.0; legal: above 0"),
        (lambda d: d["operators"][0].update(signature="relu"), "no operator signature"),
        (lambda d: d["collectives"][0].update(nbytes=1.5), r"nbytes is 1\.5; legal: a whole"),
        (lambda d: d.update(operators=[3]), "malformed"),
    ],
)
def test_a_malformed_profile_says_where(
    tmp_path: Path, spoil: Callable[[dict[str, Any]], object], message: str
) -> None:
    path = tmp_path / "profile.json"
    export_json(some(), path)
    data = json.loads(path.read_text())
    spoil(data)
    path.write_text(json.dumps(data))
    with pytest.raises(ValueError, match=message) as error:
        import_json(path, accepts=HERE.name.__eq__, expected=HERE.name)
    assert str(path) in str(error.value)


def test_what_is_no_profile_is_refused_and_a_missing_one_named(tmp_path: Path) -> None:
    path = tmp_path / "profile.json"
    with pytest.raises(ValueError, match="No such file"):
        import_json(path, accepts=HERE.name.__eq__, expected=HERE.name)
    for content in ("{", "[]", "\x00"):
        path.write_text(content)
        with pytest.raises(ValueError, match=r"profile\.json.*(not JSON|is none)"):
            import_json(path, accepts=HERE.name.__eq__, expected=HERE.name)


def test_steps_of_a_plan_replace_those_before_and_can_be_forgotten(store: Store) -> None:
    store.add(Measurements(device=HERE, steps=(step(), step("another"))))
    store.add(Measurements(device=HERE, steps=(step(measured_s=2.0),)))
    assert store.devices() == [HERE]
    assert set(s.measured_s for s in store.read(HERE).steps) == {0.5, 2.0}
    store.add(some(OTHER))
    assert store.forget_steps(lambda name: name == HERE.name) == 2
    assert store.read(HERE).steps == () and store.read(OTHER) == some(OTHER)
    assert store.forget_steps(lambda name: name == HERE.name) == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"term": "sideways"}, {"measured_s": -1.0}, {"predicted_s": float("nan")}, {"samples": 0},
        {"plan": 7}, {"parts": {"nonsense": 1.0}}, {"parts": {FORWARD: float("inf")}},
        {"parts": [1.0]},
    ],
)  # fmt: skip
def test_steps_that_nobody_measured_are_refused(store: Store, wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError):
        store.add(Measurements(device=HERE, steps=(step(**wrong),)))
    assert not store.file_of(HERE).exists()
