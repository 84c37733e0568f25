"""Traced graphs against eager runs: the same loss, the same gradients, the shapes they claim."""

import functools
import inspect
from collections.abc import Callable, Mapping
from functools import cache
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from meshwright.costmodel.graph import Graph, argument
from meshwright.planner.batch import batch_rows, split_batch
from meshwright.planner.tracing.trace import TraceError, trace
from meshwright.planner.tracing.transformers import model_name
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.traced import (
    ROWS,
    SEQUENCE,
    WIDTH,
    agree,
    hugging_face,
    rows,
    run,
    shorts,
    with_forward,
)

PAIR = (rows(WIDTH), rows(WIDTH))


class Mixed(nn.Module):
    """Nested inputs, buffers of both kinds, a plain tensor attribute, constants made in forward."""

    scale: torch.Tensor
    offset: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("scale", torch.rand(WIDTH))
        self.register_buffer("offset", torch.rand(WIDTH), persistent=False)
        self.table = torch.rand(WIDTH)

    def forward(
        self, pair: tuple[torch.Tensor, dict[str, torch.Tensor]], *, bias: Any = None, times: float
    ) -> torch.Tensor:
        x = self.l(pair[0] * self.scale + self.offset) * times + self.table
        x = x + torch.tensor([float(i) for i in range(WIDTH)]) + torch.arange(WIDTH)
        x = x + pair[1]["shift"] if bias is None else x
        return x.square().mean()


@pytest.mark.parametrize(
    ("model", "name"),
    [
        (nn.Linear(2, 2), "Linear"),
        (type("LlamaForCausalLM", (nn.Module,), {})(), "Llama"),
        (type("GPT2LMHeadModel", (nn.Module,), {})(), "GPT2"),
        (type("ForestModel", (nn.Module,), {})(), "ForestModel"),
    ],
)
def test_a_model_is_named_by_its_class_or_its_checkpoint(model: nn.Module, name: str) -> None:
    assert model_name(model) == name
    model.config = SimpleNamespace(name_or_path="meta-llama/Llama-3-70B/")
    assert model_name(model) == "Llama-3-70B"


# --- whole models --------------------------------------------------------------------------------


@cache
def graph_of(name: str) -> Graph:
    return trace(*hugging_face(name))


@pytest.mark.parametrize(
    "name",
    tiered(
        ("gpt2", "llama", "bert", "t5"),
        "gpt2".__eq__,
        "tied weights and masks stay; tests of parity run all of them",
    ),
)
def test_transformers_models_run_as_traced(name: str) -> None:
    model, batch = hugging_face(name)
    graph = agree(model.eval(), batch)
    assert set(graph.inputs.values()) == set(batch)
    assert graph.batched == set(graph.inputs)
    results = [op.results[0] for op in graph.derived]
    assert results and not any(graph.values[name].requires_grad for name in results)


def test_attention_stays_causal_without_a_mask() -> None:
    graph = graph_of("llama")
    attention = [op for op in graph.ops if op.short == "scaled_dot_product_attention"]
    assert len(attention) == 2
    assert all(len(op.operands) == 3 for op in attention)
    assert all(argument(op, 5, "is_causal", False) for op in attention)


def test_tied_weights_are_one_parameter() -> None:
    graph, (model, _) = graph_of("gpt2"), hugging_face("gpt2")
    assert list(graph.parameters.values()).count("transformer.wte.weight") == 1
    assert "lm_head.weight" not in graph.parameters.values()
    assert dict(graph.aliases) == {"lm_head.weight": "transformer.wte.weight"}
    assert graph.num_parameters() == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize(
    "reentrant", tiered([True, False], lambda own: not own, "what torch advises stays")
)
def test_activation_checkpointing_is_traced_through(reentrant: bool) -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        inner = lambda t: F.gelu(self.l(t))  # noqa: E731
        return checkpoint(inner, self.l(x), use_reentrant=reentrant).sum()

    graph = trace(with_forward(forward), (rows(WIDTH),))
    assert shorts(graph) == ["linear", "linear", "gelu", "sum"]
    assert all(graph.values[op.results[0]].requires_grad for op in graph.ops)


