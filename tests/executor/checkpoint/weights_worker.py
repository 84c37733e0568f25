"""Weights on four ranks: initialised from a seed and read from files, under many plans.

Rank 0 writes the results after each check, so that a crash says which one it was.
"""

from __future__ import annotations

import copy
import json
import os
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

from meshwright.executor.checkpoint import checkpoint
from meshwright.executor.checkpoint.weights import init_weights, load_weights
from meshwright.executor.files import weight_files
from meshwright.executor.ranks import launch
from meshwright.executor.runtime.runtime import Runtime
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.single_device import initialised, named_tensors
from tests.models.models import CASES, parallelize
from tests.parity.parity_cells import graph_of

SEED, OTHER_SEED = 11, 5
ROWS = 12  # one micro-batch: normalisation over the batch is the single device's
CASE_NAMES = ("gpt2_tied", "gpt2_untied", "llama", "bert", "resnet", "mlp")


@dataclass(frozen=True, slots=True, kw_only=True)
class Layout:
    """How a plan spreads a model."""

    meshes: tuple[tuple[int, int], ...]
    zero: int = 0
    dp_shard: int | None = None
    virtual: int = 1
    precision: str = "fp32"


LAYOUTS: Mapping[str, Layout] = {
    "dp4": Layout(meshes=((4, 1),)),
    "tp4": Layout(meshes=((1, 4),)),
    "pp2xtp2": Layout(meshes=((1, 2), (1, 2))),
    "zero1": Layout(meshes=((2, 2),), zero=1),
    "hsdp2": Layout(meshes=((4, 1),), zero=2, dp_shard=2),
    "zero3": Layout(meshes=((2, 2),), zero=3),
    "1|dp3": Layout(meshes=((1, 1), (3, 1))),
    "bf16": Layout(meshes=((2, 2),), zero=1, precision="bf16"),
}  # fmt: skip
LOAD_CASES = ("gpt2_tied", "gpt2_untied", "llama", "resnet")
LOADED = ("tp4", "pp2xtp2", "zero1", "zero3")


def running(case: str, layout: Layout) -> tuple[Runtime, nn.Module]:
    """A plan of a model on meta, and the model."""
    of = graph_of(case, ROWS, layout.precision)
    plan = build_plan(
        of.graph,
        Knobs(
            meshes=layout.meshes,
            rows=ROWS,
            num_microbatches=1,
            zero=layout.zero,
            dp_shard=layout.dp_shard,
            virtual=layout.virtual,
            precision=layout.precision,
            shardings=CASES[case].shardings,
        ),
    )
    with torch.device("meta"):
        model = CASES[case].build()
    return parallelize(model, plan, of), model


def compared(runtime: Runtime, case: str, reference: nn.Module) -> dict[str, Any]:
    """Names that differ from a single device's model, in the state and in what is outside it, and
    both losses (rank 0)."""
    state = runtime.full_state_dict()
    batch = CASES[case].batch(ROWS, 0)
    outside = {fqn: b.whole for fqn, b in runtime.held_buffers.items()}
    loss = float(runtime.train_step(batch))
    if launch.rank() != 0:
        return {}
    wanted, tensors = reference.state_dict(), named_tensors(reference)
    differing = [n for n, x in wanted.items() if n not in state or not torch.equal(state[n], x)]
    differing += [
        n for n, x in outside.items() if n not in wanted and not torch.equal(tensors[n], x)
    ]
    with torch.no_grad():
        alone = float(CASES[case].loss(copy.deepcopy(reference), batch))
    extra = sorted(state.keys() - wanted.keys())
    return {"differing": differing, "extra": extra, "loss": loss, "alone": alone}


def single(case: str, seed: int) -> nn.Module:
    model = CASES[case].build()
    initialised(model, seed)
    return model


# --- initialisation -------------------------------------------------------------------------------


def init(folder: Path, case: str, layout: str) -> dict[str, Any]:
    runtime, model = running(case, LAYOUTS[layout])
    init_weights(runtime, SEED)
    held = {p.fqn for p in runtime.stage_parameters}
    alike = all(x.is_meta == (n not in held) for n, x in model.named_parameters())
    return compared(runtime, case, single(case, SEED)) | {"alike": alike}


# --- files ----------------------------------------------------------------------------------------


