"""Malformed inputs are refused with a place, legal values and a way out; and the judge of that."""

import multiprocessing
import os
import signal
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from random import Random

import pytest

from meshwright.profiles.inputs import MeshwrightError
from scripts.fuzz_inputs import FAMILIES, faults, faults_text, fuzz, table
from scripts.fuzzing.pool import Family, UserBug, rng_of, run_cases
from tests.helpers.tiers import second_tier, tiered

FEW, MANY = 120, 350
ENOUGH = 7  # cases of a family: in fewer, all may be drawn well-formed


@second_tier("refusals of each kind of input are tested where it is read")
@pytest.mark.parametrize("cases", (FEW, MANY))
def test_malformed_inputs_are_refused_in_full(cases: int) -> None:
    # forks of a process that ran other tests have their locks, not the threads that hold them
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as fresh:
        found = fresh.submit(fuzz, FAMILIES, cases, seed=0, processes=2).result()
    assert len(found) >= 0.85 * cases
    assert not faults(found), faults_text(found, seed=0)
    for family in FAMILIES:
        if family.name == "cache":  # read within limits, or moved aside: never an error
            continue
        kinds = [outcome.kind for outcome in found if outcome.family == family.name]
        said = f"no case of {family.name} is wrong\n{table(found)}"
        assert "refused" in kinds or len(kinds) < ENOUGH, said
    assert {o.family for o in found if o.kind == "accepted"} >= {"plan", "overrides", "model"}


def _raises(error: Exception) -> Callable[[], None]:
    def run() -> None:
        raise error

    return run


REFUSAL = MeshwrightError("=0", place="tp", legal="1 or more", way_out="raise it")


def _loses() -> None:
    try:
        raise UserBug("the user's own")
    except UserBug as error:
        raise MeshwrightError(error, place="f", legal="g", way_out="h") from None


def _late() -> None:
    end = time.process_time() + 0.3
    while time.process_time() < end:
        pass
    raise REFUSAL


def _forever() -> None:
    while True:
        pass


def _large() -> None:
    list(range(10**9))


def _dies() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


FAULTS: dict[str, Callable[[], object]] = {
    "accepted": dict, "refused": _raises(REFUSAL), "user's own": _raises(UserBug("the user's own")),
    "no legal or way_out": _raises(MeshwrightError("=0", place="tp")),
    "bare ValueError": _raises(ValueError("tp=0; legal: 1 or more; raise it")),
    "bare KeyError": _raises(KeyError("tp")), "refused late": _late, "slow": _forever,
    "user's own, without its traceback": _loses, "memory": _large, "died of signal 9": _dies,
}  # fmt: skip

SEEN = ("refused", "bare ValueError")


@pytest.mark.parametrize("kind", tiered(FAULTS, SEEN.__contains__, "judged by the same function"))
def test_every_fault_is_seen(kind: str) -> None:
    def make(rng: Random, folder: Path) -> tuple[str, Callable[[], object]]:
        return "a case", FAULTS[kind]

    family = Family(name="one", make=make, share=1, refuse_s=0.1, limit_s=0.5, memory=2**28)
    (outcome,) = run_cases([(family, 0)], seed=0, processes=1)
    assert outcome.kind.startswith(kind), outcome


@pytest.mark.parametrize(
    "family",
    tiered(
        FAMILIES,
        lambda family: family.name not in ("reported", "checkpoint", "plan"),
        "families that are cheap to draw stay",
        lambda family: family.name,
    ),
)
def test_a_case_is_the_same_again(family: Family, tmp_path: Path) -> None:
    made = []
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        made.append(family.make(rng_of(family.name, 3, 0), tmp_path / name)[0])
    assert made[0] == made[1]
