"""`result.make_optimizer`: whole where parts of a tensor would be stepped otherwise; else in place,
and what one device does under every plan."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

from meshwright import Cluster, Overrides, auto_parallelize
from meshwright.executor.errors import OptimizerError
from meshwright.executor.parameters import WholeTensors, local_of, name_of, named_kind
from meshwright.optim import LAMB, Muon
from meshwright.planner.overrides import OverrideError
from meshwright.planner.plan import PlanError
from meshwright.planner.pricing import Evaluator
from meshwright.profiles.inputs import ArgumentError
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import tiered

ROWS, WORDS, STEPS = 8, 12, 3
PLANS: dict[str, dict[str, Any]] = {
    "dp2": {"dp": 2},
    "zero1": {"dp": 2, "zero": 1},
    "zero2": {"dp": 2, "zero": 2},
    "zero3": {"dp": 2, "zero": 3},
    "tp2": {"tp": 2, "shardings": {"layers.0": "colwise", "layers.2": "rowwise"}},
    "pp2": {"pp": 2, "schedule": "1f1b", "num_microbatches": 2},
}


class Own(torch.optim.Optimizer):
    """A user's: `direction` of each parameter with a gradient, times the rate."""

    def __init__(self, params: Any, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                p.sub_(self.direction(p), alpha=group["lr"])

    def direction(self, p: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class Shampoo(Own):
    """Roots of sums over whole matrices (Gupta et al., arXiv 1802.09568)."""

    def direction(self, p: Any) -> torch.Tensor:
        g = p.grad.flatten(1) if p.ndim > 1 else p.grad[:, None]
        state = self.state[p]
        for name, gram in (("left", g @ g.T), ("right", g.T @ g)):
            state[name] = state.get(name, 1e-2 * torch.eye(len(gram))) + gram
        return (_root(state["left"]) @ g @ _root(state["right"])).reshape(p.shape)


def _root(x: torch.Tensor) -> torch.Tensor:
    values, vectors = torch.linalg.eigh(x)
    return (vectors * values.clamp(min=1e-12) ** -0.25) @ vectors.T


class Rounded(Own):
    """Of no name: gradients in 16 levels of the largest of their tensor."""

    def direction(self, p: Any) -> torch.Tensor:
        level = p.grad.abs().max() / 8
        return (p.grad / level).round() * level


class Signs(Own):
    """Of elements."""

    def direction(self, p: Any) -> torch.Tensor:
        return p.grad.sign()


KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "muon": ("muon", {"lr": 1e-2}),
    "adafactor": ("adafactor", {"lr": 1e-2, "eps": (1e-16, 1e-3)}),
    "lamb": (LAMB, {"lr": 1e-2}),
    "shampoo": (Shampoo, {"lr": 1e-2}),
    "rounded": (Rounded, {}),
    "signs": (Signs, {"lr": 1e-3}),
    "adamw": ("adamw", {"lr": 1e-3, "eps": 1e-4}),
}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 16)
        self.layers = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 16), nn.Tanh())
        self.head = nn.Linear(16, WORDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.table(x))).flatten(0, 1)


def net() -> nn.Module:
    torch.manual_seed(0)
    return Net()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    draw = torch.Generator().manual_seed(1)
    x = torch.randint(0, WORDS, (ROWS, 4), generator=draw)
    return x, torch.randint(0, WORDS, (ROWS * 4,), generator=draw)


def loss_of(scores: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, labels.flatten())


def planned(plan: str, optimizer: str = "adamw") -> Any:
    x, y = batch()
    return auto_parallelize(
        net(),
        Cluster.local(2, "cpu", measure=False),
        example_inputs=(x, y.view(ROWS, 4)),
        global_batch_size=ROWS,
        loss_fn=loss_of,
        precision="fp32",
        optimizer=optimizer,
        overrides=Overrides(**PLANS[plan]),
    )


