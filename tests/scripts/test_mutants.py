"""The table of mutants fits the product; `scripts/mutants` runs it."""

from collections import Counter
from pathlib import Path

import pytest

from scripts.mutation.table import Mutant, read_mutants

ROOT = Path(__file__).resolve().parents[2]
MUTANTS = read_mutants()
LEAST = 80


def test_every_mutant_stands_once_in_its_file_and_leaves_python() -> None:
    sources = {mutant.file: (ROOT / mutant.file).read_text() for mutant in MUTANTS}
    faults = []
    for mutant in MUTANTS:
        try:
            assert mutant.applied(sources[mutant.file]) != sources[mutant.file], mutant
        except ValueError as error:
            faults.append(str(error))
    assert not faults, "\n".join(faults)


def test_names_are_unique_and_every_mutant_says_what_it_breaks() -> None:
    twice = [name for name, times in Counter(m.name for m in MUTANTS).items() if times > 1]
    assert not twice
    assert all(mutant.breaks and mutant.kind for mutant in MUTANTS)


def test_all_rooms_have_mutants() -> None:
    assert len(MUTANTS) >= LEAST
    rooms = {mutant.file.split("/")[0] for mutant in MUTANTS}
    assert rooms == {"costmodel", "executor", "meshwright", "planner", "profiles"}


def test_a_text_that_moved_is_refused() -> None:
    mutant = Mutant(name="moved", kind="", file="a.py", text="x = 1", change="x = 2", breaks="it")
    assert mutant.applied("x = 1\n") == "x = 2\n"
    for source in ("y = 1\n", "x = 1\nx = 1\n"):
        with pytest.raises(ValueError, match=r"moved: a.py has 'x = 1' . times; legal: once"):
            mutant.applied(source)
    with pytest.raises(ValueError, match="becomes no Python"):
        Mutant(name="m", kind="", file="a.py", text="1", change="(", breaks="it").applied("1")
