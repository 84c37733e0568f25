"""Files of weights: recognised, named, read in boxes; errors that say what to do."""

import gc
import json
import logging
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from meshwright.executor.checkpoint import checkpoint
from meshwright.executor.checkpoint.name_matching import Matched, Wanted, match_names
from meshwright.executor.checkpoint.weights import init_weights, load_weights
from meshwright.executor.errors import DamagedError, SavedError
from meshwright.executor.files import MANIFEST, ChunkRead, LocalChunks, Manifest, write_tensors
from meshwright.executor.files.weight_files import open_source
from meshwright.executor.runtime.runtime import Runtime
from meshwright.profiles.inputs import MAX_MEASURED_BYTES
from tests.executor.checkpoint.checkpoint_runs import differing, on_meta
from tests.executor.files import test_weight_files
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.single_device import initialised
from tests.helpers.stored import stored
from tests.helpers.tiny import Net, net, planned
from tests.models.architectures import MLP
from tests.models.models import CASES, parallelize, traced
from tests.parity.parity_cells import Cell, plan_of
from tests.scripts.test_convert_checkpoint import Calls

ROWS = 4
STATE = {
    "a.weight": torch.arange(24.0).view(4, 6),
    "a.bias": torch.arange(6.0).to(torch.bfloat16),
    "count": torch.tensor(7),
}


def write(folder: Path, kind: str) -> Path:
    """`STATE` in one format."""
    ending = kind.removeprefix("indexed")
    save = safetensors.torch.save_file if ending.endswith("safetensors") else torch.save
    if kind == "checkpoint":
        chunks = {name: LocalChunks.of(x) for name, x in STATE.items()}
        stored, files = write_tensors(chunks, folder, None)
        manifest = Manifest(files=files, tensors=stored, training={})
        (folder / MANIFEST).write_bytes(manifest.to_json())
        return folder
    if ending == kind:
        save(STATE, path := folder / f"state.{'pt' if kind == 'torch' else kind}")
        return path
    files = {name: f"part{k}{ending}" for k, name in enumerate(STATE)}
    for name, file in files.items():
        save({name: STATE[name]}, folder / file)
    (folder / f"model{ending}.index.json").write_text(json.dumps({"weight_map": files}))
    return folder


KINDS = ("torch", "safetensors", "checkpoint", "indexed.safetensors", "indexed.bin")


@pytest.mark.parametrize("kind", KINDS)
def test_every_format_gives_names_shapes_and_boxes(tmp_path: Path, kind: str) -> None:
    source = open_source(write(tmp_path, kind))
    assert source.shapes == {name: tuple(x.shape) for name, x in STATE.items()}
    rows, whole, count = torch.zeros(2, 5), torch.zeros(6), torch.zeros((), dtype=torch.int64)
    corner = torch.zeros(1, 1, dtype=torch.float64)
    reads: list[Any] = [
        ("a.weight", ((1, 3), (0, 5)), rows), ("a.weight", ((3, 4), (5, 6)), corner),
        ("a.bias", ((0, 6),), whole), ("count", (), count),
    ]  # fmt: skip
    source.fill([ChunkRead(name=name, ranges=box, into=into) for name, box, into in reads])
    assert torch.equal(rows, STATE["a.weight"][1:3, :5])
    assert torch.equal(whole, torch.arange(6.0)) and (corner.item(), count.item()) == (23, 7)


def test_names_of_nested_dicts_and_the_safer_of_two_formats(tmp_path: Path) -> None:
    torch.save({"a": {"b": {"c": torch.ones(2)}, "d": torch.ones(3)}, 5: "x"}, tmp_path / "x.bin")
    assert open_source(tmp_path / "x.bin").shapes == {"a.b.c": (2,), "a.d": (3,)}
    assert open_source(tmp_path).shapes == {"a.b.c": (2,), "a.d": (3,)}
    safetensors.torch.save_file(STATE, tmp_path / "x.safetensors")
    assert set(open_source(tmp_path).shapes) == set(STATE)
    safetensors.torch.save_file({"part": torch.ones(1)}, tmp_path / "part.safetensors")
    index = {"weight_map": {"part": "part.safetensors"}}
    (tmp_path / "x.safetensors.index.json").write_text(json.dumps(index))
    assert set(open_source(tmp_path).shapes) == {"part"}


