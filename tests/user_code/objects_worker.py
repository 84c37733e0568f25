"""One rank of a launch: what users do with their own model, optimizer and batches around the step,
under several layouts, against plain PyTorch."""

from __future__ import annotations

import dataclasses
import logging
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwright import Overrides, auto_parallelize
from meshwright.executor.ranks import launch
from meshwright.model import ParallelModel
from tests.parity.parity_launch import on_ranks, run_all
from tests.user_code.user_parts import CLASSES, WIDTH, Stack
from tests.user_code.user_runs import LAYOUTS, RANKS, ROWS, SHARDED, free_links

SEED = 3


class Net(Stack):
    """Layers, two of them tied; a buffer that scales, one that the forward writes, and one that is
    not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.layers[3].up = self.layers[0].up
        self.register_buffer("scale", torch.tensor(1.5))
        self.register_buffer("seen", torch.zeros(WIDTH))
        self.register_buffer("shift", torch.full((CLASSES,), 0.25), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen = 2 * self.layers[0].norm.weight.detach()  # of any micro-batch
        return super().forward(x * self.scale) + self.shift


def net(build: Callable[[], nn.Module] = Net, seed: int = SEED) -> nn.Module:
    torch.manual_seed(seed)
    return build()


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(step)
    x = torch.randn(ROWS, WIDTH, generator=draw)
    return x, torch.randint(CLASSES, (ROWS,), generator=draw)


def planned(model: nn.Module, layout: str, **given: Any) -> ParallelModel:
    return auto_parallelize(
        model,
        free_links(RANKS),
        example_inputs=batch(0),
        global_batch_size=ROWS,
        loss_fn=F.cross_entropy,
        **{"precision": "fp32", "overrides": overrides_of(layout), **given},
    )


def overrides_of(layout: str) -> Overrides:
    found, shardings = LAYOUTS[layout], {f"**.{k}": v for k, v in SHARDED.items()}
    return dataclasses.replace(found, shardings=shardings) if found.tp == 2 else found


def adam(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-2, eps=1e-3)


class Plain:
    """The same by plain PyTorch."""

    def __init__(self) -> None:
        self.model = net()
        self.optimizer = adam(self.model.parameters())

    def step(self, k: int) -> float:
        self.optimizer.zero_grad()
        x, y = batch(k)
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())


def steps(result: ParallelModel, optimizer: torch.optim.Optimizer, ks: range) -> list[float]:
    losses = []
    for k in ks:
        optimizer.zero_grad()
        losses.append(float(result.train_step(batch(k))))
        optimizer.step()
    return losses


def far(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    """The largest difference of whole tensors; inf for other names."""
    if found.keys() != wanted.keys():
        return float("inf")
    return max(float((found[n].float() - x.float()).abs().max()) for n, x in wanted.items())


def whole(x: torch.Tensor) -> torch.Tensor:
    return x.full_tensor() if isinstance(x, DTensor) else x


def state_here(model: nn.Module) -> dict[str, torch.Tensor]:
    """What `model.state_dict()` has on this rank."""
    return {n: whole(x) for n, x in model.state_dict().items() if not x.is_meta}


def said(run: Callable[[], Any]) -> str:
    """What every rank raised, if all raised the same."""
    try:
        run()
        error = "nothing"
    except Exception as raised:  # noqa: BLE001 - whatever it is
        error = f"{type(raised).__name__}: {raised}"
    every: list[Any] = [None] * launch.world_size()
    dist.all_gather_object(every, error)
    error = every[0]
    return error if len({e.split(":")[0] for e in every}) == 1 else str(every)


@contextmanager
def warnings_of(logger: str) -> Iterator[list[str]]:
    found: list[str] = []

    class Keep(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if record.levelno >= logging.WARNING:
                found.append(record.getMessage())

    keep = Keep()
    logging.getLogger(logger).addHandler(keep)
    yield found
    logging.getLogger(logger).removeHandler(keep)


# --- the model ------------------------------------------------------------------------------------


def owned(layout: str) -> dict[str, Any]:
    """The user's objects before and after planning, in the order in which people use them."""
    plain, model = Plain(), net()
    before = adam(model.parameters())
    result = planned(model, layout)
    found: dict[str, Any] = {"whole": result.runtime.user.whole}
    wanted = [plain.step(k) for k in range(2)]
    losses = steps(result, before, range(2))
    found["optimizer made before"] = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    found["full state"] = far(result.full_state_dict(), plain.model.state_dict())
    here, names = state_here(model), set(plain.model.state_dict())
    found["names"] = sorted(set(model.state_dict()) ^ names)
    found["state dict"] = far(here, {n: plain.model.state_dict()[n] for n in here})
    after = adam(model.parameters())
    plain.optimizer = adam(plain.model.parameters())
    wanted = [plain.step(k) for k in range(2, 4)]
    losses = steps(result, after, range(2, 4))
    found["optimizer made after"] = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    found["tied"] = model.layers[0].up.weight is model.layers[3].up.weight

    model.eval()
    plain.model.eval()
    with torch.no_grad():
        expected = plain.model(batch(9)[0])
    found["forward"] = float((result.forward(batch(9)[0], gather=True) - expected).abs().max())
    found["call"] = said(lambda: model(batch(9)[0]))
    model.train()
    plain.model.train()

    for each in (model, plain.model):
        with torch.no_grad():
            for p in each.parameters():
                p.mul_(0.5)
            each.scale.fill_(0.75)
            each.shift.add_(1.0)
    found["written"] = abs(steps(result, after, range(4, 5))[0] - plain.step(4))
    other = net(seed=SEED + 1)
    model.load_state_dict(other.state_dict())
    plain.model.load_state_dict(other.state_dict())
    found["loaded"] = abs(steps(result, after, range(5, 6))[0] - plain.step(5))
    found["loaded state"] = far(result.full_state_dict(), plain.model.state_dict())
    return found


