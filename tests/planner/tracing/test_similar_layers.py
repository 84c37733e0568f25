"""Short traces of models with repeated layers are the full ones: which layers are built alike,
which of them compute alike."""

import types
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.utils.checkpoint
from torch import nn

from meshwright.planner.tracing.trace import TraceError, trace
from meshwright.planner.tracing.user_module.similar_layers import MIN_SIMILAR, find_similar_layers
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.traced import ROWS, SEQUENCE, WIDTH, hugging_face, rows
from tests.models.stacks import DEPTH, Layer, Stack, each, nested, refusals, with_layer


def alter(change: Callable[[Any], object]) -> nn.Module:
    stack = Stack()
    change(stack.layers[3])
    return stack


UNLIKE: dict[str, Callable[[Any], object]] = {
    "training": lambda layer: layer.eval(),
    "frozen": lambda layer: layer.l.requires_grad_(False),
    "hook": lambda layer: layer.l.register_forward_hook(lambda *_: None),
    "attribute": lambda layer: setattr(layer, "gain", 2.0),
    "shape": lambda layer: setattr(layer, "l", nn.Linear(WIDTH, WIDTH, bias=False)),
    "dtype": lambda layer: layer.double(),
    "class": lambda layer: setattr(layer, "l", nn.Sequential(nn.Linear(WIDTH, WIDTH))),
    "forward": lambda layer: setattr(layer, "forward", layer.l.forward),
    "wrapped method": lambda layer: setattr(layer, "act", lambda x: x),
    "tie": lambda layer: (
        setattr(layer.l, "bias", nn.Parameter(layer.scale)) or setattr(layer, "again", layer.l.bias)
    ),
    "integer": lambda layer: setattr(layer, "index", 9),
}


def test_a_changed_layer_in_the_middle() -> None:
    assert not refusals(alter(UNLIKE["shape"]), (rows(WIDTH),))


@pytest.mark.parametrize("name", UNLIKE)
def test_one_changed_layer_is_left_out(name: str) -> None:
    groups = find_similar_layers(alter(UNLIKE[name]))
    others = tuple(f"layers.{k}" for k in range(DEPTH) if k != 3)
    # an integer is no longer every member's own position: they all differ by it
    assert [group.members for group in groups] == ([] if name == "integer" else [others])


def test_a_short_stack_is_traced_in_full() -> None:
    assert not find_similar_layers(Stack(depth=MIN_SIMILAR - 1))
    (group,) = find_similar_layers(Stack(depth=MIN_SIMILAR))
    assert (group.traced, group.spared) == (
        ("layers.0", "layers.1", "layers.4"),
        ("layers.2", "layers.3"),
    )
    assert group.identifiers == (("", "index"),)


def test_layers_that_count_statistics_are_traced_each() -> None:
    layers = [nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)) for _ in range(MIN_SIMILAR)]
    assert not find_similar_layers(nn.Sequential(*layers))
    assert find_similar_layers(nn.Sequential(*layers).eval())


def test_groups_are_outermost() -> None:
    inner = [nn.Sequential(*(nn.Linear(4, 4) for _ in range(6))) for _ in range(6)]
    assert [g.members[0] for g in find_similar_layers(nn.Sequential(*inner))] == ["0"]
    assert [g.members[0] for g in find_similar_layers(nn.Sequential(*inner[:2]))] == ["0.0", "1.0"]


@second_tier("a layer beside itself; a tie leaves a layer out above")
def test_one_layer_registered_many_times_is_no_group() -> None:
    layer = Layer()
    model = Stack(lambda k: layer)
    assert not find_similar_layers(model)
    refusals(model, (torch.rand(ROWS, SEQUENCE, WIDTH),))


# --- models of transformers ----------------------------------------------------------------------


@pytest.mark.parametrize(
    "name",
    tiered(("gpt2", "t5", "llama", "bert"), "gpt2".__eq__, "one stack of transformers stays"),
)
def test_transformers_models(name: str) -> None:
    model, batch = hugging_face(name, DEPTH)
    assert find_similar_layers(model)
    assert not refusals(model, batch, precision="bf16" if name == "gpt2" else "fp32")


