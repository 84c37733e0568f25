"""Recipes and first steps: what their pages say is run, in the order of the page.

A block of `bash` is run in a folder of the page's own, in which `my_models.py` lies; one of
`python` or `toml` is the file that its first line names; `console` and `yaml` are for what can't be
run here, which the page says.
"""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from meshwright.cli import COMMANDS, parser_of
from tests.helpers.launching import ROOT
from tests.helpers.tiers import second_tier

DOCS = ROOT / "docs"
PAGES = sorted(file for folder in ("start", "recipes") for file in DOCS.glob(f"{folder}/*.md"))
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
NAME = re.compile(r"# ([\w.]+\.(?:py|toml))\n")
TIMEOUT_S = 900


def blocks(page: Path) -> list[tuple[str, str]]:
    return BLOCK.findall(page.read_text(encoding="utf-8"))


RUN = [page for page in PAGES if any(kind == "bash" for kind, _ in blocks(page))]


def commands(text: str) -> list[str]:
    """Lines of a shell that call `meshwright`, from there on, without what follows them."""
    lines = text.replace("\\\n", " ").splitlines()
    calls = [re.split(r"(?:^|-m )meshwright ", line, maxsplit=1)[1:] for line in lines]
    return [re.split(r" \|\| | > | & ?$", call[0])[0] for call in calls if call]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_blocks_are_run_or_said_to_be_untried(page: Path) -> None:
    for kind, text in blocks(page):
        if kind in ("python", "toml"):
            assert NAME.match(text), f"{page}: a block of {kind} whose first line names no file"
        elif kind in ("console", "yaml"):
            said = "untried here" in page.read_text(encoding="utf-8").lower()
            assert said or page.stem == "several_nodes", page
        else:
            assert kind == "bash", f"{page}: {kind}"


def all_commands() -> list[str]:
    """Those of all pages but that of errors, whose messages begin with commands."""
    pages = {*DOCS.rglob("*.md"), *ROOT.glob("*.md")} - {DOCS / "reference" / "errors.md"}
    texts = [page.read_text(encoding="utf-8") for page in sorted(pages)]
    shells = [text for page in texts for text in re.findall(r"```\w*\n(.*?)```", page, re.DOTALL)]
    return [call for text in shells for call in commands(text) if "..." not in call]


def test_every_command_of_the_documents_is_one() -> None:
    calls = all_commands()
    assert len(calls) > 30
    for call in calls:
        arguments = shlex.split(call, comments=True)
        assert arguments[0] in COMMANDS, call
        parser_of([arguments[0]]).parse_args(arguments)


def test_recipes_are_run() -> None:
    assert len([page for page in RUN if page.parent.name == "recipes"]) == 13


@second_tier("that commands of the pages exist stays, and what they call has its tests")
@pytest.mark.parametrize("page", RUN, ids=lambda page: page.stem)
def test_a_page_runs(page: Path, tmp_path: Path) -> None:
    (tmp_path / "my_models.py").write_text((DOCS / "recipes" / "my_models.py").read_text())
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "REPOSITORY": str(ROOT),
        "OMP_NUM_THREADS": "1",
        "CUDA_VISIBLE_DEVICES": "",
        "MESHWRIGHT_CACHE": str(tmp_path / "cache"),
    }
    for kind, text in blocks(page):
        if name := NAME.match(text):
            (tmp_path / name[1]).write_text(text)
        elif kind == "bash":
            shell = ["bash", "-euo", "pipefail", "-c", text]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
            done = subprocess.run(
                shell, cwd=tmp_path, env=environment, text=True, timeout=TIMEOUT_S, check=False,
                **pipes,
            )  # fmt: skip
            assert done.returncode == 0, f"{page.name}:\n{text}\n{done.stdout[-4000:]}"
