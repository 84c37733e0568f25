"""What is exported under a plan, or converted of a checkpoint, is what transformers and peft load,
and full disks do no harm."""

import errno
import hashlib
import json
import os
import resource
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import peft
import pytest
import torch
import torch.distributed as dist
import transformers
import xxhash
from safetensors.torch import load_file, save_file
from torch import nn

from meshwright.cli import perform
from meshwright.executor.checkpoint import checkpoint, model_tensors
from meshwright.executor.checkpoint.weights import load_weights
from meshwright.executor.errors import SavedError
from meshwright.executor.export import full_state_dict, save_pretrained
from meshwright.executor.export.held_tensors import HeldTensor, held_tensors, owner_of
from meshwright.executor.export.naming import Part, saved_names
from meshwright.executor.export.weight_folder import INDEX, SafetensorsFile, in_file_order, in_turn
from meshwright.executor.files import MANIFEST, LocalChunks
from meshwright.executor.ranks import launch
from meshwright.executor.runtime.runtime import Runtime
from meshwright.planner.plan.plan import Plan
from meshwright.profiles.inputs import MeshwrightError
from tests.executor.export import test_pretrained
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.ranks import on_ranks
from tests.helpers.stored import stored
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.tiny import net, planned
from tests.models import architectures
from tests.models.models import CASES, Case, Traced, adamw, parallelize, traced
from tests.parity.parity_cells import Cell
from tests.parity.parity_reference import STEPS, plain_loop

SHARD_BYTES = 20_000
FULL_BYTES = 8_000  # after which a file is full
ROWS = 8
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
        r=4, lora_alpha=8, target_modules=list(targets), fan_in_fan_out="c_attn" in targets,
        init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip
    return lambda: peft.get_peft_model(base(), config)


_LAYERS = "base_model.model.model.layers.*"
_SPLIT = (
    "self_attn.q_proj.base_layer", "self_attn.q_proj.lora_B.default", "mlp.gate_proj",
    "mlp.up_proj",
)  # fmt: skip
EXPORTED: Mapping[str, Case] = {
    **CASES,
    "wrapped": replace(CASES["gpt2_tied"], build=Wrapped, shardings={}),
    "llama lora": replace(
        CASES["llama"],
        build=adapted(CASES["llama"].build, "q_proj", "v_proj", "down_proj"),
        shardings={f"{_LAYERS}.{name}": "colwise" for name in _SPLIT},
    ),
    "gpt2 lora": replace(
        CASES["gpt2_untied"],
        build=adapted(CASES["gpt2_untied"].build, "c_attn", "c_proj"),
        optimizer=adamw,
        shardings={"base_model.model.transformer.h.*.mlp.c_fc": "colwise"},
    ),
}


def plan_of(name: str, layout: str) -> tuple[Plan, Traced]:
    """A plan as a line of the parity matrix says it, of any of the models."""
    case, cell = EXPORTED[name], Cell.parse(f"x {layout}")
    rows = ROWS // cell.microbatches
    of = stored(
        "export", name, rows, make=lambda: traced(case, rows),
        models=(architectures, test_pretrained),
    )  # fmt: skip
    knobs = Knobs(
        meshes=cell.meshes, rows=ROWS, num_microbatches=cell.microbatches, zero=cell.zero,
        shardings=case.shardings,
    )  # fmt: skip
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


