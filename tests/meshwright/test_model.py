"""A ParallelModel of one rank: its steps, names and state against the plain model; what can't be
trained is refused when it is given, not at the first step."""

import copy
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import Cluster, Overrides, ParallelModel, auto_parallelize
from meshwright.decisions import one_at_a_time
from meshwright.executor.errors import BatchError
from meshwright.executor.ranks import launch
from meshwright.profiles.inputs import MeshwrightError
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import ROWS, VOCAB, batch, loss, net, planned


@cache
def alone() -> ParallelModel:
    return planned(net())


def plain_gradients(model: nn.Module, inputs: Any, targets: Any) -> tuple[float, dict[str, Any]]:
    model = copy.deepcopy(model)
    value = loss(model(inputs), targets)
    value.backward()
    return value.item(), {name: p.grad for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    ("tied", "microbatches"),
    [(False, 1), pytest.param(True, 4, marks=second_tier("parity has micro-batches, and ties"))],
)
def test_a_step_is_the_plain_step(tied: bool, microbatches: int) -> None:
    model = net(tied=tied)
    expected, gradients = plain_gradients(model, *batch(ROWS))
    result = planned(model, overrides=Overrides(num_microbatches=microbatches))
    assert result.plan.num_microbatches == microbatches
    value = result.train_step(batch(ROWS))
    assert value.dtype == torch.float32 and value.shape == ()
    assert value.item() == pytest.approx(expected, rel=1e-6)
    found = {name: p.grad for name, p in result.named_parameters()}
    assert set(found) == set(gradients)
    for name, gradient in gradients.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_gradients_add_up_over_steps() -> None:
    result = alone()
    for p in result.parameters():
        p.grad = None
    result.train_step(batch(ROWS))
    once = {name: p.grad.clone() for name, p in result.named_parameters()}
    result.train_step(batch(ROWS))
    for name, p in result.named_parameters():
        torch.testing.assert_close(p.grad, 2 * once[name])


@pytest.mark.parametrize(
    "as_dict", [pytest.param(False, marks=second_tier("targets apart from a dict stay")), True]
)
def test_targets_may_come_apart(as_dict: bool) -> None:
    ids, targets = batch(ROWS)
    named = {"ids": ids[:4], "targets": targets[:4]}
    result = planned(net(), example_inputs=named if as_dict else batch(4))
    inputs = {"ids": ids} if as_dict else ids
    expected, _ = plain_gradients(net(), ids, targets)
    assert float(result.train_step(inputs, targets)) == pytest.approx(expected, rel=1e-6)
    assert float(result.train_step(inputs, targets=targets)) == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(
    ("loss_fn", "entries"),
    [
        pytest.param(
            nn.CrossEntropyLoss(label_smoothing=0.1),
            2,
            id="a module",
            marks=second_tier("a function of the output alone stays"),
        ),
        pytest.param(lambda out: out.square().mean(), 1, id="of the output alone"),
    ],
)
def test_a_loss_may_be_any_callable(loss_fn: Any, entries: int) -> None:
    model = nn.Linear(6, 5)
    data = (torch.randn(ROWS, 6), torch.randint(0, 5, (ROWS,)))[:entries]
    result = planned(model, example_inputs=tuple(x[:4] for x in data), loss_fn=loss_fn)
    expected = loss_fn(model(data[0]), *data[1:]).item()
    assert float(result.train_step(data)) == pytest.approx(expected, rel=1e-6)