def of_one_device(name: str) -> dict[str, torch.Tensor]:
    model, (x, y) = net(), batch()
    kind, options = KINDS[name]
    params: Any = model.parameters()
    if name == "muon":
        matrices = [p for n, p in model.named_parameters() if "layers" in n and p.ndim == 2]
        others = [p for p in model.parameters() if all(p is not m for m in matrices)]
        params = [{"params": matrices}, {"params": others, "adapt": False}]
    made = {"muon": Muon, "adafactor": torch.optim.Adafactor, "adamw": torch.optim.AdamW}
    optimizer = made.get(name, kind)(params, **options)
    for _ in range(STEPS):
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    return model.state_dict()


def trained(plan: str) -> dict[str, tuple[bool, dict[str, torch.Tensor]]]:
    """By kind whether some are stepped by owners, and the weights; half way the optimizer is made
    anew from its states."""
    found, (x, y) = {}, batch()
    for name, (kind, options) in KINDS.items():
        result = planned(plan)
        optimizer = result.make_optimizer(kind, **options)
        for step in range(STEPS):
            optimizer.zero_grad()
            result.train_step((x, y.view(ROWS, 4)))
            optimizer.step()
            if step == 0 and isinstance(optimizer, WholeTensors):
                states = optimizer.state_dict()
                optimizer = result.make_optimizer(kind, **options)
                optimizer.load_state_dict(states)
        whole = {k: w.clone() for k, w in result.full_state_dict().items()}
        found[name] = isinstance(optimizer, WholeTensors), whole
    return found


def goes_on(before: str, after: str, folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    """By kind the weights of one step under a plan and the others under another, of which the
    optimizer is made anew and reads its states from a checkpoint."""
    found, (x, y) = {}, batch()
    for name in ("muon", "adafactor", "shampoo"):
        kind, options = KINDS[name]
        at = folder / name
        for plan, steps in ((before, 1), (after, STEPS - 1)):
            result = planned(plan)
            optimizer = result.make_optimizer(kind, **options)
            if plan == after:
                result.load_checkpoint(at, optimizer)
            for _ in range(steps):
                optimizer.zero_grad()
                result.train_step((x, y.view(ROWS, 4)))
                optimizer.step()
            result.save_checkpoint(at, optimizer)
        found[name] = {k: w.clone() for k, w in result.full_state_dict().items()}
    return found


@pytest.mark.parametrize(
    "plans",
    tiered(
        (("zero1", "pp2"), ("pp2", "zero3"), ("dp2", "tp2"), ("tp2", "dp2")),
        ("zero1", "pp2").__eq__,
        "from owners to none",
        " ".join,
    ),
)
def test_a_checkpoint_goes_on_under_any_plan(plans: tuple[str, str], tmp_path: Path) -> None:
    for name, weights in on_ranks(2, goes_on, *plans, tmp_path).items():
        atol = 2e-3 if name == "muon" else 1e-5
        for fqn, x in of_one_device(name).items():
            torch.testing.assert_close(weights[fqn], x, rtol=1e-4, atol=atol, msg=f"{name} {fqn}")


OWNED = {
    "dp2": {"muon", "shampoo"},  # products are shared out, and no tensor is in parts
    "pp2": set[str](),  # each stage on one rank
}
CUT = {"muon", "adafactor", "shampoo", "rounded"}


@pytest.mark.parametrize(
    "plan", tiered(PLANS, ("zero1", "pp2").__contains__, "a plan that cuts and one that does not")
)
def test_weights_are_those_of_one_device(plan: str) -> None:
    found = on_ranks(2, trained, plan)
    assert {name for name, (owned, _) in found.items() if owned} == OWNED.get(plan, CUT)
    for name, (_, weights) in found.items():
        atol = 2e-3 if name == "muon" else 1e-5  # its products are in bf16
        for fqn, x in of_one_device(name).items():
            torch.testing.assert_close(weights[fqn], x, rtol=1e-4, atol=atol, msg=f"{name} {fqn}")


def kept(plan: str) -> tuple[float, float]:
    """Bytes of all ranks' moments after a step of Muon, and as they are priced."""
    result, (x, y) = planned(plan, "muon"), batch()
    optimizer = result.make_optimizer(lr=1e-2)
    result.train_step((x, y.view(ROWS, 4)))
    optimizer.step()
    own = sum(
        local_of(x).nbytes
        for state in optimizer.state.values()
        for name, x in state.items()
        if name != "step"
    )
    everywhere = [0] * 2
    dist.all_gather_object(everywhere, own)
    stages = Evaluator(result._problem).price(result.plan).priced
    priced = [
        sum(walk.pricer.parameters.moment_bytes(v, at)[result.plan.stages[0].zero > 0] for v, at in
            {pair for block in walk.blocks for pair in block.parameters})
        for walk in stages
    ]  # fmt: skip
    return sum(everywhere), 2 * sum(priced)


@pytest.mark.parametrize(
    "plan", tiered(("dp2", "zero1", "tp2"), "zero1".__eq__, "ZeRO's division, the harder one")
)
def test_moments_of_all_ranks_are_those_that_are_priced(plan: str) -> None:
    found, priced = on_ranks(2, kept, plan)
    assert found == pytest.approx(priced)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"offload": {"optimizer": 1.0}}, "offload"),
        ({"offload": {"optimizer": 1.0, "weights": 1.0}}, "offload"),
        ({"post_validation": True, "pp": 2}, "post_validation"),
        ({"optimizer_in_backward": True}, "optimizer_in_backward"),
    ],
)
def test_what_whole_matrices_rule_out_is_refused(given: Any, says: str) -> None:
    asked: Any = {
        "cluster": Cluster.from_catalog("h100-sxm", devices_per_node=2),
        "example_inputs": batch(), "global_batch_size": ROWS, "loss_fn": loss_of,
    }  # fmt: skip
    with pytest.raises(OverrideError, match=rf"{says}.*'muon'.*optimizer='adamw'"):
        auto_parallelize(net(), optimizer="muon", overrides=Overrides(**given), **asked)
    plan = auto_parallelize(net(), overrides=Overrides(**given), **asked).plan
    with pytest.raises(PlanError, match=r"muon steps each matrix whole.*optimizer='adamw'"):
        auto_parallelize(net(), optimizer="muon", plan=plan, **asked)


