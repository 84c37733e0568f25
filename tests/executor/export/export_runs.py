"""Models that are exported, and what ranks export of them."""

from __future__ import annotations

import errno
import hashlib
import os
import resource
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import load_file
from torch import nn

from meshwright.executor.checkpoint import checkpoint, model_tensors
from meshwright.executor.export import full_state_dict, save_pretrained
from meshwright.executor.export.streams import held_tensors
from meshwright.executor.files import LocalChunks
from meshwright.executor.ranks import launch
from meshwright.executor.runtime.runtime import Runtime
from meshwright.planner.plan.plan import Plan
from tests.executor.export import export_runs
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.stored import stored
from tests.models import architectures
from tests.models.models import CASES, Case, Traced, adamw, parallelize, traced
from tests.parity.parity_cells import Cell

SHARD_BYTES = 20_000
FULL_BYTES = 8_000  # after which a file is full
ROWS, STEPS = 8, 2
LAST = 3  # of the ranks
TOLERANCE = 1e-5  # sums in another order

transformers.logging.disable_progress_bar()


class Wrapped(nn.Module):
    """A model of transformers in the user's own, with a parameter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = architectures.gpt2(tied=True)
        self.temperature = nn.Parameter(torch.tensor(0.9))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Any:
        found = self.inner(input_ids=input_ids, labels=labels)
        found.loss = found.loss * self.temperature
        return found


def adapted(base: Callable[[], nn.Module], *targets: str) -> Callable[[], nn.Module]:
    """A model with peft's LoRA, whose adapters begin with any values, not with zeros."""
    config = peft.LoraConfig(
        r=4,
        lora_alpha=8,
        target_modules=list(targets),
        fan_in_fan_out="c_attn" in targets,
        init_lora_weights=False,
        task_type="CAUSAL_LM",
    )
    return lambda: peft.get_peft_model(base(), config)


_LAYERS = "base_model.model.model.layers.*"
EXPORTED: Mapping[str, Case] = {
    **CASES,
    "wrapped": replace(CASES["gpt2_tied"], build=Wrapped, shardings={}),
    "llama lora": replace(
        CASES["llama"],
        build=adapted(CASES["llama"].build, "q_proj", "v_proj", "down_proj"),
        shardings={
            f"{_LAYERS}.self_attn.q_proj.base_layer": "colwise",
            f"{_LAYERS}.self_attn.q_proj.lora_B.default": "colwise",
            f"{_LAYERS}.mlp.gate_proj": "colwise",
            f"{_LAYERS}.mlp.up_proj": "colwise",
        },
    ),
    "gpt2 lora": replace(
        CASES["gpt2_untied"],
        build=adapted(CASES["gpt2_untied"].build, "c_attn", "c_proj"),
        shardings={"base_model.model.transformer.h.*.mlp.c_fc": "colwise"},
    ),
}


def plan_of(name: str, layout: str) -> tuple[Plan, Traced]:
    """A plan as a line of the parity matrix says it, of any of the models."""
    case, cell = EXPORTED[name], Cell.parse(f"x {layout}")
    rows = ROWS // cell.microbatches
    of = stored(
        "export", name, rows, make=lambda: traced(case, rows), models=(architectures, export_runs)
    )
    knobs = Knobs(
        meshes=cell.meshes,
        rows=ROWS,
        num_microbatches=cell.microbatches,
        zero=cell.zero,
        shardings=case.shardings,
    )
    return build_plan(of.graph, knobs), of


def running(name: str, layout: str = "1 m1", *, model: nn.Module | None = None) -> Runtime:
    """A plan of one of the models, or of one that has its graph."""
    return parallelize(model or EXPORTED[name].model(), *plan_of(name, layout))


def train(runtime: Runtime, name: str, steps: int) -> tuple[list[float], torch.optim.Optimizer]:
    optimizer, losses = adamw([p for p in runtime.parameters() if p.requires_grad]), []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(float(runtime.train_step(EXPORTED[name].batch(ROWS, step))))
        optimizer.step()
    return losses, optimizer


def trained_alone(name: str, steps: int) -> tuple[nn.Module, list[float]]:
    """The model after training by plain PyTorch, and the losses."""
    model, losses = EXPORTED[name].model(), []
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for step in range(steps):
        optimizer.zero_grad()
        loss = EXPORTED[name].loss(model, EXPORTED[name].batch(ROWS, step))
        loss.backward()
        losses.append(float(loss))
        optimizer.step()
    return model, losses


def far(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return max(float((found[name] - x).abs().max()) for name, x in wanted.items())


def sums(folder: Path) -> dict[str, str]:
    return {
        path.name: hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.iterdir())
    }


def logits(model: Any, name: str) -> torch.Tensor:
    with torch.no_grad():
        inputs = EXPORTED[name].batch(ROWS, 0)["input_ids"]
        found: torch.Tensor = model.eval()(input_ids=inputs).logits
    return found


