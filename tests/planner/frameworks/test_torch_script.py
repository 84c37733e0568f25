"""Scripts of plain PyTorch: their losses are those of one device; what they can't say is said."""

import dataclasses
import re
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.pipelining.schedules import _Action

from meshwright import Overrides, auto_parallelize
from meshwright.costmodel.graph import Graph
from meshwright.planner.decisions import DECISIONS, OUTER_LOOP
from meshwright.planner.frameworks.torch_script import (
    LEFT_OUT,
    REFUSED,
    SAID,
    Script,
    ScriptError,
    torch_script,
)
from meshwright.planner.plan.plan import Plan
from tests.helpers import tiny
from tests.helpers.launching import launch
from tests.helpers.tiers import second_tier, tiered
from tests.planner.frameworks import small_models

STEPS, RATE = 3, 1e-2
# bf16: sums of other numbers of rows are rounded otherwise
TOLERANCE = {"fp32": 1e-4, "bf16": 2e-3, "bf16_pure": 3e-2}
MODULE = small_models.__name__
END_S = 180.0

MEGATRON = {
    **{f"**.{name}_proj": "colwise" for name in ("q", "k", "v", "gate", "up")},
    "**.o_proj": "rowwise",
    "**.down_proj": "rowwise",
    "model.embed_tokens": "vocab",
    "lm_head": "colwise",
    ":cross_entropy_loss": "vocab",
}
WHOLE_RESIDUAL = {
    **MEGATRON,
    "model.layers.*:add": "replicate",
    "model.layers.*:add#1": "replicate",
}
SEQUENCE = {
    **MEGATRON,
    "**.o_proj": "rowwise -> S(1)",
    "**.down_proj": "rowwise -> S(1)",
    "model.embed_tokens": "vocab -> S(1)",
}
SUMMED = ("a result in parts S(1) of model.embed_tokens",)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A model's plan, by overrides that leave nothing to search; words of what its script loses."""

    model: str
    ranks: int = 2
    precision: str = "fp32"
    given: Mapping[str, Any]
    lost: tuple[str, ...] = ()


def _pipeline(schedule: str, microbatches: int = 4, **given: Any) -> dict[str, Any]:
    plain = {"pp": 2, "dp": 1, "tp": 1, "schedule": schedule, "num_microbatches": microbatches}
    return plain | given


