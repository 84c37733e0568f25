"""Compiled blocks compute what the single device does, under every kind of plan; what can't be
compiled is said before training, or with the name of the block."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._dynamo.backends.registry import register_backend

from meshwright import Overrides
from meshwright.costmodel.sharding.strategies import P, Placement, R
from meshwright.executor.backward.repeated import repeated
from meshwright.executor.lowering import compile as compiling
from meshwright.executor.lowering.compile import CompiledBlock, backend_of
from meshwright.executor.ranks import launch
from meshwright.executor.resharding.reshard import Axis, Reshard
from tests.executor.trained_cells import cells
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import planned
from tests.models.models import CASES, parallelize
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_reference import (
    assert_equal,
    compare,
    difference,
    reference_of,
    runtime_loop,
)

BACKEND = "aot_eager"  # traces forward and backward as every backend gets them, and runs the result
WORLD = 2
TOLERANCE = 1e-5
CELLS = cells(
    "mlp pp2 m4 zb_h1",
    """
    gpt2_tied dp2xtp2 m2 sequence selective
    llama dp4 m2 zero3 full
    resnet dp2xtp2 m2
    """,
    "a pipeline of compiled blocks is kept, and compiled moves",
)


def compiled(cell: Cell) -> dict[str, Any]:
    found = runtime_loop(CASES[cell.case], *plan_of(cell), compile=BACKEND)
    return {} if launch.rank() else compare(found, reference_of(cell))


@pytest.mark.parametrize("cell", CELLS)
def test_compiled_plan_equals_single_device(cell: Cell) -> None:
    reference_of(cell)
    assert_equal(on_ranks(cell.world, compiled, cell), cell.precision)


def moves() -> None:
    """Result and gradient of compiled moves, one of each collective, are the eager ones."""
    axis = Axis("tensor", WORLD, launch.rank(), dist.group.WORLD)
    rows, columns = Placement("S", 0), Placement("S", 1)
    for source, target in ((P, R), (P, rows), (rows, columns), (columns, R)):
        module = Reshard(source, target, axis)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(launch.rank()))
        x.requires_grad_()
        results = []
        for run in (module, torch.compile(module, backend=BACKEND, fullgraph=True)):
            y = run(x)
            seed = torch.linspace(-1, 1, y.numel()).view_as(y) * (launch.rank() + 1)
            results.append((y.detach(), *torch.autograd.grad(y, x, seed)))
        for eager, made in zip(*results, strict=True):
            torch.testing.assert_close(made, eager)  # a sum may be made in another order


def test_compiled_moves_equal_eager_ones() -> None:
    on_ranks(WORLD, moves)


@second_tier("compiled blocks of the cell, and what has no compiler")
def test_default_backend_draws_the_same_dropout_masks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is what `compile=True` of the API runs, after a replan, too."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr("torch._inductor.config.cpp_cache_precompile_headers", False)
    model = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.5), nn.Linear(16, 2))
    batch = torch.randn(8, 8), torch.randn(8, 2)
    found = []
    for mode in (False, True):
        torch.manual_seed(3)  # of the dropout masks
        given = {"example_inputs": batch, "loss_fn": nn.functional.mse_loss, "profile": False}
        result = planned(copy.deepcopy(model), compile=mode, **given)
        result = result.replan(Overrides(num_microbatches=2))
        loss = float(result.train_step(batch))
        found.append((loss, result.runtime.full_gradients(), result.runtime))
    (eager, gradients, _), (compiled, ours, runtime) = found
    assert {type(b.lowered.module) for b in runtime.stages[0].program.blocks} == {CompiledBlock}
    assert compiled == pytest.approx(eager, rel=TOLERANCE)
    error, where = difference(ours, gradients)
    assert error <= TOLERANCE, where


@second_tier("graphs of equal code, in test_graphs_of_equal_code_and_arguments_are_told_apart")
def test_equal_layers_are_compiled_once() -> None:
    torch._dynamo.reset()
    counters = torch._dynamo.utils.counters
    counters.clear()
    case = CASES["gpt2_deep"]
    runtime = parallelize(case.model(), *plan_of(Cell.parse("gpt2_deep 1 m2")), compile=BACKEND)
    runtime.train_step(case.batch(runtime.plan.global_batch_size, 0))
    (stage,) = runtime.stages.values()
    graphs = {id(block.lowered.module) for block in stage.program.blocks}
    assert len(graphs) < len(stage.program.blocks)
    # of layers that are alike, the first reads what needs no gradient: at most two each
    assert len(graphs) <= counters["stats"]["unique_graphs"] <= 2 * len(graphs)


def repeat_all(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    return repeated(graph, [node for node in graph.graph.nodes if node.op == "call_module"])


@pytest.mark.parametrize("wrapped", [lambda graph: graph, repeat_all])
def test_graphs_of_equal_code_and_arguments_are_told_apart(wrapped: Callable[..., Any]) -> None:
    """Only their submodules differ, which no call checks."""
    x = torch.linspace(-1, 1, 6)
    functions = (nn.Tanh(), nn.Sigmoid(), nn.Softplus())
    blocks = []
    for function in functions:
        graph = torch.fx.Graph()
        graph.output((graph.call_module("m0", (graph.placeholder("a0"),)),))
        made = torch.fx.GraphModule({"m0": function}, graph)
        blocks.append(CompiledBlock(wrapped(made), name="block", backend=BACKEND))
    for _ in range(2):
        for function, block in zip(functions, blocks, strict=True):
            assert torch.equal(block(x)[0], function(x))


def test_compiled_backwards_are_priced_whole() -> None:
    """W has nothing to do, and I takes what both did: what runs, as `executor.lowering.compile`
    says."""
    cell = Cell.parse("mlp pp2 zb_h1 m4")
    plan, case = plan_of(cell)[0], CASES[cell.case]
    found = {}
    for mode, target in ((False, None), (True, None), (True, "eager")):
        given = {"example_inputs": case.batch(4, 0), "loss_fn": case.loss_fn, "profile": False}
        given |= {"global_batch_size": cell.rows, "compile": mode, "target": target}
        result = planned(case.model(), 2, plan=plan, **given)
        events = [e for e in result.report.timeline["traceEvents"] if e["ph"] == "X"]
        found[mode, target] = {
            kind: sum(e["dur"] for e in events if e["name"].startswith(kind)) for kind in "IW"
        }
    assert found[False, None]["W"] > 0
    assert found[True, None]["W"] == 0
    assert found[True, None]["I"] > found[False, None]["I"]
    assert found[True, "eager"] == found[False, None]


@pytest.mark.parametrize("given", ["inductr", "", 1, None])
def test_unknown_backend_names_the_legal_ones(given: Any) -> None:
    with pytest.raises(ValueError, match=r"legal: True, False, or .*inductor"):
        backend_of(given)


def test_missing_compiler_is_said_before_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torch._inductor.config.cpp.cxx", ("no-such-compiler",))
    with pytest.raises(RuntimeError, match=r"C\+\+ compiler.*compile=False"):
        backend_of(True, "cpu")
    monkeypatch.setattr(compiling, "has_triton", lambda: False)
    with pytest.raises(RuntimeError, match=r"Triton on cuda.*compile=False"):
        backend_of(True, "cuda")


def test_failed_compilation_names_the_block() -> None:
    @register_backend(name="refusing")
    def refuse(graph: torch.fx.GraphModule, inputs: Any) -> Any:
        raise NotImplementedError("this graph")

    graph = torch.fx.symbolic_trace(nn.Linear(2, 2))
    block = CompiledBlock(graph, name="layers.3", backend="refusing")
    with pytest.raises(RuntimeError, match=r"(?s)'layers.3'.*compile=False.*this graph"):
        block(torch.ones(2, 2))
