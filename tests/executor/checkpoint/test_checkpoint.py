"""Checkpoints: saved under any plan, loaded under any other, complete or not there at all; of one
device every optimizer, what does not fit, damaged files and notes; and weights, which under every
plan are one device's, bit for bit, initialised or read from files.

That training under a plan is a plain loop's is the parity matrix's to say.
"""

import copy
import json
import math
import random
import re
from collections import Counter, OrderedDict
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import safetensors.torch
import torch
from torch import nn

from meshwright.executor.checkpoint import checkpoint, notes, values
from meshwright.executor.checkpoint.weights import init_weights, load_weights
from meshwright.executor.errors import DamagedError, SavedError
from meshwright.executor.files import (
    LocalChunks,
    Manifest,
    atomic_folder,
    weight_files,
    write_tensors,
)
from meshwright.executor.runtime.runtime import Runtime
from meshwright.planner.plan.plan import Plan
from tests.executor.checkpoint import checkpoint_runs as runs
from tests.executor.checkpoint.checkpoint_runs import GPT2, Run, differing, on_meta, plan_of, start
from tests.helpers.launching import launch
from tests.helpers.ranks import on_ranks
from tests.helpers.single_device import initialised, named_tensors
from tests.helpers.tiers import second_tier, tiered
from tests.models.models import CASES, GLOBAL_BATCH, parallelize
from tests.parity import parity_cells
from tests.parity.parity_cells import Cell

ENDS_BEFORE_ITS_SAVE = """
import sys
from pathlib import Path
from meshwright.executor.ranks import launch
from tests.executor.checkpoint.checkpoint_runs import GPT2, start

with launch.distributed("gloo"):
    start(GPT2, "alone").save(Path(sys.argv[1], "unfinished"), asynchronous=True)
"""
FOUR = ("dp2tp2", "pp4", "tp4", "zero2", "zero3", "hybrid", "virtual", "uneven")
ROUND = (
    "zero3 virtual", "virtual uneven", "uneven hybrid", "hybrid dp2tp2", "virtual alone",
    "alone zero2",
)  # fmt: skip
FIRST = (f"{GPT2} zero3 zero3",)
PAIRS = (
    *(f"{GPT2} {pair}" for pair in ROUND),
    "resnet dp2 pp2",
    "llama_lora zero3 pp2",
    *(f"{GPT2} {plan} {plan}" for plan in FOUR),
    *(f"{GPT2} dp2tp2 {plan}" for plan in (*FOUR[1:], "pp2dp2tp2", "dp2", "pp2")),
    *(f"{GPT2} {plan} dp2tp2" for plan in ("pp4", "tp4", "zero2")),
    *(f"llama_lora {pair}" for pair in ("dp2 zero3", "zero3 hybrid", "zero3 zero3")),
    *(f"resnet dp2tp2 {plan}" for plan in ("dp2tp2", "virtual", "alone")),
)
MORE = "shards of two axes that come back are kept, and data ranks' that go to stages"


