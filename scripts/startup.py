"""Start-up: CPU seconds of commands that plan nothing, beside those of `import torch`.

    python -m scripts.startup [--times 3] [--record]

Each runs in a process of its own; the least of several times is shown, and its part of what the
import of torch takes in the same run, which does not depend on the machine. A plan and its report
are made first, so that `show`, `diff` and `report` have something to read. `--record` keeps the
table for the documents.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from scripts.recording.results import record

MODEL = """
import torch

def mlp():
    model = torch.nn.Sequential(*(torch.nn.Linear(64, 64) for _ in range(4)))
    return model, (torch.randn(4, 64), torch.randn(4, 64)), torch.nn.functional.mse_loss
"""
COMMANDS = (
    "--version", "--help", "plan --help", "show plan.json", "diff plan.json plan.json",
    "diff report.json report.json", "catalog", "catalog h100-sxm",
    "report report.json -o page.html",
)  # fmt: skip
OURS = (sys.executable, "-m", "meshwright")


def cpu_s(command: Sequence[str], times: int) -> float:
    """The least CPU seconds of a command in the working folder, its children's among them."""
    found = []
    for _ in range(times):
        before = os.times()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        after = os.times()
        user_s = after.children_user - before.children_user
        found.append(user_s + after.children_system - before.children_system)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--times", type=int, default=3, help="of each (default 3)")
    parser.add_argument("--record", action="store_true", help="keep the table for the documents")
    args = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        Path("mine.py").write_text(MODEL)
        plan = "plan mine:mlp --cluster dgx-h100 --batch 64 --pp 2 -o plan.json --json"
        with open("report.json", "w") as report:
            subprocess.run([*OURS, *plan.split()], check=True, stdout=report)
        torch_s = cpu_s([sys.executable, "-c", "import torch"], args.times)
        print(f"{'import torch':34} {torch_s:5.2f} CPU-s")
        rows.append({"command": "`import torch`", "CPU-s": torch_s, "of the import, %": 100})
        for line in COMMANDS:
            own_s = cpu_s([*OURS, *line.split()], args.times)
            print(f"meshwright {line:23} {own_s:5.2f} CPU-s, {own_s / torch_s:4.0%} of that")
            part = round(100 * own_s / torch_s)
            rows.append(
                {"command": f"`meshwright {line}`", "CPU-s": own_s, "of the import, %": part}
            )
        os.chdir("/")
    if args.record:
        record("startup", "python -m scripts.startup --record", title="Start-up", rows=rows)


if __name__ == "__main__":
    main()
