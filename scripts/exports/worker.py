"""A rank of `side_by_side`: a small GPT-2 trained by DeepSpeed or accelerate, or by the plan that
the same file means here; prints the loss of each step.

    torchrun --standalone --nproc-per-node 2 -m scripts.exports.worker deepspeed ds_config.json

Imports of each software stand where it runs, in an environment of its own.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator

import torch
import torch.distributed as dist
from transformers import GPT2Config, GPT2LMHeadModel

ROWS, LENGTH, STEPS, RATE = 8, 32, 3, 1e-3
NO_DROPOUT = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0}
RANK, RANKS = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))


def made() -> tuple[GPT2LMHeadModel, torch.Tensor]:
    """The same weights and rows on every rank."""
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_embd": 64, "n_head": 4, "vocab_size": 512, "n_positions": 64}
    model = GPT2LMHeadModel(GPT2Config(**sizes, **NO_DROPOUT, bos_token_id=1, eos_token_id=1))
    return model, torch.randint(0, 500, (ROWS, LENGTH), generator=torch.Generator().manual_seed(1))


def by_deepspeed(config: str) -> Iterator[float]:
    """Losses of DeepSpeed's engine."""
    import deepspeed  # type: ignore[import-not-found]

    model, rows = made()
    deepspeed.init_distributed(dist_backend="gloo")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    engine, *_ = deepspeed.initialize(model=model, config=config, optimizer=optimizer)
    for _ in range(STEPS):
        total = torch.zeros(())
        for part in rows.chunk(RANKS)[RANK].split(engine.train_micro_batch_size_per_gpu()):
            loss = engine(input_ids=part, labels=part).loss
            engine.backward(loss)
            engine.step()
            total += loss.detach() / engine.gradient_accumulation_steps()
        torch.distributed.all_reduce(total)
        yield total.item() / RANKS


def by_accelerate(config: str) -> Iterator[float]:
    """Losses under accelerate, told by the environment that its launch makes. On CPUs it runs
    `DistributedDataParallel` whatever the file says."""
    from accelerate import Accelerator
    from accelerate.commands.launch import _validate_launch_command, launch_command_parser
    from accelerate.utils.launch import prepare_multi_gpu_env

    asked = ["--config_file", config, "--num_processes", str(RANKS), "script.py"]
    args, *_ = _validate_launch_command(launch_command_parser().parse_args(asked))
    told = prepare_multi_gpu_env(args)
    os.environ.update({k: v for k, v in told.items() if k.startswith(("FSDP", "ACCELERATE"))})
    accelerator = Accelerator(cpu=True)
    model, rows = made()
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    model, optimizer = accelerator.prepare(model, optimizer)
    for _ in range(STEPS):
        optimizer.zero_grad()
        part = rows.chunk(RANKS)[RANK]
        loss = model(input_ids=part, labels=part).loss
        accelerator.backward(loss)
        optimizer.step()
        yield accelerator.gather(loss.detach().reshape(1)).mean().item()


def by_ours(config: str) -> Iterator[float]:
    """Losses of `train_step` under the plan that the file means."""
    from meshwright import Cluster, distributed
    from meshwright.configurations import configured

    with distributed("gloo"):
        model, rows = made()
        batch = {"input_ids": rows, "labels": rows}
        found = configured(
            config, model, Cluster.detect(), example_inputs=batch, target="eager",
            **({"global_batch_size": ROWS} if config.endswith(".yaml") else {}),
        )  # fmt: skip
        optimizer = torch.optim.AdamW(found.result.parameters(), lr=RATE)
        for _ in range(STEPS):
            optimizer.zero_grad()
            loss = found.result.train_step(batch)
            optimizer.step()
            yield float(loss)


BY = {"deepspeed": by_deepspeed, "accelerate": by_accelerate, "ours": by_ours}

if __name__ == "__main__":
    for value in BY[sys.argv[1]](sys.argv[2]):
        if RANK == 0:
            print(f"loss {value:.6f}", flush=True)
    if dist.is_initialized():  # threads of a group that is left end a process that ends
        dist.barrier()
        dist.destroy_process_group()
