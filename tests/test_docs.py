"""The documents name files that exist, the README stays a page, and every example runs, as its
docstring says; the README's ten lines are one of them."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.launching import ROOT, free_port, launch
from tests.helpers.tiers import second_tier

EXAMPLES = ROOT / "examples"
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")])
FOLDERS = "profiles|costmodel|planner|executor|meshwright|tests|scripts|docs|examples"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_named_files_exist(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    named = set(re.findall(rf"`((?:{FOLDERS})/[\w/.*]*)", text))
    assert not [name for name in named if not [*ROOT.glob(name.rstrip("/"))]]
    linked = set(re.findall(r"\]\(([\w./]+)\)", text))
    assert not [name for name in linked if not (document.parent / name).exists()]
    modules = set(re.findall(r"python -m (scripts[.\w]+)", text))
    assert not [name for name in modules if not (ROOT / f"{name.replace('.', '/')}.py").exists()]


def test_the_readme_is_a_page() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 150


MORE = "that the README's lines are the example's stays, and what the examples call has its tests"


def test_ten_lines_are_the_readme_s() -> None:
    code = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    lines = (EXAMPLES / "ten_lines.py").read_text()
    assert code[0] == lines.replace("\n\nfrom mesh", "\nfrom mesh")


@second_tier(MORE)
def test_ten_lines_train(tmp_path: Path) -> None:
    lines = (EXAMPLES / "ten_lines.py").read_text()
    for large, small in (("n_layer=4", "n_layer=1"), ("256", "16"), ("(10)", "(2)")):
        assert large in lines
        lines = lines.replace(large, small)
    (tmp_path / "smaller.py").write_text(lines)
    done = launch(tmp_path / "smaller.py", ranks=4, timeout_s=300)
    assert done.ok, done.tail()


@second_tier(MORE)
def test_an_operator_of_one_s_own_is_split_by_its_rule() -> None:
    done = launch(EXAMPLES / "custom_rule.py", ranks=2, timeout_s=200)
    assert done.ok, done.tail()
    assert "'up': [32, 32], 'down': [32, 32]" in done.ranks[0].stdout


@second_tier(MORE)
def test_overrides_are_planned_without_hardware() -> None:
    command = [sys.executable, EXAMPLES / "overrides.py"]
    said = subprocess.check_output(command, text=True, timeout=300, cwd=ROOT)
    costs = [float(x) for x in re.findall(r"s a step, ([+-][\d.]+)%", said)]
    assert len(costs) == 4 and min(costs) >= 0
    assert "tp=3" in said.splitlines()[-1]


@second_tier(MORE)
def test_two_hosts_train_and_go_on_from_their_checkpoint(tmp_path: Path) -> None:
    losses = []
    for start in range(2):
        port = free_port()
        command = [
            sys.executable, "-m", "torch.distributed.run", "--nnodes", "2",
            "--nproc-per-node", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint",
            f"127.0.0.1:{port}", "--rdzv-id", str(start), EXAMPLES / "two_hosts.py", tmp_path,
        ]  # fmt: skip
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        hosts = [subprocess.Popen(command, text=True, cwd=ROOT, **pipes) for _ in range(2)]
        said = [host.communicate(timeout=200) for host in hosts]
        assert [host.returncode for host in hosts] == [0, 0], said
        (line,) = [out for out, _ in said if "loss" in out]
        losses.append(float(line.split("loss ")[1].split()[0]))
    assert losses[1] < losses[0]
    assert (tmp_path / "plan.json").exists()
