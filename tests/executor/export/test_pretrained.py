"""What is exported under a plan is what transformers and peft load, and full disks do no harm."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import load_file

from meshwright.costmodel.operators import Problem
from meshwright.executor.checkpoint import checkpoint
from meshwright.executor.errors import SavedError
from meshwright.executor.export import full_state_dict, save_pretrained
from meshwright.executor.export.safetensors_file import SafetensorsFile, in_file_order
from meshwright.executor.export.streams import HeldTensor, owner_of
from meshwright.executor.export.weight_folder import INDEX, in_turn
from meshwright.executor.files import MANIFEST
from meshwright.planner.plan import check_plan
from meshwright.planner.pricing import StageCoster, evaluate, memory_parts
from tests.executor.export.export_runs import (
    EXPORTED,
    SHARD_BYTES,
    adapters,
    export,
    far,
    fills_a_disk,
    logits,
    plan_of,
    running,
    sums,
)
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import tiered
from tests.helpers.tiny import host, net, planned

EXPORTS = (
    ("gpt2_tied", "pp2xtp2 m2"), ("bert", "dp2xtp2 m2 zero1"), ("llama", "dp2xtp2 m2 zero3"),
    ("gpt2_untied", "dp2xtp2 m2 zero1"), ("wrapped", "pp2xdp2 m2"), ("llama", "pp2xtp2 m2"),
)  # fmt: skip
ADAPTERS = (
    ("llama lora", "dp2xtp2 m2 zero3"), ("gpt2 lora", "pp2xtp2 m2"), ("llama lora", "pp2xdp2 m2"),
)  # fmt: skip
MORE = "the change tier has fused, tied and sharded weights, and one model with adapters"


@cache
def files_of_one_device(name: str, folder: Path) -> dict[str, dict[str, str]]:
    """What one device writes of a model, which transformers loads."""
    runtime, found = running(name), {}
    model = EXPORTED[name].model()
    model = model.inner if name == "wrapped" else model
    for kind, dtype in (("fp32", None), ("bf16", torch.bfloat16)):
        at = folder / f"{name}-{kind}"
        save_pretrained(runtime, at, max_shard_size=SHARD_BYTES, dtype=dtype)
        found[kind] = sums(at)
        theirs = folder / f"{name}-{kind}-theirs"
        model.to(dtype or torch.float32).save_pretrained(theirs, max_shard_size=SHARD_BYTES)
        files = sorted(path.name for path in theirs.iterdir())
        assert [*files, MANIFEST] == sorted(found[kind], key=lambda n: (n == MANIFEST, n))
        for file in files:
            if file.endswith(".safetensors"):
                assert far(load_file(at / file), load_file(theirs / file)) == 0
        index = [json.loads((x / INDEX).read_text())["weight_map"] for x in (at, theirs)]
        assert index[0] == index[1] and len(files) > 5
        loaded, report = type(model).from_pretrained(at, output_loading_info=True)
        assert not any(report.values()), "missing, unexpected or misshapen names"
        wanted = model.to(dtype or torch.float32)
        assert loaded.dtype == wanted.dtype and far(loaded.state_dict(), wanted.state_dict()) == 0
        if dtype is None:
            assert torch.equal(logits(loaded, name), logits(wanted, name))
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("alone")


@pytest.mark.parametrize("of", tiered(EXPORTS, EXPORTS[:2].__contains__, MORE, name=" ".join))
def test_transformers_loads_the_same_files_under_every_plan(
    folder: Path, tmp_path: Path, of: tuple[str, str]
) -> None:
    on_ranks(4, export, tmp_path, *of, files_of_one_device(of[0], folder))


@pytest.mark.parametrize("of", tiered(ADAPTERS, ADAPTERS[:1].__contains__, MORE, name=" ".join))
def test_adapters_train_and_peft_loads_them(tmp_path: Path, of: tuple[str, str]) -> None:
    on_ranks(4, adapters, tmp_path / "out", *of)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_full_disk_leaves_the_last_save(tmp_path: Path, rank: int) -> None:
    on_ranks(2, fills_a_disk, tmp_path, rank)


# --- one device -----------------------------------------------------------------------------------


def test_a_model_of_plain_torch_has_weights_and_no_config(tmp_path: Path) -> None:
    result = planned(net(tied=True))
    result.save_pretrained(tmp_path / "out")
    assert sorted(sums(tmp_path / "out")) == ["manifest.json", "model.safetensors"]
    wanted = {name: x.clone() for name, x in result.full_state_dict().items()}
    for p in result.parameters():
        torch.nn.init.zeros_(p)
    result.load_weights(tmp_path / "out")
    assert far(result.full_state_dict(), wanted) == 0


def test_of_a_model_without_adapters_what_trains_is_saved(tmp_path: Path) -> None:
    model = EXPORTED["gpt2_tied"].model()
    for name, p in model.named_parameters():
        p.requires_grad = ".2." in name
    save_pretrained(running("gpt2_tied", model=model), tmp_path / "out", trainable_only=True)
    assert not (tmp_path / "out" / "config.json").exists()
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert far(found, {name: p for name, p in model.named_parameters() if ".2." in name}) == 0


def test_what_cannot_be_saved_so_is_refused(tmp_path: Path) -> None:
    runtime = running("gpt2_tied")
    checkpoint.save(runtime, tmp_path / "checkpoint")
    before = sums(tmp_path / "checkpoint")
    with pytest.raises(SavedError, match=r"holds a checkpoint of a run"):
        save_pretrained(runtime, tmp_path / "checkpoint")
    assert sums(tmp_path / "checkpoint") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    with pytest.raises(SavedError, match=r"holds what no save wrote, \['config.json'\]"):
        save_pretrained(runtime, tmp_path / "mine")
    refused: list[tuple[dict[str, Any], str]] = [
        ({"max_shard_size": "5 pounds"}, r"max_shard_size='5 pounds'.*legal: bytes"),
        ({"max_shard_size": 0}, r"max_shard_size=0; legal: bytes, from 1"),
        ({"max_shard_size": True}, r"max_shard_size=True; legal: bytes, from 1"),
        ({"dtype": torch.int8}, r"dtype=torch.int8.*legal: None, torch.float64, torch.float32"),
        ({"submodule": "other"}, r"submodule='other': the model has none"),
    ]
    for options, says in refused:
        with pytest.raises(SavedError, match=says):
            save_pretrained(runtime, tmp_path / "out", **options)
    with pytest.raises(RuntimeError, match=r"rank 7 is none of the plan's; legal: \[0\]"):
        full_state_dict(runtime, 7)
    with pytest.raises(SavedError, match=r"holds peft's adapters, .* trainable_only=True"):
        save_pretrained(running("llama lora"), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_parameters_that_peft_would_not_save_are_named(tmp_path: Path) -> None:
    model = EXPORTED["llama lora"].model()
    model.base_model.model.model.norm.weight.requires_grad = True
    with pytest.raises(SavedError, match=r"1 parameters train that peft doesn't save.*norm.weight"):
        save_pretrained(running("llama lora", model=model), tmp_path / "out", trainable_only=True)


def test_only_adapters_are_priced_as_trained() -> None:
    """AdamW: 8 bytes of states and 4 of gradients for each trained element, none for others."""
    plan, of = plan_of("llama lora", "1 m1")
    trained = sum(p.numel() for p in EXPORTED["llama lora"].model().parameters() if p.requires_grad)
    problem = Problem(graph=of.graph, factors=of.table, cluster=host(1), precision="fp32")
    assignments = check_plan(plan, of.graph, of.table)
    priced = evaluate(plan, problem, assignments)
    (parts,) = memory_parts(priced, StageCoster(problem), assignments)
    assert (parts.optimizer, parts.gradients) == (8 * trained, 4 * trained)


# --- the parts ------------------------------------------------------------------------------------


def test_a_file_is_as_its_format_says(tmp_path: Path) -> None:
    """Larger elements first, without gaps, each at a multiple of its size."""
    tensors = {
        "half": torch.arange(3).to(torch.bfloat16),
        "flags": torch.tensor([True, False]),
        "whole": torch.tensor([[1.5, 2.5]], dtype=torch.float64),
        "none": torch.empty(0, 3),
    }
    kinds = {name: (x.dtype, tuple(x.shape)) for name, x in tensors.items()}
    order = in_file_order(kinds)
    assert order == ["whole", "none", "half", "flags"]
    file = SafetensorsFile(tmp_path / "x.safetensors", kinds)
    for name in order:
        file.write(tensors[name])
    checksum, raw = file.finish(), (tmp_path / "x.safetensors").read_bytes()
    assert (checksum, file.bytes) == (xxhash.xxh3_64_hexdigest(raw), len(raw))
    start = 8 + int.from_bytes(raw[:8], "little")
    assert start % 8 == 0 and len(raw) == start + 24
    header = json.loads(raw[8:start])
    offsets = {name: header[name]["data_offsets"] for name in order}
    assert offsets == {"whole": [0, 16], "none": [16, 16], "half": [16, 22], "flags": [22, 24]}
    found = load_file(tmp_path / "x.safetensors")
    assert all(torch.equal(found[name], x) for name, x in tensors.items())


def held(ranks: tuple[int, ...], elements: int) -> HeldTensor:
    return HeldTensor(
        shape=(elements,), dtype=torch.float32, placements=(), mesh_shape=(), ranks=ranks,
        trained=True,
    )  # fmt: skip


def test_files_are_shared_out_over_the_ranks_that_hold_most() -> None:
    before: dict[int, int] = {}
    files = [
        [held((0, 1), 10), held((2, 3), 4)], [held((0, 1), 2)], [held((2, 3), 5)],
        [held((0, 1), 3)], [held((2, 3), 1), held((0, 1), 1)],
    ]  # fmt: skip
    assert [owner_of(of_file, before) for of_file in files] == [0, 1, 2, 1, 3]
    assert before == {0: 14, 1: 5, 2: 5, 3: 2}
    kind = (torch.float32, (2,))
    turns = in_turn([("a", {"1": kind, "2": kind}), ("b", {"3": kind})])
    assert turns == [("a", "1"), ("b", "3"), ("a", "2")]