def far(found: Mapping[str, torch.Tensor], wanted: Mapping[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys(), found.keys() ^ wanted.keys()
    return max(float((found[name] - x).abs().max()) for name, x in wanted.items())


def sums(folder: Path) -> dict[str, str]:
    paths = sorted(folder.iterdir())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def logits(model: Any, name: str) -> torch.Tensor:
    with torch.no_grad():
        inputs = EXPORTED[name].batch(ROWS, 0)["input_ids"]
        found: torch.Tensor = model.eval()(input_ids=inputs).logits
    return found


def test_of_tied_tensors_the_name_stays_that_transformers_keeps() -> None:
    module = SimpleNamespace(all_tied_weights_keys={"head.weight": "embed.weight"})
    part = Part(module=module, prefix="inner.", pretrained=True)
    aliases = {"inner.head.weight": ["inner.embed.weight"]}
    names = saved_names(part, ["inner.head.weight", "inner.norm", "outer"], aliases)
    assert names == {"inner.head.weight": "embed.weight", "inner.norm": "norm"}


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
    with mock.patch.object(dist, "recv", wraps=dist.recv) as recv:
        found = full_state_dict(runtime, LAST)
    received = sum(call.args[0].nbytes for call in recv.call_args_list)
    held, mine = held_tensors(runtime), model_tensors(runtime)
    if launch.rank() != LAST:
        assert (found, received) == ({}, 0)
        return
    assert far(found, state) == 0
    here = [fqn for fqn, x in held.items() if LAST in x.ranks]  # whose parts come from itself
    whole = sum(x.nbytes for fqn, x in state.items() if fqn not in names)
    assert received == whole - sum(LocalChunks.of(mine[fqn]).local.nbytes for fqn in here)
    prefix = "inner." if name == "wrapped" else ""
    files = map(load_file, (folder / "trained").glob("*.safetensors"))
    exported = {name: x for file in files for name, x in file.items()}
    assert len(exported) == len([n for n in state if n.startswith(prefix)]) - len(names)
    assert all(torch.equal(x, state[prefix + n]) for n, x in exported.items())


def adapters(at: Path, name: str, layout: str) -> None:
    """Train adapters, save them, and load them by peft over a base model of its own."""
    runtime = running(name, layout)
    assert {p.gathered for p in runtime.stage_parameters} == {"zero3" in layout}
    losses, optimizer = train(runtime, name, STEPS)
    save_pretrained(runtime, at, trainable_only=True)
    whole = runtime.full_state_dict()
    wanted = plain_loop(EXPORTED[name], ROWS)
    assert losses == pytest.approx(wanted.losses, rel=TOLERANCE) and losses[-1] != losses[0]
    assert far(whole, wanted.state) < TOLERANCE
    alone = EXPORTED[name].model()
    moved = {n for n, x in alone.state_dict().items() if not torch.equal(x, whole[n])}
    assert moved == {n for n in whole if "lora_" in n}
    alone.load_state_dict(wanted.state)
    states = {fqn for fqn, p in runtime.named_parameters() if optimizer.state.get(p)}
    assert states and all("lora_" in fqn for fqn in states)
    files = {"adapter_config.json", "adapter_model.safetensors", "manifest.json"}
    assert set(os.listdir(at)) == files
    base = "llama" if "llama" in name else "gpt2_untied"
    loaded, seen = peft.PeftModel.from_pretrained(CASES[base].model(), at), logits(alone, name)
    assert float((logits(loaded, name) - seen).abs().max()) < TOLERANCE
    assert float((logits(loaded.merge_and_unload(), name) - seen).abs().max()) < TOLERANCE


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
        "behind": lambda: checkpoint.save(runtime, checkpoints, asynchronous=True).wait(),
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


# --- under a plan ---------------------------------------------------------------------------------

EXPORTS = (
    ("gpt2_tied", "pp2xtp2 m2"), ("bert", "dp2xtp2 m2 zero1"), ("llama", "dp2xtp2 m2 zero3"),
    ("gpt2_untied", "dp2xtp2 m2 zero1"), ("wrapped", "pp2xdp2 m2"), ("llama", "pp2xtp2 m2"),
)  # fmt: skip
ADAPTERS = (
    ("llama lora", "dp2xtp2 m2 zero3"), ("gpt2 lora", "pp2xtp2 m2"), ("llama lora", "pp2xdp2 m2"),
)  # fmt: skip
MORE = "fused and tied weights of stages and tensor ranks are kept"
ADAPTED = "adapters of a pipeline with data ranks are kept"
DISKS = "the disk of the other rank is kept"


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


@pytest.mark.parametrize("of", tiered(EXPORTS, EXPORTS[:1].__contains__, MORE, name=" ".join))
def test_transformers_loads_the_same_files_under_every_plan(
    folder: Path, tmp_path: Path, of: tuple[str, str]
) -> None:
    on_ranks(4, export, tmp_path, *of, files_of_one_device(of[0], folder))


@pytest.mark.parametrize("of", tiered(ADAPTERS, ADAPTERS[2:].__contains__, ADAPTED, name=" ".join))
def test_adapters_train_and_peft_loads_them(tmp_path: Path, of: tuple[str, str]) -> None:
    on_ranks(4, adapters, tmp_path / "out", *of)


@pytest.mark.parametrize("rank", tiered([0, 1], (1).__eq__, DISKS))
def test_a_full_disk_leaves_the_last_save(tmp_path: Path, rank: int) -> None:
    on_ranks(2, fills_a_disk, tmp_path, rank)


@second_tier("models of transformers are kept, whose files are these and a config")
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
    model = EXPORTED["llama lora"].model()
    model.base_model.model.model.norm.weight.requires_grad = True
    with pytest.raises(SavedError, match=r"1 parameters train that peft doesn't save.*norm.weight"):
        save_pretrained(running("llama lora", model=model), tmp_path / "out", trainable_only=True)
    assert not (tmp_path / "out").exists()


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


# --- checkpoints converted to files of transformers and back --------------------------------------

NAME = "tests.executor.export.test_pretrained:wrapped"
GPT2 = "gpt2_tied"


def wrapped() -> tuple[Any, Any]:
    """The model of a command line."""
    return EXPORTED["wrapped"].model(), EXPORTED["wrapped"].batch(4, 0)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a checkpoint of a trained GPT-2, its export, and its config."""
    folder = tmp_path_factory.mktemp("convert")
    runtime = running(GPT2)
    _, optimizer = train(runtime, GPT2, 1)
    checkpoint.save(runtime, folder / "checkpoint", optimizer)
    save_pretrained(runtime, folder / "export", max_shard_size=SHARD_BYTES)
    save_pretrained(runtime, folder / "half", dtype=torch.bfloat16)
    return folder


def convert(source: Path, folder: Path, to: str, *more: object) -> int:
    return perform(["convert", str(source), str(folder), "--to", to, *map(str, more)])


def test_a_checkpoint_becomes_what_the_run_would_have_exported(made: Path, tmp_path: Path) -> None:
    for kind, at, *options in (
        ("export", "config.json", "--max-shard-size", f"{SHARD_BYTES // 1000}KB"),
        ("half", "", "--dtype", "bfloat16"),
    ):
        config = made / "export" / at
        convert(made / "checkpoint", tmp_path / "out", "hf", "--config", config, *options)
        assert sums(tmp_path / "out") == sums(made / kind)


@pytest.mark.parametrize("kind", ["export", "bin"])
def test_weights_become_a_checkpoint_and_train_on(made: Path, tmp_path: Path, kind: str) -> None:
    model = transformers.GPT2LMHeadModel.from_pretrained(made / "export")
    source = made / "export"
    if kind == "bin":
        source = tmp_path / "weights.bin"
        torch.save(model.state_dict(), source)
    convert(source, tmp_path / "back", "checkpoint", "--config", made / "export")
    runtime = running(GPT2)
    seed = runtime.seed
    checkpoint.load(runtime, tmp_path / "back")
    assert far(runtime.full_state_dict(), model.state_dict()) == 0
    assert (runtime.steps, runtime.seed) == (0, seed)
    checkpoint.save(runtime, tmp_path / "back")  # a save wrote it, so a save may replace it
    with pytest.raises(SavedError, match=r"saved without an optimizer"):
        checkpoint.load(runtime, tmp_path / "back", adamw(runtime.parameters()))


def test_a_model_inside_the_users_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = wrapped()
    checkpoint.save(running("wrapped", model=model), tmp_path / "checkpoint")
    convert(tmp_path / "checkpoint", tmp_path / "out", "hf", "--model", NAME, "--json")
    said = json.loads(capsys.readouterr().out)
    assert said["files"] == ["model.safetensors"]
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "out")
    assert far(loaded.state_dict(), model.inner.state_dict()) == 0


def test_what_does_not_fit_or_is_damaged_is_refused(made: Path, tmp_path: Path) -> None:
    other = EXPORTED["llama"].model()
    other.config.architectures = ["LlamaForCausalLM"]
    other.config.save_pretrained(tmp_path / "llama")
    runtime = running("llama")
    differs = r"30 missing: model.embed_tokens.weight, .*; \d+ unexpected: (lm_head|transformer)"
    with pytest.raises(SavedError, match=differs):
        convert(made / "checkpoint", tmp_path / "out", "hf", "--config", tmp_path / "llama")
    with pytest.raises(SavedError, match=differs):
        load_weights(runtime, made / "export")
    with pytest.raises(SavedError, match=rf"is of another model \(fingerprint.*\); {differs}"):
        checkpoint.load(runtime, made / "checkpoint")
    convert(made / "export", tmp_path / "back", "checkpoint", "--config", made / "export")
    with pytest.raises(SavedError, match=rf"is of another model: {differs}"):
        checkpoint.load(runtime, tmp_path / "back")
    with pytest.raises(SavedError, match=r"is a checkpoint already"):
        convert(made / "checkpoint", tmp_path / "out", "checkpoint", "--config", made / "export")
    with pytest.raises(SavedError, match=r"has no 'manifest.json' of a checkpoint"):
        convert(made / "export", tmp_path / "out", "hf", "--config", made / "export")
    (tmp_path / "config.json").write_text('{"architectures": ["Mine"]}')
    with pytest.raises(
        MeshwrightError, match=r"architectures \['Mine'\]; legal: the name of a class"
    ):
        convert(made / "checkpoint", tmp_path / "out", "hf", "--config", tmp_path)
    shutil.copytree(made / "export", tmp_path / "damaged")
    second = sorted((tmp_path / "damaged").glob("model-*"))[1]
    second.write_bytes(second.read_bytes()[:-3] + b"!!!")
    with pytest.raises(SavedError, match=rf"'{second.name}' is damaged"):
        convert(tmp_path / "damaged", tmp_path / "out", "checkpoint", "--config", made / "export")
    with pytest.raises(SavedError, match=rf"'{second.name}' is damaged"):
        load_weights(running(GPT2), tmp_path / "damaged")
    with pytest.raises(SavedError, match=r"is the folder that is read, whose configs would"):
        convert(made / "export", made / "export", "checkpoint", "--config", made / "export")
    assert not (tmp_path / "out").exists()


BIG = """
import sys, threading, time
from pathlib import Path
from torch import nn
from meshwright.executor.export import from_pretrained_files, to_pretrained_files

def own_mib():  # pages of mapped files are not a process' own: the kernel takes them back
    return int(Path("/proc/self/status").read_text().split("RssAnon:")[1].split()[0]) / 1024

def watch():
    while not done:
        seen.append(own_mib())
        time.sleep(0.002)

model = nn.Sequential(*(nn.Linear(1024, 2048, bias=False, device="meta") for _ in range(24)))
folder, done, seen = Path(sys.argv[1]), [], [own_mib()]
thread = threading.Thread(target=watch)
thread.start()
from_pretrained_files(folder / "weights", folder / "checkpoint", model)
to_pretrained_files(folder / "checkpoint", folder / "again", model)
done.append(True)
thread.join()
print(max(seen) - seen[0])
"""


@second_tier("that a tensor is read when it is written is what the others here go through")
def test_no_more_than_some_tensors_are_in_memory(tmp_path: Path) -> None:
    """192 MiB in 24 tensors: one file of safetensors of which each tensor is read alone."""
    (tmp_path / "weights").mkdir()
    tensors = {f"{k}.weight": torch.full((2048, 1024), float(k)) for k in range(24)}
    save_file(tensors, tmp_path / "weights" / "model.safetensors")
    line = [sys.executable, "-c", BIG, str(tmp_path)]
    ran = subprocess.run(line, capture_output=True, text=True, timeout=200)
    assert ran.returncode == 0, ran.stderr
    assert 8 <= float(ran.stdout) < 96
    assert far(load_file(tmp_path / "again" / "model.safetensors"), tensors) == 0
