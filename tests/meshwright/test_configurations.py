"""`meshwright price`, `fit --from`, `export`, and `Plan.from_config`."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import Cluster, MeshwrightError, Plan
from meshwright.configurations import as_configuration, as_script, configured
from meshwright.planner.frameworks import ConfigurationError
from tests.helpers.tiers import second_tier
from tests.meshwright.commands import Captured, failed, printed

LAYERS = """
import torch
from torch import nn
from torch.nn import functional as F

class Layered(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
                                    for _ in range(4))
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x)

def net():
    torch.manual_seed(0)
    return Layered(), (torch.randn(8, 64), torch.randint(0, 8, (8,))), F.cross_entropy
"""
CONFIG = {
    "train_batch_size": 64,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 3},
}
MEGATRON = (
    "--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2 --micro-batch-size 4 "
    "--global-batch-size 64 --use-distributed-optimizer\n"
)


SMALL = """
base = "dgx-a100"
[device]
memory = "1.7 GB"
reserved = "0 B"
communicator = "0 B"
"""


@pytest.fixture(autouse=True)
def files(in_a_folder: Path) -> None:
    Path("layered.py").write_text(LAYERS)
    Path("ds.json").write_text(json.dumps(CONFIG))
    Path("m.args").write_text(MEGATRON)


ON = ["--cluster", "dgx-a100", "--no-profile"]
OTHER = second_tier("one number that the model has not is refused, as these are")


def test_a_configuration_is_priced_and_ours_stands_beside_it(capsys: Captured) -> None:
    text = printed(capsys, "price", "layered:net", "--from", "ds.json", *ON, "-o", "theirs.json")
    assert "deepspeed: 64 rows a step = microbatch_size=4 × num_microbatches=2 × dp=8" in text
    assert "recompute is said by scripts (model.gradient_checkpointing_enable()" in text
    assert "target deepspeed" in text and "From A, as given, to B, ours" in text
    *_, given, ours = text.splitlines()
    assert given.startswith("ds.json: dp8, 2 micro-batches of 32 rows, ZeRO-3; ")
    assert (ours.startswith("Ours is ") and "faster" in ours) or "times as fast" in ours
    plan = Plan.load("theirs.json")
    assert {stage.zero for stage in plan.stages} == {3} and plan.num_microbatches == 2
    data = json.loads(
        printed(
            capsys,
            "price",
            "layered:net",
            "--from",
            "ds.json",
            *ON,
            "--recompute",
            "full",
            "--json",
        )
    )
    assert data["theirs"]["plan"]["stages"][0]["recompute"] == {"full": ["layers.0-3"]}
    assert data["ours"]["summary"]["step_time_s"] <= data["theirs"]["summary"]["step_time_s"]
    assert not data["difference"]["same"]


@second_tier("price says whether a configuration fits; fit has models without one (test_asking)")
def test_whether_a_configuration_fits_and_what_would_help(capsys: Captured) -> None:
    text = printed(capsys, "fit", "layered:net", "--from", "m.args", *ON)
    assert text.startswith("fits: ") and "plan: pp2 × dp2×tp2, 1f1b, 8 micro-batches of 8" in text
    Path("small.toml").write_text(SMALL)
    Path("ds.json").write_text(json.dumps({"train_batch_size": 2**23}))
    tight = ["fit", "layered:net", "--from", "ds.json", "--cluster", "small.toml", "--no-profile"]
    text = printed(capsys, *tight, code=2)
    assert "does not fit" in text and "What would help" in text and "microbatch_size" in text


@second_tier("what fits stays, with ours beside it")
def test_what_does_not_fit_is_said_and_ours_stands_beside_it(capsys: Captured) -> None:
    Path("small.toml").write_text(SMALL)
    given = {**CONFIG, "train_batch_size": 2**23, "zero_optimization": {"stage": 0}}
    Path("ds.json").write_text(json.dumps(given))
    tight = ["price", "layered:net", "--from", "ds.json", "--cluster", "small.toml", "--no-profile"]
    text = printed(capsys, *tight, "-o", "no.json", code=2)
    assert "ds.json: the model does not fit" in text and "What would help" in text
    assert text.splitlines()[-1].startswith("Ours fits: ") and not Path("no.json").exists()
    data = json.loads(printed(capsys, *tight, "--json", code=2))
    assert data["theirs"] is None and data["helps"] and data["ours"]["summary"]["chosen"]


@pytest.mark.parametrize(
    ("more", "says"),
    [
        pytest.param(
            "--num-layers 5", "num_layers is 5, and the model has not; legal: 4", marks=OTHER
        ),
        pytest.param(
            "--hidden-size 65",
            "hidden_size is 65, and the model has not; legal: 8, 64, 256",
            marks=OTHER,
        ),
        ("--seq-length 4096", "seq_length is 4096, and the model has not; legal: 64"),
    ],
)
def test_a_file_for_another_model_is_refused(capsys: Captured, more: str, says: str) -> None:
    Path("m.args").write_text(MEGATRON + more)
    assert says in failed(capsys, ["price", "layered:net", "--from", "m.args", *ON])
    Path("m.args").write_text(MEGATRON + "--num-layers 4 --hidden-size 64 --seq-length 64")
    assert configured("m.args", *_net(), **_given()).configuration.values["hidden_size"] == 64


@second_tier("exports to DeepSpeed, priced again as written, stay")
def test_a_plan_is_exported_and_means_itself(capsys: Captured) -> None:
    search = ["plan", "layered:net", *ON, "--batch", "64", "--target", "megatron", "--pp", "2"]
    more = ["--schedule", "1f1b", "--tp", "2", "--zero", "1", "--num-microbatches", "4"]
    printed(capsys, *search, *more, "--recompute", "none", "--precision", "bf16", "-o", "p.json")
    text = printed(capsys, "export", "p.json", "layered:net", *ON, "--to", "megatron", "-o", "out")
    assert "As written: pp2 × dp2×tp2, 1f1b, 4 micro-batches of 16 rows, ZeRO-1" in text
    flags = Path("out/megatron.args").read_text()
    assert flags.startswith("# megatron 0.16.1\n--tensor-model-parallel-size 2\n")
    assert Path("out/export.txt").read_text().strip() == text.strip()
    back = configured("out/megatron.args", *_net(), **_given()).result
    first = Plan.load("p.json")
    assert [s.mesh for s in back.plan.stages] == [s.mesh for s in first.stages]
    assert [s.blocks for s in back.plan.stages] == [s.blocks for s in first.stages]
    assert back.plan.num_microbatches == first.num_microbatches


def test_what_is_lost_is_refused_where_nobody_knows_whether_it_fits(capsys: Captured) -> None:
    search = ["plan", "layered:net", *ON, "--batch", "64", "--pp", "2", "--num-microbatches", "4"]
    printed(capsys, *search, "--recompute", "layers.0=full", "-o", "p.json")
    err = failed(capsys, ["export", "p.json", "--to", "deepspeed", "-o", "out"])
    assert "can't be said: recompute=full of 1 of 4 layers" in err
    assert "pp=2: it has no key for it; instead 1, with dp=8" in err
    assert not Path("out/ds_config.json").exists()
    text = printed(capsys, "export", "p.json", "--to", "deepspeed", "-o", "out", "--lossy")
    assert "Not priced again" in text and "Left to you" in text
    assert json.loads(Path("out/ds_config.json").read_text())["train_batch_size"] == 64
    text = printed(capsys, "export", "p.json", "layered:net", *ON, "--to", "deepspeed", "-o", "out")
    assert "As written: dp8, " in text


def _net() -> tuple[nn.Module, Cluster]:
    import layered  # type: ignore[import-not-found]

    return layered.net()[0], Cluster.from_catalog("dgx-a100")


def _given(**more: Any) -> dict[str, Any]:
    batch = torch.randn(8, 64), torch.randint(0, 8, (8,))
    return {"example_inputs": batch, "loss_fn": F.cross_entropy, "profile": False, **more}


def test_a_configuration_is_a_plan() -> None:
    plan = Plan.from_config("m.args", *_net(), **_given())
    assert [len(stage.ranks) for stage in plan.stages] == [4, 4]
    assert {(s.dp, s.tp, s.zero) for s in plan.stages} == {(2, 2, 1)}
    assert [n for n in plan.stages[0].blocks if "layers" in n] == ["layers.0", "layers.1"]
    with pytest.raises(ConfigurationError, match=r"the model has 4 layers"):
        Path("m.args").write_text(MEGATRON + "--pipeline-model-parallel-layout 'Et|tL'")
        Plan.from_config("m.args", *_net(), **_given())
    with pytest.raises(ConfigurationError, match=r"no such file|No such file"):
        Plan.from_config("missing.json", *_net(), **_given())


def test_mistakes_are_named(capsys: Captured) -> None:
    err = failed(capsys, ["price", "layered:net", *ON])
    assert "--from: no configuration" in err or "no configuration" in err
    err = failed(capsys, ["price", "layered:net", "--from", "ds.json", *ON, "--zero", "1"])
    assert "zero beside it=1; legal: recompute" in err
    err = failed(capsys, ["fit", "layered:net", *ON])
    assert "--batch" in err and "rows per optimizer step" in err


@second_tier("scripts of plain torch are written and run in test_torch_script; other exports stay")
def test_a_script_of_plain_torch_is_written(capsys: Captured) -> None:
    search = ["plan", "layered:net", "--cluster", "local:2", "--no-profile", "--batch", "8"]
    printed(capsys, *search, "--dp", "2", "--zero", "3", "-o", "p.json")
    to = ["export", "p.json", "layered:net", "--cluster", "local:2", "--to", "torch", "-o", "out"]
    text = printed(capsys, *to)
    assert "out/train.py" in text and "As written: dp2, " in text and " a step, fits." in text
    assert "Left to you" not in text
    layered = Path("layered.py").read_text()
    Path("bare.py").write_text(layered.replace("return Layered()", 'return Layered().to("meta")'))
    text = printed(capsys, *to[:2], "bare:net", *to[3:])
    assert "weights: bare:net gives a model on meta" in text
    script = Path("out/train.py").read_text()
    assert "fully_shard(" in script and "from bare import net as build" in script
    compile(script, "train.py", "exec")
    given = {name: _given()[name] for name in ("example_inputs", "loss_fn")}
    on = Cluster.local(2)
    assert script == as_script(Plan.load("p.json"), _net()[0], on, module="bare:net", **given).text
    err = failed(capsys, ["export", "p.json", "--to", "torch"])
    assert "the model" in err and "module:function" in err


@second_tier("the command line has a list of software to choose from")
def test_an_unknown_software_is_refused() -> None:
    with pytest.raises(MeshwrightError, match=r"software='caffe'; legal: deepspeed, accelerate"):
        as_configuration(Plan.from_config("m.args", *_net(), **_given()), "caffe")


@second_tier("a model of a module is priced by the same lines")
def test_a_config_of_transformers_is_a_model(capsys: Captured) -> None:
    config = {"architectures": ["LlamaForCausalLM"], "hidden_size": 64, "num_hidden_layers": 2,
              "num_attention_heads": 4, "intermediate_size": 128, "vocab_size": 256,
              "max_position_embeddings": 128}  # fmt: skip
    Path("small").mkdir()
    Path("small/config.json").write_text(json.dumps(config))
    text = printed(capsys, "price", "hf:small:64", "--from", "ds.json", *ON)
    assert text.startswith("Llama, ") and "64 tokens" not in text
    assert "ds.json: dp8, 2 micro-batches of 32 rows, ZeRO-3" in text
    err = failed(capsys, ["price", "hf:none/such", "--from", "ds.json", *ON])
    assert "none/such" in err
    Path("small/config.json").write_text(json.dumps(config | {"architectures": ["BertModel"]}))
    err = failed(capsys, ["price", "hf:small", "--from", "ds.json", *ON])
    assert "is a BertModel; legal: a causal language model" in err
    err = failed(capsys, ["price", "hf:small:many", "--from", "ds.json", *ON])
    assert "hf:CONFIG:POSITIONS" in err
