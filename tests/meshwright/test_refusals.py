"""What can't be trained is refused when it is given, not at the first step: with what it is, what
is legal and the way out."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import Cluster, ParallelModel, auto_parallelize
from meshwright.decisions import one_at_a_time
from meshwright.executor.errors import BatchError
from meshwright.executor.ranks import launch
from meshwright.profiles.inputs import MeshwrightError
from tests.helpers.tiny import ROWS, VOCAB, batch, net, planned


class Linear(nn.Module):
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
        (lambda y: y.sum() * 1j, r"loss of torch.complex64.*legal: float32.*\.abs\(\)"),
        (lambda y: y.argmax(-1).sum(), r"loss of torch.int64.*legal: float32"),
        (lambda y: (y > 0).any(), r"loss of torch.bool.*legal: float32"),
        (lambda y: (y.sum().long(), 3), r"loss of torch.int64.*legal: float32"),
        (lambda y: (y.sum(), torch.ones(()) * 1j), r"count of torch.complex64.*legal: real"),
    ],
)
def test_losses_without_a_gradient_are_refused(loss: Callable[..., Any], message: str) -> None:
    with pytest.raises(ValueError, match=rf"loss_fn gives a {message}"):
        plan_for(Linear(), torch.ones(6, 6), loss)


@cache
def linear() -> ParallelModel:
    return plan_for(Linear(), torch.ones(6, 6))


@cache
def alone() -> ParallelModel:
    return planned(net())


UNUSUAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "sparse_coo": torch.Tensor.to_sparse,
    "sparse_csr": torch.Tensor.to_sparse_csr,
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
        plan_for(Linear(), given)
    with pytest.raises(ValueError, match=message):
        linear().train_step({"x": given})


@pytest.mark.parametrize(
    ("weight", "kind"),
    [(torch.eye(6).to_sparse(), "sparse_coo"), (torch.eye(6, dtype=torch.complex64), "complex")],
)
def test_parameters_that_cannot_be_trained_are_refused(weight: torch.Tensor, kind: str) -> None:
    with pytest.raises(
        ValueError, match=rf"parameter 'weight' is {kind}; legal: dense.*; keep a sparse one"
    ):
        plan_for(Linear(weight), torch.ones(6, 6))


class Params4bit(nn.Parameter):
    """Stands for the class of bitsandbytes, which needs a GPU."""


def test_quantized_weights_are_refused_by_name() -> None:
    packed: Any = Linear()
    packed.weight = Params4bit(torch.eye(6), requires_grad=False)
    noted: Any = nn.Sequential(Linear())  # as transformers notes it, weights being buffers (GPTQ)
    noted[0].is_quantized, noted[0].quantization_method = True, "gptq"
    for model, where in (
        (packed, r"model: parameter 'weight' is quantized \(Params4bit"),
        (noted, r"model: module '0' is quantized \(gptq"),
    ):
        with pytest.raises(ValueError, match=rf"{where}.* QLoRA.*legal: .*bfloat16.*; load the"):
            plan_for(model, torch.ones(6, 6))


@pytest.mark.parametrize("given_to", ["replan", "save_checkpoint", "load_checkpoint"])
def test_an_optimizer_of_another_model_is_refused(tmp_path: Path, given_to: str) -> None:
    result, other = planned(net()), net()
    result.save_checkpoint(tmp_path / "good", torch.optim.SGD(result.parameters(), lr=0.1))
    foreign = torch.optim.SGD(other.parameters(), lr=0.1)
    take: dict[str, Callable[[], object]] = {
        "replan": lambda: result.replan(optimizer=foreign),
        "save_checkpoint": lambda: result.save_checkpoint(tmp_path / "new", foreign),
        "load_checkpoint": lambda: result.load_checkpoint(tmp_path / "good", foreign),
    }
    with pytest.raises(ValueError, match=r"none of the \d+ parameters of this SGD is the model's"):
        take[given_to]()
    assert not (tmp_path / "new").exists()
    own = nn.Parameter(torch.ones(3))  # of the user, beside the model
    mixed = torch.optim.SGD([{"params": [*result.parameters()]}, {"params": [own]}], lr=0.1)
    foreign.param_groups[:] = mixed.param_groups
    said = r"1 of the \d+ parameters of this SGD are not the model's \(1 in group 1\), .*\(3,\)"
    with pytest.raises(ValueError, match=said) as refused:
        take[given_to]()
    assert isinstance(refused.value, MeshwrightError)
    assert "an optimizer of their own" in refused.value.way_out
    assert not (tmp_path / "new").exists()
    result.train_step(batch(ROWS))  # this plan goes on
    some = torch.optim.SGD([*result.parameters()][:2], lr=0.1)  # a part of the model may train
    result.save_checkpoint(tmp_path / "new", some)
    result.replan(optimizer=some)


# --- several threads ------------------------------------------------------------------------------


@pytest.mark.parametrize("ids", [VOCAB, -1])
def test_an_index_that_no_table_has_is_an_error_of_the_batch(ids: int) -> None:
    result, (x, targets) = alone(), batch(ROWS)
    with pytest.raises(BatchError, match="an index that is not there") as caught:
        result.train_step((torch.full_like(x, ids), targets))
    assert caught.value.legal and caught.value.way_out
    result.train_step((x, targets))  # nothing is left of it


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x.to("meta"), "meta device"),
        (lambda x: x.to(torch.complex64), "complex64"),
        (lambda x: x.float(), "float32"),
    ],
    ids=["meta", "complex", "float"],
)
def test_a_batch_of_another_kind_is_refused(change: Callable[..., Any], says: str) -> None:
    x, targets = batch(ROWS)
    with pytest.raises(BatchError, match=says):
        alone().train_step((change(x), targets))


def _in_threads(work: Callable[[], object], number: int) -> list[object]:
    found: list[object] = []

    def run() -> None:
        try:
            found.append(work())
        except RuntimeError as error:
            found.append(error)

    threads = [threading.Thread(target=run) for _ in range(number)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=120)
    return found


def test_threads_plan_in_turns() -> None:
    expected = planned(net()).plan
    found = _in_threads(lambda: planned(net()).plan, 3)
    assert found == [expected] * 3


def test_threads_of_ranks_do_not_plan_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "world_size", lambda: 2)
    with one_at_a_time():
        (error,) = _in_threads(lambda: planned(net()), 1)
    assert "plans while another one does" in str(error) and "Way out" in str(error)