CASES = {
    "dp2": Case(model="net", given={"dp": 2, "tp": 1, "zero": 0}),
    "dp2, 2 micro-batches": Case(
        model="net", given={"dp": 2, "tp": 1, "zero": 0, "num_microbatches": 2}
    ),
    "zero 1": Case(model="net", given={"dp": 2, "tp": 1, "zero": 1, "num_microbatches": 2}),
    "zero 2": Case(model="gpt2", given={"dp": 2, "tp": 1, "zero": 2, "num_microbatches": 2}),
    "zero 3": Case(model="gpt2", given={"dp": 2, "tp": 1, "zero": 3}),
    "zero 3 within 2": Case(
        model="net", ranks=4, given={"dp": 4, "tp": 1, "zero": 3, "dp_shard": 2}
    ),
    "zero 1 within 2": Case(
        model="net", ranks=4, given={"dp": 4, "tp": 1, "zero": 1, "dp_shard": 2}
    ),
    "full": Case(
        model="llama",
        given={"dp": 2, "tp": 1, "zero": 3, "recompute": {"model.layers.*": "full"}},
    ),
    "tp2": Case(model="llama", given={"dp": 1, "tp": 2, "shardings": WHOLE_RESIDUAL}),
    "sequence": Case(model="llama", given={"dp": 1, "tp": 2, "shardings": SEQUENCE}, lost=SUMMED),
    "dp2×tp2": Case(
        model="llama", ranks=4,
        given={"dp": 2, "tp": 2, "zero": 0, "shardings": SEQUENCE, "num_microbatches": 2},
        lost=SUMMED,
    ),
    "zero 3×tp2": Case(
        model="llama", ranks=4,
        given={
            "dp": 2, "tp": 2, "zero": 3, "shardings": WHOLE_RESIDUAL,
            "recompute": {"model.layers.*": "full"},
        },
    ),
    "as Megatron": Case(
        model="llama",
        given={
            "dp": 1, "tp": 2,
            "shardings": {
                "model.embed_tokens": "hidden -> S(1)",
                "model.layers.*.mlp.gate_proj": "colwise",
                "model.layers.*.mlp.down_proj": "replicate",
            },
        },
        lost=("the split of model.layers.*", "a result in parts S(1) of model.embed_tokens"),
    ),
    "fused projections": Case(
        model="gpt2",
        given={"dp": 1, "tp": 2, "shardings": {"transformer.h.*.mlp.c_fc": "colwise"}},
        lost=("transformer.h.*.mlp.c_fc",),
    ),
    "bf16": Case(model="llama", precision="bf16", given={"dp": 2, "tp": 1, "zero": 3}),
    "bf16, pure": Case(model="net", precision="bf16_pure", given={"dp": 2, "tp": 1, "zero": 0}),
    "bf16, pp2": Case(model="llama", precision="bf16", given=_pipeline("1f1b", 2)),
    "pp2": Case(model="net", given=_pipeline("1f1b")),
    "pp2 of transformers": Case(model="llama", given=_pipeline("1f1b")),
    "pp2, tied": Case(model="gpt2", given=_pipeline("gpipe")),
    "pp2, virtual": Case(model="net", given=_pipeline("interleaved_1f1b", virtual_stages=2)),
    "pp2, zb_h1": Case(model="llama", given=_pipeline("zb_h1")),
    "pp2, eager": Case(model="net", given=_pipeline("eager_1f1b")),
    "pp2, v-shaped and tied": Case(model="gpt2", given=_pipeline("zb_v")),
    "pp2×dp2": Case(model="gpt2", ranks=4, given=_pipeline("1f1b", 2, dp=2, zero=1)),
    "pp2×tp2": Case(
        model="llama", ranks=4, given=_pipeline("1f1b", 2, tp=2, shardings=SEQUENCE), lost=SUMMED
    ),
}  # fmt: skip


@cache
def traced(name: str) -> tuple[Plan, Graph]:
    case = CASES[name]
    model, example, *loss_fn = getattr(small_models, case.model)()
    result = auto_parallelize(
        model,
        tiny.host(case.ranks),
        example_inputs=example,
        loss_fn=loss_fn[0] if loss_fn else None,
        global_batch_size=tiny.ROWS,
        precision=case.precision,
        overrides=Overrides(**case.given),
    )
    return result.plan, result._problem.graph


def script_of(name: str) -> Script:
    plan, graph = traced(name)
    return torch_script(plan, graph, module=f"{MODULE}:{CASES[name].model}")


def losses_alone(case: Case, steps: int = STEPS) -> list[float]:
    """The same steps by ordinary PyTorch on one device."""
    model, example, *loss_fn = getattr(small_models, case.model)()
    if case.precision == "bf16_pure":
        model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "bf16"):
            loss = loss_fn[0](model(example[0]), example[1]) if loss_fn else model(**example).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def run(text: str, folder: Path, ranks: int, *more: str) -> list[float]:
    """The losses that a script prints."""
    script = folder / "train.py"
    script.write_text(text)
    given = ("--steps", str(STEPS), "--lr", str(RATE), *more)
    ended = launch(script, *given, ranks=ranks, timeout_s=END_S)
    assert ended.ok, ended.tail()
    found = re.findall(r"^step \d+: loss (\S+)$", ended.ranks[0].stdout, re.MULTILINE)
    return [float(loss) for loss in found]


@pytest.mark.parametrize(
    "name", tiered(CASES, "pp2".__eq__, "a launch each; a pipeline of plain PyTorch stays")
)
def test_losses_are_those_of_one_device(name: str, tmp_path: Path) -> None:
    case, script = CASES[name], script_of(name)
    said = " ".join(map(str, script.cannot_express))
    assert all(words in said for words in case.lost)
    assert bool(said) == bool(case.lost), said
    losses = run(script.text, tmp_path, case.ranks)
    assert losses == pytest.approx(losses_alone(case), abs=TOLERANCE[case.precision])