def weights_in(folder: Path) -> dict[str, torch.Tensor]:
    files = [load_file(path) for path in folder.glob("*.safetensors")]
    return {name: x for file in files for name, x in file.items()}


# --- on ranks -------------------------------------------------------------------------------------


def export(folder: Path, name: str, layout: str, wanted: Mapping[str, dict[str, str]]) -> None:
    """The files of the model as it is are those `wanted`, of one device; after a step they hold
    the state, which is whole on one rank alone."""
    runtime = running(name, layout)
    for kind, dtype in (("fp32", None), ("bf16", torch.bfloat16)):
        save_pretrained(runtime, folder / kind, max_shard_size=SHARD_BYTES, dtype=dtype)
        assert sums(folder / kind) == wanted[kind]
    train(runtime, name, 1)
    save_pretrained(runtime, folder / "trained", max_shard_size=SHARD_BYTES)
    state = runtime.full_state_dict()
    names = runtime.graph.aliases
    with counted_messages() as received:
        found = full_state_dict(runtime, LAST)
    held, mine = held_tensors(runtime), model_tensors(runtime)
    if launch.rank() != LAST:
        assert (found, sum(received)) == ({}, 0)
        return
    assert far(found, state) == 0
    here = [fqn for fqn, x in held.items() if LAST in x.ranks]  # whose parts come from itself
    whole = sum(x.nbytes for fqn, x in state.items() if fqn not in names)
    assert sum(received) == whole - sum(LocalChunks.of(mine[fqn]).local.nbytes for fqn in here)
    prefix = "inner." if name == "wrapped" else ""
    exported = weights_in(folder / "trained")
    assert len(exported) == len([n for n in state if n.startswith(prefix)]) - len(names)
    assert all(torch.equal(x, state[prefix + n]) for n, x in exported.items())


def adapters(at: Path, name: str, layout: str) -> None:
    """Train adapters, save them, and load them by peft over a base model of its own."""
    runtime = running(name, layout)
    losses, optimizer = train(runtime, name, STEPS)
    save_pretrained(runtime, at, trainable_only=True)
    whole = runtime.full_state_dict()
    alone, wanted = trained_alone(name, STEPS)
    assert losses == pytest.approx(wanted, rel=TOLERANCE) and losses[-1] != losses[0]
    assert far(whole, alone.state_dict()) < TOLERANCE
    before = EXPORTED[name].model().state_dict()
    assert {n for n, x in whole.items() if not torch.equal(x, before[n])} == {
        n for n in whole if "lora_" in n
    }
    states = {fqn for fqn, p in runtime.named_parameters() if optimizer.state.get(p)}
    assert states and all("lora_" in fqn for fqn in states)
    assert sorted(os.listdir(at)) == [
        "adapter_config.json", "adapter_model.safetensors", "manifest.json",
    ]  # fmt: skip
    base = "llama" if "llama" in name else "gpt2_untied"
    loaded = peft.PeftModel.from_pretrained(CASES[base].model(), at)
    seen = logits(alone, name)
    assert float((logits(loaded, name) - seen).abs().max()) < TOLERANCE
    merged = peft.PeftModel.from_pretrained(CASES[base].model(), at).merge_and_unload()
    assert float((logits(merged, name) - seen).abs().max()) < TOLERANCE


@contextmanager
def counted_messages() -> Iterator[list[int]]:
    """The bytes of the messages that this rank receives."""
    received: list[int] = []
    recv = dist.recv

    def counting(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        received.append(tensor.nbytes)
        return recv(tensor, *arguments, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "recv", counting)
        yield received


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


def fills_a_disk(at: Path, rank: int) -> None:
    """Save twice, the second time on a full disk: every rank gets the same error, and what was
    saved before is left, and nothing else."""
    runtime = running("gpt2_untied", "dp2 m2 zero3")
    checkpoints, weights = at / "checkpoint", at / "pretrained"
    saves = {
        "checkpoint": lambda: checkpoint.save(runtime, checkpoints),
        "in the background": lambda: checkpoint.save(
            runtime, checkpoints, asynchronous=True
        ).wait(),
        "pretrained": lambda: save_pretrained(runtime, weights, max_shard_size=SHARD_BYTES),
    }
    saves["checkpoint"]()
    saves["pretrained"]()
    before = sums(checkpoints), sums(weights)
    train(runtime, "gpt2_untied", 1)
    for save in saves.values():
        with full_disk(rank), pytest.raises(RuntimeError) as raised:
            save()
        error = f"{type(raised.value).__name__}: {raised.value}"
        assert error.startswith("UnwrittenError: ")
        assert "not saved; what was there before still is" in error
        assert f"rank {rank}: " in error and os.strerror(errno.EFBIG) in error
        dist.barrier()
        assert sorted(os.listdir(at)) == ["checkpoint", "pretrained"], "half a save is left"
        assert before == (sums(checkpoints), sums(weights)), "the last save was changed"
        dist.barrier()
    saves["pretrained"]()
    assert sums(weights) != before[1]
