"""On four ranks norms, clipping, skipped steps and optimizers are those of one device.

The single device is plain torch: the user's model, its own loop, `torch.nn.utils` for norms, the
same optimizer over the model's parameters.
"""

import contextlib
import functools
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR
from torch.torch_version import TorchVersion

from meshwright.executor.checkpoint import checkpoint
from meshwright.executor.parameters.loss_scale import LossScale, StepGuard
from meshwright.executor.parameters.norms import clip_, norm_share, total_norm
from meshwright.executor.parameters.parameters import local_of
from meshwright.executor.parameters.partial_dtensors import Reduced
from meshwright.executor.parameters.whole_tensors import WholeTensors
from meshwright.executor.ranks import launch
from meshwright.executor.runtime.runtime import Runtime
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import tiered
from tests.models.models import CASES, GLOBAL_BATCH
from tests.parity.parity_cells import Cell
from tests.parity.parity_reference import built, difference

CASE = CASES["gpt2_tied"]  # fused projections, biases, and an embedding that two stages share
LAYOUTS = ("dp2xtp2 m2 zero1", "pp2xdp2 m2 zero1", "pp2xtp2 m2")
NORM_LAYOUTS = (  # zb_v has the tied embedding twice on the same ranks
    "dp2xtp2 m2 zero1", "pp2xdp2 m4 zb_v", "dp4 m2 zero1 shard2", "dp4 m2 zero3", "pp2xtp2 m2",
    "dp4 m2 zero2",
)  # fmt: skip
NORM_TYPES = (1.0, 2.0, 3.0, math.inf)
WORLD, STEPS = 4, 3
TOLERANCE = 1e-5
MAX_NORM = 0.2  # below the norms of this model, so that every step is clipped
EPS = 1e-2  # far above the rounding noise of gradients that are zero in exact arithmetic

Groups = list[dict[str, Any]]
Named = list[tuple[str, nn.Parameter]]