def refused(layout: str) -> dict[str, Any]:
    """What can't be seen by the step is refused, on every rank."""
    model = net()
    result = planned(model, layout)
    found: dict[str, Any] = {}
    first = next(p for p in model.parameters() if not p.is_meta)
    first.requires_grad_(False)
    found["frozen"] = said(lambda: result.train_step(batch(0)))
    first.requires_grad_(True)
    name = next(n for n, p in model.named_parameters() if not p.is_meta)
    parent, leaf = model.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]
    setattr(parent, leaf, nn.Parameter(torch.zeros(first.shape)))
    found["rebound"] = said(lambda: result.train_step(batch(0)))
    setattr(parent, leaf, first)
    short = batch(0) if launch.rank() != 1 else (batch(0)[0][:3], batch(0)[1])
    found["short"] = said(lambda: result.train_step(short))
    head, model.head = model.head, nn.Linear(WIDTH, CLASSES)
    found["module"] = said(lambda: result.train_step(batch(0)))
    model.head = head
    own = [nn.Parameter(torch.ones(3))] if launch.rank() == 2 else []
    mixed = adam([*result.parameters(), *own])
    found["optimizer"] = said(lambda: result.replan(optimizer=mixed))
    given = batch(0) if launch.rank() != 2 else (batch(0)[0], batch(1)[1])
    found["batch"] = said(lambda: result.train_step(given))
    found["trained"] = any(p.grad is not None for p in result.parameters())
    loss = result.train_step(batch(0))
    found["backward"] = said(loss.backward)
    clip = torch.nn.utils.clip_grad_norm_
    found["clip"] = said(lambda: clip(result.parameters(), 0.1))
    plain = Plain()
    F.cross_entropy(plain.model(batch(0)[0]), batch(0)[1]).backward()
    wanted = torch.nn.utils.clip_grad_norm_(plain.model.parameters(), float("inf"))
    if "result.clip_grad_norm_" in found["clip"]:
        found["norm"] = abs(float(result.clip_grad_norm_(0.1) - wanted))
    else:
        for p in result.parameters():
            p.grad = None
        result.train_step(batch(0))
        norm = clip(result.parameters(), float("inf"))
        found["norm"] = abs(float(norm) - float(wanted))
    with warnings_of("meshwright.executor.parameters.loss_scale") as warned:
        for k in range(2):
            x, y = batch(k)
            result.train_step((x * float("inf"), y))
    found["not finite"] = warned
    found["again"] = said(lambda: planned(model, layout))
    return found