@second_tier("hooks leave a layer out in test_one_changed_layer_is_left_out")
def test_hidden_states_that_hooks_record() -> None:
    model, batch = hugging_face("bert", DEPTH)
    model.config.output_hidden_states = True
    refusals(model, batch)


@second_tier("layers that hold their own names stay in a stack of our own")
def test_adapters_of_peft() -> None:
    """Each of its layers holds its own name."""
    peft = pytest.importorskip("peft")
    model, batch = hugging_face("llama", DEPTH)
    config = peft.LoraConfig(r=2, target_modules=["q_proj", "up_proj"])
    model = peft.get_peft_model(model, config)
    assert not refusals(model, batch, precision="bf16")
    (group,) = find_similar_layers(model)
    places = {place for place in group.identifiers if "target_name" in place}
    assert {path for path, *_ in places} == {"self_attn.q_proj", "mlp.up_proj"}


# --- stacks that are shortened -------------------------------------------------------------------


def through(layers: Iterable[nn.Module], x: torch.Tensor) -> torch.Tensor:
    for layer in layers:
        x = layer(x)
    return x


def collected(self: Stack, x: torch.Tensor) -> torch.Tensor:
    outputs = []
    for k, layer in enumerate(self.layers):
        x = layer(x)
        if k in (0, 3, 5):
            outputs.append(self.head(x))
    return torch.stack(outputs).sum(0)


@each
def between(self: Stack, k: int, layer: Any, x: torch.Tensor) -> torch.Tensor:
    """Views, in-place operations of the parent's own, and layers that are skipped or turned."""
    return x if k == 2 else layer(x.flip(0) if k % 2 else x).relu() + k


def run_nested(self: Stack, x: torch.Tensor) -> torch.Tensor:
    state: Any = (x, {"gain": x.mean(0), "times": 2.0})
    for layer in self.layers:
        y, more = layer(state)
        state = (y, {k: more[k] for k in ("gain", "times")})
    return state[0]