WHOLE = {"whole_muon", "whole_adamw"}  # on whole tensors, each at its owner
OPTIMIZERS: Mapping[str, Callable[[Groups], optim.Optimizer]] = {
    "sgd": lambda g: optim.SGD(g, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "adam": lambda g: optim.Adam(g, lr=1e-2, eps=EPS, foreach=False),
    "adamw_fused": lambda g: optim.AdamW(g, lr=1e-2, eps=EPS, fused=True),
    "rmsprop": lambda g: optim.RMSprop(g, lr=1e-3, eps=EPS, momentum=0.5, foreach=True),
    "adafactor": lambda g: optim.Adafactor(g, lr=1e-2, eps=(EPS, 1e-3)),
    **(
        {"adafactor_foreach": lambda g: optim.Adafactor(g, lr=1e-2, eps=(EPS, 1e-3), foreach=True)}
        if TorchVersion(torch.__version__) >= "2.13"  # which has _foreach_lerp_ of DTensors
        else {}
    ),
    "muon": lambda g: optim.Muon([g[0]], lr=1e-2),  # takes matrices only
    "whole_muon": lambda g: optim.Muon([g[0]], lr=1e-2),
    "whole_adamw": lambda g: optim.AdamW(g, lr=1e-2, eps=EPS),
}  # fmt: skip


def grouped(named: Named) -> Groups:
    """Weight decay for matrices and embeddings, by FQN; none for biases and norms."""
    decayed = [p for n, p in named if n.endswith(".weight") and ".ln_" not in n]
    spared = [p for n, p in named if not n.endswith(".weight") or ".ln_" in n]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": spared, "weight_decay": 0.0}]


def train(
    optimizer: optim.Optimizer,
    step: Callable[[int], torch.Tensor],
    clip: Callable[[], torch.Tensor],
    matrices: bool,
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of steps with a schedule. Muon, of `matrices`, orthogonalises in
    bf16, whose rounding depends on the order of summation; in fp32 it is comparable."""
    scheduler = LambdaLR(optimizer, lambda k: 1 / (1 + k))
    inside: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
    if matrices:
        inside = mock.patch.object(torch.Tensor, "bfloat16", torch.Tensor.clone)
    losses, norms = [], []
    for k in range(STEPS):
        losses.append(float(step(k)))
        norms.append(float(clip()))
        with inside:
            optimizer.step()
        scheduler.step()
    return losses, norms


def backward(model: nn.Module, k: int) -> torch.Tensor:
    model.zero_grad()
    loss = CASE.loss(model, CASE.batch(GLOBAL_BATCH, k))
    loss.backward()
    return loss.detach()


@functools.cache
def _built(layout: str) -> Runtime:
    return built(Cell.parse(f"gpt2_tied {layout}"))


def runtime_of(layout: str) -> Runtime:
    """The layout's, with the weights of the start; on ranks, one for all their cases."""
    runtime = _built(layout)
    runtime.load_state_dict(CASE.model().state_dict())
    return runtime


def stepped(runtime: Runtime, k: int = 0) -> torch.Tensor:
    """One step's gradients in `.grad`, whatever was there before, and its loss."""
    for p in runtime.parameters():
        p.grad = None
    return runtime.train_step(CASE.batch(GLOBAL_BATCH, k))


def over_whole(runtime: Runtime, make: Callable[..., Any], groups: Groups) -> WholeTensors:
    held, place = runtime.stage_parameters, runtime.place
    return WholeTensors(make, groups, held=held, place=place, options={})


def of_all_ranks(value: Any) -> list[Any]:
    found: list[Any] = [None] * launch.world_size()
    dist.all_gather_object(found, value)
    return found


def steps_as_one_device(layout: str, name: str) -> None:
    runtime, model = runtime_of(layout), CASE.model()
    make, matrices = OPTIMIZERS[name], name.endswith("muon")
    groups = grouped(list(runtime.named_parameters()))
    losses, norms = train(
        over_whole(runtime, make, groups) if name in WHOLE else make(groups),
        lambda k: stepped(runtime, k),
        lambda: clip_(runtime.stage_parameters, runtime.place, MAX_NORM),
        matrices,
    )
    state = runtime.full_state_dict()
    if launch.rank() == 0:
        alone = train(
            make(grouped(list(model.named_parameters()))),
            lambda k: backward(model, k),
            lambda: nn.utils.clip_grad_norm_(model.parameters(), MAX_NORM),
            matrices,
        )
        assert min(alone[1]) > MAX_NORM
        assert losses == pytest.approx(alone[0], rel=TOLERANCE)
        assert norms == pytest.approx(alone[1], rel=TOLERANCE)
        assert difference(state, model.state_dict())[0] < TOLERANCE


FIRST = {(LAYOUTS[0], "adamw_fused"), (LAYOUTS[1], "whole_muon")}
RUNS = [(layout, name) for layout in LAYOUTS[:2] for name in OPTIMIZERS]
OTHERS = "one by elements and one over whole tensors are kept, and norms of whole tensors"


@pytest.mark.parametrize("run", tiered(RUNS, FIRST.__contains__, OTHERS, " ".join))
def test_an_optimizer_gives_the_weights_of_one_device(run: tuple[str, str]) -> None:
    """Three steps with clipping, two parameter groups and a learning-rate schedule."""
    on_ranks(WORLD, steps_as_one_device, *run)


def goes_on(layout: str, folder: Path) -> None:
    """A step of a new optimizer over whole tensors that took its states from a checkpoint gives the
    weights that the old one's gives."""
    runtime = runtime_of(layout)
    make = OPTIMIZERS["whole_adamw"]
    first = over_whole(runtime, make, grouped(list(runtime.named_parameters())))
    for k in range(STEPS):
        if k == STEPS - 1:
            weights = runtime.full_state_dict()
            checkpoint.save(runtime, folder, extra={"optimizer": first})
        stepped(runtime, k)
        first.step()
    wanted = runtime.full_state_dict()
    assert difference(weights, wanted)[0] > 0
    second = over_whole(runtime, make, grouped(list(runtime.named_parameters())))
    checkpoint.load(runtime, folder, extra={"optimizer": second})
    stepped(runtime, STEPS - 1)
    second.step()
    assert difference(runtime.full_state_dict(), wanted)[0] < TOLERANCE


@pytest.mark.parametrize("layout", tiered(LAYOUTS, LAYOUTS[1].__eq__, "two stages, data ranks"))
def test_an_optimizer_over_whole_tensors_goes_on_from_its_states(
    layout: str, tmp_path: Path
) -> None:
    on_ranks(WORLD, goes_on, layout, tmp_path)


def norms(layout: str) -> None:
    """Norms of one step's gradients are one device's, the same bits on every rank; clipped to a
    tenth, the gradients are, too."""
    runtime, model = runtime_of(layout), CASE.model()
    backward(model, 0)
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    for norm_type in NORM_TYPES:
        stepped(runtime)
        norm = clip_(runtime.stage_parameters, runtime.place, math.inf, norm_type).item()
        assert of_all_ranks(norm.hex()) == [norm.hex()] * WORLD
        assert norm == pytest.approx(nn.utils.get_total_norm(grads, norm_type).item(), rel=1e-5)
    tenth = float(nn.utils.clip_grad_norm_(model.parameters(), math.inf)) / 10
    nn.utils.clip_grad_norm_(model.parameters(), tenth)
    clip_(runtime.stage_parameters, runtime.place, tenth)
    wanted = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert difference(runtime.full_gradients(), wanted)[0] < TOLERANCE


@pytest.mark.parametrize(
    "layout",
    tiered(NORM_LAYOUTS, NORM_LAYOUTS[1].__eq__, "a tied weight twice on the same ranks is kept"),
)
def test_a_norm_counts_every_element_once(layout: str) -> None:
    on_ranks(WORLD, norms, layout)


def guard(layout: str) -> None:
    """All ranks skip a step of which each rank in turn has a gradient that is not finite, nothing
    is left of it, and a finite one has the very bits of a step that nothing scaled."""
    runtime = runtime_of(layout)
    guards = StepGuard(place=runtime.place, scale=LossScale(value=2.0**10))
    optimizer = optim.AdamW(runtime.parameters(), lr=1e-2)
    trained = [p for p in runtime.stage_parameters if p.trainable]
    stepped(runtime)
    optimizer.step()  # moments that a step with zero gradients would move along
    before = {n: local_of(p).detach().clone() for n, p in runtime.named_parameters()}
    admitted, scales = [], []
    for poisoned, value in ((None, 0.0), *enumerate((math.nan, math.inf, -math.inf, math.nan))):
        stepped(runtime)
        for p in trained:
            p.gradient, p.api.grad = local_of(p.api.grad) * guards.seed, None
        if poisoned == launch.rank():
            smallest = min((p.gradient for p in trained), key=torch.Tensor.numel)
            smallest.view(-1)[-1] = value
        scales.append(guards.seed)
        admitted.append(guards.admit(trained))
        if not admitted[-1]:
            optimizer.step()
            continue
        unscaled = [p.gradient for p in trained]
        for p in trained:
            p.gradient = None
        stepped(runtime)
        assert all(map(torch.equal, (local_of(p.api.grad) for p in trained), unscaled))
    assert admitted == [True, False, False, False, False]
    assert scales == [1024.0, 1024.0, 512.0, 256.0, 128.0]
    assert guards.skipped_steps == 4
    assert all(torch.equal(local_of(p), before[n]) for n, p in runtime.named_parameters())
    assert all(p.gradient is None for p in trained)


@pytest.mark.parametrize("layout", tiered(LAYOUTS, LAYOUTS[1].__eq__, "two stages, data ranks"))
def test_one_rank_with_nan_or_inf_makes_all_skip_the_step(layout: str) -> None:
    on_ranks(WORLD, guard, layout)


def reduced(layout: str) -> None:
    """`.item()` gives norms of whole parameters inside `Reduced`, as the shares add up to."""
    runtime = runtime_of(layout)
    whole = dict(CASE.model().named_parameters())
    divided = 0
    for name, p in runtime.named_parameters():
        assert isinstance(p, DTensor)
        divided += p.to_local().numel() < p.numel()
        if wanted := whole[name].norm().item():
            with Reduced():
                assert p.detach().norm().item() == pytest.approx(wanted, rel=TOLERANCE)
                again = p.detach().square().sum().sqrt().item()
                assert again == pytest.approx(wanted, rel=TOLERANCE)
    assert divided
    share = norm_share(((p, p.stored) for p in runtime.stage_parameters), runtime.place)
    total = nn.utils.get_total_norm(list(whole.values())).item()
    assert total_norm(share, runtime.place).item() == pytest.approx(total, rel=TOLERANCE)


@pytest.mark.parametrize("layout", tiered(LAYOUTS, LAYOUTS[0].__eq__, "data and tensor ranks"))
def test_inside_reduced_a_rank_reads_the_norm_of_the_whole_tensor(layout: str) -> None:
    on_ranks(WORLD, reduced, layout)