class Flamboyant(Signs):
    """No LAMB."""


def refused() -> list[str]:
    said = []
    for kind in ("adamw8bit", "Muon", 3, print):
        with pytest.raises(ArgumentError) as error:
            planned("dp2").make_optimizer(kind)
        said.append(str(error.value))
    made = planned("dp2", "muon").make_optimizer(lr=0.1)
    assert isinstance(made, WholeTensors) and isinstance(made.inner, Muon)
    assert [group["adapt"] for group in made.param_groups] == [True, False]
    assert name_of(made) == "muon"
    assert type(planned("zero1").make_optimizer(Flamboyant)) is Flamboyant
    bound = planned("zero1").make_optimizer(partial(Shampoo, lr=0.2))
    assert isinstance(bound, WholeTensors) and bound.param_groups[0]["lr"] == 0.2
    with pytest.raises(ArgumentError, match=r"make_optimizer: muon.*lrr.*options"):
        planned("dp2").make_optimizer("muon", lrr=1)
    result = planned("zero1")
    own = result.make_optimizer("muon", [p for p in result.parameters() if p.ndim == 2], lr=0.1)
    assert sum(owner >= 0 for owner in own.owners) == 4  # all that the user gives it as matrices
    with pytest.raises(OptimizerError, match="save_checkpoint"):
        result.replan(optimizer=own)
    return said


def test_what_has_no_class_is_refused_and_none_is_the_planned_one() -> None:
    for said in on_ranks(2, refused):
        assert "legal: adam" in said and "make_optimizer(ItsClass" in said


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("FusedLAMB", "lamb"), ("Lion", "lion"), ("DistributedShampoo", "shampoo"),
        ("SingleDeviceMuon", "muon"), ("PagedAdamW8bit", "adamw8bit"), ("Adam8bit", "adamw8bit"),
        ("Flamboyant", None), ("Million", None), ("SGD8bit", None), ("Lion8bit", "lion"),
    ],
)  # fmt: skip
def test_names_are_words(name: str, found: str | None) -> None:
    assert named_kind(type(name, (), {})) == found