@second_tier("checkpoints of torch, through which transformers go, stay")
def test_gradient_checkpointing_of_transformers_changes_nothing() -> None:
    model, batch = hugging_face("gpt2")
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()
    assert shorts(trace(model, batch)) == shorts(graph_of("gpt2"))


def test_nested_inputs_buffers_and_constants() -> None:
    batch = {"pair": (rows(WIDTH), {"shift": rows(WIDTH)}), "bias": None, "times": 2.0}
    graph = agree(Mixed(), batch)
    assert set(graph.inputs.values()) == {"pair.0", "pair.1.shift", "times"}
    assert graph.fixed == {"bias": None}
    assert set(graph.buffers.values()) == {"scale", "offset"}
    assert len(graph.constants) == 2


# --- batches and losses --------------------------------------------------------------------------


@cache
def perceptron() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, 5), nn.ReLU(inplace=True), nn.Linear(5, 4))


OTHER_LOSSES = second_tier("losses that are a module, and of a dict, stay")


@pytest.mark.parametrize(
    ("model", "batch", "loss_fn"),
    [
        pytest.param(perceptron(), (rows(WIDTH), rows(4)), F.mse_loss, marks=OTHER_LOSSES),
        (perceptron(), (rows(WIDTH), torch.tensor([0, 3, 1])), nn.CrossEntropyLoss(rows(4)[0])),
        (
            with_forward(lambda self, x: self.net(x), net=perceptron()),
            {"x": rows(WIDTH), "targets": rows(4)},
            F.l1_loss,
        ),
        pytest.param(
            perceptron(), (rows(WIDTH),), lambda output: output.square().sum(), marks=OTHER_LOSSES
        ),
        pytest.param(perceptron(), rows(WIDTH), lambda output: output.sum(), marks=OTHER_LOSSES),
        pytest.param(
            perceptron(),
            (rows(WIDTH),),
            lambda output: output.mean().view(1, 1),
            marks=OTHER_LOSSES,
        ),
    ],
    ids=["tuple", "weighted module", "dict", "one-argument", "bare tensor", "one element"],
)
def test_losses(model: nn.Module, batch: Any, loss_fn: Callable[..., Any]) -> None:
    graph = agree(model, batch, loss_fn)
    assert graph.values[graph.loss].shape == ()


def test_a_sum_and_a_count_make_a_mean() -> None:
    def pair(output: torch.Tensor, wanted: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return F.mse_loss(output, wanted, reduction="sum"), torch.ones_like(wanted).sum()

    batch = (rows(WIDTH), rows(4))
    graph = trace(perceptron(), batch, loss_fn=pair)
    loss = run(graph, perceptron(), batch)[graph.loss]
    torch.testing.assert_close(loss, F.mse_loss(perceptron()(batch[0]), batch[1]))


def test_class_weights_of_the_loss_are_a_constant() -> None:
    weights, batch = torch.rand(4), (rows(WIDTH), torch.tensor([0, 3, 1]))
    graph = trace(perceptron(), batch, loss_fn=nn.CrossEntropyLoss(weights), precision="bf16")
    assert not graph.buffers
    (constant,) = graph.constants.values()
    torch.testing.assert_close(constant, weights.to(constant.dtype))


@pytest.mark.parametrize(
    ("loss_fn", "batch", "args", "targets"),
    [
        (None, {"a": 1, "b": 2}, (), ()),
        (F.mse_loss, (1, 2, 3), (1, 2), (3,)),
        (F.mse_loss, {"a": 1, "targets": 2}, (), (2,)),
        (lambda *outputs: 0, (1, 2), (1,), (2,)),
        (lambda output, weight=None: 0, (1, 2), (1, 2), ()),
    ],
)
def test_split_batch(loss_fn: Any, batch: Any, args: tuple[int], targets: tuple[int]) -> None:
    found_args, kwargs, found_targets = split_batch(batch, loss_fn)
    assert (found_args, found_targets) == (args, targets)
    named = {k: v for k, v in batch.items() if k != "targets"} if isinstance(batch, dict) else {}
    assert kwargs == named


@second_tier("plans hold at any batch size in test_check")
def test_other_batch_size_changes_rows_alone() -> None:
    small, large = graph_of("bert"), trace(*hugging_face("bert"), batch_size=5)
    assert [op.target for op in small.ops] == [op.target for op in large.ops]
    assert (small.batch_size, large.batch_size) == (ROWS, 5)
    for name in large.inputs:
        assert large.values[name].shape == (5, SEQUENCE)
    embedded = next(op for op in large.ops if op.short == "embedding")
    assert large.values[embedded.results[0]].shape == (5, SEQUENCE, 16)


def test_batch_rows_is_the_commonest_first_dim() -> None:
    assert batch_rows({"x": rows(4), "y": rows(), "positions": torch.arange(7), "n": 2}) == ROWS


# --- precision, modes, gradients -----------------------------------------------------------------


def test_bf16_casts_parameters_and_keeps_upcasts() -> None:
    model = with_forward(lambda self, x: self.l(x).float().square().mean())
    graph = trace(model, (rows(WIDTH),), precision="bf16")
    assert {graph.values[p].dtype for p in graph.parameters} == {torch.bfloat16}
    cast = next(op for op in graph.ops if op.short == "to")
    assert graph.values[cast.results[0]].dtype == torch.float32
    assert graph.values[graph.loss].dtype == torch.float32


def normed() -> nn.Sequential:
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))


