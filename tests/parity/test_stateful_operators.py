"""Operators that draw random numbers or keep statistics, on one device: evaluated, run again in the
backward, and cut into micro-batches."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.sharding.factors import analyse
from meshwright.executor.runtime.runtime import Runtime
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.tracing.trace import trace
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.tiers import second_tier
from tests.helpers.traced import WIDTH
from tests.models.models import CASES, Traced, parallelize, traced

ROWS = 4
DRAWN = second_tier("other draws; those of rows and of a layer of torch stay")
KEPT = second_tier("other layers; statistics kept or frozen, and a recurrent layer, stay")
AGAIN = second_tier("other draws and statistics; masks, slopes and a batch norm stay")
MASKED = second_tier("masks without rows, and with rows among others, stay")


class DropPath(nn.Module):
    """Rows dropped by a uniform number of their own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * (torch.rand(x.shape[0], 1, 1) < 0.7) if self.training else x


class First(nn.Module):
    """An LSTM without its state."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH, 2, dropout=dropout, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lstm(x)[0]


def of_layer(
    layer: Callable[[], nn.Module], *, recompute: str = "none", microbatches: int = 1
) -> tuple[nn.Module, Runtime]:
    """A model with one such layer, and its runtime on one device."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), layer(), nn.Linear(WIDTH, WIDTH))
    graph = trace(model, batch(), loss_fn=F.mse_loss, batch_size=ROWS // microbatches)
    table = analyse(graph)
    of = Traced(graph=cut_blocks(graph, table), table=table)
    plan = build_plan(
        of.graph,
        Knobs(meshes=((1, 1),), rows=ROWS, num_microbatches=microbatches, recompute=recompute),
    )
    runtime = parallelize(model, plan, of)
    runtime.seed = 1
    return model, runtime


class DropWeights(nn.Module):
    """One mask of the weights for all rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, F.dropout(self.weight, 0.5))


class DropTokens(nn.Module):
    """Rows and sequence in one dim."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x.flatten(0, 1), 0.5).view(x.shape)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = torch.randn(2, ROWS, WIDTH, WIDTH, generator=generator)
    return x, y


def plain(model: nn.Module) -> float:
    x, y = batch()
    with torch.no_grad():
        return float(F.mse_loss(model.eval()(x), y))


# --- evaluated ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("layer", "why"),
    [
        (DropPath, r"aten.rand.default\) draws random numbers"),
        pytest.param(lambda: First(0.5), r"aten.lstm.input\) draws random numbers", marks=DRAWN),
        (lambda: nn.RReLU(), r"aten.rrelu.default\) draws random numbers"),
        pytest.param(
            lambda: nn.AlphaDropout(0.3),
            r"aten.alpha_dropout.default\) draws random numbers",
            marks=DRAWN,
        ),
    ],
    ids=["drop path", "lstm", "rrelu", "alpha dropout"],
)
def test_what_a_graph_of_training_can_not_evaluate_is_refused(
    layer: Callable[[], nn.Module], why: str
) -> None:
    _, runtime = of_layer(layer)
    before = {name: x.clone() for name, x in runtime.full_state_dict().items()}
    with pytest.raises(ValueError, match=rf"eval_step: .*{why}.* \.eval\(\)"):
        runtime.eval_step(batch())
    after = runtime.full_state_dict()
    assert all(torch.equal(after[name], x) for name, x in before.items())


@pytest.mark.parametrize(
    "layer",
    [
        lambda: First(0.0),
        pytest.param(lambda: nn.Dropout1d(0.5), marks=KEPT),
        pytest.param(lambda: nn.InstanceNorm1d(WIDTH, affine=True), marks=KEPT),
        pytest.param(lambda: nn.BatchNorm1d(WIDTH, track_running_stats=False), marks=KEPT),
        lambda: nn.BatchNorm1d(WIDTH).eval(),
        lambda: nn.BatchNorm1d(WIDTH),
        lambda: nn.InstanceNorm1d(WIDTH, track_running_stats=True),
    ],
    ids=[
        "lstm",
        "channels",
        "instance norm",
        "untracked",
        "frozen batch norm",
        "batch norm",
        "tracked instance norm",
    ],
)
def test_the_rest_is_evaluated_as_plain_pytorch_does(layer: Callable[[], nn.Module]) -> None:
    model, runtime = of_layer(layer)
    runtime.train_step(batch())  # which moves running statistics
    assert float(runtime.eval_step(batch())) == pytest.approx(plain(model), rel=1e-6)


def test_attention_is_evaluated_without_its_dropout() -> None:
    case = CASES["gpt2_dropout"]
    of = traced(case, ROWS)
    plan = build_plan(of.graph, Knobs(meshes=((1, 1),), rows=ROWS, num_microbatches=1))
    model = case.model()
    runtime = parallelize(model, plan, of)
    with torch.no_grad():
        expected = float(case.loss(model.eval(), case.batch(ROWS, 0)))
    assert float(runtime.eval_step(case.batch(ROWS, 0))) == pytest.approx(expected, rel=1e-6)


# --- run again in the backward --------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [
        pytest.param(lambda: First(0.5), marks=AGAIN),
        lambda: nn.RReLU(),
        pytest.param(lambda: nn.AlphaDropout(0.3), marks=AGAIN),
        lambda: nn.Dropout(0.3),
        pytest.param(DropPath, marks=AGAIN),
        pytest.param(lambda: nn.InstanceNorm1d(WIDTH, track_running_stats=True), marks=AGAIN),
        lambda: nn.BatchNorm1d(WIDTH),
    ],
    ids=["lstm", "rrelu", "alpha dropout", "dropout", "drop path", "instance norm", "batch norm"],
)
def test_recompute_changes_nothing(layer: Callable[[], nn.Module]) -> None:
    """Masks drawn and statistics kept by the step are those of the step without recompute."""
    found = []
    for recompute in ("none", "full"):
        _, runtime = of_layer(layer, recompute=recompute)
        torch.manual_seed(3)
        runtime.train_step(batch())
        found.append((runtime.full_gradients(), runtime.full_state_dict()))
    for kept, again in zip(*found, strict=True):
        assert kept.keys() == again.keys()
        torch.testing.assert_close(again, kept)


# --- in micro-batches -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [
        DropWeights,
        DropTokens,
        pytest.param(DropPath, marks=MASKED),
        pytest.param(lambda: nn.Dropout(0.3), marks=MASKED),
    ],
    ids=["weights", "tokens", "rows", "activations"],
)
def test_masks_do_not_depend_on_the_number_of_micro_batches(layer: Callable[[], nn.Module]) -> None:
    """Down to micro-batches of one row, in which nothing has a batch dim that shows."""
    losses = []
    for count in (1, 2, ROWS):
        _, runtime = of_layer(layer, microbatches=count)
        losses.append(float(runtime.train_step(batch())))
    assert losses[1:] == pytest.approx([losses[0]] * 2, rel=1e-5)
