"""State that a forward or a loss reads outside of plain attributes: compared at every step, refused
where the forward changes it, named in the report where nothing can be compared."""

from __future__ import annotations

import functools
import itertools
import random
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from contextvars import ContextVar
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn

from meshwright import Cluster, ParallelModel, auto_parallelize
from meshwright.planner.tracing.trace import TraceError
from tests.helpers.tiers import second_tier, tiered

WIDTH, ROWS = 16, 8


class Slotted:
    __slots__ = ("beta", "unread")

    def __init__(self) -> None:
        self.beta, self.unread = 1.0, 1


@dataclass
class Options:
    beta: float = 1.0
    names: dict[str, dict[str, float]] = field(default_factory=lambda: {"a": {"b": 1.0}})


class OfClass:
    beta = 1.0
    unread = 1


class Plain:
    def __init__(self) -> None:
        self.beta, self.unread = 1.0, 1

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.beta

    @functools.cache  # noqa: B019 - as users do
    def cached(self) -> float:
        return BETA


BETA = 1.0
BAG = SimpleNamespace(beta=1.0, unread=1)
SLOTTED = Slotted()
TABLE = {"beta": 1.0}
NESTED = SimpleNamespace(of=Slotted())
OBJECT = Plain()
COUNT = 0
DRAWS, TURNS = random.Random(0), itertools.count(1)
VARIABLE = ContextVar("VARIABLE", default=1.0)
UNSET = ContextVar[float]("UNSET")
LOCAL = threading.local()
WEAK = weakref.ref(OBJECT)
OPTIMIZER = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=1.0)
CONFIG = transformers.PretrainedConfig()


@functools.lru_cache
def cached() -> float:
    return BETA


def double(x: torch.Tensor) -> torch.Tensor:
    return 2 * x


def triple(x: torch.Tensor) -> torch.Tensor:
    return 3 * x


ACT = double


def helper(x: torch.Tensor) -> torch.Tensor:
    return x * BETA