def on_plan(plan: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """A function of the runs on the ranks of a plan, or here."""
    world = runs.cell_of(GPT2, plan).world
    return on_ranks(world, function, *arguments) if world > 1 else function(*arguments)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """By case and plan, where a run was saved, once, and its history."""
    folder = tmp_path_factory.mktemp("checkpoints")

    @cache
    def of(case: str, plan: str) -> tuple[Path, runs.History]:
        path = folder / f"{case}-{plan}"
        return path, on_plan(plan, runs.saves, path, case, plan)

    return of


@pytest.mark.parametrize("pair", tiered(PAIRS, FIRST.__contains__, MORE))
def test_training_goes_on_under_any_plan(saved: Any, pair: str) -> None:
    case, source, target = pair.split()
    on_plan(target, runs.goes_on, *saved(case, source), case, target, source == target)


SOURCES = tuple(dict.fromkeys(pair.rpartition(" ")[0] for pair in PAIRS))
FIRST_SOURCES = {pair.rpartition(" ")[0] for pair in FIRST}


@pytest.mark.parametrize("of", tiered(SOURCES, FIRST_SOURCES.__contains__, MORE))
def test_a_checkpoint_is_read_without_meshwright(saved: Any, of: str) -> None:
    """By safetensors alone, under the model's own names, a tied parameter under its first. Neither
    replicas nor tied copies are written twice: the parts of a tensor have as many elements as it
    has."""
    case, plan = of.split()
    path, history = saved(case, plan)
    manifest = json.loads((path / "manifest.json").read_text())
    files = {name: safetensors.torch.load_file(path / name) for name in manifest["files"]}
    read = {}
    for name, tensor in manifest["tensors"].items():
        x = torch.zeros(tensor["shape"], dtype=getattr(torch, tensor["dtype"]))
        parts = 0
        for file, offset, sizes, *_ in tensor["chunks"]:
            ends = [(a, a + n) for a, n in zip(offset, sizes, strict=True)]
            box = f"[{','.join(f'{a}:{b}' for a, b in ends)}]"
            part = files[file][name if sizes == tensor["shape"] else name + box]
            x[tuple(slice(*of_dim) for of_dim in ends)] = part
            parts += part.numel()
        assert parts == x.numel(), name
        read[name] = x
    model = dict(CASES[case].model(seed=5).named_parameters())
    weights = {name: read[f"model.{name}"] for name in model}
    assert differing(weights, {name: history.at_save[name] for name in model}) == []
    tied = {"model.lm_head.weight", "model.transformer.wte.weight"}
    assert len(tied & read.keys()) == 1 or case != GPT2
    assert Plan.from_json(json.dumps(manifest["training"]["plan"])) == plan_of(case, plan)[0]


def test_an_asynchronous_save_holds_the_state_at_its_call(tmp_path: Path) -> None:
    on_ranks(2, runs.saves_beside_training, tmp_path)
    on_ranks(2, runs.saves_beside_another_start, tmp_path, timeout_s=90)


def test_a_mistake_is_told_alike_on_all_ranks(saved: Any, tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("not a checkpoint")
    start("mlp", "alone").save(tmp_path / "mlp")
    says = {
        "missing": r"NotThereError: checkpoint '.*nowhere': there is none",
        "no checkpoint": r"\w+Error: .*has no 'manifest.json' of a checkpoint",
        "not replaced": r"\w+edError: .*no save wrote, \['file'\], so it is not replaced",
        "other model": r"\w+edError: .*is of another model \(fingerprint \w+, this one \w+\)",
        "other optimizer": r"\w+edError: .*are those of AdamW, which SGD can't take",
        "no such extra": r"\w+edError: .*holds no state of \['sampler'\]; saved .*\['scheduler'\]",
        "foreign state": r"\w+edError: .*of shape \(5,\) that is none of the model's",
    }
    said = on_ranks(2, runs.mistakes, tmp_path, saved(GPT2, "zero3")[0], tmp_path / "mlp")
    assert said.keys() == says.keys()
    for name, heard in said.items():
        assert len(set(heard)) == 1, name
        assert re.search(says[name], heard[0], re.DOTALL), (name, heard[0])
    assert sorted(x.name for x in tmp_path.iterdir()) == ["afterwards", "mlp", "other"]


@second_tier("saves beside training, which are waited for, are kept")
def test_a_save_that_nobody_waits_for_is_finished(tmp_path: Path) -> None:
    (worker := tmp_path / "worker.py").write_text(ENDS_BEFORE_ITS_SAVE)
    run = launch(worker, str(tmp_path), ranks=1, timeout_s=300)
    assert run.ok, run.tail()
    runs.resume(GPT2, "alone", tmp_path / "unfinished")


# --- weights --------------------------------------------------------------------------------------

SEED, OTHER_SEED = 11, 5
# one micro-batch: normalisation over the batch is the single device's
LAYOUTS = (
    "dp4", "tp4", "pp2xtp2", "dp2xtp2 zero1", "dp4 zero2 shard2", "dp2xtp2 zero3", "1|dp3",
    "dp2xtp2 zero1 bf16",
)  # fmt: skip
FIRST_INITIALISED = (
    "gpt2_tied dp2xtp2 zero3", "llama pp2xtp2", "resnet dp4 zero2 shard2", "mlp 1|dp3",
)  # fmt: skip
INITIALISED = {
    *FIRST_INITIALISED,
    "bert dp2xtp2 zero1 bf16",
    *(f"gpt2_tied {layout}" for layout in LAYOUTS),
    *(f"{case} tp4" for case in ("gpt2_untied", "llama", "bert", "resnet", "mlp")),
    *(f"{case} dp2xtp2 zero3" for case in ("gpt2_untied", "llama", "resnet")),
}
FIRST_LOADED = ("gpt2_tied dp2xtp2 zero3", "resnet tp4")
LOADED = {
    *FIRST_LOADED,
    "gpt2_untied dp2xtp2 zero1",
    *(f"gpt2_tied {layout}" for layout in ("tp4", "pp2xtp2", "dp2xtp2 zero1")),
    *("llama tp4", "llama dp2xtp2 zero3", "resnet dp2xtp2 zero3"),
}
TURNS = "a model of shards, one of stages and one of unequal stages are kept"
LOADS = "the model with the most formats, and one with buffers, are kept"


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
    batch = CASES[cell.case].batch(cell.rows, 0)
    with torch.no_grad():
        wanted = float(CASES[cell.case].loss(copy.deepcopy(reference), batch))
    tolerance = 1e-2 if cell.precision == "bf16" else runs.TOLERANCE
    assert float(runtime.train_step(batch)) == pytest.approx(wanted, rel=tolerance)


def initialise(line: str) -> None:
    cell, runtime, model = on_meta(line)
    init_weights(runtime, SEED)
    held = {p.fqn for p in runtime.stage_parameters}
    assert all(x.is_meta == (n not in held) for n, x in model.named_parameters())
    check_state(runtime, single(cell.case, SEED))
    check_loss(cell, runtime, single(cell.case, SEED))


@pytest.mark.parametrize("line", tiered(sorted(INITIALISED), FIRST_INITIALISED.__contains__, TURNS))
def test_initialised_like_one_device(line: str) -> None:
    on_ranks(4, initialise, line)


def write_files(folder: Path, case: str) -> dict[str, Path]:
    """One model in every format; paths by format."""
    names = {"torch": "model.pt", "safetensors": "model.safetensors"}
    paths = {kind: folder / names.get(kind, kind) for kind in (*names, "checkpoint")}
    model = single(case, OTHER_SEED)
    state = {n: x.clone() for n, x in model.state_dict().items()}
    torch.save({"model": state, "step": 3}, paths["torch"])
    safetensors.torch.save_file(state, paths["safetensors"])
    paths["checkpoint"].mkdir()
    chunks = {f"model.{name}": LocalChunks.of(x) for name, x in state.items()}
    stored, files = write_tensors(chunks, paths["checkpoint"], None)
    manifest = Manifest(files=files, tensors=stored, training={})
    (paths["checkpoint"] / "manifest.json").write_bytes(manifest.to_json())
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
    tensors a rank reads what it holds and no more; of a checkpoint whole chunks."""
    cell, runtime, _ = on_meta(line)
    reference = single(cell.case, OTHER_SEED)
    opened = weight_files.opened

    def counted(*of: Any) -> dict[str, Counted]:
        return {name: Counted(x) for name, x in opened(*of).items()}

    with mock.patch.object(weight_files, "opened", counted):
        for kind, path in paths.items():
            if runtime.loaded:
                for p in runtime.stage_parameters:
                    p.stored.fill_(77)
            Counted.read_bytes = 0
            load_weights(runtime, path)
            held = sum(p.stored.nbytes for p in runtime.stage_parameters)
            if cell.case == "resnet":
                held += sum(b.whole.nbytes for b in runtime.held_buffers.values())
            assert Counted.read_bytes == (0 if kind == "checkpoint" else held), kind
            check_state(runtime, reference)
    check_loss(cell, runtime, reference)


@pytest.mark.parametrize("line", tiered(sorted(LOADED), FIRST_LOADED.__contains__, LOADS))
def test_loaded_from_every_format(tmp_path: Path, line: str) -> None:
    on_ranks(4, load, line, write_files(tmp_path, line.split()[0]))


# --- one device -----------------------------------------------------------------------------------

OPTIMIZERS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "plain SGD": lambda p: torch.optim.SGD(p, lr=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, amsgrad=True),
    "Adam fused": lambda p: torch.optim.Adam(p, fused=True),
    "NAdam": torch.optim.NAdam,  # a scalar that is no count
    "Adafactor": torch.optim.Adafactor,  # states of other shapes than the parameters'
}
FIRST_STATES = ("SGD", "AdamW", "Adam fused", "Adafactor")
STATES = "the change tier has states like the parameters, of other shapes, and none of a tensor"


@pytest.mark.parametrize("name", tiered(OPTIMIZERS, FIRST_STATES.__contains__, STATES))
def test_any_optimizer_goes_on_bit_by_bit(tmp_path: Path, name: str) -> None:
    both = []
    for other in (False, True):
        made = start("mlp", "alone", other=other)
        optimizer = OPTIMIZERS[name]([*made.runtime.parameters()])
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        both.append(replace(made, optimizer=optimizer, scheduler=scheduler))
    straight, again = both
    straight.steps(0, 2)
    straight.save(tmp_path / "at2")
    before = {fqn: p.clone() for fqn, p in again.runtime.named_parameters()}
    assert differing(before, dict(straight.runtime.named_parameters())) != []
    again.load(tmp_path / "at2")
    assert differing(again.state(), straight.state()) == []
    assert again.steps(2, 2) == straight.steps(2, 2)
    assert differing(again.state(), straight.state()) == []


def test_the_loss_scale_is_kept(tmp_path: Path) -> None:
    of = parity_cells.plan_of(Cell.parse("mlp 1 m1 fp16"))
    run, again = (parallelize(CASES["mlp"].model(), *of) for _ in range(2))
    for finite in (False, True):
        run.loss_scale.update(finite)
    checkpoint.save(run, tmp_path / "at0")
    assert again.loss_scale != run.loss_scale
    checkpoint.load(again, tmp_path / "at0")
    assert again.loss_scale == run.loss_scale


def test_a_model_without_weights_gets_them(tmp_path: Path) -> None:
    """Llama's frequencies are no part of a state dict; on meta they have no value to keep."""
    run = start("llama", "alone")
    run.save(tmp_path / "at0")
    with torch.device("meta"):
        model = CASES["llama"].build()
    runtime = parallelize(model, *plan_of("llama", "alone"))
    with pytest.raises(ValueError, match=r"meta device: .* call init_weights, load_weights, load_"):
        checkpoint.save(runtime, tmp_path / "none")
    optimizer, _ = runs.optimize("llama", dict(runtime.named_parameters()))
    checkpoint.load(runtime, tmp_path / "at0", optimizer)
    assert differing(runtime.full_state_dict(), run.runtime.full_state_dict()) == []
    batch = CASES["llama"].batch(GLOBAL_BATCH, 0)
    assert float(runtime.train_step(batch)) == float(run.runtime.train_step(batch))
    assert not (tmp_path / "none").exists()


def test_what_does_not_fit_is_told_before_anything_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = start("mlp", "alone")
    run.steps(0, 1)
    run.save(tmp_path / "at1")
    other = start("mlp", "alone", other=True)
    before = other.state()
    # a rank with one group
    monkeypatch.setattr(checkpoint, "all_gather_object", lambda _, of: [of, of[:1]])
    with pytest.raises(ValueError, match=r"has \[2, 1\] groups on the ranks; make the same"):
        other.load(tmp_path / "at1")
    assert differing(other.state(), before) == []


def test_options_go_by_name_and_must_agree_within_a_group(tmp_path: Path) -> None:
    run = start("gpt2_tied", "alone")
    run.save(tmp_path / "at0")
    one = torch.optim.AdamW([{"params": [*run.runtime.parameters()]}])
    with pytest.raises(ValueError, match=r"in group 0 .*saved with different options"):
        checkpoint.load(run.runtime, tmp_path / "at0", one)
    text = (tmp_path / "at0" / "manifest.json").read_text()
    saved = values.decoded(json.loads(text)["training"]["optimizer"]["groups"], tensor=dict)
    how = {"foreach": True, "fused": None, "capturable": True, "differentiable": False}
    assert not any(set(how) & set(options) for options, _ in saved)
    part = torch.optim.AdamW([next(iter(run.runtime.parameters()))], lr=1.0, **how)
    checkpoint.load(run.runtime, tmp_path / "at0", part)
    assert part.param_groups[0]["lr"] == 1e-3
    assert how.items() <= part.param_groups[0].items(), "how it runs is the run's own choice"


def test_parameters_that_were_not_trained_have_no_states(tmp_path: Path) -> None:
    run = start("mlp", "alone")
    some = [*run.runtime.parameters()][1:]
    checkpoint.save(run.runtime, tmp_path / "at0", torch.optim.SGD(some, lr=0.1))
    every = torch.optim.SGD([*run.runtime.parameters()], lr=0.1)
    with pytest.raises(ValueError, match=r"lacks 1 parameters that this one trains"):
        checkpoint.load(run.runtime, tmp_path / "at0", every)
    checkpoint.save(run.runtime, tmp_path / "at0")
    with pytest.raises(ValueError, match=r"saved without an optimizer; load it without one"):
        checkpoint.load(run.runtime, tmp_path / "at0", every)


def test_only_states_without_code_are_saved(tmp_path: Path) -> None:
    class Odd:
        def state_dict(self) -> dict[str, Any]:
            return {"path": Path("somewhere")}

    run = start("mlp", "alone")
    with pytest.raises(ValueError, match=r"of 'odd' holds a pathlib\S*Path; legal: tensors, num"):
        checkpoint.save(run.runtime, tmp_path / "at0", extra={"odd": Odd()})
    with pytest.raises(ValueError, match=r"extra\['epoch'\] is of type int, .* no state_dict"):
        checkpoint.save(run.runtime, tmp_path / "at0", extra={"epoch": 1})
    run.save(tmp_path / "at0")
    with pytest.raises(ValueError, match=r"extra\['odd'\] is of type Odd, .* no load_state_dict"):
        checkpoint.load(run.runtime, tmp_path / "at0", extra={"odd": Odd()})


def test_a_damaged_file_is_told(tmp_path: Path) -> None:
    run = start("mlp", "alone")
    run.save(tmp_path / "at0")
    (data,) = (tmp_path / "at0").glob("*.safetensors")
    whole = data.read_bytes()
    data.write_bytes(whole[:100])
    with pytest.raises(
        RuntimeError, match=r"'tensors-00000.\S+' has 100 bytes, and \d+ were saved"
    ):
        run.load(tmp_path / "at0")
    data.write_bytes(whole[:-1000] + bytes(range(250)) * 4)
    says = r"at0': damaged, and read in part.*'model.*' in '.*-00000.safetensors' is damaged: its"
    with pytest.raises(RuntimeError, match=says):
        run.load(tmp_path / "at0")


def test_an_error_in_the_background_is_raised_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, path = start("mlp", "alone"), tmp_path / "at1"

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(atomic_folder, "publish", full)
        saving = run.save(path, asynchronous=True)
        with pytest.raises(RuntimeError, match=r"at1': not saved.*No space left"):
            saving.wait()
        saving.wait()
        run.save(path, asynchronous=True)
        with pytest.raises(RuntimeError, match=r"No space left"):
            run.save(path)
    run.save(path)
    run.load(path)


@pytest.fixture(scope="module")
def noted(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Run]:
    """A checkpoint, and the run that it is of."""
    run = start("mlp", "alone")
    run.steps(0, 1)
    path = tmp_path_factory.mktemp("notes") / "at"
    run.save(path)
    return path, run


def test_any_bit_of_a_manifest_that_flips_is_told(noted: tuple[Path, Run]) -> None:
    path, run = noted
    file, draw, before = path / "manifest.json", random.Random(0), run.state()
    whole = file.read_bytes()
    try:
        for k in range(60):
            damaged = bytearray(whole)
            damaged[draw.randrange(len(whole))] ^= 1 << k % 8
            file.write_bytes(damaged)
            with pytest.raises(SavedError):
                run.load(path)
        file.write_bytes(whole[:-5])
        with pytest.raises(DamagedError, match=r"at': .*manifest.json' is damaged"):
            run.load(path)
    finally:
        file.write_bytes(whole)
    assert differing(run.state(), before) == []


class Anything:
    """An object with a state of every kind."""

    def __init__(self, state: Any = None) -> None:
        self.state = state

    def state_dict(self) -> Any:
        return self.state

    def load_state_dict(self, state: Any) -> None:
        self.state = state


OF_EVERY_KIND: dict[str, Any] = {
    "numbers": [1, -0.0, 1e-300, float("inf"), 2**200, True, None, 3 + 4j, math.pi],
    "texts": ["ä\ud800", b"\0\xff", bytearray(b"1")],
    "tuples": {"rng": (3, tuple(range(5)), None), "empty": ()},
    "keys": {3: "int", None: 1, (1, 2): "tuple", "!": "tag"},
    "containers": [{1, 2}, frozenset("a"), Counter("aab"), OrderedDict(b=1, a=[])],
    "torch": [torch.Size([2, 3]), torch.bfloat16, torch.device("cuda", 1)],
}


def test_states_of_every_kind_come_back(tmp_path: Path) -> None:
    """Values, types and the order of entries; tensors of any dtype, views among them."""
    whole = torch.arange(12).view(3, 4)
    tensors = [whole.t(), whole[1], torch.tensor(1.5, dtype=torch.float64), torch.empty(0, 2),
               torch.tensor([1j], dtype=torch.complex128), nn.Parameter(torch.ones(2))]  # fmt: skip
    run, saved, back = start("mlp", "alone"), Anything((OF_EVERY_KIND, tensors)), Anything()
    checkpoint.save(run.runtime, tmp_path / "at", extra={"x": saved}, asynchronous=True).wait()
    whole.zero_()
    checkpoint.load(run.runtime, tmp_path / "at", extra={"x": back})
    states, read = back.state
    assert repr(states) == repr(OF_EVERY_KIND)
    whole.copy_(torch.arange(12).view(3, 4))
    assert all(torch.equal(x, y) and x.dtype == y.dtype for x, y in zip(read, tensors, strict=True))
    nested: list[Any] = []
    nested.append(nested)
    with pytest.raises(SavedError, match=r"state of 'x' holds values that are nested too deeply"):
        checkpoint.save(run.runtime, tmp_path / "at", extra={"x": Anything(nested)})


WRONG: dict[str, tuple[Callable[[Any], Any], str]] = {
    "steps before the first": (lambda n: n.update(steps=-1), "steps is -1, and must not be neg"),
    "seed": (lambda n: n.update(seed=True), "seed is True"),
    "loss scale": (lambda n: n.update(loss_scale={"value": "x"}), "the loss scale's value is 'x'"),
    "extra": (lambda n: n.update(extra=None), "extra is None, and must be of type dict"),
    "optimizer": (lambda n: n.update(optimizer=[]), "optimizer is [], and must be of type dict"),
    "class": (lambda n: n["optimizer"].pop("class"), "the optimizer's class is None"),
    "groups": (lambda n: n["optimizer"].update(groups=5), "the optimizer's groups is 5"),
    "a group": (lambda n: n["optimizer"]["groups"].append({}), "a group is {}"),
    "options": (lambda n: n["optimizer"]["groups"].append((1, [])), "a group's options is 1"),
    "parameters": (lambda n: n["optimizer"]["groups"].append(({}, [1])), "name of a parameter"),
    "values": (lambda n: n["optimizer"]["values"].update(a=1), "the optimizer's values is 1"),
    "tensors": (lambda n: n["optimizer"]["tensors"].update(a={}), "the optimizer's tensors is {}"),
}


def told(noted: tuple[Path, Run], change: Callable[[Any], Any]) -> Exception:
    """The error of a load whose notes are changed as they are read."""
    path, run = noted

    check = notes._check

    def changed(read: Any) -> None:
        change(read)
        check(read)

    with (
        mock.patch.object(notes, "_check", changed),
        pytest.raises((SavedError, DamagedError)) as error,
    ):
        run.load(path)
    return error.value


@pytest.mark.parametrize("name", WRONG)
def test_what_is_of_another_type_is_told_before_anything_is_loaded(
    noted: tuple[Path, Run], name: str
) -> None:
    change, says = WRONG[name]
    before = noted[1].state()
    error = told(noted, change)
    assert isinstance(error, DamagedError) and says in str(error)
    assert "its notes are damaged; load an earlier checkpoint" in str(error)
    assert differing(noted[1].state(), before) == []


def test_states_that_adam_cannot_take_are_told(noted: tuple[Path, Run]) -> None:
    """Numbers of Adam's steps are notes; without them torch raises a KeyError."""

    def without_steps(notes: Any) -> None:
        for state in notes["optimizer"]["values"].values():
            state.pop("step")

    error = told(noted, without_steps)
    assert isinstance(error, DamagedError) and error.place and error.legal and error.way_out
    assert re.search(r"are none that Adam.* can take.*KeyError", str(error))
