"""An optimizer that steps in the backward trains what one that steps at the end trains, to the bit,
and holds a few gradients at a time."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn, optim

from meshwright import Overrides
from meshwright.executor.errors import OptimizerError
from meshwright.executor.parameters.whole_tensors import WholeTensors
from meshwright.executor.runtime.runtime import Runtime
from meshwright.profiles.inputs import MeshwrightError
from tests.executor.trained_cells import cells, planned
from tests.helpers import tiny
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier, tiered
from tests.models.models import CASES, parallelize
from tests.parity.parity_cells import Cell, plan_of
from tests.parity.parity_reference import difference

STEPS = 4
# tied weights in a bucket, experts with and without gradients, frozen weights beside adapters
CELLS = cells(
    "moe dp2 gpipe m1 bf16",
    """
    gpt2_tied dp2xtp2 gpipe m1 full
    llama dp2xcp2 gpipe m1 ring bf16
    llama_lora dp2xtp2 gpipe m1 bf16_pure
    gpt2_untied dp4 gpipe m1 chunks3
    resnet dp2 gpipe m1
    """,
    "experts on data ranks, and tied weights on one, are kept",
)
OPTIMIZERS: dict[str, Any] = {
    "adamw": lambda params: optim.AdamW(params, lr=3e-3),
    "momentum": lambda params: optim.SGD(params, lr=1e-2, momentum=0.9),
}


def trained(cell: Cell, optimizer: Any, *, in_backward: bool) -> tuple[Runtime, list[str]]:
    """A runtime after some steps, and the losses."""
    case, (plan, of) = CASES[cell.case], plan_of(cell)
    runtime = parallelize(case.model(), replace(plan, optimizer_in_backward=in_backward), of)
    steps, losses = optimizer(runtime.parameters()), []
    rates = optim.lr_scheduler.ExponentialLR(steps, 0.5)
    for k in range(STEPS):
        batch = case.batch(cell.rows, k)
        if in_backward:
            loss = runtime.train_step(batch, optimizer=steps)
            assert all(p.grad is None for p in runtime.parameters())
        else:
            steps.zero_grad()
            loss = runtime.train_step(batch)
            steps.step()
        rates.step()
        losses.append(loss.item().hex())
    return runtime, losses


def trains_the_same(cell: Cell, name: str) -> None:
    runs = [trained(cell, OPTIMIZERS[name], in_backward=late) for late in (False, True)]
    (first, wanted), (second, found) = runs
    assert found == wanted and len(set(found)) == STEPS
    assert difference(second.full_state_dict(), first.full_state_dict())[0] == 0


@pytest.mark.parametrize("cell", CELLS)
def test_what_is_trained_is_the_same(cell: Cell) -> None:
    on_ranks(cell.world, trains_the_same, cell, "adamw")


def test_another_optimizer_steps_so() -> None:
    trains_the_same(Cell.parse("gpt2_tied 1 gpipe m1"), "momentum")


def trains_what_was_made_before() -> None:
    """An optimizer over the user's parameters, which planning replaces."""
    losses = []
    for in_backward in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))
        optimizer = optim.SGD(model.parameters(), lr=0.5)
        x, y = torch.randn(8, 8), torch.randn(8, 4)
        result = tiny.planned(
            model, 2, example_inputs=(x, y), global_batch_size=8, loss_fn=nn.functional.mse_loss,
            overrides=Overrides(
                dp=1, tp=2, num_microbatches=1, optimizer_in_backward=in_backward
            ),
        )  # fmt: skip
        steps = [result.train_step(x, y, optimizer=optimizer).item() for _ in range(3)]
        losses.append([loss.hex() for loss in steps])
        assert len(set(steps)) == 3
    assert losses[0] == losses[1]


def test_an_optimizer_that_was_made_before_planning_steps() -> None:
    on_ranks(2, trains_what_was_made_before)


