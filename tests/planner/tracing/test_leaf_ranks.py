"""Leaves on ranks: models with parts that no tracer follows train as on one device."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from meshwright.planner.plan.plan import Plan
from tests.helpers.launching import launch
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.ranks import on_ranks
from tests.helpers.stored import stored
from tests.helpers.tiers import second_tier, tiered
from tests.models import leaf_models
from tests.models.leaf_models import batch, loss_fn, model_of
from tests.models.models import Case, Traced, sgd, traced
from tests.parity.parity_reference import compare, plain_loop, runtime_loop

EXAMPLE = Path(__file__).parents[3] / "examples" / "leaf.py"
ROWS = 8
TOLERANCE = {"fp32": 1e-5, "bf16": 0.1}  # bf16 keeps 8 bits, and a router chooses by them
SPLIT = {
    "layers.0.part:leaf": "d", "layers.2:leaf": "d0", "layers.5:random_leaf": "i",
    "layers.*.up": "colwise",
}  # fmt: skip
ALL = ("scan", "rounded", "swish", "branch", "routed", "kernel")
CELLS = {
    "dp2 tp2": (ALL, {"meshes": [(2, 2)], "num_microbatches": 2}),
    "dp4 zero3": (ALL, {"meshes": [(4, 1)], "num_microbatches": 2, "zero": 3}),
    "pp2 tp2": (
        ("scan", "rounded", "branch", "kernel"),
        {"meshes": [(1, 2)] * 2, "num_microbatches": 4, "recompute": "full"},
    ),
    "compiled": (("scan", "swish"), {"meshes": [(2, 2)], "compile": "aot_eager"}),
    "bf16": (ALL, {"meshes": [(2, 2)], "precision": "bf16"}),
}  # fmt: skip


def case(kinds: tuple[str, ...]) -> Case:
    """What branches on values sees its own micro-batch."""
    return Case(
        build=lambda: model_of(kinds), batch=batch, optimizer=sgd, loss_fn=loss_fn,
        batch_statistics=True,
    )  # fmt: skip


def planned(kinds: tuple[str, ...], **knobs: Any) -> tuple[Plan, Traced]:
    knobs = {"rows": ROWS, "num_microbatches": 1, "precision": "fp32", **knobs}
    rows, precision = ROWS // knobs["num_microbatches"], knobs["precision"]
    of = stored(
        "leaves", kinds, rows, precision,
        make=lambda: traced(case(kinds), rows, precision), models=(leaf_models,),
    )  # fmt: skip
    return build_plan(of.graph, Knobs(**knobs)), of


def train(
    kinds: tuple[str, ...], plan: Plan, of: Traced, compile: bool | str
) -> dict[str, Any] | None:
    """Differences from one device, on rank 0."""
    sharded = runtime_loop(case(kinds), plan, of, compile=compile)
    if dist.get_rank():
        return None
    return compare(sharded, plain_loop(case(kinds), ROWS, parts=plan.num_microbatches))


@pytest.mark.parametrize(
    "name",
    tiered(
        CELLS,
        "dp4 zero3".__eq__,
        "other axes see leaves as other nodes; every kind of leaf on rows stays",
    ),
)
def test_planned_leaves_train_as_on_one_device(name: str) -> None:
    kinds, knobs = CELLS[name]
    knobs = dict(knobs)
    compile = knobs.pop("compile", False)
    shardings = SPLIT if kinds == ALL else {}
    plan, of = planned(kinds, shardings=shardings, **knobs)
    difference = on_ranks(4, train, kinds, plan, of, compile)
    limit = TOLERANCE[plan.precision]
    assert difference["loss"] < limit
    assert difference["gradient"][0] < limit, difference["gradient"]
    assert difference["state"][0] < limit, difference["state"]
    assert not difference["names"]


def drawn(kinds: tuple[str, ...], plan: Plan, of: Traced) -> list[Any]:
    """Losses and a gradient on every rank."""
    sharded = runtime_loop(case(kinds), plan, of)
    mine = (sharded.losses, sharded.gradients[-1]["embed.weight"].double().norm().item())
    ranks: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(ranks, mine)
    return ranks


def test_replicas_of_a_leaf_draw_the_same_and_recompute_repeats_it() -> None:
    kinds = ("noisy", "noisy")
    plain, again = (
        on_ranks(4, drawn, kinds, *planned(kinds, meshes=[(1, 4)], num_microbatches=2, recompute=r))
        for r in ("none", "full")
    )
    assert all(rank == plain[0] for rank in plain)
    assert again == plain
    assert len(set(plain[0][0])) > 1  # each step draws anew


@second_tier("takes a launch of its own; leaves on ranks and the other examples stay")
def test_the_example_trains_on_ranks_as_on_one_device() -> None:
    done = launch(EXAMPLE, ranks=4, timeout_s=300)
    assert done.ok, done.tail()
    said = done.ranks[0].stdout
    match = re.search(r"loss (\S+) -> (\S+) in .* difference from one device (\S+)", said)
    assert match, said
    assert float(match[2]) < 0.1 * float(match[1])
    assert float(match[3]) < 1e-4
    assert "selective_scan" in said
