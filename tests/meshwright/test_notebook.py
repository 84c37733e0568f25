"""The notebook among the examples runs in a kernel of its own, from its first cell to its last."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.tiers import second_tier

RUN = """
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], as_version=4)
nbclient.NotebookClient(notebook, timeout=300, kernel_name="python3").execute()
nbformat.write(notebook, sys.argv[2])
"""
NOTEBOOK = Path(__file__).parents[2] / "examples" / "plan_and_train.ipynb"


def texts(cell: Any) -> str:
    return "".join(output.get("text", "") for output in cell["outputs"])


@second_tier("a kernel and two ranks are started; what the cells call has tests of its own")
def test_it_plans_shows_the_page_and_trains_on_two_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    nbformat = pytest.importorskip("nbformat", reason="pip install nbclient ipykernel")
    for name in ("nbclient", "ipykernel"):
        pytest.importorskip(name, reason="pip install nbclient ipykernel")
    root = str(NOTEBOOK.parents[1])
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells), "kept without outputs"
    run = tmp_path / "run.ipynb"
    subprocess.run([sys.executable, "-c", RUN, NOTEBOOK, run], cwd=tmp_path, check=True)
    notebook = nbformat.read(run, as_version=4)
    plan, page, _, ranks, log = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert "Chosen: " in texts(plan)
    (shown,) = page["outputs"]
    assert "<div><iframe srcdoc=" in shown["data"]["text/html"]
    assert "&lt;!doctype html" in shown["data"]["text/html"].lower()
    assert "step 60/60: loss " in texts(ranks)
    assert "5, 6, 7 is followed by [8, 9, 10, 11, 12, 13, 14, 15]" in texts(ranks)
    assert texts(log).count("tokens/s") == 6
