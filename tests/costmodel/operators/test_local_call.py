"""Signatures against what ranks really hold and call, and against graphs traced at other rows."""

import math
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.graph import Graph, Op
from meshwright.costmodel.operators.local_call import local_shape, signature
from meshwright.costmodel.sharding.factors import FactorTable, analyse
from meshwright.costmodel.sharding.strategies import Placement, R, Strategy, strategies
from meshwright.planner.tracing.trace import trace
from meshwright.profiles.measure.operators import operator
from meshwright.profiles.op_signature import OperandIndex, OpSignature
from tests.costmodel.traces import graph_of, sample_of
from tests.helpers.sharded_ops import Sample
from tests.helpers.shards import shards

LIVE = ("llama", "resnet")  # tokens and images


@pytest.fixture(scope="module", params=LIVE)
def sample(request: pytest.FixtureRequest) -> Sample:
    return sample_of(request.param)


def options(sample: Sample, degree: int) -> list[tuple[Op, Strategy, OpSignature]]:
    graph, table = sample.graph, sample.table
    found = []
    for op in sample.ops:
        for one in strategies(graph, table, op, degree):
            made = signature(graph, table, op, one, rows=graph.batch_size, tp=degree)
            if made is not None:
                found.append((op, one, made))
    return found


@pytest.mark.parametrize("degree", [1, 2, 4])
def test_calls_take_and_give_what_a_rank_holds(sample: Sample, degree: int) -> None:
    """Operands are the largest rank's, which is waited for. The call rebuilt from the text alone
    runs on the first rank's, and makes local results: its sizes were localised."""
    for op, one, made in options(sample, degree):
        at = f"{op.target} {one.name}"

        def held(value: str, placement: Placement) -> list[torch.Tensor]:
            return [*shards(sample.values[value], (R, placement), (1, degree)).values()]

        operands = list(map(held, op.operands, one.operands))
        for value, parts, operand in zip(op.operands, operands, made.operands, strict=True):
            part, meta = max(parts, key=torch.numel), sample.graph.values[value]
            dtype = str(part.dtype).removeprefix("torch.")
            assert operand == (dtype, tuple(part.shape), meta.requires_grad), at
        again = OpSignature.parse(made.text)
        assert again == made
        if degree > 2:
            continue
        args, kwargs = again.call_arguments(
            lambda k, own=operands: own[k][0].clone(), torch.device("cpu")
        )
        if one.implementation:  # ids of other ranks: the executor masks them
            args[1] = args[1] % operands[0][0].shape[0]
        got = operator(again.target)(*args, **kwargs)
        results = [got] if isinstance(got, torch.Tensor) else list(got)
        for parts, result in zip(map(held, op.results, one.results), results, strict=True):
            assert result.shape == parts[0].shape, at


@pytest.mark.parametrize("name", LIVE)
def test_rows_scale_as_a_trace_of_that_many_rows(name: str) -> None:
    """Shapes of a graph traced at 4 rows, asked for 8, are those of one traced at 8."""
    (four, small), (eight, large) = (
        (of.graph, of.table) for of in (graph_of(name, rows) for rows in (4, 8))
    )
    compared = 0
    for a, b in zip(four.ops, eight.ops, strict=True):
        for one in strategies(four, small, a, 2):
            same = [s for s in strategies(eight, large, b, 2) if s.name == one.name]
            if not same:
                continue
            found = signature(four, small, a, one, rows=8, tp=2)
            assert found == signature(eight, large, b, same[0], rows=8, tp=2), a.key
            compared += found is not None
    assert compared > 20


@cache
def mlp() -> tuple[Graph, FactorTable]:
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 4))
    batch = torch.randn(4, 8), torch.zeros(4, dtype=torch.long)
    graph = trace(model, batch, batch_size=4, loss_fn=F.cross_entropy, precision="fp32")
    return graph, analyse(graph)


def op_named(graph: Graph, short: str) -> Op:
    return next(op for op in graph.ops if op.short == short)


def made_for(short: str, name: str, *, rows: float = 4) -> OpSignature | None:
    graph, table = mlp()
    op = op_named(graph, short)
    one = next(s for s in strategies(graph, table, op, 2) if s.name == name)
    return signature(graph, table, op, one, rows=rows, tp=2)


def test_local_shapes_and_signatures_by_hand() -> None:
    made = made_for("linear", "colwise", rows=12)
    assert made is not None
    shapes = ((12, 8), (8, 8), (8,))
    assert made.operands == tuple(("float32", s, s != (12, 8)) for s in shapes)
    assert (made.target, made.dtype) == ("aten.linear.default", "float32")
    assert made.nbytes == 4 * (12 * 8 + 8 * 8 + 8) and made.differentiable
    assert made_for("dropout", "replicate") is None
    assert made_for("cross_entropy_loss", "vocab") is None
    assert made_for("cross_entropy_loss", "replicate") is not None
    for rows in (0.5, 2.5):  # no whole number
        assert made_for("linear", "colwise", rows=rows) is None
    graph, table = mlp()
    value = op_named(graph, "linear").results[0]
    assert local_shape(graph, table, value, Placement("S", 1), rows=8, tp=4) == (8, 4)
    assert local_shape(graph, table, value, R, rows=1, tp=4) == (1, 16)


def test_views_have_no_signature(sample: Sample) -> None:
    graph, table = sample.graph, sample.table
    views = [op for op in graph.ops if op.short in ("view", "transpose", "reshape", "flatten")]
    assert views
    for op in views:
        one = strategies(graph, table, op, 1)[0]
        assert signature(graph, table, op, one, rows=graph.batch_size, tp=1) is None


def of(args: list[Any], **kwargs: Any) -> OpSignature:
    return OpSignature.of_call("aten.f.default", [("float32", (2, 3), True)], args, kwargs)


def test_arguments_survive_the_text() -> None:
    args = [
        OperandIndex(0), None, True, 3, -0.5, math.inf, "mean", [1, [2, OperandIndex(0)]],
        torch.float16, torch.contiguous_format, torch.strided, torch.device("cuda", 1),
    ]  # fmt: skip
    made = OpSignature.parse(of(args, dim=1).text)
    x, here = torch.ones(1), torch.device("cpu")
    got, kwargs = made.call_arguments(lambda k: (x,)[k], here)
    assert got == [
        x, None, True, 3, -0.5, math.inf, "mean", [1, [2, x]],
        torch.float16, torch.contiguous_format, torch.strided, here,
    ]  # fmt: skip
    assert kwargs == {"dim": 1}


def test_equal_calls_have_equal_texts() -> None:
    assert of([OperandIndex(0)], a=1, b=2).text == of([OperandIndex(0)], b=2, a=1).text
    texts = {of([1]).text, of([True]).text, of(["1"]).text, of([1.0]).text, of([None]).text}
    assert len(texts) == 5
    assert str(of([1])) == of([1]).text
    with pytest.raises(ValueError, match=r"aten\.f\.default: argument .* is a set"):
        of([{1, 2}])
    for text in ("", "[]", '{"op":"a","operands":[["float31",[1],0]],"args":[],"kwargs":{}}'):
        with pytest.raises(ValueError, match="no operator signature"):
            OpSignature.parse(text)