Forward = Callable[[Any, torch.Tensor], torch.Tensor]
# what is read, what it is kept in (by the model), and what changes it
KINDS: dict[str, tuple[Forward, dict[str, Any], Callable[[nn.Module], object]]] = {
    "a global number": (lambda m, x: m.l(x) * BETA, {}, lambda m: globals().update(BETA=0.5)),
    "a helper's global": (lambda m, x: helper(m.l(x)), {}, lambda m: globals().update(BETA=0.5)),
    "a global namespace": (lambda m, x: m.l(x) * BAG.beta, {}, lambda m: setattr(BAG, "beta", 0.5)),
    "a global with slots": (
        lambda m, x: m.l(x) * SLOTTED.beta, {}, lambda m: setattr(SLOTTED, "beta", 0.5)
    ),
    "a global dict": (
        lambda m, x: m.l(x) * TABLE["beta"], {}, lambda m: TABLE.update(beta=0.5)
    ),
    "an object of a global": (
        lambda m, x: m.l(x) * NESTED.of.beta, {}, lambda m: setattr(NESTED.of, "beta", 0.5)
    ),
    "a class": (lambda m, x: m.l(x) * OfClass.beta, {}, lambda m: setattr(OfClass, "beta", 0.5)),
    "slots": (
        lambda m, x: m.l(x) * m.kept.beta, {"kept": Slotted()},
        lambda m: setattr(m.kept, "beta", 0.5),
    ),
    "in a tuple": (
        lambda m, x: m.l(x) * m.kept[0].beta, {"kept": (Plain(),)},
        lambda m: setattr(m.kept[0], "beta", 0.5),
    ),
    "in a list": (
        lambda m, x: m.l(x) * m.kept[0].beta, {"kept": [Slotted()]},
        lambda m: setattr(m.kept[0], "beta", 0.5),
    ),
    "in a dict": (
        lambda m, x: m.l(x) * m.kept["a"].beta, {"kept": {"a": Plain()}},
        lambda m: setattr(m.kept["a"], "beta", 0.5),
    ),
    "a dataclass in a dict": (
        lambda m, x: m.l(x) * m.kept["a"].beta, {"kept": {"a": Options()}},
        lambda m: setattr(m.kept["a"], "beta", 0.5),
    ),
    "a function": (
        lambda m, x: m.kept(m.l(x)), {"kept": double}, lambda m: setattr(m, "kept", triple)
    ),
    "a class by its instance": (
        lambda m, x: m.l(x) * type(m).scale, {},
        lambda m: setattr(type(m), "scale", 0.5),
    ),
    "keywords of a partial": (
        lambda m, x: m.kept(m.l(x)), {"kept": functools.partial(F.leaky_relu, negative_slope=0.1)},
        lambda m: m.kept.keywords.update(negative_slope=0.5),
    ),
    "the forward of a class": (
        lambda m, x: m.l(x), {}, lambda m: setattr(type(m), "forward", lambda m, x: 2 * m.l(x))
    ),
    "an iterator": (lambda m, x: m.l(x) * m.kept.__length_hint__(), {"kept": iter([1.0, 2.0])},
        lambda m: next(m.kept)),
    "a context variable": (
        lambda m, x: m.l(x) * VARIABLE.get(), {}, lambda m: VARIABLE.set(0.5)
    ),
    "a context variable without a value": (
        lambda m, x: m.l(x) * UNSET.get(1.0), {}, lambda m: UNSET.set(0.5)
    ),
    "another global function": (
        lambda m, x: ACT(m.l(x)), {}, lambda m: globals().update(ACT=triple)
    ),
    "a cached method": (
        lambda m, x: m.l(x) * OBJECT.cached(), {}, lambda m: globals().update(BETA=0.5)
    ),
    "a thread's own": (lambda m, x: m.l(x) * LOCAL.beta, {}, lambda m: setattr(LOCAL, "beta", 0.5)),
    "a weak reference": (
        lambda m, x: m.l(x) * WEAK().beta, {}, lambda m: setattr(OBJECT, "beta", 0.5)
    ),
    "a cached function": (
        lambda m, x: m.l(x) * cached(), {}, lambda m: globals().update(BETA=0.5)
    ),
    "an optimizer's options": (
        lambda m, x: m.l(x) * OPTIMIZER.param_groups[0]["lr"], {},
        lambda m: OPTIMIZER.param_groups[0].update(lr=0.5),
    ),
    "a library's config": (
        lambda m, x: m.l(x) * CONFIG.beta, {}, lambda m: setattr(CONFIG, "beta", 0.5)
    ),
    "a partial": (
        lambda m, x: m.kept(m.l(x)), {"kept": functools.partial(torch.mul, torch.tensor(2.0))},
        lambda m: setattr(m, "kept", functools.partial(torch.mul, torch.tensor(3.0))),
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    LOCAL.beta = CONFIG.beta = 1.0
    yield
    globals().update(BETA=1.0, COUNT=0, ACT=double)
    UNSET.set(1.0)
    Plain.cached.cache_clear()
    BAG.beta = SLOTTED.beta = NESTED.of.beta = OfClass.beta = OBJECT.beta = TABLE["beta"] = 1.0
    LOCAL.beta = CONFIG.beta = OPTIMIZER.param_groups[0]["lr"] = 1.0
    VARIABLE.set(1.0)
    cached.cache_clear()
    TABLE.pop("new", None)


def net(forward: Forward, kept: dict[str, Any]) -> nn.Module:
    class Net(nn.Module):
        scale = 1.0

        def __init__(self) -> None:
            super().__init__()
            self.l = nn.Linear(WIDTH, 4)
            for name, value in kept.items():
                setattr(self, name, value)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return forward(self, x)

    return Net()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(ROWS, WIDTH), torch.randint(0, 4, (ROWS,))


def planned(model: nn.Module, loss_fn: Any = F.cross_entropy) -> ParallelModel:
    return auto_parallelize(
        model,
        Cluster.local(1, measure=False),
        example_inputs=batch(),
        global_batch_size=ROWS,
        loss_fn=loss_fn,
    )


FIRST = (
    "a global dict", "a class by its instance", "in a tuple", "in a list",
    "another global function", "a cached method", "a context variable without a value",
    "an optimizer's options", "a library's config",
)  # fmt: skip
PLACES = "one place of each kind in which a value can be stays"


@pytest.mark.parametrize("kind", tiered(KINDS, FIRST.__contains__, PLACES))
def test_a_change_is_refused(kind: str) -> None:
    forward, kept, change = KINDS[kind]
    model = net(forward, kept)
    result = planned(model)
    result.train_step(batch())
    change(model)
    with pytest.raises(ValueError, match=r"the model was planned|another forward than planned"):
        result.train_step(batch())


def losses() -> dict[str, tuple[Any, Callable[[], object]]]:
    """Losses, and what changes what they read."""
    weights, options, cell = [1.0], {"label_smoothing": 0.0}, SimpleNamespace(beta=1.0)

    def closing(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, y) * weights[0]

    def of_bag(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, y) * cell.beta

    class Callable_:
        def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(x, y) * OBJECT.beta

    class Methods:
        def __init__(self) -> None:
            self.beta, self.unread = 1.0, 0

        def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(x, y) * self.beta

        def __call__(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return self.loss(x, y)

    def with_default(x: torch.Tensor, y: torch.Tensor, w: list[float] = [1.0]) -> torch.Tensor:  # noqa: B006
        return F.cross_entropy(x, y) * w[0]

    def weighted(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(x, y, weight=table["w"])

    partial, bound, called = functools.partial(F.cross_entropy, **options), Methods(), Methods()
    table, module = {"w": torch.ones(4)}, nn.CrossEntropyLoss(weight=torch.ones(4))
    many = deque([1.0])
    return {
        "method": (bound.loss, lambda: setattr(bound, "beta", 0.5)),
        "object called": (lambda x, y: called(x, y), lambda: setattr(called, "beta", 0.5)),
        "default": (with_default, lambda: with_default.__defaults__[0].__setitem__(0, 0.5)),
        "tensor of a dict": (weighted, lambda: table.update(w=2 * torch.ones(4))),
        "buffer of a module": (
            lambda x, y: module(x, y), lambda: setattr(module, "weight", torch.ones(4) / 2)
        ),
        "deque": (lambda x, y: F.cross_entropy(x, y) * many[-1], lambda: many.append(0.5)),
        "closure": (closing, lambda: weights.__setitem__(0, 0.5)),
        "closure over an object": (of_bag, lambda: setattr(cell, "beta", 0.5)),
        "partial": (partial, lambda: partial.keywords.update(label_smoothing=0.1)),
        "callable object": (Callable_(), lambda: setattr(OBJECT, "beta", 0.5)),
        "partial of a closure": (
            functools.partial(closing), lambda: weights.__setitem__(0, 0.25)
        ),
    }  # fmt: skip


LOSSES = ("default", "tensor of a dict", "closure", "partial", "callable object")


@pytest.mark.parametrize("kind", tiered(losses(), LOSSES.__contains__, PLACES))
def test_a_change_of_what_a_loss_reads_is_refused(kind: str) -> None:
    loss_fn, change = losses()[kind]
    result = planned(net(lambda m, x: m.l(x), {}), loss_fn)
    result.train_step(batch())
    change()
    with pytest.raises(ValueError, match="was changed since the model was planned"):
        result.train_step(batch())


def counting(model: Any, x: torch.Tensor) -> torch.Tensor:
    global COUNT
    COUNT += 1
    y: torch.Tensor = model.l(x) / COUNT
    return y


def of_bag(model: Any, x: torch.Tensor) -> torch.Tensor:
    BAG.beta *= 0.9
    y: torch.Tensor = model.l(x) * BAG.beta
    return y


def drawing(model: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model.l(x) * DRAWS.random()
    return y


def in_turn(model: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model.l(x) / next(TURNS)
    return y


@pytest.mark.parametrize("forward", [counting, of_bag, drawing, in_turn])
def test_a_forward_that_changes_it_is_refused(forward: Forward) -> None:
    message = r"the forward changes .*(COUNT|BAG|DRAWS|TURNS).*register_buffer"
    with pytest.raises(TraceError, match=message):
        planned(net(forward, {}))


def timed(model: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model.l(x) * (1.0 + 0 * time.time())
    return y


def test_the_clock_is_named_in_the_report() -> None:
    notes = planned(net(timed, {})).report.notes
    assert any("reads the clock" in note and "test_outside_state.time" in note for note in notes)


@second_tier("unread attributes of a model and its config change in test_forward_state.py")
def test_what_no_forward_reads_may_change() -> None:
    for forward, kept, _ in KINDS.values():
        model = net(forward, kept)
        result = planned(model)
        BAG.unread, SLOTTED.unread, OfClass.unread = BAG.unread + 1, SLOTTED.unread + 1, 2
        TABLE["new"] = 2.0  # a cache grows
        globals()["COUNT"] += 1
        result.train_step(batch())


@pytest.mark.parametrize("of", ["one weight", "all of them"])
def test_a_loss_that_reads_weights_is_refused(of: str) -> None:
    model = net(lambda m, x: m.l(x), {})

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        weights = [model.l.weight] if of == "one weight" else model.parameters()
        return F.cross_entropy(x, y) + 0.1 * sum(p.square().sum() for p in weights)

    with pytest.raises(TraceError, match=r"reads the parameter 'l\..*in the model's forward"):
        planned(model, loss)


def kept_by(model: Any, x: torch.Tensor) -> torch.Tensor:
    y: torch.Tensor = model.l(x)
    model.aux = y.square().mean()
    return y


@pytest.mark.parametrize("named", ["closure", "attribute of an object"])
@pytest.mark.parametrize(
    "ran", tiered([False, True], (True).__eq__, "where it was a tensor before is the harder one")
)
def test_a_loss_that_reads_what_the_forward_left_is_refused(named: str, ran: bool) -> None:
    model = net(kept_by, {"aux": None})
    if ran:  # the attribute is a tensor then, which a trace could take for a constant
        model(batch()[0])
    bag = SimpleNamespace(net=model)

    def by_closure(x: torch.Tensor, y: torch.Tensor) -> Any:
        return F.cross_entropy(x, y) + model.aux

    def by_object(x: torch.Tensor, y: torch.Tensor) -> Any:
        return F.cross_entropy(x, y) + bag.net.aux

    with pytest.raises(TraceError, match=r"the loss reads 'aux' of the model.*Return it"):
        planned(model, by_closure if named == "closure" else by_object)


class Running(nn.Module):
    """A loss divided by a running mean, which it writes in place or assigns."""

    def __init__(self, in_place: bool) -> None:
        super().__init__()
        self.in_place = in_place
        self.register_buffer("mean", torch.ones(()))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        loss = F.cross_entropy(x, y)
        with torch.no_grad():
            if self.in_place:
                self.mean.mul_(0.9).add_(0.1 * loss)
            else:
                self.mean = 0.9 * self.mean + 0.1 * loss
        return loss / self.mean


@pytest.mark.parametrize("in_place", [True, False])
def test_a_loss_that_writes_its_buffers_is_refused(in_place: bool) -> None:
    with pytest.raises(TraceError, match=r"loss_fn writes to a buffer.*a part of the model"):
        planned(net(lambda m, x: m.l(x), {}), Running(in_place))


GENERATOR = torch.Generator()


@pytest.mark.parametrize("place", ["forward", "loss"])
def test_draws_from_a_generator_of_its_own_are_refused(place: str) -> None:
    def noisy(x: torch.Tensor) -> torch.Tensor:
        return x + torch.randn(x.shape, generator=GENERATOR)

    def loss(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(noisy(x) if place == "loss" else x, y)

    model = net(lambda m, x: noisy(m.l(x)) if place == "forward" else m.l(x), {})
    with pytest.raises(TraceError, match=r"generator of its own at .*test_outside_state.py:\d+"):
        planned(model, loss)


def test_a_tensor_of_an_earlier_forward_is_refused() -> None:
    earlier = nn.Linear(WIDTH, 1)(batch()[0]).mean()
    with pytest.raises(TraceError, match=r"an earlier forward made, with its gradient"):
        planned(net(lambda m, x: m.l(x) * earlier, {}))
