"""What the product raises: errors with a code, a place, legal values and a way out.

Read from the syntax trees: what is raised by name must be a `MeshwrightError`, or stand in `INSIDE`
with the reason why no user is given it. The page of errors is as `scripts/write_errors.py` writes.
"""

import ast
import re
from collections.abc import Iterator

import pytest

from meshwright.profiles.inputs import MeshwrightError
from scripts import write_errors
from tests.helpers.launching import ROOT
from tests.helpers.source_files import PRODUCT, SourceFile, called_name, files_in
from tests.helpers.tiers import second_tier

BASE = "MeshwrightError"
CAUGHT = "the caller catches it"
PROTOCOL = "what Python expects of the method"
OWN_TABLES = "its tables are made by the search, never by a user"

# classes of signals between our own functions -> who takes them
SIGNALS = {
    "AssertionError": "for our own bugs",
    "ArgumentTypeError": "argparse makes the command's message of it",
    "CannotForkError": "the rehearsal goes on in one process",
    "Irregular": "the model is traced in full",
    "KeptTensors": "the model is traced again",
    "Misfit": "the rule is refused, or does not hold",
    "MixedDevicesError": "the rehearsal names rank, phase and block",
    "NotSteadyError": "the rehearsal runs every micro-batch",
    "TooLarge": "the operator is skipped, and said to be",
}
# file and class -> why no user is given it
INSIDE = {
    ("profiles/op_signature.py", "ValueError"): "parse, which alone calls it, names the signature",
    ("profiles/store.py", "OSError"): "the cache warns, and is left alone",
    ("planner/tracing/leaves/record.py", "ValueError"): CAUGHT,
    ("planner/intra_op/solvers.py", "TimeoutError"): CAUGHT,
    ("planner/intra_op/elimination.py", "KeyError"): PROTOCOL,
    ("planner/inter_op/partition.py", "ValueError"): OWN_TABLES,
    ("planner/inter_op/equal_meshes.py", "ValueError"): OWN_TABLES,
    ("executor/files/checksums.py", "EOFError"): CAUGHT,
    ("executor/files/manifest.py", "ValueError"): CAUGHT,
    ("executor/files/manifest.py", "TypeError"): CAUGHT,
    ("executor/files/tensors.py", "ValueError"): CAUGHT,
    ("executor/checkpoint/values.py", "ValueError"): CAUGHT,
    ("executor/checkpoint/values.py", "TypeError"): CAUGHT,
    ("executor/stand_in/layouts.py", "IndexError"): PROTOCOL,
    ("planner/tracing/similar/stand_ins.py", "AttributeError"): PROTOCOL,
    ("profiles/inputs/lazy_exports.py", "AttributeError"): PROTOCOL,
}


# files of the executor some of whose errors say all in `what`, and why
WHOLE = {
    "executor/checkpoint/notes.py": "the reader of the checkpoint names it around them",
    "executor/ranks/joining.py": "rank 0's own text, told by the others",
    "executor/ranks/replicas.py": "made of what all ranks say",
    "executor/stages/checked.py": "a text that the report has too",
}


def raised(file: SourceFile) -> Iterator[tuple[int, str]]:
    """Line and class of what is raised by a class' name; `raise error` and `raise of(...)` are of
    errors made elsewhere."""
    for node in file.nodes:
        if isinstance(node, ast.Raise) and node.exc is not None:
            call = node.exc
            name = called_name(call) if isinstance(call, ast.Call) else getattr(call, "id", "")
            if name[:1].isupper():
                yield node.lineno, name


def structured(files: tuple[SourceFile, ...]) -> set[str]:
    """The names of the classes of the product that are a `MeshwrightError`."""
    bases = {
        node.name: [ast.unparse(base) for base in node.bases]
        for file in files
        for node in file.nodes
        if isinstance(node, ast.ClassDef)
    }
    found = {BASE}
    while more := {name for name, of in bases.items() if name not in found and found & {*of}}:
        found |= more
    return found


