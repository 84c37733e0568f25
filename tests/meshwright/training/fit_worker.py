"""One rank of a launch: runs that are stopped by a signal and go on under other plans."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

from meshwright import ParallelModel, fit
from meshwright.executor.errors import StateError
from meshwright.executor.ranks import launch
from meshwright.training import Fitted
from tests.meshwright.data.feeding import ROWS, Tokens, batch_of, planned
from tests.parity.parity_launch import on_ranks, run_all

SEED, STEPS, STOPPED_AT = 3, 6, 2


def run(result: ParallelModel, folder: Path, **given: Any) -> tuple[Fitted, dict[int, float]]:
    """How it ended, and the losses by step that rank 0 has logged."""
    losses: dict[int, float] = {}

    def log(metrics: Any) -> None:
        if "loss" in metrics:
            losses[int(metrics["step"])] = metrics["loss"]

    options = {
        "optimizer": lambda result: torch.optim.SGD(result.parameters(), lr=0.5),
        "schedule": lambda optimizer: torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0),
        "max_grad_norm": None,
        "folder": folder,
        "log_to": log,
        "log_every": 1,
        "seed": SEED,
        **given,
    }
    return fit(result, Tokens(), **options), losses


def signalled(number: int, rank: int) -> Any:
    """An optimizer after whose step `STOPPED_AT` one rank gets a signal."""

    def make(result: ParallelModel) -> torch.optim.Optimizer:
        optimizer = torch.optim.SGD(result.parameters(), lr=0.5)
        steps = []

        def count(*_: Any) -> None:
            steps.append(1)
            if len(steps) == STOPPED_AT and launch.rank() == rank:
                os.kill(os.getpid(), number)

        optimizer.register_step_post_hook(count)
        return optimizer

    return make


def stopped_and_resumed(folder: Path) -> dict[str, Any]:
    stop = signalled(signal.SIGTERM, rank=2)
    first, before = run(planned("dp2×tp2"), folder, steps=STEPS, optimizer=stop)
    second, after = run(planned("pp2×dp2"), folder, steps=STEPS)
    return {
        "ended": [first.ended, second.ended],
        "steps": [first.steps, second.steps],
        "losses": [before[k] for k in sorted(before)] + [after[k] for k in sorted(after)],
        "logged": [sorted(before), sorted(after)],
    }


def saved_and_gone_on(folder: Path) -> dict[str, Any]:
    """SIGUSR1, checkpoints every 5 steps, of which 2 are kept; one epoch of data."""
    save = signalled(signal.SIGUSR1, rank=1)
    done, _ = run(planned("dp4"), folder, optimizer=save, keep=2, save_every=5)
    return {
        "ended": done.ended,
        "steps": done.steps,
        "kept": sorted(path.name for path in folder.iterdir()),
    }


def evaluated_until_no_better(folder: Path) -> dict[str, Any]:
    """Without learning no evaluation is better than the first; the run ends by itself."""
    still: Any = lambda result: torch.optim.SGD(result.parameters(), lr=0.0)  # noqa: E731
    given = {"optimizer": still, "steps": 50}
    done, _ = run(
        planned("dp4"), folder, **given, evaluation=Tokens(8), evaluate_every=2, patience=3
    )
    return {"ended": done.ended, "steps": done.steps, "eval": done.eval_loss}


def ended_early_on_one_rank() -> dict[str, Any]:
    """What is said where a rank has a batch less, of an iterable of the user's own."""
    batches = [batch_of(range(ROWS))] * (1 if launch.rank() == 2 else 2)
    still: Any = lambda result: torch.optim.SGD(result.parameters(), lr=0.0)  # noqa: E731
    try:
        fit(planned("dp4"), batches, optimizer=still)
    except StateError as error:
        return {"says": str(error)}
    return {"says": "nothing"}


def main(folder: Path) -> None:
    runs = {
        "stopped": lambda: stopped_and_resumed(folder / "stopped"),
        "saved": lambda: saved_and_gone_on(folder / "saved"),
        "unequal": ended_early_on_one_rank,
        "patience": lambda: evaluated_until_no_better(folder / "none"),
    }
    run_all(runs, folder, "")


if __name__ == "__main__":
    on_ranks(main)