class Normed(nn.Module):
    """Batch norm (buffers), a buffer of its own, one that is not saved, and a frozen weight."""

    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(6, 12)
        self.norm = nn.BatchNorm1d(12)
        self.b = nn.Linear(12, 5)
        self.a.bias.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(2.0))
        self.register_buffer("shift", torch.tensor(1.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(self.norm(self.a(x)) * self.scale + self.shift)


def test_state_goes_back_into_the_model() -> None:
    torch.manual_seed(0)
    model, data = Normed(), (torch.randn(ROWS, 6), torch.randint(0, 5, (ROWS,)))
    given = {"example_inputs": tuple(x[:4] for x in data), "loss_fn": F.cross_entropy}
    result = planned(model, overrides=Overrides(num_microbatches=1), **given)
    plain = copy.deepcopy(model)
    result.train_step(data)
    torch.optim.SGD([p for p in result.parameters() if p.requires_grad], lr=0.1).step()
    optimizer = torch.optim.SGD([p for p in plain.parameters() if p.requires_grad], lr=0.1)
    F.cross_entropy(plain(data[0]), data[1]).backward()
    optimizer.step()
    for state in (result.state_dict(), result.full_state_dict()):
        fresh = Normed()
        fresh.load_state_dict(state)  # strict: the very same names
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(fresh.state_dict()[name], value, rtol=1e-5, atol=1e-6)


def test_state_that_does_not_fit_is_named() -> None:
    result, state = alone(), net().state_dict()
    with pytest.raises(ValueError, match=r"missing 'head.weight'"):
        result.load_state_dict({n: x for n, x in state.items() if n != "head.weight"})
    with pytest.raises(ValueError, match=r"'head.weight' has shape \(2, 2\), the model"):
        result.load_state_dict({**state, "head.weight": torch.zeros(2, 2)})


@pytest.mark.parametrize(
    ("given", "says"),
    [
        (batch(12), r"'0' has shape \(12, 6\); the plan expects \(8, 6\)"),
        ((batch(8)[0], batch(4)[1]), r"'1' has shape \(4, 6\); the plan expects \(8, 6\)"),
        pytest.param(
            (batch(8)[0][:, :3], batch(8)[1]),
            r"'0' has shape \(8, 3\)",
            marks=second_tier("other numbers of rows are named by the same words"),
        ),
        (batch(8)[:1], r"missing \['1'\]; the model was planned with inputs"),
        ((batch(8)[0].to("meta"), batch(8)[1]), "meta device"),
        ((batch(8)[0].to(torch.complex64), batch(8)[1]), "complex64"),
        ((batch(8)[0].float(), batch(8)[1]), "float32"),
        ({"ids": batch(8)[0]}, "'ids'.*were not among example_inputs"),
        ((*batch(8), batch(8)[0]), r"\['2'\] were not among example_inputs.*inputs \['0', '1'\]"),
    ],
)
def test_a_wrong_batch_is_named(given: Any, says: str) -> None:
    with pytest.raises(BatchError, match=f"batch: .*{says}"):
        alone().train_step(given)


@pytest.mark.parametrize("ids", [VOCAB, -1])
def test_an_index_that_no_table_has_is_an_error_of_the_batch(ids: int) -> None:
    result, (x, targets) = alone(), batch(ROWS)
    with pytest.raises(BatchError, match="an index that is not there") as caught:
        result.train_step((torch.full_like(x, ids), targets))
    assert caught.value.legal and caught.value.way_out
    result.train_step((x, targets))  # nothing is left of it


class Weight(nn.Module):
    def __init__(self, weight: torch.Tensor | None = None) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6) if weight is None else weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def total(y: torch.Tensor) -> torch.Tensor:
    return y.sum()


def plan_for(model: nn.Module, x: torch.Tensor, loss: Callable[..., Any] = total) -> ParallelModel:
    return auto_parallelize(
        model, Cluster.local(1), example_inputs={"x": x}, global_batch_size=6, loss_fn=loss
    )


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        pytest.param(
            lambda y: y.sum() * 1j,
            r"loss of torch.complex64.*legal: float32.*\.abs\(\)",
            marks=second_tier("a loss of integers stays"),
        ),
        (lambda y: (y.sum().long(), 3), r"loss of torch.int64.*legal: float32"),
        pytest.param(
            lambda y: (y.sum(), torch.ones(()) * 1j),
            r"count of torch.complex64.*legal: real",
            marks=second_tier("a loss of integers stays"),
        ),
    ],
)
def test_losses_without_a_gradient_are_refused(loss: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"loss_fn gives a {message}"):
        plan_for(Weight(), torch.ones(6, 6), loss)


@cache
def weighted() -> ParallelModel:
    return plan_for(Weight(), torch.ones(6, 6))


UNUSUAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse_coo": torch.Tensor.to_sparse,
    "mkldnn": torch.Tensor.to_mkldnn,
    "nested": lambda x: torch.nested.nested_tensor([x, x], layout=torch.jagged),
    "quantized": lambda x: torch.quantize_per_tensor(x, 0.1, 0, torch.qint8),
}


