"""What users do with their own model, optimizer and batches around the step: right, or refused."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright import Cluster, Overrides, auto_parallelize
from meshwright.model import ParallelModel
from tests.helpers.launching import Results, results_of
from tests.user_code.user_parts import CLASSES, WIDTH, Stack
from tests.user_code.user_runs import RANKS, ROWS

# --- four ranks -----------------------------------------------------------------------------------

OWNED = ("dp4", "zero3", "dp2×tp2", "pp4", "pp2×tp2")
REFUSED = ("dp4", "zero3", "dp2×tp2", "pp4")
EXACT = (
    "optimizer made before", "full state", "state dict", "optimizer made after", "forward",
    "written", "loaded", "loaded state",
)  # fmt: skip
SAID = {
    "frozen": "requires_grad of .* was changed after planning",
    "rebound": "was replaced after planning.*in place",
    "batch": r"BatchError: batch: it differs from rank 0's in '1' on ranks \[2\].*same whole batch",
    "short": r"BatchError: batch: it is not as planned on ranks \[1\]",
    "module": "module 'head' was replaced after planning",
    "optimizer": r"OptimizerError: optimizer: 1 of the \d+ .* are not the model's \(1 in group 0\)",
    "backward": "train_step has run the backward already",
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Results:
    worker = Path(__file__).with_name("objects_worker.py")
    folder = tmp_path_factory.mktemp("objects")
    return results_of(worker, folder, ranks=RANKS, timeout_s=580)


@pytest.mark.parametrize("layout", OWNED)
@pytest.mark.parametrize("what", EXACT)
def test_the_users_objects_train(found: Results, layout: str, what: str) -> None:
    """As plain PyTorch does, to rounding."""
    assert found[f"owned {layout}"][what] < 2e-6


@pytest.mark.parametrize("layout", OWNED)
def test_the_users_model_is_the_model(found: Results, layout: str) -> None:
    of = found[f"owned {layout}"]
    assert of["whole"] == (layout == "dp4")
    assert of["names"] == []
    assert of["tied"]
    assert of["call"] == "nothing" if of["whole"] else "result.forward(...)" in of["call"]


@pytest.mark.parametrize("layout", REFUSED)
@pytest.mark.parametrize("what", SAID)
def test_what_a_step_could_not_see_is_refused(found: Results, layout: str, what: str) -> None:
    assert re.search(SAID[what], found[f"refused {layout}"][what])


@pytest.mark.parametrize("layout", REFUSED)
def test_nothing_is_trained_on_batches_that_differ(found: Results, layout: str) -> None:
    assert not found[f"refused {layout}"]["trained"]


@pytest.mark.parametrize("layout", REFUSED)
def test_torch_clips_the_whole_model_or_says_what_does(found: Results, layout: str) -> None:
    of = found[f"refused {layout}"]
    assert ("result.clip_grad_norm_" in of["clip"]) == (layout == "pp4")
    assert of["norm"] < 1e-5


@pytest.mark.parametrize("layout", REFUSED)
def test_a_step_that_is_not_finite_is_warned_about_once(found: Results, layout: str) -> None:
    (warning,) = found[f"refused {layout}"]["not finite"]
    assert "'head." in warning  # where the backward begins


@pytest.mark.parametrize("layout", REFUSED)
def test_a_parallelized_model_is_planned_again_by_replan(found: Results, layout: str) -> None:
    of = found[f"refused {layout}"]
    assert of["again"] == "nothing" if layout == "dp4" else "replan()" in of["again"]


@pytest.mark.parametrize("layout", REFUSED)
def test_ranks_start_from_rank_0s_model(found: Results, layout: str) -> None:
    of = found[f"equalised {layout}"]
    assert of["state"] == 0
    assert re.search(r"check_replicas: .*on ranks \[2, 3\]", of["compared"])
    assert of["alike"] == "nothing"


@pytest.mark.parametrize("change", ["dp4 pp4", "pp2×tp2 zero3", "zero3 dp4"])
def test_replan_goes_on_from_what_was_trained(found: Results, change: str) -> None:
    of = found[f"replanned {change}"]
    assert of["losses"] < 2e-6
    assert of["state"] < 2e-6
    assert of["steps"] == 4
    assert "replaced by replan()" in of["old"]


@pytest.mark.parametrize("layout", ["dp4", "pp2×tp2"])
def test_a_model_on_meta_is_loaded_and_trained(found: Results, layout: str) -> None:
    of = found[f"meta {layout}"]
    assert "meta device" in of["empty"]
    assert max(of["loss"], of["state"], of["forward"]) < 2e-6


def test_planning_leaves_the_random_state_of_every_rank(found: Results) -> None:
    assert found["drawn"]["restored"]


# --- one device -----------------------------------------------------------------------------------


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm = nn.Linear(WIDTH, 32), nn.BatchNorm1d(32)
        self.frozen, self.head = nn.Linear(32, 32), nn.Linear(32, CLASSES)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(F.gelu(self.frozen(self.norm(self.up(x)))))


def made(build: Any = Normed) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = build()
    return model


def batch(step: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=draw)
    return x, torch.randint(CLASSES, (ROWS,), generator=draw)


def planned(model: nn.Module, precision: str = "fp32", **given: Any) -> ParallelModel:
    return auto_parallelize(
        model,
        Cluster.local(1, measure=False),
        example_inputs=batch(),
        global_batch_size=ROWS,
        loss_fn=F.cross_entropy,
        precision=precision,
        **{"overrides": Overrides(num_microbatches=1), **given},
    )


def stepped(result: ParallelModel, optimizer: torch.optim.Optimizer, k: int = 0) -> float:
    optimizer.zero_grad()
    loss = float(result.train_step(batch(k)))
    optimizer.step()
    return loss


def test_parameters_and_buffers_are_the_same_memory() -> None:
    model = made()
    before = {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()}
    result = planned(model)
    assert result.runtime.loaded
    assert {n: (id(p), p.data_ptr()) for n, p in result.named_parameters()} == before
    assert {n: (id(p), p.data_ptr()) for n, p in model.named_parameters()} == before


def test_running_statistics_are_the_models() -> None:
    model, plain = made(), made()
    result = planned(model)
    held = model.norm.running_mean
    stepped(result, torch.optim.SGD(model.parameters(), lr=0.1))
    plain(batch()[0])
    torch.testing.assert_close(model.norm.running_mean, plain.norm.running_mean)
    assert held is model.norm.running_mean
    model.norm.running_mean.fill_(3.0)
    model.norm.running_var = torch.full((32,), 2.0)
    plain.load_state_dict(model.state_dict())
    result.train_step(batch(1))
    plain(batch(1)[0])
    torch.testing.assert_close(model.state_dict(), plain.state_dict(), rtol=1e-5, atol=1e-6)


def test_a_buffer_of_another_shape_is_refused() -> None:
    model = made()
    result = planned(model)
    assert result.runtime
    model.norm.running_mean = torch.zeros(3)
    with pytest.raises(ValueError, match=r"'norm.running_mean' was replaced by one of shape"):
        result.train_step(batch())


@pytest.mark.parametrize("write", ["copy_", "load_state_dict", "data"])
def test_frozen_weights_written_between_steps_are_seen_in_bf16(write: str) -> None:
    model = made()
    result = planned(model, "bf16")
    first = float(result.train_step(batch()))
    new = model.frozen.weight.detach() * 5
    if write == "copy_":
        with torch.no_grad():
            model.frozen.weight.copy_(new)
    elif write == "load_state_dict":
        model.load_state_dict({**model.state_dict(), "frozen.weight": new})
    else:
        model.frozen.weight.data = new
    fresh = made()
    fresh.frozen.weight.data = new
    expected = float(planned(fresh, "bf16").train_step(batch()))
    again = float(result.train_step(batch()))
    assert again == pytest.approx(expected, rel=1e-3)
    assert again != pytest.approx(first, rel=1e-3)


def test_a_model_in_half_precision_trains_fp32_masters() -> None:
    model = made(lambda: Stack().bfloat16())
    first = next(model.parameters())
    result = planned(model, "bf16")
    stepped(result, torch.optim.SGD(model.parameters(), lr=0.1))
    assert all(p.dtype == torch.float32 for p in model.parameters())
    assert next(model.parameters()) is first


def test_moving_or_casting_the_model_after_planning_is_refused() -> None:
    model = made()
    result = planned(model)
    assert result.runtime
    model.half()
    with pytest.raises(ValueError, match="do not move or cast the model after planning"):
        result.train_step(batch())


def test_replan_goes_on_in_place() -> None:
    model, plain = made(Stack), made(Stack)
    optimizer = torch.optim.AdamW(model.parameters())
    result = planned(model)
    alone = planned(plain)
    same = torch.optim.AdamW(plain.parameters())
    for k in range(2):
        assert stepped(result, optimizer, k) == stepped(alone, same, k)
    again = result.replan(Overrides(num_microbatches=2), optimizer=optimizer)
    for k in range(2, 4):
        assert stepped(again, optimizer, k) == pytest.approx(stepped(alone, same, k), rel=1e-5)
    assert again.runtime.steps == 4
    with pytest.raises(ValueError, match="replaced by replan"):
        result.train_step(batch())


def test_the_model_evaluates_and_is_copied_as_trained() -> None:
    model = made()
    result = planned(model)
    stepped(result, torch.optim.SGD(model.parameters(), lr=0.5))
    model.eval()
    average = copy.deepcopy(model)
    assert torch.equal(model(batch(1)[0]), average(batch(1)[0]))
    assert torch.equal(result.forward(batch(1)[0]), model(batch(1)[0]))
    assert not result.forward(batch(1)[0]).requires_grad


def test_a_model_on_meta_is_loaded_by_its_own_method() -> None:
    with torch.device("meta"):
        model = Stack()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    result = planned(model)
    with pytest.raises(ValueError, match="on the meta device"):
        result.train_step(batch())
    wanted = made(Stack)
    model.load_state_dict(wanted.state_dict())
    stepped(result, early)
    F.cross_entropy(wanted(batch()[0]), batch()[1]).backward()
    torch.optim.SGD(wanted.parameters(), lr=0.1).step()
    torch.testing.assert_close(model.state_dict(), wanted.state_dict(), rtol=1e-5, atol=1e-6)


def test_the_loss_of_a_step_says_that_its_backward_is_done() -> None:
    loss = planned(made(Stack)).train_step(batch())
    with pytest.raises(RuntimeError, match="train_step has run the backward already"):
        loss.backward()