def write_files(folder: Path, case: str) -> dict[str, Path]:
    """Rank 0 writes one model in every format; paths by format."""
    paths = {
        "torch": folder / f"{case}.pt",
        "safetensors": folder / f"{case}.safetensors",
        "dcp": folder / f"{case}_dcp",
        "dcp_model": folder / f"{case}_dcp_model",
    }
    if hasattr(CASES[case].build(), "save_pretrained"):
        paths |= {"shards": folder / f"{case}_shards"}
        if case in ("gpt2_tied", "gpt2_untied"):
            paths |= {"base": folder / f"{case}_base"}
    if launch.rank() != 0:
        return paths
    model = single(case, OTHER_SEED)
    state = {n: x.clone() for n, x in model.state_dict().items()}
    torch.save({"model": state, "step": 3}, paths["torch"])
    safetensors.torch.save_file(state, paths["safetensors"])
    dcp.save(state, checkpoint_id=paths["dcp"], no_dist=True)
    dcp.save({"model": state}, checkpoint_id=paths["dcp_model"], no_dist=True)
    if "shards" in paths:
        model.save_pretrained(paths["shards"], max_shard_size="20KB")
    if "base" in paths:
        base = {n.removeprefix("transformer."): x for n, x in state.items()}
        paths["base"].mkdir()
        safetensors.torch.save_file(base, paths["base"] / "model.safetensors")
    return paths


class Counted:
    """A stored tensor that counts the bytes read of it."""

    read_bytes = 0

    def __init__(self, stored: Any) -> None:
        self.stored = stored

    def get_shape(self) -> Any:
        return weight_files.shape_of(self.stored)

    def __getitem__(self, box: Any) -> torch.Tensor:
        found = self.stored[box]
        Counted.read_bytes += found.nbytes
        return found


def stored_of(runtime: Runtime) -> Iterator[torch.Tensor]:
    """This rank's memory for what a state dict holds."""
    yield from (p.stored for p in runtime.stage_parameters)
    for fqn, b in runtime.held_buffers.items():
        if fqn in runtime.persistent:
            yield b.whole


def load(folder: Path, case: str) -> dict[str, Any]:
    """Every format under every layout; bytes read on the way, against what the rank holds."""
    paths = write_files(folder, case)
    launch.agree_on(lambda: None)
    reference = single(case, OTHER_SEED)
    found: dict[str, Any] = {"formats": sorted(paths)}
    for layout in LOADED:
        for kind, path in paths.items():
            runtime, _ = running(case, LAYOUTS[layout])
            Counted.read_bytes = 0
            load_weights(runtime, path)
            held = sum(p.stored.nbytes for p in runtime.stage_parameters)
            if case == "resnet":
                held += sum(b.whole.nbytes for b in runtime.held_buffers.values())
            reads: list[Any] = [None] * launch.world_size()
            dist.all_gather_object(reads, (Counted.read_bytes, held))
            found[f"{layout}-{kind}"] = compared(runtime, case, reference) | {"reads": reads}
    return found


def load_checkpoint(folder: Path) -> dict[str, Any]:
    """What `save` wrote under a plan with strided and ZeRO shards, read under others."""
    runtime, _ = running("gpt2_untied", LAYOUTS["zero1"])
    init_weights(runtime, SEED)
    path = folder / "saved"
    checkpoint.save(runtime, path, None)
    found = {}
    for layout in ("tp4", "pp2xtp2", "zero3"):
        other, _ = running("gpt2_untied", LAYOUTS[layout])
        load_weights(other, path)
        found[layout] = compared(other, "gpt2_untied", single("gpt2_untied", SEED))
    return found


def work(folder: Path) -> dict[str, Callable[[], dict[str, Any]]]:
    """All checks by name."""
    named: dict[str, Callable[[], dict[str, Any]]] = {
        f"init-{case}-{layout}": partial(init, folder, case, layout)
        for case in CASE_NAMES
        for layout in LAYOUTS
    }
    named |= {f"load-{case}": partial(load, folder, case) for case in LOAD_CASES}
    return named | {"load_checkpoint": partial(load_checkpoint, folder)}


def main(folder: Path, only: str = "") -> None:
    opened = weight_files.opened
    weight_files.opened = lambda *given: {n: Counted(x) for n, x in opened(*given).items()}
    results: dict[str, Any] = {}
    for name, run in work(folder).items():
        if only not in name:
            continue
        results[name] = run()
        if launch.rank() == 0:
            (folder / "results.json").write_text(json.dumps(results))


if __name__ == "__main__":
    torch.set_num_threads(1)
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)  # groups and files of many plans
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    os.environ.setdefault("MESHWRIGHT_TIMEOUT_S", "60")
    with launch.distributed("gloo"):
        main(Path(sys.argv[1]), *sys.argv[2:])
