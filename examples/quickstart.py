"""Train a byte-level GPT-2 on the source files of Python's standard library, by a plan for this
machine.

Run it by `scripts/quickstart`: four processes plan together and train. Rank 0 then repeats the
steps on one device and compares the losses.
"""

from __future__ import annotations

import argparse
import os
import sys
import sysconfig
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright import Cluster, auto_parallelize, distributed

BATCH, LENGTH = 16, 128
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))  # by torchrun


def make_model() -> GPT2LMHeadModel:
    """A byte-level GPT-2: the same weights in every process, and no dropout, so that losses can be
    compared exactly."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=LENGTH,
        n_embd=192,
        n_layer=4,
        n_head=6,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
        bos_token_id=0,
        eos_token_id=0,
    )
    return GPT2LMHeadModel(config)


def batches() -> Iterator[dict[str, torch.Tensor]]:
    """Random windows of the standard library's source files, the same in every process."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))[:60]
    data = torch.frombuffer(bytearray(b"\n".join(f.read_bytes() for f in files)), dtype=torch.uint8)
    generator = torch.Generator().manual_seed(1)
    while True:
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator)
        ids = torch.stack([data[s : s + LENGTH] for s in starts]).long()
        yield {"input_ids": ids, "labels": ids}


def train(
    step: Callable[[dict[str, torch.Tensor]], torch.Tensor], parameters: Any, steps: int, name: str
) -> tuple[list[float], float]:
    """`steps` optimizer steps; returns the losses and the median seconds of a step."""
    optimizer = torch.optim.AdamW(parameters, lr=1e-3)
    losses, times = [], []
    for k, batch in zip(range(steps), batches(), strict=False):
        started = time.perf_counter()
        optimizer.zero_grad()
        losses.append(step(batch).item())
        optimizer.step()
        times.append(time.perf_counter() - started)
        if RANK == 0 and (k % 10 == 0 or k == steps - 1):
            sys.stderr.write(f"{name}: step {k + 1:3d}/{steps}, loss {losses[-1]:.3f}\n")
    return losses, sorted(times)[len(times) // 2]


def one_device(steps: int) -> tuple[list[float], float]:
    """The same steps in plain PyTorch on one device."""
    model = make_model()

    def step(batch: dict[str, torch.Tensor]) -> torch.Tensor:
        loss = model(**batch).loss
        loss.backward()
        return loss.detach()

    return train(step, model.parameters(), steps, "one device")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=60)
    steps = parser.parse_args().steps
    transformers.logging.set_verbosity_error()
    with distributed("gloo"):
        result = auto_parallelize(
            make_model(),
            Cluster.local(RANKS, "cpu"),
            example_inputs=next(batches()),
            global_batch_size=BATCH,
            precision="fp32",
        )
        if RANK == 0:
            print(result.report, flush=True)
        losses, step_s = train(result.train_step, result.parameters(), steps, f"{RANKS} ranks")
        if RANK == 0:
            alone, alone_s = one_device(steps)
            apart = max(abs(a - b) / b for a, b in zip(losses, alone, strict=True))
            print(
                f"\nloss {losses[0]:.3f} -> {losses[-1]:.3f} on {RANKS} ranks, {alone[-1]:.3f} on "
                f"one device after the same "
                f"{steps} steps (largest relative difference {apart:.1e}); {step_s * 1e3:.0f} ms a "
                f"step against {alone_s * 1e3:.0f} ms, "
                f"predicted {result.prediction.step_time_s * 1e3:.0f} ms"
            )


if __name__ == "__main__":
    main()
