"""What a forward reads and leaves beside tensors, and numbers and attributes that change between
steps: followed as plain PyTorch runs it, or refused with the line."""

import inspect
import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import Overrides, ParallelModel
from meshwright.planner.tracing.trace import TraceError, trace
from tests.helpers import tiny
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.traced import WIDTH, agree, rows, with_forward
from tests.user_code.user_models import holding

Forward = Callable[..., torch.Tensor]

# --- what is followed -----------------------------------------------------------------------------


def keeps_mask(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.mask is None:
        self.mask = torch.ones(WIDTH, WIDTH).tril()
    return (self.l(x) @ self.mask).sum()


def keeps_output(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen = self.l(x)
    self.losses = [self.seen.mean()]
    return self.seen.sum() + sum(self.losses)


def clears_list(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.losses.clear()
    y = self.l(x)
    self.losses.append(y.mean())
    return y.sum() + sum(self.losses)


def keeps_length(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.config.length = max(self.config.length, x.shape[1])
    return self.l(x).sum() / self.config.length


def reads_data(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    return (y - y.data * 0.5 + x.data).square().sum()


FOLLOWED: dict[str, tuple[Forward, Callable[[nn.Module], object] | None]] = {
    "mask made once": (keeps_mask, holding(mask=None)),
    "output kept to look at": (keeps_output, holding(seen=None)),
    "list cleared before": (clears_list, holding(losses=[])),
    "length kept": (keeps_length, holding(config=SimpleNamespace(length=0))),
    "data read": (reads_data, None),
}


@pytest.mark.parametrize("name", FOLLOWED)
def test_followed(name: str) -> None:
    forward, prepare = FOLLOWED[name]
    model = with_forward(forward, prepare)
    trace(model, (rows(WIDTH),))
    agree(model, (rows(WIDTH),))


# --- what is refused ------------------------------------------------------------------------------


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x).sum()
    self.n += 1
    return y * self.n


def warms_up(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x).sum()
    if self.cold:
        self.cold = False
        return 2 * y
    return y


def collects(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    self.kept.append(y.detach())
    return y.sum() + torch.stack(self.kept).mean()


def first_batch(self: Any, x: torch.Tensor) -> torch.Tensor:
    if self.mean is None:
        self.mean = x.mean(0)
    return self.l(x - self.mean).sum()


def carries_gradient(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x).mean(0)
    loss = (y * self.last).sum()
    self.last = y
    return loss


def rebinds(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    self.l.weight = nn.Parameter(self.l.weight * 0.9)
    return y.sum()


def decays_data(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    self.l.weight.data.mul_(0.9)
    return y.sum()


def decays_data_after_a_view(self: Any, x: torch.Tensor) -> torch.Tensor:
    before = self.l.weight.detach().square().sum()
    self.l.weight.data.mul_(0.9)
    return self.l(x).sum() * before


def assigns_data(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    self.l.weight.data = self.l.weight * 0.9
    return y.sum()


def draws_numpy(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    return (y * torch.from_numpy(np.random.rand(WIDTH) < 0.5)).sum()


def draws_python(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.l(x).sum() * random.random()


_imported = random.random


def draws_imported(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.l(x).sum() * _imported()


def draws_own(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.l(x).sum() * self.generator.random()


def draws_new(self: Any, x: torch.Tensor) -> torch.Tensor:
    return self.l(x).sum() * np.random.default_rng(seed=None).random()


def batch_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.state = self.l(x).detach()
    return (self.l(x) + self.state).sum()


def differentiates(self: Any, x: torch.Tensor) -> torch.Tensor:
    x = x.detach().requires_grad_()
    u = torch.tanh(self.l(x)).sum()
    (slope,) = torch.autograd.grad(u, x, create_graph=True)
    return slope.square().mean()


def skips(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    if torch.rand(()) < 0.1:
        y = x
    return y.sum()


# forward, preparation, the line that is named (0: none), the way out
REFUSED: dict[str, tuple[Forward, Callable[[nn.Module], object] | None, int, str]] = {
    "counter": (counts, holding(n=0), 2, "'model.n'.*register_buffer"),
    "first call": (warms_up, holding(cold=True), 3, "'model.cold'.*another course"),
    "list of activations": (collects, holding(kept=[]), 2, "'model.kept'.*register_buffer"),
    "statistics of the first batch": (
        first_batch, holding(mean=None), 2, "'model.mean'.*read by the next one",
    ),
    "history": (
        carries_gradient, holding(last=torch.zeros(WIDTH)), 3, r"carries a gradient: detach\(\)",
    ),
    "parameter rebound": (rebinds, None, 2, "replaces 'model.l.weight'.*between steps"),
    "data edited": (decays_data, None, 2, r"in place through .data.*between steps"),
    "data edited after a view": (
        decays_data_after_a_view, None, 2, r"in place through .data.*between steps"
    ),
    "data assigned": (assigns_data, None, 2, "assigns .data"),
    "numpy mask": (draws_numpy, None, 2, "numpy.random.rand.*one outcome.*torch.rand"),
    "python number": (draws_python, None, 1, "random.random.*one outcome"),
    "imported draw": (draws_imported, None, 0, "random or numpy.random.*one outcome"),
    "generator of its own": (
        draws_own, holding(generator=random.Random(0)), 1, "'model.generator'.*another after",
    ),
    "new generator": (draws_new, None, 1, "default_rng.*one outcome"),
    "derivative in the loss": (
        differentiates, None, 3, "calls autograd.*module of its own.*meshwright.leaf",
    ),
    "layer dropped at random": (skips, None, 2, "torch.rand.* < 0.1.*depends on tensor values"),
    "buffer with rows": (
        batch_buffer, lambda m: m.register_buffer("state", torch.zeros(9, WIDTH)), 0,
        "buffer 'state', of .9, 8..*rows of a batch",
    ),
}  # fmt: skip
LIKE_OTHERS = (
    "first call", "statistics of the first batch", "list of activations", "history", "data edited",
    "python number", "generator of its own", "new generator",
)  # fmt: skip


@pytest.mark.parametrize(
    "name", tiered(REFUSED, lambda n: n not in LIKE_OTHERS, "one of each kind of state stays")
)
def test_refused_with_line_and_way_out(name: str) -> None:
    forward, prepare, line, message = REFUSED[name]
    with pytest.raises(TraceError, match=f"(?s){message}") as raised:
        trace(with_forward(forward, prepare), (rows(WIDTH),))
    if line:
        assert f"{__file__}:{inspect.getsourcelines(forward)[1] + line}" in str(raised.value)


class Counting(nn.Linear):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        Counting.calls += 1
        return super().forward(x).sum() * self.calls


def test_a_counter_of_the_class_is_refused_and_not_moved() -> None:
    with pytest.raises(TraceError, match=r"'Counting.calls'"):
        trace(Counting(WIDTH, WIDTH), (rows(WIDTH),))


def test_what_a_trace_reads_is_left_alone() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        self.table.mul_(0.5)
        self.seen.append(1)
        self.seen.pop()
        return (self.l(x) * self.table).sum()

    model = with_forward(forward, holding(table=torch.ones(WIDTH), seen=[]))
    graph = trace(model, (rows(WIDTH),))
    assert torch.equal(model.table, torch.ones(WIDTH))
    assert list(graph.buffers.values()) == ["table"] and len(graph.updates) == 1


@second_tier("a buffer with rows is refused above")
def test_a_buffer_with_the_rows_of_the_example_is_named_at_other_rows() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        return (self.l(x) + self.state).sum()

    model = with_forward(forward, lambda m: m.register_buffer("state", torch.zeros(3, WIDTH)))
    trace(model, (rows(WIDTH),))
    with pytest.raises(TraceError, match=r"micro-batch of 2 rows.*must not have the rows"):
        trace(model, (rows(WIDTH),), batch_size=2)


class Ctc(nn.Linear):
    def forward(self, x: torch.Tensor, y: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
        scores = super().forward(x).log_softmax(-1).transpose(0, 1)
        lengths = torch.full((len(x),), x.shape[1])
        return F.ctc_loss(scores, y, lengths, sizes)


@pytest.mark.parametrize("parts", tiered([1, 2], (2).__eq__, "two do what one does, and add up"))
def test_ctc_in_a_wrapped_model(parts: int) -> None:
    torch.manual_seed(0)
    batch = torch.randn(4, 9, WIDTH), torch.randint(1, 10, (4, 4)), torch.tensor([4, 3, 4, 2])
    model = Ctc(WIDTH, 10)
    wanted = model(*batch)
    wanted.backward()
    wrapped, overrides = torch.compile(nn.DataParallel(model)), Overrides(num_microbatches=parts)
    given = {"example_inputs": batch, "loss_fn": None, "overrides": overrides}
    result = tiny.planned(wrapped, global_batch_size=4, **given)
    torch.testing.assert_close(result.train_step(batch), wanted.detach())
    found = dict(result.named_parameters())
    assert found.keys() == {"weight", "bias"}
    for name, p in model.named_parameters():
        torch.testing.assert_close(found[name].grad, p.grad)


def result_of(
    forward: Forward, batch: Any, prepare: Callable[[nn.Module], object] | None = None
) -> tuple[nn.Module, ParallelModel]:
    model = with_forward(forward, prepare)
    one = Overrides(num_microbatches=1)
    given = {"example_inputs": batch, "global_batch_size": 4, "loss_fn": None, "overrides": one}
    return model, tiny.planned(model, **given)


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


def test_a_number_is_an_input() -> None:
    model, result = result_of(scaled, {"x": torch.rand(4, WIDTH), "beta": 0.5})
    for beta in (0.25, 0, 2):
        x = torch.rand(4, WIDTH)
        loss = result.train_step({"x": x, "beta": beta})
        torch.testing.assert_close(loss, model(x, beta).detach())


def test_numbers_keep_the_compute_dtype_and_a_branch_on_one_fixes_it_alone() -> None:
    batch = {"x": rows(WIDTH), "beta": 1.0}
    graph = trace(with_forward(scaled), batch, precision="bf16")
    wide = {m.dtype for m in graph.values.values() if m.shape == (3, WIDTH) and m.requires_grad}
    assert wide == {torch.bfloat16}
    graph = trace(with_forward(branches), batch)
    assert graph.fixed == {"beta": 1.0} and list(graph.inputs.values()) == ["x"]


def test_what_the_course_depends_on_is_compared() -> None:
    batch = {"x": torch.rand(4, WIDTH), "n": 2, "flag": True, "mode": "sum"}
    _, result = result_of(repeated, batch)
    result.train_step(batch)
    for change, message in (
        ({"n": 3}, r"'n' was 2 .* is 3 now.*plan again"),
        ({"flag": False}, "'flag' was True .* is False"),
        ({"mode": "mean"}, "'mode' was 'sum' .* is 'mean'"),
        ({"n": None}, "'n' was 2 .* is None"),
        ({"more": 1}, r"\['more'\] were not among example_inputs"),
        ({"x": 1.0}, "'x' is a float"),
    ):
        for step in (result.train_step, result.eval_step):
            with pytest.raises(ValueError, match=message):
                step({**batch, **change})


def test_a_float_for_an_int_and_numpy_arrays_are_refused() -> None:
    x = torch.rand(4, WIDTH)
    _, result = result_of(scaled, {"x": x, "beta": 1})
    with pytest.raises(ValueError, match=r"'beta' is 0.5, but .* with an int; .* with a float"):
        result.train_step({"x": x, "beta": 0.5})
    with pytest.raises(ValueError, match=r"'beta' is a numpy array.*from_numpy"):
        trace(with_forward(scaled), {"x": x, "beta": np.ones(3)})


# --- attributes set between steps -----------------------------------------------------------------


class Config:
    """As config classes are: its attributes are read one by one."""

    def __init__(self) -> None:
        self.scale, self.unread = 2.0, 1


def tempered(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = F.dropout(self.l(x), 0.0, self.training) / self.temperature * self.config.scale
    return (y * self.weights[0] + self.table).square().mean()


CHANGES: dict[str, tuple[Callable[[Any], object], str]] = {
    "number": (lambda m: setattr(m, "temperature", 0.5), "model.temperature was 1.0 .* is 0.5 now"),
    "config": (lambda m: setattr(m.config, "scale", 1.0), "model.config.scale was 2.0 .* is 1.0"),
    "other config": (lambda m: setattr(m, "config", Config()), "model.config was"),
    "list": (lambda m: m.weights.__setitem__(0, 3.0), "model.weights was changed"),
    "deleted": (lambda m: delattr(m, "temperature"), "temperature was 1.0 .* is deleted now"),
    "mode": (lambda m: m.eval(), r"planned in training mode: call model.train\(True\)"),
    "tensor": (lambda m: m.table.add_(1), "model.table was changed"),  # can't be set back
}


def tempered_result() -> tuple[nn.Module, ParallelModel, torch.Tensor]:
    x, given = torch.rand(4, WIDTH), {"weights": [1.0, 2.0], "table": torch.zeros(WIDTH)}
    prepare = holding(temperature=1.0, config=Config(), unread=3, **given)
    return *result_of(tempered, (x,), prepare), x


def test_a_changed_attribute_is_refused() -> None:
    """And no more, where it is set back."""
    model, result, x = tempered_result()
    config, before = model.config, result.train_step((x,))
    for change, message in CHANGES.values():
        torch.testing.assert_close(result.train_step((x,)), before)
        change(model)
        with pytest.raises(ValueError, match=message):
            result.train_step((x,))
        model.temperature, model.weights[0], model.config, config.scale = 1.0, 1.0, config, 2.0
        model.train()


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


Undo = Callable[[], object]


def hooked_module(model: nn.Module) -> Undo:
    return model.l.register_forward_hook(lambda module, args, output: output * 2).remove


def other_forward(model: nn.Module) -> Undo:
    vars(model.l)["forward"] = torch.tanh
    return lambda: vars(model.l).pop("forward")


def other_module(model: nn.Module) -> Undo:
    planned, model.act = model.act, nn.ReLU()
    return lambda: setattr(model, "act", planned)


def hooked_gradient(model: nn.Module) -> Undo:
    return next(model.parameters()).register_hook(lambda gradient: gradient * 0.1).remove


def hooked_after_accumulation(model: nn.Module) -> Undo:
    return next(model.parameters()).register_post_accumulate_grad_hook(lambda p: None).remove


CALLED: dict[Callable[[nn.Module], Undo], str] = {
    hooked_module: "module 'l' has other hooks than planned",
    other_forward: "module 'l' has another forward than planned",
    other_module: "module 'act' was replaced after planning",
    hooked_gradient: "parameter '.*' has a hook",
    hooked_after_accumulation: "parameter '.*' has a hook",
}


def test_what_calls_run_since_planning_is_refused() -> None:
    """Before the first step as after it."""

    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        loss: torch.Tensor = self.act(self.l(x)).square().mean()
        return loss

    x = torch.randn(4, WIDTH)
    model, result = result_of(forward, (x,), lambda model: setattr(model, "act", nn.Tanh()))
    for _ in range(2):
        for change, message in CALLED.items():
            undo = change(model)
            for step in (result.train_step, result.eval_step):
                with pytest.raises(ValueError, match=message):
                    step((x,))
            undo()
        result.train_step((x,))
