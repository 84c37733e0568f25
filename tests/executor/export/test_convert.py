"""Checkpoints converted to files of transformers and back, by the API and the command line."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from meshwright.cli import main, perform
from meshwright.executor.checkpoint import checkpoint
from meshwright.executor.checkpoint.weights import load_weights
from meshwright.executor.errors import SavedError
from meshwright.executor.export import save_pretrained
from tests.executor.export.export_runs import EXPORTED, SHARD_BYTES, far, running, sums, train
from tests.helpers.tiers import second_tier
from tests.models.models import adamw

NAME = "tests.executor.export.test_convert:wrapped"
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
    config = made / "export" / "config.json"
    convert(
        made / "checkpoint", tmp_path / "out", "hf", "--config", config,
        "--max-shard-size", f"{SHARD_BYTES // 1000}KB",
    )  # fmt: skip
    assert sums(tmp_path / "out") == sums(made / "export")
    convert(
        made / "checkpoint", tmp_path / "out", "hf", "--config", made / "export",
        "--dtype", "bfloat16",
    )  # fmt: skip
    assert sums(tmp_path / "out") == sums(made / "half")


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
    with pytest.raises(SavedError, match=r"is no checkpoint: it has no '.metadata'"):
        convert(made / "export", tmp_path / "out", "hf", "--config", made / "export")
    shutil.copytree(made / "export", tmp_path / "damaged")
    second = sorted((tmp_path / "damaged").glob("model-*"))[1]
    second.write_bytes(second.read_bytes()[:-3] + b"!!!")
    with pytest.raises(SavedError, match=rf"'{second.name}' is damaged"):
        convert(tmp_path / "damaged", tmp_path / "out", "checkpoint", "--config", made / "export")
    assert not (tmp_path / "out").exists()


def test_a_config_of_no_class_of_transformers(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "config.json").write_text('{"architectures": ["Mine"]}')
    line = ["convert", str(made / "checkpoint"), str(tmp_path / "out"), "--to", "hf", "--config"]
    assert main([*line, str(tmp_path)]) == 1
    assert "has architectures ['Mine']; legal: the name of a class" in capsys.readouterr().err


BIG = """
import sys, threading, time
from pathlib import Path
from torch import nn
from meshwright.executor.export import from_pretrained_files, to_pretrained_files

def own_mib():  # pages of mapped files are not a process' own: the kernel takes them back
    lines = Path("/proc/self/status").read_text().splitlines()
    return int(next(x for x in lines if x.startswith("RssAnon")).split()[1]) / 1024

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
    ran = subprocess.run(
        [sys.executable, "-c", BIG, str(tmp_path)], capture_output=True, text=True, timeout=200
    )
    assert ran.returncode == 0, ran.stderr
    assert 8 <= float(ran.stdout) < 96
    found = load_file(tmp_path / "again" / "model.safetensors")
    assert all(torch.equal(x, tensors[name]) for name, x in found.items())
    assert found.keys() == tensors.keys()
