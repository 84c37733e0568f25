"""The order of the house, read from the syntax trees: no module of the project is imported here.

The rooms stand in one row, profiles -> costmodel -> planner -> executor -> meshwright, and import
only from rooms to their left. Each rule is a function from one file's tree to the offences in it;
the tests apply the rules to every file, and each rule to a snippet that must break it.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROOMS = ("profiles", "costmodel", "planner", "executor", "meshwright")
FOLDERS = (*ROOMS, "scripts", "tests")
MAX_FILE_LINES = 450
MAX_FUNCTION_LINES = 80

Rule = Callable[[str, ast.Module], list[str]]


def paths_in(*folders: str) -> list[str]:
    """Python files of the folders, relative to the root; a folder not there yet has none."""
    files = (file for folder in folders for file in (ROOT / folder).rglob("*.py"))
    return sorted(file.relative_to(ROOT).as_posix() for file in files)


@cache
def parse(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=path)


def module_name(path: str) -> str:
    """`planner/tracing/trace.py` -> `planner.trace`, `planner/__init__.py` -> `planner`."""
    dotted = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return f"meshwright.{dotted}" if dotted.split(".")[0] in ROOMS[:-1] else dotted


def imported(path: str, node: ast.AST) -> list[str]:
    """Absolute dotted names one import statement asks for, `from a import b` being `a.b`; also the
    literal argument of `import_module` and `__import__`."""
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        # A relative import climbs from the package: one level is the folder the file lies in.
        package = path.split("/")[:-1]
        above = package[: len(package) + 1 - node.level] if node.level else []
        base = [*above, *([node.module] if node.module else [])]
        return [".".join([*base, alias.name]) for alias in node.names]
    if isinstance(node, ast.Call) and called_name(node) in ("import_module", "__import__"):
        return [str(arg.value) for arg in node.args[:1] if isinstance(arg, ast.Constant)]
    return []


def called_name(call: ast.Call) -> str:
    """The last name of what is called: `f` in both `f()` and `m.f()`."""
    function = call.func
    if isinstance(function, ast.Attribute):
        return function.attr
    return function.id if isinstance(function, ast.Name) else ""


def located_imports(path: str, tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and absolute name of every import in the file, inside functions too."""
    for node in ast.walk(tree):
        if isinstance(node, ast.stmt | ast.expr):
            yield from ((node.lineno, name) for name in imported(path, node))


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


def imports_to_the_right(path: str, tree: ast.Module) -> list[str]:
    """Imports of a room to the right, or of a folder that is no room, wherever they stand."""
    room = path.split("/")[0]
    barred = {*ROOMS[ROOMS.index(room) + 1 :], "scripts", "tests"}
    return [
        f"{path}:{line} imports {name}"
        for line, name in located_imports(path, tree)
        if name.split(".")[0] in barred
    ]


def solver_imports(path: str, tree: ast.Module) -> list[str]:
    if path == "planner/intra_op/solvers.py":
        return []
    return [
        f"{path}:{line} imports {name}; only planner/intra_op/solvers.py may"
        for line, name in located_imports(path, tree)
        if name.split(".")[0] in ("pulp", "highspy")
    ]


def process_group_uses(path: str, tree: ast.Module) -> list[str]:
    """Imports of `torch.distributed`, and its use as an attribute of an imported `torch`."""
    if path.startswith("executor/") or path == "profiles/measure/collectives.py":
        return []
    lines = [
        line for line, name in located_imports(path, tree) if is_within(name, "torch.distributed")
    ]
    lines += [
        node.lineno
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
    ]
    return [f"{path}:{line} uses torch.distributed" for line in lines]


def prints(path: str, tree: ast.Module) -> list[str]:
    if path == "meshwright/cli.py":
        return []
    return [
        f"{path}:{node.lineno} prints; the library logs"
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]


def long_functions(path: str, tree: ast.Module) -> list[str]:
    return [
        f"{path}:{node.lineno} {node.name} has {length} lines, at most {MAX_FUNCTION_LINES}"
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (length := (node.end_lineno or node.lineno) - node.lineno + 1) > MAX_FUNCTION_LINES
    ]


