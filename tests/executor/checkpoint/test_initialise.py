"""Deferred initialisation against a single device that initialises the same model in place."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from meshwright.executor.checkpoint.weights import initialise
from tests.helpers.single_device import initialised, named_tensors
from tests.models.models import CASES

SEED = 11


class Scaled(nn.Module):
    """Initialises itself by what its child was given: reads, writes in part, replaces."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.none = nn.Linear(8, 8), nn.Linear(0, 3)
        self.gate = nn.Parameter(torch.empty(6, 8))
        self.mean = nn.Parameter(torch.empty(8))
        self.new = nn.Parameter(torch.empty(8))
        self.register_buffer("table", torch.empty(8, dtype=torch.int64), persistent=False)

    def reset_parameters(self) -> None:
        self.inner.weight.data /= 3
        for part in self.gate.chunk(3):
            nn.init.xavier_uniform_(part)
        self.mean.copy_(self.inner.weight.mean(0))
        self.new.data = torch.randn(8)
        self.table = torch.arange(8, device=self.table.device)


class Nested(nn.Module):
    """The same module twice, an embedding that is also the head, each of which initialises it in
    its own way, and modules of torch, within modules."""

    def __init__(self) -> None:
        super().__init__()
        shared = Scaled()
        self.first, self.second = nn.Sequential(shared), nn.Sequential(shared, Scaled())
        self.attention = nn.MultiheadAttention(8, 2)
        self.norm = nn.BatchNorm1d(8)
        self.transformer = nn.Transformer(8, 2, 1, 1, 16)
        self.tokens, self.body = nn.Embedding(24, 8, padding_idx=1), nn.LSTM(8, 8, num_layers=2)
        self.head = nn.Linear(8, 24, bias=False)
        self.head.weight = self.tokens.weight


class Governed(nn.Module):
    """A root with an `_init_weights(module)` that leaves norms to themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 32), nn.LayerNorm(32), nn.Linear(32, 8)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.02)
            nn.init.zeros_(module.bias)

    def initialize_weights(self) -> None:
        self.norm.reset_parameters()
        with torch.no_grad():
            self.apply(self._init_weights)


def on_meta(build: Callable[[], nn.Module]) -> nn.Module:
    with torch.device("meta"):
        return build()


def taken(model: nn.Module, **options: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    initialise(model, found.__setitem__, seed=SEED, **options)
    return found


class Allocations(TorchDispatchMode):
    """The most bytes of CPU storage alive at a time, of what is made inside."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        self.alive = {key: made for key, made in self.alive.items() if not made[0].expired()}
        for x in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(x, torch.Tensor) and x.device.type == "cpu":
                storage = x.untyped_storage()
                self.alive[storage._cdata] = StorageWeakRef(storage), storage.nbytes()
        self.peak_bytes = max(self.peak_bytes, sum(nbytes for _, nbytes in self.alive.values()))
        return out


@pytest.mark.parametrize("build", [Nested, Governed])
def test_equals_the_single_device_bit_for_bit(build: Callable[[], nn.Module]) -> None:
    """Models of transformers do under every plan (test_checkpoint.py)."""
    wanted = initialised(build(), SEED)
    found = taken(on_meta(build))
    assert found.keys() >= wanted.keys()
    assert [n for n, x in wanted.items() if not torch.equal(found[n], x)] == []
    assert all((found[n].dtype, found[n].device) == (x.dtype, x.device) for n, x in wanted.items())


@pytest.mark.parametrize("name", ["gpt2_tied", "llama"])
def test_holds_one_module_at_a_time(name: str) -> None:
    model = on_meta(CASES[name].build)
    largest = max(
        sum(x.nbytes for x in (*m.parameters(recurse=False), *m.buffers(recurse=False)))
        for m in model.modules()
    )
    with Allocations() as watch:
        initialise(model, lambda fqn, x: None, seed=SEED)
    assert largest <= watch.peak_bytes <= 1.05 * largest


def test_leaves_the_model_and_the_random_state_alone() -> None:
    model = on_meta(CASES["gpt2_tied"].build)
    before = named_tensors(model)
    tensors = [id(x) for x in (*model.parameters(), *model.buffers())]
    state = torch.get_rng_state()
    taken(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert [id(x) for x in (*model.parameters(), *model.buffers())] == tensors
    assert all(x.is_meta for x in before.values())
    assert model.lm_head.weight is model.transformer.wte.weight


def test_real_tensors_keep_their_values_and_the_stream_is_the_same() -> None:
    model = on_meta(CASES["mlp"].build)
    ours = torch.full((128,), 5.0)
    model.net[0].bias = nn.Parameter(ours.clone())
    found = taken(model)
    wanted = initialised(CASES["mlp"].build(), SEED)
    assert "net.0.bias" not in found
    assert torch.equal(model.net[0].bias, ours)
    assert all(torch.equal(x, wanted[n]) for n, x in found.items())


def test_only_what_is_asked_for_and_what_it_is_made_of_is_run() -> None:
    model = on_meta(CASES["llama"].build)
    with Allocations() as watch:
        found = taken(model, only={"model.rotary_emb.inv_freq"}, whole_stream=False)
    wanted = initialised(CASES["llama"].build(), SEED)
    assert list(found) == ["model.rotary_emb.inv_freq"]
    assert torch.equal(found["model.rotary_emb.inv_freq"], wanted["model.rotary_emb.inv_freq"])
    assert watch.peak_bytes < model.lm_head.weight.nbytes
    found = taken(on_meta(Scaled), only={"mean", "table"}, whole_stream=False)
    assert set(found) == {"mean", "table"}
    assert torch.equal(found["mean"], initialised(Scaled(), SEED)["mean"])


class Bare(nn.Module):
    """Nothing here initialises anything."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.empty(8))
        self.register_buffer("mask", torch.empty(8), persistent=False)


class Partial(Bare):
    """Writes all of one, half of the other."""

    def reset_parameters(self) -> None:
        self.scale.zero_()
        self.mask[:4] = 1


class Reading(Bare):
    """Branches on a value."""

    def reset_parameters(self) -> None:
        if float(self.linear.weight.sum()) > 0:
            self.scale.zero_()


@pytest.mark.parametrize(("build", "names"), [(Bare, "'mask', 'scale'"), (Partial, "'mask'")])
def test_without_initialiser_is_refused_before_anything_is_allocated(
    build: Callable[[], nn.Module], names: str
) -> None:
    model = on_meta(build)
    message = rf"no initialiser writes \[{re.escape(names)}\]; define reset_parameters"
    with Allocations() as watch, pytest.raises(ValueError, match=message):
        taken(model)
    assert watch.peak_bytes == 0
    assert all(x.is_meta for x in named_tensors(model).values())


def test_initialiser_that_reads_values_is_named() -> None:
    model = on_meta(Reading)
    with pytest.raises(RuntimeError) as caught:
        taken(model)
    assert "while rehearsing the initialisation of 'the model'" in caught.value.__notes__[0]
    assert all(x.is_meta for x in named_tensors(model).values())
