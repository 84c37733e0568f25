"""The table of mutants fits the product; `scripts/mutants` runs it."""

import json
from collections import Counter
from pathlib import Path

import pytest

from scripts.mutation.gate import KILLERS
from scripts.mutation.reach import Tree
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


def test_names_are_unique_and_a_text_that_moved_is_refused() -> None:
    twice = [name for name, times in Counter(m.name for m in MUTANTS).items() if times > 1]
    assert not twice
    assert all(mutant.breaks and mutant.kind for mutant in MUTANTS)
    assert len(MUTANTS) >= LEAST
    rooms = {mutant.file.split("/")[0] for mutant in MUTANTS}
    assert rooms == {"costmodel", "executor", "meshwright", "planner", "profiles"}
    mutant = Mutant(name="moved", kind="", file="a.py", text="x = 1", change="x = 2", breaks="it")
    assert mutant.applied("x = 1\n") == "x = 2\n"
    for source in ("y = 1\n", "x = 1\nx = 1\n"):
        with pytest.raises(ValueError, match=r"moved: a.py has 'x = 1' . times; legal: once"):
            mutant.applied(source)
    with pytest.raises(ValueError, match="becomes no Python"):
        Mutant(name="m", kind="", file="a.py", text="1", change="(", breaks="it").applied("1")


def test_recorded_killers_are_tests_of_today() -> None:
    """A test that moves takes its line in the file along: that keeps it in the change tier."""
    missing = [
        f"{name}: {killer}"
        for name, killer in json.loads(KILLERS.read_text()).items()
        for file, *_, test in [killer.split("::")]
        if not (ROOT / file).is_file()
        or f"def {test.partition('[')[0]}(" not in (ROOT / file).read_text()
    ]
    assert not missing, "\n".join(missing)


def test_the_nearest_tests_come_first(tmp_path: Path) -> None:
    """Mirror, its folder, then the others by how far they import the file."""
    for path, text in {
        "planner/__init__.py": "",
        "planner/plan/__init__.py": "from .check import checked",
        "planner/plan/check.py": "checked = 1",
        "planner/search.py": "from meshwright.planner.plan import checked",
        "tests/planner/plan/test_check.py": "import numpy",
        "tests/planner/plan/test_words.py": "",
        "tests/planner/test_search.py": "from meshwright.planner import search",
        "tests/planner/test_file.py": "from meshwright.planner.plan import checked\n" * 9,
        "tests/helpers/launching.py": "from meshwright.planner import search",
        "tests/planner/test_ranks.py": "import tests.helpers.launching",
        "tests/planner/test_other.py": "from meshwright.planner import nothing",
    }.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(text)
    tree = Tree(tmp_path)
    mirror, near, far = tree.reaching("planner/plan/check.py")
    assert mirror == ["tests/planner/plan/test_check.py"]
    assert near == ["tests/planner/plan/test_words.py"]
    assert [path.rpartition("/")[2] for path in far] == [
        "test_file.py", "test_search.py", "test_ranks.py",
    ]  # fmt: skip
    assert [path for path in tree.tests if tree.starts_ranks(path)] == [far[-1]]
    assert tree.others == ("numpy",)