@pytest.mark.parametrize(
    "name",
    tiered(
        ("zero 1", "pp2, tied", "pp2, virtual", "dp2×tp2"),
        lambda name: False,
        "two launches each; the steps themselves are in the change tier",
    ),
)
def test_a_checkpoint_goes_on(name: str, tmp_path: Path) -> None:
    case, folder = CASES[name], tmp_path / "saved"
    losses = [
        loss
        for _ in range(2)
        for loss in run(script_of(name).text, tmp_path, case.ranks, "--checkpoint", str(folder))
    ]
    assert losses == pytest.approx(losses_alone(case, 2 * STEPS), abs=1e-4)


# --- the text -------------------------------------------------------------------------------------

GRAPH, _ = tiny.cut(tiny.net())
TIED, _ = tiny.cut(tiny.net(tied=True))


def written(plan: Plan, graph: Graph = GRAPH) -> Script:
    return torch_script(plan, graph, module="my_models:net")


PLANS = {
    "alone": tiny.plan_for(GRAPH, dp=1, tp=1),
    "dp4": tiny.plan_for(GRAPH, dp=4, tp=1),
    "tp2": tiny.plan_for(GRAPH),
    "zero 3": tiny.with_stage(tiny.plan_for(GRAPH), zero=3, dp_shard=1, recompute="full"),
    "zero 1": tiny.with_stage(tiny.plan_for(GRAPH, dp=4, tp=1), zero=1, dp_shard=2),
    "pp2": tiny.plan_for(GRAPH, stages=2, schedule="1f1b"),
    "zb_h2": tiny.plan_for(GRAPH, stages=2, dp=1, tp=1, schedule="zb_h2"),
    "bf16": tiny.with_stage(tiny.plan_for(GRAPH, precision="bf16"), zero=3),
}