def under_autocast(self: Stack, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", dtype=torch.bfloat16):
        return through(self.layers, x).float()


def frozen_trunk(self: Stack, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        x = through(self.layers, x)
    return self.head(x)


def inner_writes(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x).relu_()
    y[:, 0] = 0
    return x + y.chunk(2, dim=1)[1].sum()


class Twice:
    @classmethod
    def of(cls, x: torch.Tensor) -> torch.Tensor:
        return 2 * x


def one_kind_of_problem(self: Stack, x: torch.Tensor) -> torch.Tensor:
    """As classifiers of transformers find out, at the first batch, what labels they are given."""
    if self.problem is None:
        self.problem = "regression"
    return through(self.layers, x) if self.problem == "regression" else x


def classifier() -> Stack:
    stack = Stack(run=one_kind_of_problem)
    stack.problem = None
    return stack


def tied_everywhere(stack: Stack) -> Stack:
    for layer in stack.layers[1:]:
        layer.l.bias = stack.layers[0].l.bias
    return stack


SHORT: dict[str, Callable[[], nn.Module]] = {
    "collected": lambda: Stack(run=collected),
    "between": lambda: Stack(run=between),
    "nested structures": lambda: Stack(with_layer(nested), run_nested),
    "constants": lambda: Stack(
        with_layer(
            lambda self, x: x + self.l(x) * torch.tensor([1.0] * WIDTH) + torch.arange(WIDTH)
        )
    ),
    "writes inside": lambda: Stack(with_layer(inner_writes)),
    "no_grad inside": lambda: Stack(
        with_layer(lambda self, x: x + self.l(x) * torch.no_grad()(self.l)(x).sigmoid())
    ),
    "autocast": lambda: Stack(run=under_autocast),
    "frozen trunk": lambda: Stack(run=frozen_trunk),
    "tied everywhere": lambda: tied_everywhere(Stack()),
    "two kinds in turn": lambda: Stack(
        with_layer(lambda self, x: x + self.l(x) * self.gain, gain=lambda k: 1.0 + k % 2), depth=11
    ),
    "names": lambda: Stack(
        with_layer(
            Layer.forward,
            name=lambda k: f"layers.{k}",
            names=lambda k: {"of": {"product": f"layers.{k}.l", "kind": "Linear"}},
        )
    ),
    "a method of a class": lambda: Stack(
        with_layer(lambda self, x: x + self.act(self.l(x)), act=lambda k: Twice.of)
    ),
    "the first casts its input": lambda: Stack(
        with_layer(lambda self, x: x.float() + self.l(x.float())),
        lambda self, x: through(self.layers, x.double()),
    ),
    "an attribute that stays": classifier,
    "frozen input": lambda: nn.Sequential(*(Layer() for _ in range(DEPTH))),
}


KEPT = ("collected", "names")


@pytest.mark.parametrize(
    "name", tiered(SHORT, KEPT.__contains__, "names of layers, and uses in between, stay")
)
def test_stacks_with_a_short_trace(name: str) -> None:
    model = SHORT[name]()
    assert find_similar_layers(model)
    loss_fn = None if isinstance(model, Stack) else lambda y: y.square().mean()
    assert not refusals(model, (rows(WIDTH),), loss_fn=loss_fn)


def test_only_three_layers_are_run() -> None:
    calls: list[int] = []

    def counted(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return x + self.l(x)

    trace(Stack(with_layer(counted)), (rows(WIDTH),))
    assert len(calls) == 3


def test_the_model_is_left_as_it_was() -> None:
    model = Stack()
    classes = [type(m) for m in model.modules()]
    before = [dict(vars(m)) for m in model.modules()]
    trace(model, (rows(WIDTH),))
    assert [type(m) for m in model.modules()] == classes
    assert [vars(m) for m in model.modules()] == before


Kind = Callable[[], nn.Module]
TURN = {"k": 0}
LEAKED: list[torch.Tensor] = []


# --- layers that are not -------------------------------------------------------------------------


def keeps(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.seen = x
    return x + self.l(x)


def appends(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.history.append(x.sum())
    return x + self.l(x)


def counts(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.shared.depth += 1
    return x + self.l(x) * (2.0 if self.shared.depth % 4 == 3 else 1.0)


def assigns_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    self.scale = (0.9 * self.scale + x.mean(0)).detach()
    return x + self.l(x) * self.scale


def writes_buffer(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.scale.mul_(0.9).add_(x.mean(0), alpha=0.1)
    return x + self.l(x) * self.scale


def leaks(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    LEAKED.append(y)
    return x + y


def run_leaks(self: Stack, x: torch.Tensor) -> torch.Tensor:
    LEAKED.clear()
    return through(self.layers, x) + sum(LEAKED)


def penalty(self: Stack, x: torch.Tensor) -> torch.Tensor:
    return through(self.layers, x) + sum(p.square().sum() for p in self.layers.parameters())


def in_turn(self: Stack, x: torch.Tensor) -> torch.Tensor:
    for TURN["k"], layer in enumerate(self.layers):
        x = layer(x)
    return x


def own_masks(self: Stack, x: torch.Tensor) -> torch.Tensor:
    shared = x.sigmoid()
    for k, layer in enumerate(self.layers):
        x = layer((x, shared * 2 if k == 3 else shared))
    return x


@each
def sets_one_attribute(self: Stack, k: int, layer: Any, x: torch.Tensor) -> torch.Tensor:
    self.layers[3].gain = 2.0
    return layer(x)


@each
def sets_shared(self: Stack, k: int, layer: Any, x: torch.Tensor) -> torch.Tensor:
    """For one layer only, an object that all of them hold."""
    self.layers[0].shared.gain = 2.0 if k == 3 else 1.0
    return layer(x)


@each
def swallowing(self: Stack, k: int, layer: Any, x: torch.Tensor) -> torch.Tensor:
    x = layer(x)
    try:
        weight = layer.l.weight
    except Exception:  # noqa: BLE001
        return x
    return x + weight.sum()


def fresh(self: Any, x: torch.Tensor) -> torch.Tensor:
    """Another layer in the first forward, for all that hold the object."""
    gain, self.shared.gain = self.shared.gain, 2.0
    return x + self.l(x) * gain if gain == 1.0 else x


def sharing(forward: Callable[..., Any], **shared: Any) -> Callable[[int], Any]:
    """Layers that hold one object."""
    one = types.SimpleNamespace(**shared)
    return with_layer(forward, shared=lambda k: one)


FULL: dict[str, Kind] = {
    "depends on its position": lambda: Stack(
        with_layer(lambda self, x: x + self.l(x) * (3.0 if self.index == 4 else 1.0))
    ),
    "depends on its name": lambda: Stack(
        with_layer(
            lambda self, x: x + self.l(x) * (3.0 if self.name.endswith("4") else 1.0),
            name=lambda k: f"layers.{k}",
        )
    ),
    "depends on a name in a dict": lambda: Stack(
        with_layer(
            lambda self, x: x + self.l(x) * {"layers.4.l": 3.0}.get(self.names["l"], 1.0),
            names=lambda k: {"l": f"layers.{k}.l"},
        )
    ),
    "keeps a tensor": lambda: Stack(with_layer(keeps)),
    "assigns a buffer": lambda: Stack(with_layer(assigns_buffer)),
    "the last by a global": lambda: Stack(
        with_layer(lambda self, x: x + self.l(x) * (2.0 if TURN["k"] == DEPTH - 1 else 1.0)),
        in_turn,
    ),
    "one attribute set": lambda: Stack(
        with_layer(lambda self, x: x + self.l(x) * self.gain, gain=lambda k: 1.0),
        sets_one_attribute,
    ),
    "a shared object set": lambda: Stack(
        sharing(lambda self, x: x + self.l(x) * self.shared.gain, gain=1.0), sets_shared
    ),
    "another argument in the middle": lambda: Stack(
        with_layer(nested),
        each(lambda self, k, layer, x: layer((x, {"gain": x, "times": 3.0 if k == 3 else 2.0}))[0]),
    ),
    "writes its input": lambda: Stack(with_layer(lambda self, x: x.add_(self.l(x)))),
    "writes a buffer": lambda: Stack(with_layer(writes_buffer)),
    "gives a view": lambda: Stack(with_layer(lambda self, x: x.view(x.shape))),
    "leaks a tensor": lambda: Stack(with_layer(leaks), run_leaks),
    "weights in the loss": lambda: Stack(run=penalty),
    "parent uses positions": lambda: Stack(
        run=each(lambda self, k, layer, x: layer(x) * (layer.index + 1))
    ),
    "called twice": lambda: Stack(run=lambda self, x: through([*self.layers] * 2, x)),
    "backwards": lambda: Stack(run=lambda self, x: through([*self.layers][::-1], x)),
    "another shape in the middle": lambda: Stack(
        run=each(lambda self, k, layer, x: layer(x[None])[0] if k == 3 else layer(x))
    ),
    "looks inside, and hides it": lambda: Stack(run=swallowing),
    "a mask of its own": lambda: Stack(
        with_layer(lambda self, pair: pair[0] + self.l(pair[0]) * pair[1]), own_masks
    ),
}
ONE_OF_EACH_KIND = (
    "depends on its position", "a shared object set",
)  # fmt: skip
KEEPING: dict[str, Kind] = {
    "appends to a list": lambda: Stack(with_layer(appends, history=lambda k: [])),
    "counts elsewhere": lambda: Stack(sharing(counts, depth=0), depth=8),
    "a first forward": lambda: Stack(sharing(fresh, gain=1.0)),
}


@second_tier("what a forward keeps for the next one is refused in test_forward_state")
@pytest.mark.parametrize("name", KEEPING)
def test_layers_that_count_from_step_to_step_are_refused(name: str) -> None:
    with pytest.raises(TraceError, match=r"would be another after the next one|another course"):
        trace(KEEPING[name](), (rows(WIDTH),))


@pytest.mark.parametrize(
    "name",
    tiered(
        FULL, ONE_OF_EACH_KIND.__contains__, "a position that is used and state that is set stay"
    ),
)
def test_layers_that_differ_are_traced_in_full(name: str) -> None:
    model = FULL[name]()
    assert find_similar_layers(model)
    assert len(refusals(model, (rows(WIDTH),))) == 1


@second_tier("checkpoints are traced through in test_trace")
def test_layers_in_checkpoints_give_the_full_graph() -> None:
    checkpoint = torch.utils.checkpoint.checkpoint
    run = each(lambda self, k, layer, x: checkpoint(layer, x, use_reentrant=False))
    refusals(Stack(run=run), (rows(WIDTH),))
