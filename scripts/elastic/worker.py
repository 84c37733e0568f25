"""One rank of a run that hosts leave and join. Its host is lost where its trial says so.

    torchrun ... -m scripts.elastic.worker FOLDER STEPS

`struck.<host>` in the folder holds a phase: the rank on that host halts where it comes into the
phase, says so in `halted.<host>`, and is killed with its host meanwhile. Every loss is a line of
`losses.jsonl`, with the number of hosts.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers import logging as transformers_logging

from meshwright import Overrides, distributed, fit
from meshwright.executor.files import atomic_folder
from meshwright.executor.ranks import launch
from meshwright.executor.ranks.watchdog import progress

ROWS, LENGTH, SAMPLES, SAVE_EVERY = 12, 32, 30, 4
HOST = "TRIAL_HOST"
STRIKE_STEP = 6  # phases of a step: those of this one, or the first after it
SLOW_S = 1.0  # a step without the lost host, after the first few: it shall come back to a run

# the runtime's names of phases, and names for what is no phase of its own
START, JOINING, PLANNED = "start", "joining the process group", "with a plan, before the first step"
LOADING, DATA, USER = "loading a checkpoint", "reading data", "optimizer step"
RENAME = "putting a save in its place"
BEFORE_STEPS = (START, JOINING, PLANNED, LOADING)
PHASES = (
    *BEFORE_STEPS, DATA, "preparing the step", "forward", "backward", "reducing gradients", USER,
    "evaluating a batch", "saving a checkpoint", RENAME,
)  # fmt: skip


class Tokens:
    """Rows of tokens by number."""

    def __init__(self, size: int, strike: Strike) -> None:
        self.size, self.strike = size, strike

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        self.strike.at(DATA)
        draw = torch.Generator().manual_seed(number)
        start = torch.randint(64, (1,), generator=draw)
        ids = (start + torch.arange(LENGTH) * (1 + number % 3)) % 64
        return {"input_ids": ids, "labels": ids}


class Strike:
    """Halts this rank in the phase that the trial wrote for its host, once it has been trained for
    some steps (a phase of the start: at once)."""

    def __init__(self, folder: Path, host: str) -> None:
        self.halted = folder / f"halted.{host}"
        asked = folder / f"struck.{host}"
        self.phase = asked.read_text() if asked.exists() and not self.halted.exists() else ""
        self.step = 0

    def at(self, phase: str) -> None:
        if phase != self.phase or (phase not in BEFORE_STEPS and self.step < STRIKE_STEP):
            return
        self.halted.touch()
        time.sleep(600)

    @contextmanager
    def watching(self) -> Any:
        """Inside, what the runtime says that it enters is a phase, too."""
        enter, rename = progress.enter, atomic_folder._rename

        def entering(name: str, **details: Any) -> None:
            enter(name, **details)
            self.at(name)

        def renaming(source: Path, target: Path) -> None:
            rename(source, target)
            self.at(RENAME)

        progress.enter = entering  # type: ignore[method-assign]
        atomic_folder._rename = renaming
        yield


def model() -> GPT2LMHeadModel:
    transformers_logging.set_verbosity_error()
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=64, n_positions=LENGTH, n_embd=48, n_layer=2, n_head=4, bos_token_id=0,
        eos_token_id=0, attn_pdrop=0.0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def train(folder: Path, steps: int, hosts: tuple[int, ...], strike: Strike) -> str:
    """Train to the end, or until hosts change; returns why the run ended."""

    def log(metrics: Mapping[str, Any]) -> None:
        if "loss" in metrics:
            line = {"step": metrics["step"], "loss": metrics["loss"], "ranks": launch.world_size()}
            with (folder / "losses.jsonl").open("a") as file:
                file.write(json.dumps({**line, "time_s": time.time()}) + "\n")

    def optimizer(result: Any) -> torch.optim.Optimizer:
        strike.at(PLANNED)
        made = torch.optim.AdamW(result.parameters(), lr=1e-3)

        def count(*_: Any) -> None:
            strike.step += 1
            strike.at(USER)
            if launch.world_size() < max(hosts, default=1) and strike.step > STRIKE_STEP:
                time.sleep(SLOW_S)

        made.register_step_post_hook(count)
        return made

    return fit(
        model(),
        Tokens(SAMPLES, strike),
        planning={"global_batch_size": ROWS, "precision": "fp32", "overrides": Overrides(pp=1)},
        optimizer=optimizer,
        steps=steps,
        evaluation=Tokens(ROWS, strike),
        evaluate_every=5,
        folder=folder / "run",
        save_every=SAVE_EVERY,
        hosts=hosts,
        log_to=log,
        log_every=1,
        seed=3,
    ).ended


def main() -> None:
    folder, steps = Path(sys.argv[1]), int(sys.argv[2])
    hosts = tuple(int(x) for x in sys.argv[3].split(",")) if len(sys.argv) > 3 else ()
    torch.set_num_threads(1)
    strike = Strike(folder, os.environ[HOST])
    strike.at(START)
    with strike.watching(), distributed("gloo"):
        ended = train(folder, steps, hosts, strike)
        if launch.rank() == 0 and ended == "steps":
            (folder / "done").touch()


if __name__ == "__main__":
    main()
