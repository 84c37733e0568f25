"""Meshwright takes one name: users may have a `planner` or `profiles` of their own beside it. A
process loads no search for a plan file, and no planner for the executor."""

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

import meshwright
from meshwright import Overrides
from tests.helpers.source_files import PACKAGE, PRODUCT, ROOMS, ROOT, files_in
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import net, planned

RULES = second_tier("the rules of imports over the tree (test_architecture) stay")
SHIPPED = ("pyproject.toml", "README.md", "LICENSE", *PRODUCT)
ENVIRONMENT = {"PATH": os.environ["PATH"], "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
OWN = ("profiles.py", "executor.py", "costmodel.py", "planner/__init__.py")
FORMS = (".j2", ".css", ".js")  # of the report's page
TRAINS = """
import torch
from torch import nn

import meshwright

model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
batch = (torch.randn(4, 4), torch.randn(4, 2))
cluster, loss_fn = meshwright.Cluster.local(1, measure=False), nn.functional.mse_loss
given = {"example_inputs": batch, "loss_fn": loss_fn, "precision": "fp32", "profile": False}
result = meshwright.auto_parallelize(model, cluster, global_batch_size=4, **given)
assert float(result.train_step(batch)) > 0
print(meshwright.__file__)
"""


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the checkout, links as links, to build in."""
    folder = tmp_path_factory.mktemp("source")
    for name in (*SHIPPED, "scripts", "tests"):
        if (ROOT / name).is_dir():
            unwanted = shutil.ignore_patterns("__pycache__", "*.csv")
            shutil.copytree(ROOT / name, folder / name, symlinks=True, ignore=unwanted)
        else:
            shutil.copy(ROOT / name, folder)
    return folder


@pytest.fixture(scope="module")
def installed(source: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that Meshwright's wheel is installed into."""
    folder = tmp_path_factory.mktemp("installed")
    command = "-m pip install --quiet --disable-pip-version-check --no-deps --no-build-isolation"
    _python(*command.split(), "--target", str(folder), str(source), cwd=source)
    return folder


def _python(*arguments: str, cwd: Path, **environment: str) -> str:
    run = subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=ENVIRONMENT | environment, timeout=300,
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr[-3000:]
    return run.stdout


def shipped() -> set[str]:
    """What a distribution has to hold, by paths under which it is imported."""
    paths = {
        file.module.replace(".", "/") + "/__init__" * file.is_package for file in files_in(*PRODUCT)
    }
    catalog = (ROOT / "profiles" / "catalog").glob("*.json")
    page = [file for file in (ROOT / "planner" / "page").iterdir() if file.suffix in FORMS]
    return (
        {f"{path}.py" for path in paths}
        | {f"{PACKAGE}/profiles/catalog/{file.name}" for file in catalog}
        | {f"{PACKAGE}/planner/page/{file.name}" for file in page}
    )


@RULES
def test_wheel_holds_the_package_alone(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names - {"bin"} == {PACKAGE}
    found = {path.relative_to(installed).as_posix() for path in installed.rglob("*.*")}
    assert shipped() - found == set()


@RULES
def test_source_distribution_holds_what_a_wheel_is_built_from(source: Path, tmp_path: Path) -> None:
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    _python("-c", code, str(tmp_path), cwd=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        files = {m.name.partition("/")[2] for m in opened.getmembers() if m.isfile()}
    assert {*shipped(), "pyproject.toml"} - files == set()
    assert not {name for name in files if name.split("/")[0] in ROOMS}


@RULES
@pytest.mark.parametrize("kind", ["wheel", "checkout"])
def test_users_have_names_of_their_own(installed: Path, tmp_path: Path, kind: str) -> None:
    """A script beside them plans and trains a step."""
    for name in OWN:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("raise ImportError('a module of the user was imported')")
    (tmp_path / "script.py").write_text(TRAINS)
    root = installed if kind == "wheel" else ROOT
    used = _python("script.py", cwd=tmp_path, PYTHONPATH=str(root))
    assert Path(used.strip()).parent.parent == root


SEARCH = (
    "meshwright.planner.search", "meshwright.planner.drafts", "meshwright.planner.alternatives",
    "meshwright.planner.inter_op", "meshwright.planner.intra_op", "pulp", "highspy",
)  # fmt: skip
PLANNER = (
    *SEARCH, "meshwright.planner.tracing", "meshwright.planner.report",
    "meshwright.planner.pricing",
)  # fmt: skip


def loaded_by(program: str, *arguments: str) -> set[str]:
    """Modules that a fresh process has loaded when the program is done."""
    told = f"{program}\nimport sys\nprint('\\n'.join(['loaded:', *sys.modules]))"
    said = _python("-c", told, *arguments, cwd=ROOT, **os.environ)
    return set(said.partition("loaded:\n")[2].splitlines())


def within(modules: set[str], rooms: tuple[str, ...]) -> list[str]:
    return sorted(m for m in modules for room in rooms if m == room or m.startswith(f"{room}."))


@RULES
def test_a_rank_with_a_plan_file_loads_no_search_and_no_solver(tmp_path: Path) -> None:
    planned(net(), overrides=Overrides(num_microbatches=2)).plan.save(tmp_path / "plan.json")
    program = """
import sys
from tests.helpers.tiny import ROWS, batch, net, planned
result = planned(net(), plan=sys.argv[1])
assert float(result.train_step(batch(ROWS))) > 0
assert "nothing was searched" in str(result.report)
"""
    loaded = loaded_by(program, str(tmp_path / "plan.json"))
    assert "meshwright.executor.runtime.runtime" in loaded
    assert within(loaded, SEARCH) == []


@RULES
def test_the_executor_loads_plans_and_operators_of_the_planner_only() -> None:
    program = """
import pkgutil
from importlib import import_module
import meshwright.executor
for module in pkgutil.walk_packages(meshwright.executor.__path__, "meshwright.executor."):
    import_module(module.name)
"""
    loaded = loaded_by(program)
    assert "meshwright.executor.stages.build" in loaded
    assert within(loaded, PLANNER) == []


@RULES
def test_errors_are_imported_without_who_raises_them() -> None:
    names = "InfeasibleError, OverrideError, PlanError, TraceError"
    loaded = loaded_by(f"from meshwright import {names}")
    assert within(loaded, (*SEARCH, "meshwright.planner.tracing", "meshwright.executor")) == []


def test_every_public_name_is_where_it_is_said_to_be() -> None:
    for name in meshwright.__all__:
        assert getattr(meshwright, name).__name__ == name
