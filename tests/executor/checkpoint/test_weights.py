"""Weights under every plan are one device's, bit for bit: initialised, or read from files."""

from __future__ import annotations

import copy
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp
from torch import nn

from meshwright.executor.checkpoint import checkpoint
from meshwright.executor.checkpoint.weights import init_weights, load_weights
from meshwright.executor.files import weight_files
from meshwright.executor.runtime.runtime import Runtime
from tests.executor.checkpoint.checkpoint_runs import differing, on_meta
from tests.helpers.ranks import on_ranks
from tests.helpers.single_device import initialised, named_tensors
from tests.helpers.tiers import tiered
from tests.models.models import CASES
from tests.parity.parity_cells import Cell

SEED, OTHER_SEED = 11, 5
TOLERANCE, HALF_TOLERANCE = 1e-5, 1e-2  # of the loss: sums in another order; bf16
# one micro-batch: normalisation over the batch is the single device's
LAYOUTS = (
    "dp4", "tp4", "pp2xtp2", "dp2xtp2 zero1", "dp4 zero2 shard2", "dp2xtp2 zero3", "1|dp3",
    "dp2xtp2 zero1 bf16",
)  # fmt: skip
CASE_NAMES = ("gpt2_tied", "gpt2_untied", "llama", "bert", "resnet", "mlp")
INITIALISED = tuple(f"{case} {layout}" for case in CASE_NAMES for layout in LAYOUTS)
FIRST_INITIALISED = (
    "gpt2_tied dp2xtp2 zero3", "llama pp2xtp2", "resnet dp4 zero2 shard2", "mlp 1|dp3",
    "bert dp2xtp2 zero1 bf16",
)  # fmt: skip
LOADED = tuple(
    f"{case} {layout}"
    for case in ("gpt2_tied", "gpt2_untied", "llama", "resnet")
    for layout in ("tp4", "pp2xtp2", "dp2xtp2 zero1", "dp2xtp2 zero3")
)
FIRST_LOADED = ("gpt2_tied dp2xtp2 zero3", "gpt2_untied dp2xtp2 zero1", "resnet tp4")
MORE = "in the change tier each kind of model and of layout has its turn"


@cache
def single(case: str, seed: int) -> nn.Module:
    model = CASES[case].build()
    initialised(model, seed)
    return model


def check_state(runtime: Runtime, reference: nn.Module) -> None:
    """The state, and the buffers outside of it, are those of the single device's model."""
    tensors = named_tensors(reference)
    assert differing(runtime.full_state_dict(), reference.state_dict()) == []
    outside = {fqn: b.whole for fqn, b in runtime.held_buffers.items()}
    assert differing(outside, {fqn: tensors[fqn] for fqn in outside}) == []


def check_loss(cell: Cell, runtime: Runtime, reference: nn.Module) -> None:
    """The graphs read the weights."""
    batch = CASES[cell.case].batch(cell.rows, 0)
    with torch.no_grad():
        wanted = float(CASES[cell.case].loss(copy.deepcopy(reference), batch))
    tolerance = HALF_TOLERANCE if cell.precision == "bf16" else TOLERANCE
    assert float(runtime.train_step(batch)) == pytest.approx(wanted, rel=tolerance)


def initialise(line: str) -> None:
    cell, runtime, model = on_meta(line)
    init_weights(runtime, SEED)
    held = {p.fqn for p in runtime.stage_parameters}
    assert all(x.is_meta == (n not in held) for n, x in model.named_parameters())
    check_state(runtime, single(cell.case, SEED))
    check_loss(cell, runtime, single(cell.case, SEED))


@pytest.mark.parametrize("line", tiered(INITIALISED, FIRST_INITIALISED.__contains__, MORE))
def test_initialised_like_one_device(line: str) -> None:
    on_ranks(4, initialise, line)


# --- files ----------------------------------------------------------------------------------------


def write_files(folder: Path, case: str) -> dict[str, Path]:
    """One model in every format; paths by format."""
    paths = {
        "torch": folder / "model.pt",
        "safetensors": folder / "model.safetensors",
        "dcp": folder / "dcp",
        "dcp_model": folder / "dcp_model",
    }
    model = single(case, OTHER_SEED)
    state = {n: x.clone() for n, x in model.state_dict().items()}
    torch.save({"model": state, "step": 3}, paths["torch"])
    safetensors.torch.save_file(state, paths["safetensors"])
    dcp.save(state, checkpoint_id=paths["dcp"], no_dist=True)
    dcp.save({"model": state}, checkpoint_id=paths["dcp_model"], no_dist=True)
    if hasattr(model, "save_pretrained"):
        paths["shards"] = folder / "shards"
        model.save_pretrained(paths["shards"], max_shard_size="20KB")
    if case.startswith("gpt2"):
        paths["base"] = folder / "base"
        paths["base"].mkdir()
        base = {n.removeprefix("transformer."): x for n, x in state.items()}
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


def load(line: str, paths: dict[str, Path]) -> None:
    """The first format into a model on meta, the others over whatever is there. Of files of whole
    tensors a rank reads what it holds and no more; of DCP whole chunks."""
    cell, runtime, _ = on_meta(line)
    reference = single(cell.case, OTHER_SEED)
    opened = weight_files.opened
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            weight_files, "opened", lambda *x: {n: Counted(y) for n, y in opened(*x).items()}
        )
        for kind, path in paths.items():
            if runtime.loaded:
                for p in runtime.stage_parameters:
                    p.stored.fill_(77)
            Counted.read_bytes = 0
            load_weights(runtime, path)
            held = sum(p.stored.nbytes for p in runtime.stage_parameters)
            if cell.case == "resnet":
                held += sum(b.whole.nbytes for b in runtime.held_buffers.values())
            assert Counted.read_bytes == (0 if kind.startswith("dcp") else held), kind
            check_state(runtime, reference)
    check_loss(cell, runtime, reference)


@pytest.mark.parametrize("line", tiered(LOADED, FIRST_LOADED.__contains__, MORE))
def test_loaded_from_every_format(tmp_path: Path, line: str) -> None:
    on_ranks(4, load, line, write_files(tmp_path, line.split()[0]))


def load_checkpoint(path: Path, source: str, *targets: str) -> None:
    cell, runtime, _ = on_meta(source)
    init_weights(runtime, SEED)
    checkpoint.save(runtime, path, None)
    for target in targets:
        _, other, _ = on_meta(target)
        load_weights(other, path)
        check_state(other, single(cell.case, SEED))
        check_loss(cell, other, single(cell.case, SEED))


def test_loaded_from_a_checkpoint_of_another_plan(tmp_path: Path) -> None:
    """Whose chunks are strided ones, cut by ZeRO."""
    targets = ("gpt2_untied pp2xtp2", "gpt2_untied dp2xtp2 zero3")
    on_ranks(4, load_checkpoint, tmp_path / "saved", "gpt2_untied dp2xtp2 zero1", *targets)
