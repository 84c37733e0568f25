"""Meshwright takes one name: users may have a `planner` or `profiles` of their own beside it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.helpers.source_files import PACKAGE, PRODUCT, ROOMS, ROOT, files_in
from tests.helpers.tiers import second_tier

pytestmark = second_tier("the rules of imports over the tree (test_architecture) stay")
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
result = meshwright.auto_parallelize(
    model,
    meshwright.Cluster.local(1, measure=False),
    example_inputs=batch,
    global_batch_size=4,
    loss_fn=nn.functional.mse_loss,
    precision="fp32",
    profile=False,
)
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
        [sys.executable, *arguments],
        cwd=cwd,
        env=ENVIRONMENT | environment,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
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


def test_wheel_holds_the_package_alone(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names - {"bin"} == {PACKAGE}
    found = {path.relative_to(installed).as_posix() for path in installed.rglob("*.*")}
    assert shipped() - found == set()


def test_source_distribution_holds_what_a_wheel_is_built_from(source: Path, tmp_path: Path) -> None:
    code = "import sys; from setuptools import build_meta; build_meta.build_sdist(sys.argv[1])"
    _python("-c", code, str(tmp_path), cwd=source)
    (archive,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(archive) as opened:
        files = {m.name.partition("/")[2] for m in opened.getmembers() if m.isfile()}
    assert {*shipped(), "pyproject.toml"} - files == set()
    assert not {name for name in files if name.split("/")[0] in ROOMS}


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