def test_what_is_no_weight_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"nowhere' does not exist; give a file of torch.save"):
        open_source(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"holds none; give a file of torch.save"):
        open_source(tmp_path)
    for name in ("a", "b"):
        safetensors.torch.save_file(STATE, tmp_path / f"{name}.safetensors")
    with pytest.raises(ValueError, match=r"several, \['a.safetensors', 'b.safetensors'\]; name"):
        open_source(tmp_path)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "a.safetensors", "y": "c.safetensors"}}))
    with pytest.raises(ValueError, match=r"lists \['c.safetensors'\], which are not there"):
        open_source(tmp_path)
    torch.save([1, 2], tmp_path / "list.pt")
    with pytest.raises(ValueError, match=r"list.pt' holds a list, no state dict"):
        open_source(tmp_path / "list.pt")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(ImportError, match=r"a.safetensors' needs .* pip install safetensors"):
        open_source(tmp_path / "a.safetensors")


def want(*names: str, required: bool = True) -> Wanted:
    return Wanted(names=names, shape=(2,), required=required)


def match(wanted: dict[str, Wanted], *stored: str) -> Matched:
    return match_names(wanted, {name: (2,) for name in stored}, "file")


NAMES = st.lists(st.sampled_from("abcd"), min_size=1, max_size=3).map(".".join)


@settings(deadline=None)
@given(st.sets(NAMES, min_size=2, max_size=6), st.sampled_from(["", "x.", "x.y."]), st.booleans())
def test_a_prefix_more_or_less_changes_nothing(names: set[str], prefix: str, more: bool) -> None:
    """Two names at least: one could be had by other prefixes as well."""
    pairs = {n: prefix + n for n in names} if more else {prefix + n: n for n in names}
    try:
        matched = match({n: want(n) for n in pairs}, *pairs.values())
    except ValueError as error:
        assert "or with" in str(error) or "or without" in str(error)
        return
    assert (dict(matched.stored), matched.unexpected) == (pairs, ())


def test_any_name_of_a_tied_parameter_will_do() -> None:
    tied = {"emb.w": want("emb.w", "head.w"), "norm": want("norm")}
    one = match(tied, "head.w", "norm")
    assert one == Matched(stored={"emb.w": "head.w", "norm": "norm"}, unexpected=())
    both = match(tied, "emb.w", "head.w", "norm")
    assert both.stored["emb.w"] == "emb.w" and both.unexpected == ()
    wrapped = match(tied, "model.head.w", "model.norm", "model.emb.w", "optimizer.norm.exp_avg")
    assert wrapped.stored == {"emb.w": "model.emb.w", "norm": "model.norm"}
    assert wrapped.unexpected == ()
    # exact names come before renamed ones
    model = {"body.a.w": want("body.a.w"), "body.b.w": want("body.b.w"), "head.w": want("head.w")}
    matched = match(model, "a.w", "b.w", "head.w", "other")
    assert matched.stored == {"body.a.w": "a.w", "body.b.w": "b.w", "head.w": "head.w"}
    assert matched.unexpected == ("other",)


def test_all_that_is_missing_or_misshapen_is_one_error() -> None:
    model = {"a": want("a"), "b": want("b"), "c": want("c"), "d": want("d", required=False)}
    with pytest.raises(ValueError) as caught:
        match_names(model, {"c": (3,), "z": (2,)}, "file.pt")
    text = str(caught.value)
    assert "'file.pt' doesn't fit the model: 2 missing: a, b; 1 misshapen: c is (3,)" in text
    assert "(2,) in the model; 1 unexpected: z; it holds 2 tensors, e.g. c, z; rename or" in text
    with pytest.raises(ValueError, match=r"without 'ema\.' or without 'model\.', 2 each; save one"):
        match({"a": want("a"), "b": want("b")}, "ema.a", "ema.b", "model.a", "model.b")