def test_bf16_norms_with_running_statistics_stay_fp32() -> None:
    graph = trace(normed(), PAIR, loss_fn=F.mse_loss, precision="bf16")
    dtypes = {fqn: graph.values[value].dtype for value, fqn in graph.parameters.items()}
    assert dtypes["0.weight"] == torch.bfloat16
    assert dtypes["1.weight"] == torch.float32


def test_buffers_keep_their_dtype_where_they_meet_bf16() -> None:
    positions = lambda self: self.register_buffer("pe", torch.rand(WIDTH))  # noqa: E731
    model = with_forward(lambda self, x: self.l(self.l(x) + self.pe).sum(), positions)
    graph = trace(model, (rows(WIDTH),), precision="bf16")
    assert graph.values[next(iter(graph.buffers))].dtype == torch.float32
    added = next(op for op in graph.ops if op.short == "add")
    assert graph.values[added.results[0]].dtype == torch.float32
    products = [op for op in graph.ops if op.short == "linear"]
    assert {graph.values[v].dtype for op in products for v in op.operands} == {torch.bfloat16}


@second_tier("casts beside buffers in fp32 stay")
def test_operands_of_two_dtypes_are_cast() -> None:
    model, batch = with_forward(lambda self, x: self.l(self.l(x).float()).sum()), (rows(WIDTH),)
    agree(model, batch)
    graph = trace(model, batch, precision="bf16")
    products = [op for op in graph.ops if op.short == "linear"]
    assert {graph.values[v].dtype for op in products for v in op.operands} == {torch.bfloat16}


def test_dropout_follows_the_mode_of_its_module() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Dropout(0.2))
    model[2].eval()
    assert shorts(trace(model, PAIR, loss_fn=F.mse_loss)) == ["linear", "dropout", "mse_loss"]
    assert shorts(agree(model.eval(), PAIR, F.mse_loss)) == ["linear", "mse_loss"]


@second_tier("buffers that a forward writes are updates in test_functional")
def test_batch_norm_counts_its_batches() -> None:
    model = normed()
    graph = trace(model, PAIR, loss_fn=F.mse_loss)
    ((buffer, update),) = graph.updates.items()
    assert graph.buffers[buffer] == "1.num_batches_tracked"
    assert int(run(graph, model, PAIR)[update]) == 1


def test_frozen_parameters_stop_gradients() -> None:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))
    model[0].requires_grad_(False)
    graph = agree(model, PAIR, F.mse_loss)
    flows = [graph.values[op.results[0]].requires_grad for op in graph.ops]
    assert flows == [False, True, True, True]
    assert sum(graph.values[p].requires_grad for p in graph.parameters) == 4


# --- the user's model ----------------------------------------------------------------------------


@second_tier("a model of repeated layers is left as it was in test_similar_layers")
def test_the_model_is_left_alone() -> None:
    model, batch = hugging_face("gpt2")
    model.transformer.h[1].eval()
    model.register_buffer("seen", torch.zeros(1))

    def state() -> list[Any]:
        modes = [m.training for m in model.modules()]
        return [modes, [id(p) for p in model.parameters()], model.config.use_cache]

    before, tensors = state(), {k: v.clone() for k, v in model.state_dict().items()}
    trace(model, batch)
    assert state() == before
    assert all(torch.equal(t, tensors[name]) for name, t in model.state_dict().items())


