"""What is exported under a plan is what transformers and peft load, and full disks do no harm.

One launch of four ranks (`export_worker.py`) does everything; each test reads its part of the
results.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from meshwright import auto_parallelize
from meshwright.executor.errors import SavedError
from tests.executor.export.export_models import MODELS, ROWS, adapted, batch
from tests.executor.export.export_worker import ADAPTERS, EXPORTS, SHARD_BYTES, sums
from tests.helpers.launching import Results, results_of
from tests.helpers.tiny import host, net, planned

TIMEOUT_S = 500
TOLERANCE = 1e-5  # sums in another order


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    worker = Path(__file__).with_name("export_worker.py")
    folder = tmp_path_factory.mktemp("export")
    return results_of(worker, folder, ranks=4, timeout_s=TIMEOUT_S)


def test_every_rank_ends_in_order(results: Results) -> None:
    assert results.run.ok, results.run.tail()
    assert not any(rank.killed or rank.children_left for rank in results.run.ranks)


@pytest.mark.parametrize(("name", "layout"), EXPORTS)
def test_transformers_loads_what_was_trained(results: Results, name: str, layout: str) -> None:
    found = results[f"{name}-{layout}"]
    assert found["report"] == {}, "missing, unexpected or misshapen names"
    assert found["state"] == 0
    assert found["logits"] == 0
    assert found["trained"] < TOLERANCE, "not the single device's"
    assert (found["half"], found["half state"]) == ("torch.bfloat16", 0)


@pytest.mark.parametrize(("name", "layout"), EXPORTS)
def test_files_are_the_same_under_every_plan(
    results: Results, tmp_path: Path, name: str, layout: str
) -> None:
    alone(MODELS[name]()).save_pretrained(tmp_path / "alone", max_shard_size=SHARD_BYTES)
    wanted, found = sums(tmp_path / "alone"), results[f"{name}-{layout}"]["files"]
    assert len(wanted) > 5
    assert found == wanted


@pytest.mark.parametrize(("name", "layout"), ADAPTERS)
def test_adapters_train_and_peft_loads_them(results: Results, name: str, layout: str) -> None:
    found = results[f"peft-{name}-{layout}"]
    assert found["losses"] == pytest.approx(found["wanted"], rel=TOLERANCE)
    assert found["losses"][-1] < found["losses"][0]
    assert found["trained"] < TOLERANCE
    assert found["frozen"] == 0
    assert found["states"] and all("lora_" in fqn for fqn in found["states"])
    assert found["files"] == ["adapter_config.json", "adapter_model.safetensors", "manifest.json"]
    assert max(found["logits"], found["merged"]) < TOLERANCE


@pytest.mark.parametrize("layout", ["zero3", "pp2×tp2"])
def test_a_state_dict_is_whole_on_one_rank_alone(results: Results, layout: str) -> None:
    for rank, found in enumerate(results[f"one-{layout}"]["ranks"]):
        if rank == 1:
            assert found["far"] == 0
            assert 0 < found["received"] < found["bytes"], "its own parts come from itself"
        else:
            assert (found["names"], found["received"]) == (0, 0)


@pytest.mark.parametrize("rank", [0, 2])
@pytest.mark.parametrize("kind", ["checkpoint", "in the background", "pretrained"])
def test_a_full_disk_leaves_the_last_save(results: Results, rank: int, kind: str) -> None:
    found = results[f"full-{rank}"]
    for error in found[kind]["errors"]:
        assert error.startswith("UnwrittenError: ")
        assert "not saved; what was there before still is" in error
        assert f"rank {rank}: " in error and "File too large" in error
    assert found[kind]["left"] == ["checkpoint", "pretrained"], "half a save is left"
    assert found[kind]["same"], "the last save was changed"
    assert found["again"], "no save after it"


# --- one device -----------------------------------------------------------------------------------


def alone(model: Any) -> Any:
    return auto_parallelize(
        model, host(1), example_inputs=batch(), global_batch_size=ROWS, precision="fp32"
    )


def test_a_model_of_plain_torch_has_weights_and_no_config(tmp_path: Path) -> None:
    result = planned(net(tied=True))
    result.save_pretrained(tmp_path / "out")
    assert sorted(sums(tmp_path / "out")) == ["manifest.json", "model.safetensors"]
    other = planned(net(tied=True))
    for p in other.parameters():
        torch.nn.init.zeros_(p)
    other.load_weights(tmp_path / "out")
    wanted = result.full_state_dict()
    assert all(torch.equal(x, wanted[name]) for name, x in other.full_state_dict().items())


def test_of_a_model_without_adapters_what_trains_is_saved(tmp_path: Path) -> None:
    model = MODELS["llama"]()
    for name, p in model.named_parameters():
        p.requires_grad = ".3." in name
    alone(model).save_pretrained(tmp_path / "out", trainable_only=True)
    assert not (tmp_path / "out" / "config.json").exists()
    found = load_file(tmp_path / "out" / "model.safetensors")
    wanted = {name: p for name, p in model.named_parameters() if ".3." in name}
    assert found.keys() == wanted.keys()
    assert all(torch.equal(x, wanted[name]) for name, x in found.items())


def test_what_cannot_be_saved_so_is_refused(tmp_path: Path) -> None:
    result = alone(MODELS["llama"]())
    result.save_checkpoint(tmp_path / "checkpoint")
    before = sums(tmp_path / "checkpoint")
    with pytest.raises(SavedError, match=r"holds a checkpoint of a run"):
        result.save_pretrained(tmp_path / "checkpoint")
    assert sums(tmp_path / "checkpoint") == before
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "config.json").write_text("{}")
    with pytest.raises(SavedError, match=r"holds what no save wrote, \['config.json'\]"):
        result.save_pretrained(tmp_path / "mine")
    with pytest.raises(SavedError, match=r"max_shard_size='5 pounds'.*legal: bytes"):
        result.save_pretrained(tmp_path / "out", max_shard_size="5 pounds")
    with pytest.raises(SavedError, match=r"submodule='other': the model has none"):
        result.save_pretrained(tmp_path / "out", submodule="other")
    with pytest.raises(RuntimeError, match=r"rank 7 is none of the plan's; legal: \[0\]"):
        result.full_state_dict(rank=7)
    with pytest.raises(SavedError, match=r"holds peft's adapters, .* trainable_only=True"):
        alone(adapted("llama")).save_pretrained(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_parameters_that_peft_would_not_save_are_named(tmp_path: Path) -> None:
    model = adapted("llama")
    model.base_model.model.model.norm.weight.requires_grad = True
    with pytest.raises(SavedError, match=r"1 parameters train that peft doesn't save.*norm.weight"):
        alone(model).save_pretrained(tmp_path / "out", trainable_only=True)


def test_only_adapters_are_priced_as_trained() -> None:
    """AdamW: 8 bytes of states and 4 of gradients for each trained element, none for others."""
    for model in (MODELS["llama"](), adapted("llama")):
        trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
        parts = alone(model).report.to_dict()["memory"][0]["parts"]
        assert parts["optimizer"] == 8 * trained
        assert parts["gradients"] == 4 * trained
