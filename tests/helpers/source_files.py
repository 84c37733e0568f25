"""The project's Python files as syntax trees: what they import, and the graph of that. No module of
the project is imported here."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "meshwright"
ROOMS = ("profiles", "costmodel", "planner", "executor")  # folders beside the package, links in it
PRODUCT = (*ROOMS, PACKAGE)


@dataclass(frozen=True)
class SourceFile:
    """One file; `path` is relative to the root, and never leads through a link."""

    path: str
    text: str

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text, filename=self.path)

    @cached_property
    def module(self) -> str:
        """`planner/plan/check.py` -> `meshwright.planner.plan.check`."""
        dotted = self.path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
        return f"{PACKAGE}.{dotted}" if dotted.split(".")[0] in ROOMS else dotted

    @cached_property
    def is_package(self) -> bool:
        return self.path.endswith("__init__.py")

    @property
    def package(self) -> str:
        """The package that the module lies in; a package lies in itself."""
        return self.module if self.is_package else self.module.rpartition(".")[0]

    @cached_property
    def nodes(self) -> tuple[ast.AST, ...]:
        return tuple(ast.walk(self.tree))

    @cached_property
    def imports(self) -> tuple[tuple[int, str], ...]:
        """Line and absolute name of every import, in functions and under TYPE_CHECKING too."""
        return tuple(
            (node.lineno, name)
            for node in self.nodes
            if isinstance(node, ast.Import | ast.ImportFrom | ast.Call)
            for name in self.imported(node)
        )

    def imported(self, node: ast.AST) -> list[str]:
        """Absolute names that one statement asks for, `from a import b` being `a.b`; also the
        literal argument of `import_module` and `__import__`."""
        if isinstance(node, ast.Import):
            return [alias.name for alias in node.names]
        if isinstance(node, ast.ImportFrom):
            above = self.package.split(".")
            # A relative import climbs from the package: one level is the package itself.
            above = above[: len(above) + 1 - node.level] if node.level else []
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


def is_within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@cache
def files_in(*folders: str) -> tuple[SourceFile, ...]:
    """The Python files of the folders; a folder not there yet has none."""
    paths = sorted(
        path
        for folder in folders
        for path in (ROOT / folder).rglob("*.py")  # follows no links
        if not any(part.is_symlink() for part in path.parents)
    )
    return tuple(
        SourceFile(path.relative_to(ROOT).as_posix(), path.read_text(encoding="utf-8"))
        for path in paths
    )


def defined_in(name: str, modules: Mapping[str, SourceFile]) -> str | None:
    """The module of `modules` that defines `name`, through what packages export again."""
    module = name
    while module and module not in modules:
        module = module.rpartition(".")[0]
    if not module:
        return None
    file, rest = modules[module], name[len(module) + 1 :]
    if file.is_package and rest:
        for _, exported in file.imports:
            if exported.rpartition(".")[2] == rest and exported != name:
                return defined_in(exported, modules)
    return module


def importers(files: Iterable[SourceFile]) -> dict[str, set[str]]:
    """Module -> the modules that use it, by what packages export of it and as attributes of rooms
    (`sharding.moves`), too; packages themselves are no modules here."""
    modules = {file.module: file for file in files}
    found: dict[str, set[str]] = {name: set() for name, f in modules.items() if not f.is_package}
    for file in (modules[name] for name in found):
        names = [name for _, name in file.imports]
        rooms = {name.rpartition(".")[2]: name for name in names if name in modules}
        names += [
            f"{rooms[node.value.id]}.{node.attr}"
            for node in file.nodes
            if isinstance(node, ast.Attribute)
            and isinstance(node.value, ast.Name)
            and node.value.id in rooms
        ]
        for source in {defined_in(name, modules) for name in names} & found.keys():
            found[source].add(file.module)
    return found


# --- cycles ---------------------------------------------------------------------------------------


def import_cycle(files: Iterable[SourceFile], *, typing: bool = False) -> list[str]:
    """The modules of one cycle of imports run at import, or for types, the first repeated at the
    end; empty where there is none."""
    modules = {file.module for file in files}
    graph: dict[str, set[str]] = {module: set() for module in modules}
    for file in files:
        for statement in statements_run_at_import(file.tree.body, typing=typing):
            for name in file.imported(statement):
                # `a.b.c` is module a.b.c, or a name in a.b: the longest prefix that is a module.
                while name and name not in modules:
                    name = name.rpartition(".")[0]
                if name and name != file.module:
                    graph[file.module].add(name)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        return list(error.args[1])
    return []


def statements_run_at_import(body: list[ast.stmt], *, typing: bool) -> Iterator[ast.stmt]:
    """Statements of a module, into classes and branches but not functions; `if TYPE_CHECKING` with
    `typing` alone."""
    for statement in body:
        yield statement
        if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        if isinstance(statement, ast.If) and is_type_checking(statement.test) and not typing:
            yield from statements_run_at_import(statement.orelse, typing=typing)
            continue
        for field in ("body", "orelse", "finalbody"):
            yield from statements_run_at_import(getattr(statement, field, []), typing=typing)
        for handler in [*getattr(statement, "handlers", []), *getattr(statement, "cases", [])]:
            yield from statements_run_at_import(handler.body, typing=typing)


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")
