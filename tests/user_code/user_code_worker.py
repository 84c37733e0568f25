"""One rank of a launch of user models: what `user_runs.prepare` left in the folder, in turn."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from tests.parity.parity_launch import on_ranks, run_all
from tests.user_code.user_runs import run


def main(folder: Path) -> None:
    names = sorted(file.stem for file in folder.glob("*.run"))
    run_all({name: partial(run, folder, name) for name in names}, folder, "")


if __name__ == "__main__":
    on_ranks(main)
