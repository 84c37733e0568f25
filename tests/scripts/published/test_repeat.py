"""A stack deepened from a shallow trace against the same depth traced in full."""

import dataclasses
from functools import cache

import pytest

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding.factors import analyse
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.plan.check import fingerprint
from meshwright.planner.plan.plan import Plan
from meshwright.planner.pricing.evaluate import Evaluator
from meshwright.planner.tracing.trace import trace
from scripts.published.models import TransformerDims, build
from scripts.published.predict import deepen
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.planning import cluster, linears, problem_of
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import with_stage
from tests.models.models import Traced

GPT = TransformerDims(
    layers=3, hidden=32, heads=4, kv_heads=4, ffn=64, vocab=64, seq_len=16, dropout=0.1,
    attention="written",
)  # fmt: skip
LLAMA = dataclasses.replace(
    GPT, kv_heads=2, activation="swiglu", norm="rms", positions="rotary", bias=False, tied=False,
    dropout=0.0, attention="fused",
)  # fmt: skip
DEEP = 6
STYLES = {"gpt": GPT, "llama": LLAMA}


@cache
def traced(style: str, layers: int) -> Graph:
    model, batch = build(dataclasses.replace(STYLES[style], layers=layers))
    graph = trace(model, batch, loss_fn=None, batch_size=2, precision="bf16")
    return cut_blocks(graph, analyse(graph))


@pytest.fixture(
    scope="module",
    params=[
        pytest.param(style, marks=second_tier("parameters of a deep stack are counted by hand"))
        for style in STYLES
    ],
)
def pair(request: pytest.FixtureRequest) -> tuple[Graph, Graph]:
    """Deepened, and traced at full depth."""
    return deepen(traced(request.param, 3), "layers", DEEP), traced(request.param, DEEP)


def test_names_are_those_of_a_full_trace(pair: tuple[Graph, Graph]) -> None:
    deepened, full = pair
    assert [op.key for op in deepened.ops] == [op.key for op in full.ops]
    assert [op.module for op in deepened.ops] == [op.module for op in full.ops]
    assert sorted(deepened.parameters.values()) == sorted(full.parameters.values())
    assert deepened.num_parameters() == full.num_parameters()
    assert deepened.aliases == full.aliases
    assert fingerprint(deepened) == fingerprint(full)


def test_blocks_are_those_of_a_full_trace(pair: tuple[Graph, Graph]) -> None:
    deepened, full = pair
    for found, expected in zip(deepened.blocks, full.blocks, strict=True):
        assert found.name == expected.name
        assert [op.key for op in found.ops] == [op.key for op in expected.ops]
        for side in ("inputs", "outputs", "derived", "parameters", "buffers"):
            assert len(getattr(found, side)) == len(getattr(expected, side)), side
        assert [deepened.parameters[v] for v in found.parameters] == [
            full.parameters[v] for v in expected.parameters
        ]

    def classes(graph: Graph) -> list[int]:
        """The first block of each block's class."""
        ids = [block.class_id for block in graph.blocks]
        return [ids.index(each) for each in ids]

    assert classes(deepened) == classes(full)


def test_every_value_is_made_once_and_before_it_is_read(pair: tuple[Graph, Graph]) -> None:
    deepened, full = pair
    outside = {*deepened.inputs, *deepened.parameters, *deepened.buffers, *deepened.constants}
    known = outside | {r for op in deepened.derived for r in op.results}
    for op in deepened.ops:
        assert known.issuperset(op.operands), op.key
        assert known.isdisjoint(op.results), op.key
        known |= set(op.results)
    assert deepened.loss in known
    assert len({op.name for op in deepened.ops}) == len(deepened.ops)
    for found, expected in zip(deepened.ops, full.ops, strict=True):
        assert [deepened.values[v] for v in (*found.operands, *found.results)] == [
            full.values[v] for v in (*expected.operands, *expected.results)
        ]


def plan_of(graph: Graph) -> Plan:
    """Two stages of two data-parallel pairs, split as Megatron does."""
    shardings = {
        "layers.*.attention.qkv": "colwise", "layers.*.attention.proj": "rowwise",
        "layers.*.mlp.up": "colwise", "layers.*.mlp.down": "rowwise",
    }  # fmt: skip
    names = [block.name for block in graph.blocks]
    cut = names.index(f"layers.{DEEP // 2}")
    knobs = Knobs(
        meshes=[(2, 2)] * 2, rows=16, num_microbatches=4, cut=[cut], zero=1, precision="bf16",
        shardings=shardings,
    )  # fmt: skip
    plan = build_plan(graph, knobs)
    return with_stage(with_stage(plan, zero=0), 1, recompute="full")


def test_a_plan_costs_the_same(pair: tuple[Graph, Graph]) -> None:
    plans, prices = [], []
    for graph in pair:
        plans.append(plan_of(graph))
        problem = problem_of(Traced(graph=graph, table=analyse(graph)), cluster(8))
        prices.append(Evaluator(problem).price(plans[-1]))
    assert plans[0] == plans[1]
    found, wanted = (price.prediction for price in prices)
    assert found.step_time_s == pytest.approx(wanted.step_time_s)
    assert found.mfu == pytest.approx(wanted.mfu)
    assert found.peak_memory_bytes == wanted.peak_memory_bytes
    for one, other in zip(prices[0].stages, prices[1].stages, strict=True):
        for name, value in dataclasses.asdict(one).items():
            assert getattr(other, name) == pytest.approx(value, rel=1e-9), name


def test_as_many_as_there_are_is_no_change_of_program() -> None:
    shallow = traced("gpt", 3)
    same = deepen(shallow, "layers", 3)
    assert [op.key for op in same.ops] == [op.key for op in shallow.ops]
    assert fingerprint(same) == fingerprint(shallow)


@pytest.mark.parametrize(
    ("stack", "count", "says"),
    [
        ("layers", 2, "stack 'layers' has 3 blocks; legal: three or more .* than the 2 wanted"),
        ("blocks", 9, "stack 'blocks' has 0 blocks"),
    ],
)
def test_what_cannot_be_deepened_is_refused(stack: str, count: int, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        deepen(traced("gpt", 3), stack, count)


def test_unequal_layers_are_refused() -> None:
    of = linears(8, 4, 2)
    odd = tuple(
        dataclasses.replace(block, class_id=f"{block.class_id} {k}")
        for k, block in enumerate(of.graph.blocks)
    )
    with pytest.raises(ValueError, match=r"stack 'layers': block layers\.2 is not one of a chain"):
        deepen(dataclasses.replace(of.graph, blocks=odd), "layers", 8)
