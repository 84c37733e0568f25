"""Which tests reach a file of the product, the nearest first, by the imports of a tree.

A test file is as far from a file as the chain of imports between them is long; what a package
exports again leads to where it is defined. The mirror of `planner/plan/check.py` is
`tests/planner/plan/test_check.py`; its folder comes next.
"""

from __future__ import annotations

import ast
from collections import deque
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

PACKAGE = "meshwright"
ROOMS = ("profiles", "costmodel", "planner", "executor")
TESTED = (*ROOMS, PACKAGE, "scripts", "tests", "examples")
STARTS_RANKS = ("tests/helpers/launching.py", "tests/helpers/ranks.py", "scripts/elastic/hosts.py")


@dataclass(frozen=True)
class Tree:
    """The Python files below `root`, by their paths."""

    root: Path
    _distances: dict[str, dict[str, int]] = field(default_factory=dict)

    @cached_property
    def files(self) -> dict[str, str]:
        """Dotted name -> path; links of the package are not followed."""
        found = {}
        for room in TESTED:
            for file in sorted((self.root / room).rglob("*.py")):
                path = file.relative_to(self.root).as_posix()
                dotted = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
                found[f"{PACKAGE}.{dotted}" if room in ROOMS else dotted] = path
        return found

    @cached_property
    def tests(self) -> tuple[str, ...]:
        names = ((path, path.rpartition("/")[2]) for path in self.files.values())
        return tuple(p for p, name in names if p[:6] == "tests/" and name[:5] == "test_")

    @cached_property
    def _asked(self) -> dict[str, dict[str, str]]:
        """Of each file, the names that it imports, by the names that they have there."""
        return {path: _imports(self.root / path, name) for name, path in self.files.items()}

    @cached_property
    def edges(self) -> dict[str, set[str]]:
        return {
            path: {found for name in asked.values() if (found := self.defined_in(name))} - {path}
            for path, asked in self._asked.items()
        }

    @cached_property
    def others(self) -> tuple[str, ...]:
        """Modules of others that the product and the tests import."""
        names = {name for asked in self._asked.values() for name in asked.values()}
        return tuple(sorted({name for name in names if name.split(".")[0] not in TESTED}))

    def defined_in(self, name: str) -> str | None:
        """The file that defines what is imported as `name`."""
        if name in self.files:
            return self.files[name]
        module, _, last = name.rpartition(".")
        if module not in self.files:
            return self.defined_in(module) if module else None
        again = self._asked[self.files[module]].get(last)
        return (again != name and again and self.defined_in(again)) or self.files[module]

    def distances(self, test: str) -> dict[str, int]:
        """Files that `test` reaches, and over how many imports."""
        if test not in self._distances:
            found, waiting = {test: 0}, deque([test])
            while waiting:
                path = waiting.popleft()
                for other in self.edges[path] - found.keys():
                    found[other] = found[path] + 1
                    waiting.append(other)
            self._distances[test] = found
        return self._distances[test]

    def reaching(self, file: str) -> list[list[str]]:
        """Test files that reach `file`: its mirror, the folder of that, all others."""
        folder, _, name = f"tests/{file}".rpartition("/")
        while not any(test.startswith(f"{folder}/") for test in self.tests) and "/" in folder:
            folder = folder.rpartition("/")[0]
        reached = {test: self.distances(test).get(file) for test in self.tests}
        mirror, near, far = [], [], []
        for test in self.tests:
            inside, _, own = test.rpartition("/")
            mirrors = own == f"test_{name}" and test.split("/")[1] == file.split("/")[0]
            if mirrors and (reached[test] or inside == folder):
                mirror.append(test)
            elif inside == folder:
                near.append(test)
            elif reached[test] is not None:
                far.append(test)

        room = "/".join(folder.split("/")[:2])

        def order(test: str) -> tuple[bool, bool, int, int]:
            inside = not test.startswith(f"{folder}/"), not test.startswith(f"{room}/")
            return *inside, reached[test] or 99, (self.root / test).stat().st_size

        return [sorted(own, key=order) for own in (mirror, near, far)]

    def starts_ranks(self, test: str) -> bool:
        return any(start in self.distances(test) for start in STARTS_RANKS)


def _imports(file: Path, module: str) -> dict[str, str]:
    above = module.split(".") if file.name == "__init__.py" else module.split(".")[:-1]
    found = {}
    for node in ast.walk(ast.parse(file.read_bytes())):
        if isinstance(node, ast.Import):
            found |= {alias.asname or alias.name: alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            base = above[: len(above) + 1 - node.level] if node.level else []
            base = [*base, *([node.module] if node.module else [])]
            names = {alias.asname or alias.name: alias.name for alias in node.names}
            found |= {own: ".".join([*base, name]) for own, name in names.items()}
    return found