def replanned(before: str, after: str) -> dict[str, Any]:
    """Another plan goes on from what was trained, with the optimizer."""
    plain, model = Plain(), net()
    result = planned(model, before)
    optimizer = adam(model.parameters())
    wanted = [plain.step(k) for k in range(4)]
    losses = steps(result, optimizer, range(2))
    again = result.replan(overrides_of(after), optimizer=optimizer)
    losses += steps(again, optimizer, range(2, 4))
    off = max(abs(a - b) for a, b in zip(losses, wanted, strict=True))
    return {
        "losses": off,
        "state": far(again.full_state_dict(), plain.model.state_dict()),
        "steps": again.runtime.steps,
        "old": said(lambda: result.train_step(batch(0))),
    }


# --- ranks that differ ----------------------------------------------------------------------------


def equalised(layout: str) -> dict[str, Any]:
    """Every rank builds another model; rank 0's is trained."""
    model = net(seed=SEED + launch.rank())
    model.seen.fill_(float(launch.rank()))
    found: dict[str, Any] = {
        "compared": said(
            lambda: planned(net(seed=SEED + launch.rank() // 2), layout, check_replicas=True)
        )
    }
    result = planned(model, layout)
    found["state"] = far(result.full_state_dict(), net().state_dict())
    found["alike"] = said(lambda: planned(net(), layout, check_replicas=True))
    return found


def drawn() -> dict[str, Any]:
    """Planning leaves each rank's own random state as it was, Python's and torch's."""
    model = net()
    random.seed(launch.rank())
    torch.manual_seed(launch.rank())
    before = random.getstate(), torch.get_rng_state()
    planned(model, "dp4")
    same = random.getstate() == before[0] and torch.equal(torch.get_rng_state(), before[1])
    every: list[Any] = [None] * launch.world_size()
    dist.all_gather_object(every, same)
    return {"restored": all(every)}


def from_meta(layout: str) -> dict[str, Any]:
    """A model on meta gets its weights by its own `load_state_dict`."""
    plain = Plain()
    with torch.device("meta"):
        model = Net()
    result = planned(model, layout)
    found: dict[str, Any] = {"empty": said(lambda: result.train_step(batch(0)))}
    result.load_state_dict({**plain.model.state_dict(), "shift": plain.model.shift})
    optimizer = adam(model.parameters())
    found["loss"] = abs(steps(result, optimizer, range(1))[0] - plain.step(0))
    plain.model.eval()
    found["forward"] = float(
        (result.forward(batch(9)[0], gather=True) - plain.model(batch(9)[0])).abs().max()
    )
    found["state"] = far(result.full_state_dict(), plain.model.state_dict())
    return found


def main(folder: Path) -> None:
    work: dict[str, Any] = {}
    for layout in ("dp4", "zero3", "dp2×tp2", "pp4", "pp2×tp2"):
        work[f"owned {layout}"] = partial(owned, layout)
    for layout in ("dp4", "zero3", "dp2×tp2", "pp4"):
        work[f"refused {layout}"] = partial(refused, layout)
        work[f"equalised {layout}"] = partial(equalised, layout)
    for before, after in (("dp4", "pp4"), ("pp2×tp2", "zero3"), ("zero3", "dp4")):
        work[f"replanned {before} {after}"] = partial(replanned, before, after)
    for layout in ("dp4", "pp2×tp2"):
        work[f"meta {layout}"] = partial(from_meta, layout)
    work["drawn"] = drawn
    run_all(work, folder, "")


if __name__ == "__main__":
    on_ranks(main)