def statements_run_at_import(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, into classes and branches but not functions or `if TYPE_CHECKING`."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.If) and is_type_checking(statement.test):
            yield from statements_run_at_import(statement.orelse)
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from statements_run_at_import(getattr(statement, field, []))
        for handler in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
            yield from statements_run_at_import(handler.body)


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


def import_graph(trees: dict[str, ast.Module]) -> dict[str, set[str]]:
    """Module -> the modules among `trees` that it imports while it is itself being imported."""
    modules = {module_name(path) for path in trees}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for path, tree in trees.items():
        for statement in statements_run_at_import(tree.body):
            for name in imported(path, statement):
                # `a.b.c` is module a.b.c, or a name in a.b: the longest prefix that is a module.
                while name and name not in modules:
                    name = name.rpartition(".")[0]
                if name and name != module_name(path):
                    graph[module_name(path)].add(name)
    return graph


def import_cycle(graph: dict[str, set[str]]) -> list[str]:
    """The modules of one cycle, the first repeated at the end; empty where there is none."""
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


@pytest.mark.parametrize("path", paths_in(*ROOMS))
@pytest.mark.parametrize("rule", [imports_to_the_right, process_group_uses, prints])
def test_rooms_keep_the_rule(rule: Rule, path: str) -> None:
    assert rule(path, parse(path)) == []


@pytest.mark.parametrize("path", paths_in(*ROOMS, "scripts"))
def test_only_solvers_import_the_solver(path: str) -> None:
    assert solver_imports(path, parse(path)) == []


@pytest.mark.parametrize("path", paths_in(*FOLDERS))
def test_files_and_functions_are_short(path: str) -> None:
    lines = len((ROOT / path).read_text(encoding="utf-8").splitlines())
    assert lines <= MAX_FILE_LINES, f"{path} has {lines} lines; split it"
    assert long_functions(path, parse(path)) == []


def test_no_import_cycle() -> None:
    cycle = import_cycle(import_graph({path: parse(path) for path in paths_in(*ROOMS)}))
    assert not cycle, " -> ".join(cycle)


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (imports_to_the_right, "planner/a.py", "import executor.lower"),
        (imports_to_the_right, "planner/a.py", "def f():\n    from meshwright import api"),
        (imports_to_the_right, "planner/exporters/a.py", "from ... import executor"),
        (imports_to_the_right, "profiles/a.py", "importlib.import_module('costmodel.rules')"),
        (imports_to_the_right, "executor/a.py", "from tests import test_schedule"),
        (solver_imports, "planner/search/search.py", "import pulp as lp"),
        (solver_imports, "meshwright/api.py", "def f():\n    from highspy import Highs"),
        (process_group_uses, "planner/a.py", "import torch.distributed as dist"),
        (process_group_uses, "planner/a.py", "from torch import distributed"),
        (process_group_uses, "meshwright/api.py", "from torch.distributed.tensor import DTensor"),
        (process_group_uses, "profiles/a.py", "import torch\ntorch.distributed.is_initialized()"),
        (prints, "meshwright/api.py", "def f():\n    print('done')"),
        (long_functions, "scripts/a.py", "def f():\n" + "    x = 1\n" * MAX_FUNCTION_LINES),
    ],
)
def test_rule_catches(rule: Rule, path: str, source: str) -> None:
    assert len(rule(path, ast.parse(source))) == 1


@pytest.mark.parametrize(
    ("rule", "path", "source"),
    [
        (imports_to_the_right, "executor/a.py", "from planner.plan import Plan\nfrom . import b"),
        (imports_to_the_right, "profiles/a.py", "import executors, plannerlib.executor"),
        (solver_imports, "planner/intra_op/solvers.py", "import pulp, highspy"),
        (process_group_uses, "executor/a.py", "import torch.distributed as dist"),
        (process_group_uses, "profiles/measure/collectives.py", "import torch.distributed"),
        (process_group_uses, "planner/a.py", "from torch import distributions, nn"),
        (prints, "meshwright/cli.py", "print('done')"),
        (prints, "planner/a.py", "report.print()"),
        (long_functions, "scripts/a.py", "def f():\n" + "    x = 1\n" * (MAX_FUNCTION_LINES - 1)),
    ],
)
def test_rule_allows(rule: Rule, path: str, source: str) -> None:
    assert rule(path, ast.parse(source)) == []


@pytest.mark.parametrize(
    ("a", "b", "cyclic"),
    [
        ("from planner.b import g", "import planner.a", True),
        ("from planner import b", "from .a import f", True),
        (
            "try:\n    import planner.b\nexcept ImportError:\n    pass",
            "class C:\n    from . import a",
            True,
        ),
        ("from planner import b", "def g():\n    from planner import a", False),
        ("from planner import b", "if TYPE_CHECKING:\n    from planner.a import f", False),
        ("from planner import b", "if not TYPE_CHECKING:\n    from planner.a import f", True),
        ("from planner import b", "from planner import c", False),
    ],
)
def test_cycles_are_found(a: str, b: str, cyclic: bool) -> None:
    # The package re-exports `a`, as a package does; only its modules' own imports make a cycle.
    sources = {
        "planner/__init__.py": "from planner.a import f",
        "planner/a.py": a,
        "planner/b.py": b,
        "planner/c.py": "",
    }
    trees = {path: ast.parse(source) for path, source in sources.items()}
    assert bool(import_cycle(import_graph(trees))) == cyclic