def bare(file: SourceFile, legal: set[str]) -> list[tuple[int, str]]:
    """What a file raises that is neither a `MeshwrightError` nor a signal."""
    return [(k, name) for k, name in raised(file) if name not in legal | SIGNALS.keys()]


def test_what_is_raised_is_structured() -> None:
    files = files_in(*PRODUCT)
    legal = structured(files)
    found = {(file.path, name): line for file in files for line, name in bare(file, legal)}
    assert not [f"{path}:{found[path, name]} {name}" for path, name in found.keys() - INSIDE]
    assert not INSIDE.keys() - found.keys()  # no reason for what is not there
    assert not SIGNALS.keys() - {name for file in files for _, name in raised(file)}


def unplaced(file: SourceFile) -> list[int]:
    """Lines of structured errors that have the fields of their class alone."""
    own = {"place", "legal", "way_out"}
    return [
        node.lineno
        for node in file.nodes
        if isinstance(node, ast.Raise)
        and isinstance(node.exc, ast.Call)
        and called_name(node.exc).endswith("Error")
        and called_name(node.exc) not in SIGNALS
        and not own & {keyword.arg for keyword in node.exc.keywords}
    ]


@second_tier("classes of errors and their entries stay; this reads who raises them")
def test_errors_of_the_executor_have_fields_of_their_own() -> None:
    found = {file.path for file in files_in("executor") if unplaced(file)}
    assert found - {path for path, _ in INSIDE} == WHOLE.keys()
    text = "raise StateError('no')\nraise StateError('no', way_out='go')\nraise x\n"
    assert unplaced(SourceFile("executor/x.py", text)) == [1]


@second_tier("classes of errors and their entries stay; this reads who raises them")
def test_bare_errors_are_found() -> None:
    text = "def f(x):\n raise KeyError\n raise KeyError('no') from x\n raise PlanError('no')\n"
    legal = structured(files_in(*PRODUCT))
    assert bare(SourceFile("planner/x.py", text), legal) == [(2, "KeyError"), (3, "KeyError")]


# --- codes ----------------------------------------------------------------------------------------

PAGE = (ROOT / write_errors.PAGE).read_text(encoding="utf-8")


def codeless(file: SourceFile) -> list[int]:
    """Lines that make an error of the base class, which has no code: `E(...)`, `E.of(...)`."""
    called = [(node.lineno, node.func) for node in file.nodes if isinstance(node, ast.Call)]
    makers = [(line, f.value if isinstance(f, ast.Attribute) else f) for line, f in called]
    return [line for line, maker in makers if isinstance(maker, ast.Name) and maker.id == BASE]


@second_tier("classes with a code stay, each with its entry")
def test_every_error_has_a_code() -> None:
    assert not [
        (file.path, k)
        for file in (*files_in(*PRODUCT), *files_in("scripts"))
        for k in codeless(file)
    ]
    text = f"raise {BASE}('no')\nraise {BASE}.of(e, 'x')\nraise PlanError('no')\n"
    assert codeless(SourceFile("planner/x.py", text)) == [1, 2]
    coded = write_errors.classes()
    known = {MeshwrightError}
    for error in coded.values():
        known |= {error, *error.__subclasses__()}  # those without a code have their parent's
    assert {error.__name__ for error in known} >= structured(files_in(*PRODUCT))


@pytest.mark.parametrize(("code", "error"), write_errors.classes().items())
def test_a_code_has_its_entry(code: str, error: type[MeshwrightError]) -> None:
    assert re.fullmatch(r"MW[1-4]\d\d", code)
    assert error.PLACE and error.LEGAL and error.WAY_OUT
    assert write_errors.entry(code, error) in PAGE


@second_tier("plans for half of the entries; the change tier compares the fields of each")
def test_messages_of_the_page_are_those_that_are_raised() -> None:
    assert write_errors.page() == PAGE
