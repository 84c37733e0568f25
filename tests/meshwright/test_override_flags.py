"""Flags of `meshwright plan` as overrides: what each reads, what is refused, what the help says."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

from meshwright.costmodel.schedules.schedule import SCHEDULES
from meshwright.planner.overrides.overrides import Overrides
from meshwright.planner.overrides.values import FORBIDDABLE, OverrideError
from meshwright.shell.override_flags import add_arguments, overrides_of


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="plan", exit_on_error=False)
    add_arguments(made)
    return made


def read(*flags: str) -> Overrides:
    return overrides_of(parser().parse_args(flags))


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("", {}),
        ("--tp 4 --dp=2 --cp 2 --ep 8 --pp 3", {"tp": 4, "dp": 2, "cp": 2, "ep": 8, "pp": 3}),
        ("--virtual-stages 2 --microbatch-size 1", {"virtual_stages": 2, "microbatch_size": 1}),
        ("--num-microbatches 8 --schedule zb_v", {"num_microbatches": 8, "schedule": "zb_v"}),
        ("--placement tp,pp,dp", {"placement": "tp,pp,dp"}),
        ("--zero 3 --dp-shard 8", {"zero": 3, "dp_shard": 8}),
        ("--zero h.0-11=2 --zero head=0", {"zero": {"h.0-11": 2, "head": 0}}),
        ("--tp=h.*=4 --tp=**.head=1", {"tp": {"h.*": 4, "**.head": 1}}),
        ("--recompute full", {"recompute": "full"}),
        ("--recompute h.*=selective", {"recompute": {"h.*": "selective"}}),
        ("--dp-shard a=b=2", {"dp_shard": {"a=b": 2}}),
        (
            "--stage embed,h.0-5 --stage h.6-11,head",
            {"stages": [["embed", "h.0-5"], ["h.6-11", "head"]]},
        ),
        ("--sharding h.*.up=colwise", {"shardings": {"h.*.up": "colwise"}}),
        ("--forbid tp --forbid zero-3", {"forbid": ("tp", "zero-3")}),
    ],
)
def test_flags_are_overrides(flags: str, expected: dict[str, Any]) -> None:
    assert read(*flags.split()) == Overrides(**expected)


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--zero 1 --zero head=0", "--zero 1, head=0; legal: one VALUE for all blocks, or GLOB="),
        ("--tp 2 --tp 4", "--tp 2, 4; legal: one VALUE"),
        ("--dp-shard h=2 --dp-shard h=4", "--dp-shard h=2, h=4; legal: .* once per glob"),
        ("--sharding colwise", "--sharding 'colwise': no decision; legal: GLOB=DECISION"),
    ],
)
def test_values_that_cannot_be_merged_are_named(flags: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        read(*flags.split())


@pytest.mark.parametrize("flags", ["--tp two", "--zero =2", "--cp h=", "--pp 1.5", "--dp-shard h"])
def test_what_is_no_number_is_refused_with_the_form(flags: str) -> None:
    with pytest.raises(argparse.ArgumentError, match=r"VALUE or GLOB=VALUE|invalid int value"):
        read(*flags.split())


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        ("--zero 4", "zero=4; legal: 0, 1, 2, 3"),
        ("--recompute h=some", "recompute=.*legal: none, regather, selective"),
        ("--placement pp,dp,tp", "placement='pp,dp,tp'; legal: tp,dp,pp"),
        ("--tp 2 --forbid tp", "tp=2 contradicts forbid='tp'"),
    ],
)
def test_overrides_check_the_values(flags: str, says: str) -> None:
    with pytest.raises(OverrideError, match=says):
        read(*flags.split())


def test_the_help_names_what_is_legal() -> None:
    text = " ".join(parser().format_help().split())
    for flag in ("tp", "dp", "cp", "ep", "pp", "zero", "dp-shard", "virtual-stages", "placement"):
        assert f"--{flag} " in text
    assert "ZeRO stage: 0, 1, 2, 3; repeatable with GLOB=VALUE" in text
    assert "products+regather, full" in text and "tp,dp,pp or tp,pp,dp" in text
    assert ", ".join(SCHEDULES) in text and ", ".join(FORBIDDABLE) in text
