"""Exports of one rank of a launch: weights and adapters, written under several layouts and read by
transformers and peft, and disks that are full."""

from __future__ import annotations

import errno
import hashlib
import resource
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers

from meshwright import Overrides, ParallelModel, auto_parallelize
from meshwright.executor.ranks import launch
from tests.executor.export.export_models import (
    MODELS,
    ROWS,
    STEPS,
    adapted,
    batch,
    optimizer_of,
    trained_alone,
)
from tests.parity.parity_launch import on_ranks, run_all
from tests.user_code.user_runs import free_links

RANKS = 4
LAYOUTS: Mapping[str, Overrides] = {
    "dp2×tp2": Overrides(dp=2, tp=2, pp=1, zero=1),
    "pp2×tp2": Overrides(dp=1, tp=2, pp=2, num_microbatches=2),
    "pp2×dp2": Overrides(dp=2, tp=1, pp=2, num_microbatches=2),
    "zero3": Overrides(dp=4, tp=1, pp=1, zero=3),
    "ep2": Overrides(dp=4, tp=1, pp=1, ep=2),
}
EXPORTS = (
    ("llama", "zero3"), ("llama", "pp2×tp2"), ("gpt2", "dp2×tp2"), ("bert", "dp2×tp2"),
    ("mixtral", "ep2"), ("wrapped", "pp2×dp2"),
)  # fmt: skip
ADAPTERS = (
    ("llama", "dp2×tp2"), ("llama", "pp2×dp2"), ("llama", "zero3"), ("gpt2", "pp2×tp2"),
)  # fmt: skip
SHARD_BYTES = 20_000
FULL_BYTES = 8_000  # after which a file is full


def running(model: Any, layout: str) -> ParallelModel:
    return auto_parallelize(
        model,
        free_links(RANKS),
        example_inputs=batch(),
        global_batch_size=ROWS,
        precision="fp32",
        overrides=LAYOUTS[layout],
    )


def train(result: ParallelModel, steps: int = STEPS) -> tuple[list[float], torch.optim.Optimizer]:
    optimizer = optimizer_of([p for p in result.parameters() if p.requires_grad])
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        losses.append(float(result.train_step(batch())))
        optimizer.step()
    return losses, optimizer


