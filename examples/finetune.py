"""Train a small GPT-2 on the source files of networkx; stop, and resume on another number of ranks.

    torchrun --nproc-per-node 4 examples/finetune.py --folder run --steps 60
    torchrun --nproc-per-node 2 examples/finetune.py --folder run --steps 120

After Ctrl-C, a SIGTERM or a lost host the same command resumes from the newest checkpoint in the
folder, at the sample after it. `metrics.jsonl` has the losses of all runs.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
from pathlib import Path

import torch
import transformers
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel

from meshwright import Cluster, distributed, fit

ROWS, LENGTH = 16, 128


class Windows(Dataset[dict[str, torch.Tensor]]):
    """Consecutive windows of bytes; every tenth is for evaluation."""

    def __init__(self, *, evaluation: bool) -> None:
        spec = importlib.util.find_spec("networkx")
        assert spec is not None and spec.origin is not None
        files = sorted(Path(spec.origin).parent.glob("algorithms/*.py"))
        text = bytearray(b"\n".join(file.read_bytes() for file in files))
        windows = torch.frombuffer(text, dtype=torch.uint8).long().split(LENGTH)[:-1]
        self.windows = [w for k, w in enumerate(windows) if (k % 10 == 9) == evaluation]

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, number: int) -> dict[str, torch.Tensor]:
        ids = self.windows[number]
        return {"input_ids": ids, "labels": ids}


def make_model() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256, n_positions=LENGTH, n_embd=128, n_layer=4, n_head=4, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--folder", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    ranks = int(os.environ["WORLD_SIZE"])
    with distributed("gloo"):
        done = fit(
            make_model(),
            Windows(evaluation=False),
            planning={
                "cluster": Cluster.local(ranks, "cpu"),
                "global_batch_size": ROWS,
                "precision": "fp32",
            },
            optimizer=lambda result: torch.optim.AdamW(result.parameters(), lr=1e-3),
            steps=args.steps,
            evaluation=torch.utils.data.Subset(Windows(evaluation=True), range(4 * ROWS)),
            evaluate_every=30,
            folder=args.folder,
            save_every=30,
            log_to=args.folder / "metrics.jsonl",
            log_every=10,
        )
    if int(os.environ["RANK"]) == 0 and done.eval_loss is not None:
        print(
            f"{done.steps} steps on {ranks} ranks: evaluation loss {done.eval_loss:.3f}, "
            f"perplexity {math.exp(done.eval_loss):.1f} a byte"
        )


if __name__ == "__main__":
    main()