def test_scripts_are_clean_and_need_nothing_of_ours(tmp_path: Path) -> None:
    (tmp_path / "my_models.py").touch()
    for k, plan in enumerate(PLANS.values()):
        text = written(plan).text
        compile(text, "train.py", "exec")
        assert "meshwright" not in text.lower()
        (tmp_path / f"train{k}.py").write_text(text)
    ruff = [sys.executable, "-m", "ruff", "check", "--isolated", "--no-cache", "."]
    ended = subprocess.run(ruff, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout


@second_tier("scripts of these plans are compiled and linted above, and one is run")
def test_a_script_has_what_its_plan_needs_alone() -> None:
    parts = (
        "fully_shard",
        "DistributedData",
        "parallelize_module",
        "PipelineStage",
        "checkpoint_w",
    )
    found = {name: [p for p in parts if p in written(plan).text] for name, plan in PLANS.items()}
    assert found["alone"] == []
    assert found["dp4"] == ["DistributedData"]
    assert found["zb_h2"] == ["PipelineStage"]


def test_an_order_has_each_compute_of_each_stage_once() -> None:
    text = written(PLANS["zb_h2"]).text
    (order,) = re.findall(r'ORDER = """\\\n(.*?)"""', text, re.DOTALL)
    for stage, line in enumerate(order.strip().split("\n")):
        actions = [_Action.from_str(entry) for entry in line.split(",")]
        done = [(a.computation_type.name, a.microbatch_index) for a in actions if a]
        assert {a.stage_index for a in actions if a} == {stage}
        for kinds in (["FORWARD"], ["FULL_BACKWARD", "BACKWARD_INPUT"]):
            assert sorted(k for kind, k in done if kind in kinds) == [0, 1]
        halves = ([k for kind, k in done if kind == f"BACKWARD_{n}"] for n in ("INPUT", "WEIGHT"))
        assert len({*map(tuple, halves)}) == 1


# --- what is lost ---------------------------------------------------------------------------------


def test_every_decision_is_said_refused_or_left_out() -> None:
    beside = {"cp_kind", *OUTER_LOOP[1:]}
    assert {*SAID, *REFUSED, *LEFT_OUT} | beside == {*DECISIONS}


@pytest.mark.parametrize(
    ("changes", "of_stage", "words"),
    [
        ({}, {"zero": 3, "hpz": 2}, "secondary shards"),
        ({}, {"zero": 3, "quantized": "both"}, "quantised"),
        ({}, {"compressed": "powersgd-4"}, "gradients by powersgd-4"),
        ({}, {"recompute": "full", "segments": 2}, "segments of 2"),
        ({}, {"offload": {"optimizer": 1.0}}, "in host memory"),
        ({"chunked_loss": 2}, {}, "loss in 2 parts"),
        ({"post_validation": True}, {}, "validated afterwards"),
        ({"optimizer_in_backward": True}, {}, "optimizer in the backward"),
        ({}, {"recompute": "widening"}, "widening recompute of layers.0-2"),
        ({}, {"recompute": "full"}, "full recompute of embed, head"),
        ({"precision": "fp16"}, {}, "precision fp16"),
    ],
)
def test_a_decision_is_lost_aloud(
    changes: dict[str, Any], of_stage: dict[str, Any], words: str
) -> None:
    plan = tiny.with_stage(tiny.plan_for(GRAPH, dp=4, tp=1, **changes), **of_stage)
    script = written(plan)
    assert any(words in lost.what for lost in script.cannot_express)
    assert all(lost.why and lost.instead for lost in script.cannot_express)
    assert " ".join(words.split()) in " ".join(script.text.split())


def test_nothing_is_lost_of_a_plain_plan() -> None:
    assert written(PLANS["dp4"]).cannot_express == ()


def test_stages_differ_in_no_zero() -> None:
    plan = tiny.with_stage(tiny.plan_for(GRAPH, stages=2, dp=2, tp=1), 1, zero=1)
    assert [lost.what for lost in written(plan).cannot_express] == ["ZeRO by stage"]


def test_ranks_that_no_axes_give_are_lost() -> None:
    plan = tiny.plan_for(GRAPH, stages=2, dp=2, tp=1)
    plan = tiny.with_stage(tiny.with_stage(plan, 0, ranks=(0, 3)), 1, ranks=(1, 2))
    assert [lost.what for lost in written(plan).cannot_express] == ["ranks of the stages"]


def test_a_pipeline_inside_the_node_is_a_mesh() -> None:
    plan = tiny.plan_for(GRAPH, stages=2, dp=2, tp=1)
    plan = tiny.with_stage(tiny.with_stage(plan, 0, ranks=(0, 2)), 1, ranks=(1, 3))
    script = written(plan)
    assert not script.cannot_express
    assert 'mesh_dim_names=("replicate", "shard", "pp")' in script.text


class Positions(nn.Module):
    """A model that adds to its embedding itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = tiny.net()
        self.positions = nn.Parameter(torch.zeros(tiny.SEQUENCE, tiny.WIDTH))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.inner.embed(ids) + self.positions
        for layer in self.inner.layers:
            x = layer(x)
        logits: torch.Tensor = self.inner.head(x)
        return logits


def test_a_forward_of_more_than_modules_in_a_row_has_no_pipeline() -> None:
    graph, _ = tiny.cut(Positions())
    with pytest.raises(ScriptError, match="would run on every stage"):
        written(tiny.plan_for(graph, stages=2, dp=1, tp=1), graph)
    assert written(tiny.plan_for(graph, dp=2, tp=1), graph).cannot_express == ()


@pytest.mark.parametrize(
    ("of_stage", "place"),
    [({"cp": 2}, "stage 1: cp"), ({"ep": 2}, "stage 1: ep"), ({"dp": 1, "tp": 2}, "stage 1: mesh")],
)
def test_a_plan_is_refused(of_stage: dict[str, Any], place: str) -> None:
    plan = tiny.with_stage(tiny.plan_for(GRAPH, stages=2, dp=2, tp=1), 1, **of_stage)
    with pytest.raises(ScriptError) as caught:
        written(plan)
    assert caught.value.place == place
    assert caught.value.legal
    assert caught.value.way_out


def test_inputs_without_rows_are_refused() -> None:
    graph = dataclasses.replace(GRAPH, fixed={"2": 3})
    with pytest.raises(ScriptError, match="can't be cut into rows"):
        written(tiny.plan_for(graph, dp=4, tp=1), graph)


@pytest.mark.parametrize("module", ["my_models", "my models:net", "m:f(1)"])
def test_a_module_without_a_function_is_refused(module: str) -> None:
    with pytest.raises(ScriptError, match="legal: module:function"):
        torch_script(PLANS["dp4"], GRAPH, module=module)