@pytest.mark.filterwarnings("ignore:.*prototype|.*beta state|.*deprecated")
@pytest.mark.parametrize("kind", UNUSUAL)
def test_inputs_that_are_not_dense_are_refused(kind: str) -> None:
    given = UNUSUAL[kind](torch.ones(6, 6))
    message = rf"entry 'x' is a {kind} tensor; legal: dense tensors.*; pass it dense"
    with pytest.raises(ValueError, match=message):
        plan_for(Weight(), given)
    with pytest.raises(ValueError, match=message):
        weighted().train_step({"x": given})


@pytest.mark.parametrize(
    ("weight", "kind"),
    [(torch.eye(6).to_sparse(), "sparse_coo"), (torch.eye(6, dtype=torch.complex64), "complex")],
)
def test_parameters_that_cannot_be_trained_are_refused(weight: torch.Tensor, kind: str) -> None:
    says = rf"parameter 'weight' is {kind}; legal: dense.*; keep a sparse one"
    with pytest.raises(ValueError, match=says):
        plan_for(Weight(weight), torch.ones(6, 6))


class Params4bit(nn.Parameter):
    """Stands for the class of bitsandbytes, which needs a GPU."""


def test_quantized_weights_are_refused_by_name() -> None:
    packed: Any = Weight()
    packed.weight = Params4bit(torch.eye(6), requires_grad=False)
    noted: Any = nn.Sequential(Weight())  # as transformers notes it, weights being buffers (GPTQ)
    noted[0].is_quantized, noted[0].quantization_method = True, "gptq"
    for model, where in (
        (packed, r"model: parameter 'weight' is quantized \(Params4bit"),
        (noted, r"model: module '0' is quantized \(gptq"),
    ):
        with pytest.raises(ValueError, match=rf"{where}.* QLoRA.*legal: .*bfloat16.*; load the"):
            plan_for(model, torch.ones(6, 6))


def test_an_optimizer_of_another_model_is_refused(tmp_path: Path) -> None:
    result, other = planned(net()), net()
    own = nn.Parameter(torch.ones(3))  # of the user, beside the model
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)
    mixed = torch.optim.SGD([{"params": [*result.parameters()]}, {"params": [own]}], lr=0.1)
    result.save_checkpoint(tmp_path / "good", torch.optim.SGD(result.parameters(), lr=0.1))
    none = r"none of the \d+ parameters of this SGD is the model's"
    one = r"1 of the \d+ parameters of this SGD are not the model's \(1 in group 1\), .*\(3,\)"
    for wrong, says in ((foreign, none), (mixed, one)):
        for take in (
            lambda x: result.replan(optimizer=x),
            lambda x: result.save_checkpoint(tmp_path / "new", x),
            lambda x: result.load_checkpoint(tmp_path / "good", x),
        ):
            with pytest.raises(MeshwrightError, match=says) as refused:
                take(wrong)
            assert wrong is foreign or "an optimizer of their own" in refused.value.way_out
    assert not (tmp_path / "new").exists()
    result.train_step(batch(ROWS))  # this plan goes on
    some = torch.optim.SGD([*result.parameters()][:2], lr=0.1)  # a part of the model may train
    result.save_checkpoint(tmp_path / "new", some)
    result.replan(optimizer=some)


def _in_threads(work: Callable[[], object], number: int) -> list[object]:
    def run() -> object:
        try:
            return work()
        except RuntimeError as error:
            return error

    with ThreadPoolExecutor(number) as pool:
        return [future.result(timeout=120) for future in [pool.submit(run) for _ in range(number)]]


@second_tier("who plans meanwhile is told so in the test below")
def test_threads_plan_in_turns() -> None:
    plans = _in_threads(lambda: planned(net()).plan, 2)
    assert plans == [planned(net()).plan] * 2


def test_threads_of_ranks_do_not_plan_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "world_size", lambda: 2)
    with one_at_a_time():
        (error,) = _in_threads(lambda: planned(net()), 1)
    assert "plans while another one does" in str(error) and "Way out" in str(error)
