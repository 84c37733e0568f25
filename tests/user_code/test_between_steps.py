"""Numbers of the batch and attributes of the model that change between steps: followed, or refused
at the step."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import Cluster, Overrides, ParallelModel, auto_parallelize
from meshwright.planner.tracing.trace import trace
from tests.helpers.traced import WIDTH, rows, with_forward
from tests.user_code.user_parts import holding

Forward = Callable[..., torch.Tensor]


def result_of(
    forward: Forward, batch: Any, prepare: Callable[[nn.Module], object] | None = None
) -> tuple[nn.Module, ParallelModel]:
    model = with_forward(forward, prepare)
    return model, auto_parallelize(
        model,
        Cluster.local(1, measure=False),
        example_inputs=batch,
        global_batch_size=4,
        precision="fp32",
        overrides=Overrides(num_microbatches=1),
    )


# --- numbers of the batch -------------------------------------------------------------------------


def scaled(self: Any, x: torch.Tensor, beta: float) -> torch.Tensor:
    return (self.l(x) * beta + (1 - beta)).square().mean()


def repeated(self: Any, x: torch.Tensor, n: int, flag: bool, mode: str) -> torch.Tensor:
    for _ in range(n):
        x = self.l(x) if flag else torch.tanh(self.l(x))
    return x.sum() if mode == "sum" else x.mean()


def branches(self: Any, x: torch.Tensor, beta: float) -> torch.Tensor:
    y = self.l(x).mean()
    return y * 2 if beta > 0 else y


@cache
def scaled_result() -> tuple[nn.Module, ParallelModel]:
    return result_of(scaled, {"x": torch.rand(4, WIDTH), "beta": 0.5})


@pytest.mark.parametrize("beta", [0.25, 0, 1.0, 2])
def test_a_number_is_an_input(beta: float) -> None:
    x = torch.rand(4, WIDTH)
    model, result = scaled_result()
    loss = result.train_step({"x": x, "beta": beta})
    torch.testing.assert_close(loss, model(x, beta).detach())


def test_numbers_keep_the_compute_dtype() -> None:
    batch = {"x": rows(WIDTH), "beta": 0.5}
    graph = trace(with_forward(scaled), batch, precision="bf16")
    wide = {m.dtype for m in graph.values.values() if m.shape == (3, WIDTH) and m.requires_grad}
    assert wide == {torch.bfloat16}


@cache
def repeated_result() -> tuple[ParallelModel, dict[str, Any]]:
    batch = {"x": torch.rand(4, WIDTH), "n": 2, "flag": True, "mode": "sum"}
    _, result = result_of(repeated, batch)
    result.train_step(batch)
    return result, batch


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"n": 3}, r"'n' was 2 .* is 3 now.*plan again"),
        ({"flag": False}, "'flag' was True .* is False"),
        ({"mode": "mean"}, "'mode' was 'sum' .* is 'mean'"),
        ({"n": None}, "'n' was 2 .* is None"),
        ({"more": 1}, r"\['more'\] were not among example_inputs"),
        ({"x": 1.0}, "'x' is a float"),
    ],
)
def test_what_the_course_depends_on_is_compared(change: dict[str, Any], message: str) -> None:
    result, batch = repeated_result()
    with pytest.raises(ValueError, match=message):
        result.train_step({**batch, **change})
    with pytest.raises(ValueError, match=message):
        result.eval_step({**batch, **change})


def test_a_branch_on_a_number_fixes_it_alone() -> None:
    batch = {"x": rows(WIDTH), "beta": 1.0}
    graph = trace(with_forward(branches), batch)
    assert graph.fixed == {"beta": 1.0} and list(graph.inputs.values()) == ["x"]


def test_a_float_for_an_int_is_refused() -> None:
    x = torch.rand(4, WIDTH)
    _, result = result_of(scaled, {"x": x, "beta": 1})
    with pytest.raises(ValueError, match=r"'beta' is 0.5, but .* with an int; .* with a float"):
        result.train_step({"x": x, "beta": 0.5})


def test_numpy_arrays_are_refused() -> None:
    batch = {"x": rows(WIDTH), "beta": np.ones(3)}
    with pytest.raises(ValueError, match=r"'beta' is a numpy array.*from_numpy"):
        trace(with_forward(scaled), batch)


# --- attributes set between steps -----------------------------------------------------------------


class Config:
    """As config classes are: its attributes are read one by one."""

    def __init__(self) -> None:
        self.scale, self.unread = 2.0, 1


def tempered(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = F.dropout(self.l(x), 0.0, self.training) / self.temperature * self.config.scale
    return (y * self.weights[0] + self.table).square().mean()


def tempered_result() -> tuple[nn.Module, ParallelModel, torch.Tensor]:
    x = torch.rand(4, WIDTH)
    prepare = holding(
        temperature=1.0, config=Config(), weights=[1.0, 2.0], table=torch.zeros(WIDTH), unread=3
    )
    return *result_of(tempered, (x,), prepare), x


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "number": (lambda m: setattr(m, "temperature", 0.5), "model.temperature was 1.0 .* is 0.5 now"),
    "config": (lambda m: setattr(m.config, "scale", 1.0), "model.config.scale was 2.0 .* is 1.0"),
    "other config": (lambda m: setattr(m, "config", Config()), "model.config was"),
    "list": (lambda m: m.weights.__setitem__(0, 3.0), "model.weights was changed"),
    "tensor": (lambda m: m.table.add_(1), "model.table was changed"),
    "deleted": (lambda m: delattr(m, "temperature"), "temperature was 1.0 .* is deleted now"),
    "mode": (lambda m: m.eval(), r"planned in training mode: call model.train\(True\)"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_attribute_is_refused(name: str) -> None:
    change, message = CHANGES[name]
    model, result, x = tempered_result()
    result.train_step((x,))
    change(model)
    with pytest.raises(ValueError, match=message):
        result.train_step((x,))


def test_ordinary_use_changes_nothing() -> None:
    model, result, x = tempered_result()
    before = result.train_step((x,))
    model.eval()
    result.eval_step((x,))
    model(x)
    model.train()
    model.unread, model.config.unread, model.new = 4, 5, 6
    model.temperature, model.weights = 2.0 / 2, [1.0, 2.0]
    torch.testing.assert_close(result.train_step((x,)), before)
    del model
    result.train_step((x,))


# --- what calls run -------------------------------------------------------------------------------


def hooked_module(model: nn.Module) -> None:
    model.l.register_forward_hook(lambda module, args, output: output * 2)


def other_forward(model: nn.Module) -> None:
    vars(model.l)["forward"] = torch.tanh


def other_module(model: nn.Module) -> None:
    model.act = nn.ReLU()


def hooked_gradient(model: nn.Module) -> None:
    next(model.parameters()).register_hook(lambda gradient: gradient * 0.1)


def hooked_after_accumulation(model: nn.Module) -> None:
    next(model.parameters()).register_post_accumulate_grad_hook(lambda p: None)


CALLED = {
    hooked_module: "module 'l' has other hooks than planned",
    other_forward: "module 'l' has another forward than planned",
    other_module: "module 'act' was replaced after planning",
    hooked_gradient: "parameter '.*' has a hook",
    hooked_after_accumulation: "parameter '.*' has a hook",
}


@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("change", CALLED)
def test_what_calls_run_since_planning_is_refused(
    change: Callable[[nn.Module], None], trained: bool
) -> None:
    """Before the first step as after it."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.act(self.l(x)).square().mean()
        return loss

    def acting(model: nn.Module) -> None:
        model.act = nn.Tanh()

    x = torch.randn(4, WIDTH)
    model, result = result_of(forward, (x,), acting)
    if trained:
        result.train_step((x,))
    change(model)
    with pytest.raises(ValueError, match=CALLED[change]):
        result.train_step((x,))
    with pytest.raises(ValueError, match=CALLED[change]):
        result.eval_step((x,))