def test_of_a_file_what_is_too_much_is_logged_and_half_a_model_refused(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    state: dict[str, Any] = initialised(CASES["mlp"].build(), 0)
    torch.save(state | {"stray": torch.zeros(1)}, tmp_path / "state.pt")
    torch.save({n: x for n, x in state.items() if not n.startswith("net.0")}, tmp_path / "half.pt")
    cell, runtime, _ = on_meta("mlp 1")
    with pytest.raises(ValueError, match=r"half.pt' .*2 missing: net.0.weight, net.0.bias"):
        load_weights(runtime, tmp_path / "half.pt")
    with pytest.raises(ValueError, match="meta"):
        runtime.train_step(CASES["mlp"].batch(cell.rows, 0))
    with caplog.at_level(logging.WARNING, logger="meshwright.executor.checkpoint.weights"):
        load_weights(runtime, tmp_path / "state.pt")
    assert "1 unexpected, e.g. stray" in caplog.text


def test_a_real_model_is_loaded_in_place(tmp_path: Path) -> None:
    wanted = initialised(CASES["resnet"].build(), 1)
    torch.save(wanted, tmp_path / "state.pt")
    model = CASES["resnet"].model()
    runtime = parallelize(model, *plan_of(Cell.parse("resnet 1 m4")))
    load_weights(runtime, tmp_path / "state.pt")
    for state in (runtime.full_state_dict(), model.state_dict()):
        assert differing(state, wanted) == []


class Spare(MLP):
    """Has a layer that the forward doesn't use, and a parameter without elements."""

    def __init__(self) -> None:
        super().__init__(layers=1)
        self.spare = nn.Linear(3, 3)
        self.empty = nn.Linear(0, 3, bias=False)


def spare(*, real: bool = False) -> tuple[Runtime, nn.Module]:
    case = replace(CASES["mlp"], build=Spare)
    of = stored("spare", make=lambda: traced(case, ROWS), models=(test_weight_files,))
    plan = build_plan(of.graph, Knobs(meshes=((1, 1),), rows=ROWS, num_microbatches=1))
    with torch.device("cpu" if real else "meta"):
        model = Spare()
    return parallelize(model, plan, of), model


def optimizer_of(runtime: Runtime) -> torch.optim.Optimizer:
    return torch.optim.AdamW(runtime.parameters())


@pytest.mark.parametrize("real", [False, True])
@pytest.mark.parametrize("way", ["initialised", "file", "state dict", "checkpoint"])
def test_what_the_graph_does_not_read_gets_its_value_too(
    tmp_path: Path, way: str, real: bool
) -> None:
    wanted = initialised(Spare(), 1)
    torch.save(wanted, tmp_path / "state.pt")
    source, _ = spare()
    source.load_state_dict(wanted)
    checkpoint.save(source, tmp_path / "at", optimizer_of(source))
    runtime, model = spare(real=real)
    assert runtime.loaded == real
    if way == "state dict":
        runtime.load_state_dict({n: nn.Parameter(x) for n, x in wanted.items()})
    elif way == "file":
        load_weights(runtime, tmp_path / "state.pt")
    elif way == "checkpoint":
        checkpoint.load(runtime, tmp_path / "at", optimizer_of(runtime))
    elif not real:
        init_weights(runtime, 1)
    else:
        with pytest.raises(ValueError, match=r"nothing of the model is on the meta device.*build"):
            init_weights(runtime, 1)
        return
    assert differing(runtime.full_state_dict(), wanted) == []
    assert {n for n, x in model.state_dict().items() if torch.equal(x, wanted[n])} == set(wanted)
    assert not any(x.requires_grad for x in runtime.unused.values())


def test_what_lacks_it_or_has_another_shape_is_refused(tmp_path: Path) -> None:
    wanted = initialised(Spare(), 1)
    part = {n: x for n, x in wanted.items() if "spare" not in n}
    torch.save(part, tmp_path / "part.pt")
    runtime, _ = spare()
    with pytest.raises(ValueError, match=r"2 missing: spare.weight, spare.bias"):
        load_weights(runtime, tmp_path / "part.pt")
    with pytest.raises(ValueError, match=r"missing 'spare.weight'"):
        runtime.load_state_dict(part)
    with pytest.raises(ValueError, match=r"'spare.bias' has shape \(4,\), the model \(3,\)"):
        runtime.load_state_dict(wanted | {"spare.bias": torch.zeros(4)})
    assert not runtime.loaded
    real, model = spare(real=True)
    real.load_state_dict(part)
    assert torch.equal(real.full_state_dict()["spare.bias"], model.spare.bias)


def test_a_model_that_nobody_keeps_is_loaded(tmp_path: Path) -> None:
    torch.save(net().state_dict(), tmp_path / "state.pt")
    made = planned(Net())
    gc.collect()
    made.load_weights(tmp_path / "state.pt")
    found = made.full_state_dict()
    assert all(torch.equal(x, found[n]) for n, x in net().state_dict().items())


def test_buffers_outside_the_state_are_asked_for_with_the_way_out() -> None:
    _, runtime, _ = on_meta("llama 1")
    says = r"buffers \['model.rotary_emb.inv_freq.*call init_weights first.*file by load_weights"
    with pytest.raises(ValueError, match=says):
        runtime.load_state_dict(CASES["llama"].build().state_dict())
    init_weights(runtime)
    runtime.load_state_dict(CASES["llama"].build().state_dict())


# --- files that were made to harm -----------------------------------------------------------------


@pytest.mark.parametrize("name", ["../state.safetensors", "link.safetensors"])
def test_an_index_names_files_of_its_folder(tmp_path: Path, name: str) -> None:
    (inside := tmp_path / "at").mkdir()
    index = inside / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": dict.fromkeys(STATE, name)}))
    write(tmp_path, "safetensors")
    (inside / "link.safetensors").symlink_to(tmp_path / "state.safetensors")
    with pytest.raises(ValueError, match=r"index.json' names the file .*, which is"):
        open_source(inside)


NONE = r"index.json' is damaged .*it must be an object with"
NO_INDEX = (
    ("", NONE), ("[]", NONE), ('{"weight_map": 5}', NONE), ("[" * 100_000, NONE),
    ('{"weight_map": {"a": []}}', NONE), (f"{'[' * 900}{']' * 900}", "nested too deeply"),
    (" " * MAX_MEASURED_BYTES + "{}", r"has 33,\d+,\d+ bytes"),
)  # fmt: skip


@pytest.mark.parametrize(("text", "says"), NO_INDEX, ids=lambda text: text[:20])
def test_an_index_that_is_none_or_has_no_limits(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(text)
    with pytest.raises(DamagedError, match=says) as caught:
        open_source(tmp_path)
    assert caught.value.place and caught.value.legal and caught.value.way_out


@pytest.mark.parametrize("name", ["model.pt", "model.safetensors", "model.safetensors.index.json"])
def test_a_pipe_is_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    (tmp_path / "zero.pt").symlink_to("/dev/zero")
    for path in (tmp_path / name, tmp_path / "zero.pt"):
        with pytest.raises(SavedError, match="is no regular file") as caught:
            open_source(path)
        assert caught.value.place == f"weights: {str(path.resolve())!r}" and caught.value.way_out


def test_a_file_of_weights_runs_no_code(tmp_path: Path) -> None:
    torch.save({"a": Calls(open, str(tmp_path / "ran"), "w")}, tmp_path / "state.pt")
    with pytest.raises(RuntimeError, match=r"state.pt' would run code, or is no such file"):
        open_source(tmp_path / "state.pt")
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_a_damaged_file_of_weights_is_told(tmp_path: Path, kind: str) -> None:
    path = write(tmp_path, kind)
    whole = path.read_bytes()
    for damaged in (b"", b"PK", whole[:50], bytes(len(whole))):
        path.write_bytes(damaged)
        with pytest.raises(RuntimeError, match=rf"'{path}' (is damaged|would run code), or is no"):
            open_source(path)
