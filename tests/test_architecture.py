"""The order of the house, read from the syntax trees.

Each rule is a function from one file to its offences; the tests apply the rules to all of them, and
each rule to a snippet that must break it.
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import defaultdict
from collections.abc import Callable
from functools import cache

import pytest

from tests.helpers.order_of_imports import POSITION
from tests.helpers.source_files import (
    PACKAGE,
    PRODUCT,
    ROOMS,
    SourceFile,
    defined_in,
    files_in,
    import_cycle,
    importers,
    is_within,
)
from tests.helpers.tiers import second_tier

# what the executor may know of the planner: the plan, not how it was found
CONTRACT = ("planner.plan", "planner.operators", "planner.batch")

MAX_FILE_LINES, ONE_IDEA = 800, "One idea: "
MAX_FUNCTION_LINES = 60
MAX_PARAMETERS = 8
ONE_IMPORTER = 0.1  # part of the modules that one other uses, at most
PUBLIC = {"auto_parallelize", "data_loader", "fit", "rule"}  # keywords of users and what each means

SOLVERS = ("pulp", "highspy")
SOLVING = "planner/intra_op/solvers.py"
COMMUNICATING = ("executor/", "profiles/measure/collectives.py")
PRINTING = ("meshwright/cli.py",)
COMMANDS = "meshwright/shell/commands"
BESIDE = ("scripts", "examples", "tests")

Rule = Callable[[SourceFile], list[str]]


# --- imports --------------------------------------------------------------------------------------


def room(file: SourceFile) -> str:
    """The module where it has a place of its own in the order of imports, else its package."""
    return file.module if file.module in POSITION else file.package


# a constructor of a plan that traces and searches, which is imported where it is called
FRONT = {"planner/plan/plan.py": ("meshwright.configurations.plan_from",)}


def imports_forward(file: SourceFile) -> list[str]:
    """Imports of later packages, followed through what packages export again. A package's
    `__init__` may import what the package holds."""
    modules = {other.module: other for other in files_in(*PRODUCT)} | {file.module: file}
    found = []
    for line, name in file.imports:
        if name.split(".")[0] in (*ROOMS, *BESIDE):
            found.append(f"{file.path}:{line} imports {name}, which users may have of their own")
        source = defined_in(name, modules)
        if source is None or (file.is_package and is_within(source, file.package)):
            continue
        own, other = room(file), room(modules[source])
        if (
            own != other
            and POSITION[other] >= POSITION[own]
            and name not in FRONT.get(file.path, ())
        ):
            found.append(f"{file.path}:{line} imports {name}: {other} is not before {own}")
    return found


def plan_makers_known(file: SourceFile) -> list[str]:
    """Imports of the executor beyond the plan."""
    if not file.path.startswith("executor/"):
        return []
    return [
        f"{file.path}:{line} imports {name}; legal of the planner: {', '.join(CONTRACT)}"
        for line, name in file.imports
        if is_within(name, f"{PACKAGE}.planner")
        and not any(is_within(name, f"{PACKAGE}.{legal}") for legal in CONTRACT)
    ]


def solver_imports(file: SourceFile) -> list[str]:
    return [
        f"{file.path}:{line} imports {name}; only {SOLVING} may"
        for line, name in file.imports
        if name.split(".")[0] in SOLVERS and file.path != SOLVING
    ]


def process_group_uses(file: SourceFile) -> list[str]:
    """Imports of `torch.distributed`, and its use as an attribute of an imported `torch`."""
    if file.path.startswith(COMMUNICATING):
        return []
    lines = [line for line, name in file.imports if is_within(name, "torch.distributed")]
    lines += [
        node.lineno
        for node in file.nodes
        if isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.distributed"
    ]
    return [f"{file.path}:{line} uses torch.distributed" for line in lines]


# --- habits ---------------------------------------------------------------------------------------


def prints(file: SourceFile) -> list[str]:
    return [
        f"{file.path}:{node.lineno} prints; the library logs"
        for node in file.nodes
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
        and file.path not in PRINTING
    ]


def import_path_edits(file: SourceFile) -> list[str]:
    """Assignments to `sys.path` or a part of it, and calls of its methods."""
    found = []
    for node in file.nodes:
        changed: list[ast.expr] = []
        if isinstance(node, ast.Assign | ast.Delete):
            changed = node.targets
        elif isinstance(node, ast.AugAssign | ast.AnnAssign):
            changed = [node.target]
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            changed = [node.func.value]
        for target in changed:
            whole = target.value if isinstance(target, ast.Subscript) else target
            if ast.unparse(whole) == "sys.path":
                found.append(f"{file.path}:{node.lineno} changes sys.path; run it by `python -m`")
    return found


def blanket_ignores(file: SourceFile) -> list[str]:
    """Comments that silence a checker without saying of what."""
    tokens = tokenize.generate_tokens(io.StringIO(file.text).readline)
    return [
        f"{file.path}:{token.start[0]} {token.string!r} names no error"
        for token in tokens
        if token.type == tokenize.COMMENT
        and re.search(r"type:\s*ignore(?!\[)|noqa(?!:\s*[A-Z]+\d)", token.string)
    ]


# --- sizes ----------------------------------------------------------------------------------------


def large_files(file: SourceFile) -> list[str]:
    """Long files whose docstring does not say in its first line which one idea they are."""
    lines = len(file.text.splitlines())
    idea = (ast.get_docstring(file.tree) or "").split("\n")[0]
    if lines <= MAX_FILE_LINES or ONE_IDEA in idea:
        return []
    return [
        f"{file.path} has {lines} lines; over {MAX_FILE_LINES} its first line says {ONE_IDEA!r}"
    ]


def large_functions(file: SourceFile) -> list[str]:
    found = []
    for node in file.nodes:
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        at = f"{file.path}:{node.lineno} {node.name}"
        lines = (node.end_lineno or node.lineno) - node.lineno + 1
        given = [*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs]
        parameters = len([arg for arg in given if arg.arg not in ("self", "cls")])
        if lines > MAX_FUNCTION_LINES and node.name not in PUBLIC:
            found.append(f"{at} has {lines} lines, at most {MAX_FUNCTION_LINES}")
        if parameters > MAX_PARAMETERS and node.name not in PUBLIC:
            found.append(f"{at} has {parameters} parameters, at most {MAX_PARAMETERS}")
    return found


# --- decisions ------------------------------------------------------------------------------------

MOST_FILES = 8  # in which the name of a decision may stand
# of decisions that stand in more of them: these numbers fall
MORE_FILES: dict[str, int] = {"recompute": 13, "schedule": 15, "zero": 13}
KNOBS = {
    "quantized": {"quantized", "quantised"},
    "compressed": {"compressed"},
    "servers": {"servers"},
    "sync_every": {"sync_every"},
    "outer_bits": {"outer_bits"},
    "fragments": {"fragments"},
    "hpz": {"hpz"},
    "dp_shard": {"dp_shard"},
    "segments": {"segments"},
    "offload": {"offload"},
    "cp_kind": {"cp_kind"},
    "virtual stages": {"virtual", "virtual_stages"},
    "placement": {"placement", "placements"},
    "post_validation": {"post_validation"},
    "optimizer_in_backward": {"optimizer_in_backward"},
    "chunked_loss": {"chunked_loss"},
    "recompute": {"recompute"},
    "schedule": {"schedule"},
    "zero": {"zero"},
}
# keys of other software beside decisions: one that is added needs no line there, and is said to be
# lost where a plan is written for them
OTHERS = "planner/frameworks/"
# where the word is about something else: tensors' placements, packed tensors, others' tables, the
# learning rate's schedule, numbers that may be zero
ELSEWHERE = {
    "placement": ("costmodel/", "executor/", "planner/plan/assignments.py"),
    "quantized": ("planner/batch.py", "meshwright/traced/"),
    "schedule": ("meshwright/hf/", "meshwright/training/"),
    "zero": ("planner/page/", "profiles/"),
}


@cache
def names_in(file: SourceFile) -> set[str]:
    """Identifiers, keywords and the words of string literals that are no prose: of less than three
    words."""
    found = set()
    for node in file.nodes:
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.arg | ast.keyword):
            found.add(node.arg or "")
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.alias):
            found |= {node.name.split(".")[-1], node.asname or ""}
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= set(re.findall(r"\w+", node.value) if len(node.value.split()) < 3 else ())
    return found


@pytest.mark.parametrize("knob", KNOBS)
def test_a_decision_is_named_in_few_files(knob: str) -> None:
    elsewhere = (OTHERS, *ELSEWHERE.get(knob, ()))
    files = [
        file.path
        for file in files_in(*PRODUCT)
        if names_in(file) & KNOBS[knob] and not file.path.startswith(elsewhere)
    ]
    most = MORE_FILES.get(knob, MOST_FILES)
    assert len(files) <= most, f"{knob} in {len(files)} files, at most {most}:\n" + "\n".join(files)
    assert len(files) == most or knob not in MORE_FILES, f"{knob}: {len(files)} is the new limit"


@pytest.mark.parametrize(
    "text",
    [
        "x.hpz",
        "f(hpz=2)",
        "def f(hpz): ...",
        "def hpz(): ...",
        "from a import hpz",
        "'hpz'",
        "f'{place}: hpz'",
    ],
)
def test_a_name_is_found(text: str) -> None:
    assert "hpz" in names_in(SourceFile("planner/a.py", text))


def test_prose_is_no_name() -> None:
    assert "hpz" not in names_in(SourceFile("planner/a.py", "x = 'choose zero 3, or drop hpz'"))


# --- the project ----------------------------------------------------------------------------------

OF_ALL: tuple[Rule, ...] = (blanket_ignores, large_functions)
OF_PRODUCT: tuple[Rule, ...] = (
    imports_forward,
    plan_makers_known,
    solver_imports,
    process_group_uses,
    prints,
    large_files,
    *OF_ALL,
)
OF_SCRIPTS: tuple[Rule, ...] = (solver_imports, import_path_edits, *OF_ALL)
OF_TESTS: tuple[Rule, ...] = (import_path_edits, *OF_ALL)
BESIDE_PRODUCT = second_tier("the product's files stay; ruff reads all")


@pytest.mark.parametrize(
    ("rules", "folders"),
    [
        pytest.param(OF_PRODUCT, PRODUCT, id="product"),
        pytest.param(OF_SCRIPTS, ("scripts", "examples"), id="scripts", marks=BESIDE_PRODUCT),
        pytest.param(OF_TESTS, ("tests",), id="tests", marks=BESIDE_PRODUCT),
    ],
)
def test_files_keep_the_rules(rules: tuple[Rule, ...], folders: tuple[str, ...]) -> None:
    offences = [found for file in files_in(*folders) for rule in rules for found in rule(file)]
    assert not offences, "\n".join(offences)


def test_every_package_has_its_place() -> None:
    packages = {room(file) for file in files_in(*PRODUCT)}
    assert packages - set(POSITION) == set()


@pytest.mark.parametrize("typing", [False, True])
def test_no_import_cycle(typing: bool) -> None:
    cycle = import_cycle(files_in(*PRODUCT), typing=typing)
    assert not cycle, " -> ".join(cycle)


def test_a_file_name_is_used_once_in_a_room() -> None:
    """A command's file has the command's name."""
    by_name = defaultdict(list)
    for file in files_in(*PRODUCT):
        folder, _, name = file.path.rpartition("/")
        if not file.is_package and folder != COMMANDS:
            by_name[file.path.split("/")[0], name].append(file.path)
    repeated = [paths for paths in by_name.values() if len(paths) > 1]
    assert not repeated, "\n".join(map(", ".join, repeated))


def test_few_modules_serve_one_other_alone() -> None:
    users = importers(files_in(*PRODUCT))
    lonely = sorted(name for name, found in users.items() if len(found) == 1)
    assert len(lonely) <= ONE_IMPORTER * len(users), "\n".join(lonely)


def test_users_are_found_through_packages_and_attributes() -> None:
    files = [
        SourceFile("planner/a/__init__.py", "from meshwright.planner.a.b import f"),
        SourceFile("planner/a/b.py", "def f(): ..."),
        SourceFile("planner/c.py", "from meshwright.planner.a import f"),
        SourceFile("planner/d.py", "from meshwright.planner import a\na.f()"),
    ]
    users = importers(files)
    assert users["meshwright.planner.a.b"] == {"meshwright.planner.c", "meshwright.planner.d"}


# --- the rules ------------------------------------------------------------------------------------

MANY = "x = 1\n" * MAX_FILE_LINES
LONG = "    x = 1\n" * MAX_FUNCTION_LINES
WIDE = ", ".join(f"p{k}=0" for k in range(MAX_PARAMETERS + 1))


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (imports_forward, "planner/plan/a.py", "import meshwright.executor.lowering.lower"),
        (imports_forward, "planner/plan/a.py", "def f():\n    from meshwright import api"),
        (imports_forward, "planner/plan/a.py", "from ..search import search"),
        (imports_forward, "planner/tracing/values/a.py", "from ..trace import trace"),
        (imports_forward, "planner/tracing/similar/a.py", "from ..leaves import record"),
        (imports_forward, "costmodel/rules/a.py", "from meshwright.costmodel import sharding"),
        (imports_forward, "costmodel/rules/__init__.py", "from meshwright.costmodel import blocks"),
        (imports_forward, "profiles/a.py", "import_module('meshwright.costmodel.graph')"),
        (imports_forward, "profiles/a.py", "import profiles.hardware.curve"),
        (imports_forward, "executor/lowering/a.py", "from tests import test_schedule"),
        (plan_makers_known, "executor/a.py", "from meshwright.planner.search import search"),
        (plan_makers_known, "executor/a.py", "from meshwright.planner import plan_b"),
        (solver_imports, "planner/search/search.py", "import pulp as lp"),
        (solver_imports, "meshwright/api.py", "def f():\n    from highspy import Highs"),
        (process_group_uses, "planner/a.py", "import torch.distributed as dist"),
        (process_group_uses, "planner/a.py", "from torch import distributed"),
        (process_group_uses, "meshwright/api.py", "from torch.distributed.tensor import DTensor"),
        (process_group_uses, "profiles/a.py", "import torch\ntorch.distributed.is_initialized()"),
        (prints, "meshwright/api.py", "def f():\n    print('done')"),
        (import_path_edits, "scripts/a.py", "sys.path.insert(0, '')"),
        (import_path_edits, "scripts/a.py", "sys.path[:0] = ['']"),
        (import_path_edits, "tests/a.py", "def f():\n    sys.path += ['']"),
        (blanket_ignores, "planner/a.py", "x = f()  # type: " + "ignore"),
        (blanket_ignores, "planner/a.py", "x = f()  # noqa" + " - it's fine"),
        (large_files, "planner/a.py", f'"""Bounds."""\n{MANY}'),
        (large_functions, "scripts/a.py", f"def f():\n{LONG}"),
        (large_functions, "tests/a.py", f"class C:\n    def f(self, {WIDE}): ..."),
    ],
)
def test_rule_catches(rule: Rule, path: str, text: str) -> None:
    assert len(rule(SourceFile(path, text))) == 1


@pytest.mark.parametrize(
    ("rule", "path", "text"),
    [
        (imports_forward, "executor/stages/a.py", "from meshwright.planner.plan.plan import Plan"),
        (imports_forward, "planner/plan/a.py", "from . import plan\nimport executors.planner"),
        (imports_forward, "planner/__init__.py", "from meshwright.planner.search import search"),
        (plan_makers_known, "executor/a.py", "from meshwright.planner.plan import plan"),
        (plan_makers_known, "meshwright/a.py", "from meshwright.planner.search import search"),
        (solver_imports, SOLVING, "import pulp, highspy"),
        (process_group_uses, "executor/ranks/a.py", "import torch.distributed as dist"),
        (process_group_uses, "profiles/measure/collectives.py", "import torch.distributed"),
        (process_group_uses, "planner/a.py", "from torch import distributions, nn"),
        (prints, "meshwright/cli.py", "print('done')"),
        (prints, "planner/a.py", "report.print()"),
        (import_path_edits, "scripts/a.py", "found = list(sys.path)"),
        (blanket_ignores, "planner/a.py", "x = '# noqa'  # noqa: E501\ny = z  # type: ignore[x]"),
        (large_files, "planner/a.py", f'"""One idea: bounds."""\n{MANY}'),
        (large_functions, "scripts/a.py", f"def f():\n{LONG[:-10]}"),
        (large_functions, "meshwright/api.py", f"def auto_parallelize({WIDE}): ..."),
    ],
)
def test_rule_allows(rule: Rule, path: str, text: str) -> None:
    assert rule(SourceFile(path, text)) == []


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
    sources = {"__init__": "from planner.a import f", "a": a, "b": b, "c": ""}
    absolute = {
        name: text.replace("planner", "meshwright.planner") for name, text in sources.items()
    }
    files = [SourceFile(f"planner/{name}.py", text) for name, text in absolute.items()]
    assert bool(import_cycle(files)) == cyclic
    assert bool(import_cycle(files, typing=True)) == (cyclic or "if TYPE" in b)