def far(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return max(float((found[name] - x).abs().max()) for name, x in wanted.items())


def sums(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        found: torch.Tensor = model.eval()(input_ids=batch()["input_ids"]).logits
    return found


def export(folder: Path, name: str, layout: str) -> dict[str, Any]:
    """Of the untrained model the files' checksums; the trained one as transformers loads it."""
    model = MODELS[name]()
    result = running(model, layout)
    at = folder / f"{name}-{layout}"
    result.save_pretrained(at, max_shard_size=SHARD_BYTES)
    untrained = sums(at) if launch.rank() == 0 else {}
    train(result)
    whole = result.full_state_dict()
    result.save_pretrained(at, max_shard_size=SHARD_BYTES)
    result.save_pretrained(folder / f"{name}-{layout}-bf16", dtype=torch.bfloat16)
    if launch.rank() != 0:
        return {}
    alone = MODELS[name]()
    trained_alone(alone)
    exact = MODELS[name]()
    exact.load_state_dict(whole)
    kept = alone.inner if name == "wrapped" else alone
    wanted = exact.inner if name == "wrapped" else exact
    loaded, report = type(kept).from_pretrained(at, output_loading_info=True)
    half = type(kept).from_pretrained(folder / f"{name}-{layout}-bf16")
    return {
        "files": untrained,
        "report": {key: sorted(map(str, value)) for key, value in report.items() if value},
        "state": far(loaded.state_dict(), wanted.state_dict()),
        "logits": float((logits(loaded) - logits(wanted)).abs().max()),
        "trained": far(loaded.state_dict(), kept.state_dict()),
        "half": str(half.dtype),
        "half state": far(half.state_dict(), wanted.bfloat16().state_dict()),
    }


def adapters(folder: Path, name: str, layout: str) -> dict[str, Any]:
    """Train adapters, save them, and load them by peft over a base model of its own."""
    result = running(adapted(name), layout)
    losses, optimizer = train(result)
    at = folder / f"peft-{name}-{layout}"
    result.save_pretrained(at, trainable_only=True)
    whole = result.full_state_dict()
    alone = adapted(name)
    frozen = {n: x.clone() for n, x in alone.state_dict().items() if "lora_" not in n}
    wanted = trained_alone(alone)
    states = {fqn for fqn, p in result.named_parameters() if optimizer.state.get(p)}
    if launch.rank() != 0:
        return {"states": sorted(states)}
    loaded = peft.PeftModel.from_pretrained(MODELS[name](), at)
    merged = peft.PeftModel.from_pretrained(MODELS[name](), at).merge_and_unload()
    return {
        "losses": losses,
        "wanted": wanted,
        "trained": far({n: x for n, x in whole.items() if "lora_" in n}, 
                       {n: x for n, x in alone.state_dict().items() if "lora_" in n}),
        "frozen": far({n: x for n, x in whole.items() if "lora_" not in n}, frozen),
        "states": sorted(states),
        "files": sorted(path.name for path in at.iterdir()),
        "logits": float((logits(loaded) - logits(alone)).abs().max()),
        "merged": float((logits(merged) - logits(alone)).abs().max()),
    }  # fmt: skip


# --- a state dict on one rank ---------------------------------------------------------------------


@contextmanager
def counted_messages(received: list[int]) -> Iterator[None]:
    """Count the bytes of the messages that this rank receives."""
    recv = dist.recv

    def counting(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        received.append(tensor.nbytes)
        return recv(tensor, *arguments, **options)

    dist.recv = counting
    try:
        yield
    finally:
        dist.recv = recv


def one_rank(layout: str) -> dict[str, Any]:
    result = running(MODELS["llama"](), layout)
    whole = result.full_state_dict()
    received: list[int] = []
    with counted_messages(received):
        found = result.full_state_dict(rank=1)
    mine = {
        "names": len(found),
        "received": sum(received),
        "far": far(found, whole) if found else None,
        "bytes": sum(x.nbytes for name, x in whole.items() if name != "lm_head.weight"),
    }
    everyone: list[Any] = [None] * launch.world_size()
    dist.all_gather_object(everyone, mine)
    return {"ranks": everyone}


# --- full disks -----------------------------------------------------------------------------------


@contextmanager
def full_disk(rank: int) -> Iterator[None]:
    """A file of this rank can't grow beyond some bytes: the kernel refuses to write on."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    if launch.rank() == rank:
        resource.setrlimit(resource.RLIMIT_FSIZE, (FULL_BYTES, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def full(folder: Path, rank: int) -> dict[str, Any]:
    """Save twice, the second time on a full disk: which error each rank gets, and what is left."""
    at = folder / f"full{rank}"
    if launch.rank() == 0:
        at.mkdir()
    dist.barrier()
    result = running(MODELS["llama"](), "zero3")
    saves = {
        "checkpoint": lambda: result.save_checkpoint(at / "checkpoint"),
        "in the background": lambda: result.save_checkpoint(
            at / "checkpoint", asynchronous=True
        ).wait(),
        "pretrained": lambda: result.save_pretrained(at / "pretrained", max_shard_size=SHARD_BYTES),
    }
    saves["checkpoint"]()
    saves["pretrained"]()
    before = {kind: sums(at / kind) for kind in ("checkpoint", "pretrained")}
    train(result, 1)
    found: dict[str, Any] = {}
    for kind, save in saves.items():
        error = ""
        with full_disk(rank):
            try:
                save()
            except RuntimeError as raised:
                error = f"{type(raised).__name__}: {raised}"
        errors: list[Any] = [None] * launch.world_size()
        dist.all_gather_object(errors, error)
        found[kind] = {
            "errors": errors,
            "left": sorted(path.name for path in at.iterdir()),
            "same": before == {kind: sums(at / kind) for kind in before},
        }
        dist.barrier()
    result.save_pretrained(at / "pretrained", max_shard_size=SHARD_BYTES)
    found["again"] = sums(at / "pretrained") != before["pretrained"]
    found["reason"] = errno.errorcode[errno.EFBIG]
    return found


def main(folder: Path) -> None:
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    work = {f"{name}-{layout}": partial(export, folder, name, layout) for name, layout in EXPORTS}
    work |= {
        f"peft-{name}-{layout}": partial(adapters, folder, name, layout)
        for name, layout in ADAPTERS
    }
    work |= {f"one-{layout}": partial(one_rank, layout) for layout in ("zero3", "pp2×tp2")}
    work |= {f"full-{rank}": partial(full, folder, rank) for rank in (0, 2)}
    run_all(work, folder, "")


if __name__ == "__main__":
    on_ranks(main)