@second_tier("models of tests of the search are on meta, those of parity are not")
def test_a_meta_model_gives_the_same_graph() -> None:
    model, batch = hugging_face("llama")
    meta = trace(model.to("meta"), {k: v.to("meta") for k, v in batch.items()})
    real = graph_of("llama")
    assert (real.ops, real.derived, real.values) == (meta.ops, meta.derived, meta.values)


# --- what can't be traced ------------------------------------------------------------------------


def _branching(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    if y.sum() > 0:  # the line that the message names
        y = 2 * y
    return y.sum()


def _conditional(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    scale = 2.0 if y.sum() > 0 else 1.0
    return scale * y.sum()


def _selecting(self: Any, x: torch.Tensor) -> torch.Tensor:
    y = self.l(x)
    return y[y > 0].sum()


def _norming(self: Any, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        self.l.weight.div_(self.l.weight.norm())
    return self.l(x).sum()


ALIKE = second_tier("a selection by values is refused with its line, too")
ELSEWHERE = second_tier("writes to weights are refused in tests/user_code")


@pytest.mark.parametrize(
    ("forward", "line", "way_out"),
    [
        pytest.param(_branching, 2, "torch.where", marks=ALIKE),
        pytest.param(
            _conditional, 2,
            r"(?s)the condition `y.sum\(\) > 0` depends on tensor values.*leaf.*loss_fn=",
            marks=ALIKE,
        ),
        (_selecting, 2, "masks"),
        (lambda self, x: self.l(x), None, "loss_fn="),
        pytest.param(_norming, None, "between steps", marks=ELSEWHERE),
        (lambda self, x: self.l(x).detach().sum(), None, "no trainable parameter"),
    ],
    ids=["branch", "conditional", "selection", "no scalar", "parameter", "no gradient"],
)  # fmt: skip
def test_errors_say_where_and_what_to_do(forward: Any, line: int | None, way_out: str) -> None:
    with pytest.raises(TraceError, match=way_out) as raised:
        trace(with_forward(forward), (rows(WIDTH),))
    if line is not None:
        first = inspect.getsourcelines(forward)[1]
        assert f"{__file__}:{first + line}" in str(raised.value)


def test_symbolic_trace_where_export_fails() -> None:
    """A model that keeps its activations as numpy arrays to look at."""

    def forward(self: Any, x: torch.Tensor, mask: Any = None, scale: float = 1.0) -> torch.Tensor:
        y = self.l(x)
        self.seen = y.detach().numpy()
        return (y if mask is None else y * mask).mul(scale).sum()

    graph = agree(with_forward(forward), {"x": rows(WIDTH), "scale": 2.0})
    assert shorts(graph) == ["linear", "mul", "sum"]
    assert "symbolic_trace" in graph.notes[0]


@pytest.mark.parametrize(
    ("batch", "options", "message"),
    [
        ({"n": 3}, {}, "no tensor with a batch dim"),
        ((torch.tensor(1.0),), {}, "no tensor with a batch dim"),
        ({"input": rows(WIDTH), "y": rows(WIDTH)}, {}, r"Sequential.forward.*'y'.*\['input'\]"),
        ((rows(WIDTH), rows(4)), {}, r"too many positional.*\['input'\].*loss_fn"),
        ({"input": rows(WIDTH)}, {"loss_fn": F.mse_loss}, "dict with the entry 'targets'; add it"),
        ((rows(WIDTH),), {"loss_fn": F.mse_loss}, "inputs..., targets"),
        (
            (rows(WIDTH),),
            {"loss_fn": torch.sum, "precision": "fp4"},
            "legal: fp32, bf16, bf16_pure, fp16",
        ),
        ((rows(WIDTH),), {"loss_fn": torch.sum, "batch_size": 0}, "an integer from 1"),
        ((rows(WIDTH), rows(4)), {"loss_fn": nn.Bilinear(4, 4, 1)}, "parameters of its own"),
    ],
)
def test_batches_that_do_not_fit(batch: Any, options: Mapping[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        trace(perceptron(), batch, **options)


def test_hooks_on_a_forward_are_followed() -> None:
    model = with_forward(lambda self, x: self.l(x).square().sum())
    model.l.register_forward_pre_hook(lambda module, args: (2 * args[0],))
    model.l.register_forward_hook(lambda module, args, y: y + 1)
    agree(model, (rows(WIDTH),))


OTHER_HOOKS = second_tier("a hook of a module, and one of an activation, stay")


@pytest.mark.parametrize(
    ("register", "says"),
    [
        (lambda m: m.l.register_full_backward_hook, "'l' has a register_full_"),
        pytest.param(
            lambda m: m.l.register_full_backward_pre_hook, "backward_pre_hook", marks=OTHER_HOOKS
        ),
        pytest.param(
            lambda m: m.l.weight.register_hook, "'l.weight' has a register_hook", marks=OTHER_HOOKS
        ),
        pytest.param(
            lambda m: m.l.weight.register_post_accumulate_grad_hook,
            "register_post_accumulate_grad_",
            marks=OTHER_HOOKS,
        ),
    ],
)
def test_hooks_of_autograd_are_refused(register: Callable[[Any], Any], says: str) -> None:
    model = with_forward(lambda self, x: self.l(x).sum())
    hook = register(model)(lambda *arguments: None)
    with pytest.raises(TraceError, match=says):
        trace(model, (rows(WIDTH),))
    hook.remove()
    assert trace(model, (rows(WIDTH),)).ops


def test_a_hook_on_an_activation_is_refused_with_its_line() -> None:
    def forward(self: Any, x: torch.Tensor) -> torch.Tensor:
        y = self.l(x)
        y.register_hook(lambda gradient: 2 * gradient)
        return y.sum()

    says = r"test_trace.py:\d+: y.register_hook.*forward are followed"
    with pytest.raises(TraceError, match=says):
        trace(with_forward(forward), (rows(WIDTH),))
    x = torch.ones(1, requires_grad=True)
    x.register_hook(lambda gradient: 2 * gradient)  # untouched outside of a trace
    x.sum().backward()
    assert x.grad.item() == 2.0


calls: list[int] = []


def causal(length: int) -> torch.Tensor:
    calls.append(length)
    return torch.ones(length, length).tril()


def parts(length: int) -> tuple[int, dict[str, torch.Tensor]]:
    return length, {"mask": causal(length)}


class Masked(nn.Module):
    def __init__(self, mask: Callable[[int], Any]) -> None:
        super().__init__()
        self.mask, self.lin = mask, nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        cached = self.mask(x.shape[1])
        mask = cached if isinstance(cached, torch.Tensor) else cached[1]["mask"]
        return {"loss": (mask @ self.lin(x)).square().mean()}


@functools.cache
def known(length: int) -> torch.Tensor:
    return causal(length)


class Masks:
    """Caches of a class, and of an instance."""

    def __init__(self) -> None:
        self.caches = {"causal": functools.lru_cache(2)(causal)}

    @staticmethod
    @functools.cache
    def of_class(length: int) -> torch.Tensor:
        return causal(length)

    def of_instance(self, length: int) -> torch.Tensor:
        return self.caches["causal"](length)


def closed_over() -> Callable[[int], torch.Tensor]:
    cached = functools.cache(causal)
    return lambda length: cached(length)


MASKS = {
    "cache": functools.cache(causal),
    "parts": functools.cache(parts),
    "a module's": lambda length: known(length),
    "a class's": lambda length: Masks.of_class(length),
    "an instance's": Masks().of_instance,
    "closed over": closed_over(),
}


@pytest.mark.parametrize(
    "name", tiered(MASKS, "an instance's".__eq__, "caches elsewhere; one in an object's dict stays")
)
def test_caches_hold_nothing_of_the_trace(name: str) -> None:
    model = Masked(MASKS[name])
    batch = {"x": torch.randn(2, 4, 8)}
    first = trace(model, batch)
    assert float(model(**batch)["loss"].detach()) > 0  # as plain PyTorch
    assert [op.target for op in trace(model, batch).ops][-1] == first.ops[-1].target


def test_other_caches_stay() -> None:
    model = Masked(functools.lru_cache(None)(causal))
    batch = {"x": torch.randn(2, 4, 8)}
    model(**batch)
    count = len(calls)
    trace(model, batch)
    model(**batch)
    assert len(calls) == count