def test_few_gradients_are_there_at_once() -> None:
    """As a parameter is stepped, all that have a gradient are it, and those that the block's own
    backward has just made."""
    case, (plan, of) = CASES["gpt2_untied"], plan_of(Cell.parse("gpt2_untied 1 gpipe m1"))
    runtime = parallelize(case.model(), replace(plan, optimizer_in_backward=True), of)
    held = list[int]()

    class Counting(optim.SGD):
        def step(self, closure: Any = None) -> Any:
            there = [p.leaf.grad is not None for p in runtime.stage_parameters]
            held.append(sum(there) + sum(p.grad is not None for p in runtime.parameters()))
            return super().step(closure)

    optimizer = Counting(runtime.parameters(), lr=0.1)
    for k in range(2):  # the first one also tries the kind of optimizer
        held.clear()
        runtime.train_step(case.batch(8, k), optimizer=optimizer)
    assert len(held) == len(list(runtime.parameters()))
    assert max(held) <= 2 < len(held) / 4


def test_parameters_of_nobody_keep_their_gradients() -> None:
    """Those that the optimizer does not have, as with torch's own loop."""
    case, (plan, of) = CASES["gpt2_untied"], plan_of(Cell.parse("gpt2_untied 1 gpipe m1"))
    runtime = parallelize(case.model(), replace(plan, optimizer_in_backward=True), of)
    some = [*runtime.parameters()][::2]
    runtime.train_step(case.batch(8, 0), optimizer=optim.SGD(some, lr=0.1))
    kept = [p for p in runtime.parameters() if p.grad is not None]
    assert [id(p) for p in kept] == [id(p) for p in [*runtime.parameters()][1::2]]


# --- what can't be stepped so ---------------------------------------------------------------------


class Across(optim.Optimizer):
    """Steps by the norm of all gradients."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        params = [p for group in self.param_groups for p in group["params"]]
        norm = sum(p.grad.norm() for p in params)
        for p in params:
            p.sub_(p.grad / norm)


class Counted(optim.Optimizer):
    """Counts its steps in the group."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "count": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["count"] += 1
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad * group["lr"] / group["count"])


class Named(Across):
    """Can't be made without a name."""

    def __init__(self, params: Any, name: str) -> None:
        super().__init__(params)


KINDS = (Across, Counted, Named, optim.LBFGS, WholeTensors)
REFUSED = "one whose steps apart end elsewhere is kept"


@pytest.mark.parametrize(
    "kind", tiered(KINDS, {Counted}.__contains__, REFUSED, lambda kind: kind.__name__)
)
def test_an_optimizer_that_needs_them_all_is_refused(kind: Any) -> None:
    result = planned(Cell.parse("gpt2_untied 1 gpipe m1"))
    runtime, batch = result.runtime, CASES["gpt2_untied"].batch(8, 0)
    made: Any = (
        result.whole_tensor_optimizer(optim.Adafactor)
        if kind is WholeTensors
        else kind(runtime.parameters(), **{"name": "it"} if kind is Named else {})
    )
    with pytest.raises(OptimizerError, match=r"needs several parameters at once.*False\)"):
        runtime.train_step(batch, optimizer=made)


@pytest.mark.parametrize(
    ("given", "said"),
    [
        pytest.param(
            {},
            r"optimizer=None leaves all gradients.*legal: an optimizer",
            marks=second_tier("the refusal of a norm of all gradients is kept"),
        ),
        ({"max_grad_norm": 1.0}, r"max_grad_norm=1\.0 clips by the norm of all gradients"),
    ],
)
def test_a_step_that_keeps_gradients_is_refused(given: dict[str, Any], said: str) -> None:
    result = planned(Cell.parse("gpt2_untied 1 gpipe m1"))
    object.__setattr__(result.runtime.plan, "optimizer_in_backward", True)
    if given:
        given = given | {"optimizer": optim.SGD(result.parameters(), lr=0.1)}
    with pytest.raises(MeshwrightError, match=said):
        result.train_step(CASES["gpt2_untied"].batch(8, 0), **given)


def test_parameters_of_another_model_stay() -> None:
    other = nn.Linear(2, 2)
    case, (plan, of) = CASES["gpt2_untied"], plan_of(Cell.parse("gpt2_untied 1 gpipe m1"))
    runtime = parallelize(case.model(), replace(plan, optimizer_in_backward=True), of)
    before = [p.detach().clone() for p in other.parameters()]
    runtime.train_step(case.batch(8, 0), optimizer=optim.SGD(other.parameters(), lr=0.1))
    assert all(map(torch.equal, other.parameters(), before))
