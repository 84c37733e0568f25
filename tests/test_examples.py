"""Every example runs, as its docstring says; the README's ten lines are one of them."""

import re
import subprocess
import sys
from pathlib import Path

from tests.helpers.launching import ROOT, free_port, launch
from tests.helpers.tiers import second_tier

EXAMPLES = ROOT / "examples"

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


@second_tier(MORE)
def test_the_quickstart_learns_as_one_device_does() -> None:
    done = launch(EXAMPLES / "quickstart.py", "--steps", "4", ranks=2, timeout_s=300)
    assert done.ok, done.tail()
    difference = re.search(r"largest relative difference (\S+)\)", done.ranks[0].stdout)
    assert difference and float(difference[1]) < 1e-4


@second_tier(MORE)
def test_fine_tuning_goes_on_with_other_ranks(tmp_path: Path) -> None:
    losses = []
    for ranks, steps in ((2, 30), (1, 60)):
        given = ("--folder", str(tmp_path), "--steps", str(steps))
        done = launch(EXAMPLES / "finetune.py", *given, ranks=ranks, timeout_s=300)
        assert done.ok, done.tail()
        said = re.search(
            rf"{steps} steps on {ranks} ranks: evaluation loss (\S+),", done.ranks[0].stdout
        )
        assert said
        losses.append(float(said[1]))
    assert losses[1] < losses[0]


@second_tier(MORE)
def test_experts_are_shared_out() -> None:
    done = launch(EXAMPLES / "experts.py", ranks=2, timeout_s=200)
    assert done.ok, done.tail()
    assert "{'experts.experts.up.weight': 2}" in done.ranks[0].stdout


@second_tier(MORE)
def test_adapters_are_loaded_as_they_were_trained(tmp_path: Path) -> None:
    done = launch(EXAMPLES / "adapters.py", str(tmp_path / "adapters"), ranks=2, timeout_s=200)
    assert done.ok, done.tail()
    trained, loaded = re.findall(r"(?:evaluated|loaded) (\S+?)[,\n]", done.ranks[0].stdout)
    assert abs(float(trained) - float(loaded)) < 1e-3


@second_tier(MORE)
def test_a_plan_for_hardware_elsewhere_is_rehearsed() -> None:
    command = [sys.executable, EXAMPLES / "rehearse.py"]
    said = subprocess.check_output(command, text=True, timeout=300, cwd=ROOT)
    assert "\n0 mismatches\n" in said and said.splitlines()[-1] == "fits"


def test_every_example_is_run() -> None:
    texts = [
        file.read_text() for file in (Path(__file__), *ROOT.glob("tests/**/test_leaf_ranks.py"))
    ]
    run = {file.name for file in EXAMPLES.glob("*.py") if any(file.name in t for t in texts)}
    assert run == {file.name for file in EXAMPLES.glob("*.py")} and len(run) >= 8
