"""transformers' mixtures of experts: written with our operators exactly, and run at parity.

Oracle: transformers' own loop over experts (`experts_implementation="eager"`) on one device.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.rules.moe import COMBINE, DISPATCH, GROUPED
from meshwright.costmodel.sharding.data_axis import data_layout
from meshwright.costmodel.sharding.factors import analyse
from meshwright.planner.tracing.trace import trace
from meshwright.planner.tracing.transformers.adapter import adapted
from tests.helpers.launching import launch

pytest.importorskip("transformers")

from transformers.integrations import moe

from tests.executor.experts.hf_experts_worker import LAYOUTS, MASKED, MODELS, batch_of, model_of

WORKER = Path(__file__).with_name("hf_experts_worker.py")
WIDTH, INNER, EXPERTS, TOPK, TOKENS = 6, 5, 4, 2, 7


# --- the same numbers -----------------------------------------------------------------------------


class Written:
    """A loop over experts, as modules of transformers have it; the decorator adds the rest."""

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        out = torch.zeros_like(x)
        for expert in range(EXPERTS):  # and none for a copy of expert `EXPERTS`
            token, place = torch.where(chosen == expert)
            first = "gate_up_proj" if self.has_gate else "up_proj"
            rows = self.product(x[token], first, expert)
            rows = self._apply_gate(rows) if self.has_gate else self.act_fn(rows)
            rows = self.product(rows, "down_proj", expert)
            if self.has_post_expert_norm:
                rows = self.post_expert_norm(rows)
            out = out.index_add(0, token, rows * weights[token, place, None])
        return out

    def product(self, rows: torch.Tensor, name: str, expert: int) -> torch.Tensor:
        weight = getattr(self, name)[expert]
        bias = getattr(self, f"{name}_bias")[expert] if self.has_bias else None
        return F.linear(rows, weight.t() if self.is_transposed else weight, bias)


def experts(*, gate: bool, bias: bool, transposed: bool, norm: bool, interleaved: bool) -> Any:
    """A module of experts whose class went through transformers' decorator."""
    torch.manual_seed(0)
    outer = 2 * INNER if gate else INNER

    class Experts(Written, nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts, self.act_fn = EXPERTS, F.silu
            first = "gate_up_proj" if gate else "up_proj"
            for name, i, o in ((first, WIDTH, outer), ("down_proj", INNER, WIDTH)):
                shape = (EXPERTS, i, o) if transposed else (EXPERTS, o, i)
                self.register_parameter(name, nn.Parameter(torch.randn(shape).double()))
                if bias:
                    made = nn.Parameter(torch.randn(EXPERTS, o).double())
                    self.register_parameter(f"{name}_bias", made)
            if norm:
                self.post_expert_norm = nn.LayerNorm(WIDTH, dtype=torch.double)

    def apply_gate(self: Any, rows: torch.Tensor) -> torch.Tensor:
        return self.act_fn(rows[..., ::2]) * rows[..., 1::2]

    if interleaved:
        Experts._apply_gate = apply_gate
    Experts = moe.use_experts_implementation(
        Experts,
        has_gate=gate,
        has_bias=bias,
        is_transposed=transposed,
        has_post_expert_norm=norm,
        is_concatenated=not interleaved,
    )
    return Experts(SimpleNamespace(_experts_implementation="eager"))


def routed(dropped: bool) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, experts and weights; no token goes to expert 1."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(TOKENS, WIDTH, dtype=torch.double, generator=generator)
    weights = torch.rand(TOKENS, TOPK, dtype=torch.double, generator=generator)
    legal = torch.tensor([0, 2, 3, EXPERTS] if dropped else [0, 2, 3])
    chosen = legal[torch.randint(len(legal), (TOKENS, TOPK), generator=generator)]
    assert bool((chosen == EXPERTS).any()) == dropped
    return x, chosen, weights


def outcome(module: nn.Module, dropped: bool) -> list[torch.Tensor]:
    """The result, and gradients of tokens, weights and parameters."""
    x, chosen, weights = routed(dropped)
    leaves = [x.requires_grad_(), weights.requires_grad_(), *module.parameters()]
    out = module(x, chosen, weights)
    return [out.detach(), *torch.autograd.grad(out.tanh().sum(), leaves)]


@pytest.mark.parametrize("dropped", [False, True])
@pytest.mark.parametrize(
    ("gate", "bias", "transposed", "norm", "interleaved"),
    [c for c in itertools.product([False, True], repeat=5) if c[0] or not c[4]],
)
def test_experts_of_every_layout_are_the_loop(
    gate: bool, bias: bool, transposed: bool, norm: bool, interleaved: bool, dropped: bool
) -> None:
    module = experts(
        gate=gate, bias=bias, transposed=transposed, norm=norm, interleaved=interleaved
    )
    wanted = outcome(module, dropped)
    with adapted(module):
        found = outcome(module, dropped)
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def test_what_was_touched_is_restored() -> None:
    model = model_of("Mixtral", "eager")
    before = dict(vars(moe.ALL_EXPERTS_FUNCTIONS))
    trace(model, batch_of(masked=False))
    assert vars(moe.ALL_EXPERTS_FUNCTIONS) == before
    assert model.config._experts_implementation == "eager"


def test_an_implementation_of_the_users_own_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(module: nn.Module, x: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        return x * 3

    known = dict(moe.ALL_EXPERTS_FUNCTIONS._global_mapping)
    monkeypatch.setattr(type(moe.ALL_EXPERTS_FUNCTIONS), "_global_mapping", {**known, "own": own})
    module = experts(gate=True, bias=False, transposed=False, norm=False, interleaved=False)
    module.config._experts_implementation = "own"
    x, *routing = routed(dropped=False)
    with adapted(module):
        assert torch.equal(module(x, *routing), x * 3)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_whatever_the_config_names_is_traced_as_our_operators(implementation: str) -> None:
    model = model_of("Qwen3-MoE", implementation)
    shorts = [op.short for op in trace(model, batch_of(masked=False)).ops]
    layers = model.config.num_hidden_layers
    assert shorts.count(DISPATCH) == shorts.count(COMBINE) == layers
    assert shorts.count(GROUPED) == 2 * layers


@pytest.mark.parametrize("name", MODELS)
def test_every_operator_has_a_rule_and_the_batch_stays_split(name: str) -> None:
    graph = trace(model_of(name), batch_of(masked=False))
    table = analyse(graph)
    assert [op.key for op in graph.ops if not table.ops[op.name].known] == []
    assert data_layout(graph, table, 2).gathered == ()


# --- on four ranks --------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """All runs in one launch."""
    folder = tmp_path_factory.mktemp("hf_experts")
    done = launch(WORKER, str(folder), ranks=4, timeout_s=420)
    assert done.ok, done.tail()
    return json.loads((folder / "results.json").read_text())


CELLS = [*itertools.product(MODELS, LAYOUTS), ("Mixtral", " ".join(MASKED))]


@pytest.mark.parametrize(("name", "layout"), CELLS)
def test_a_step_is_that_of_the_loop_on_one_device(
    launched: dict[str, Any], name: str, layout: str
) -> None:
    """Router and experts included, and the balancing loss of the whole micro-batch."""
    found = launched[f"{name} {layout}"]
    assert "failed" not in found and "refused" not in found, found
    assert found["loss"] < 1e-5
    assert found["gradient"][0] < 2e-5, found["gradient"]
    assert not found["missing"] and found["router"] > 1e-4


@pytest.mark.parametrize(("name", "layout"), list(itertools.product(MODELS, LAYOUTS)))
def test_experts_are_shared_out_or_their_matrices_split(
    launched: dict[str, Any], name: str, layout: str
) -> None:
    """A rank holds 1/(ep·tp) of the experts, or less with ZeRO."""
    found = launched[f"{name} {layout}"]
    assert all(ep == (LAYOUTS[layout].ep or 1) for ep in found["ep"])
    tp = LAYOUTS[layout].tp
    assert isinstance(tp, int) and found["held"]
    for fqn, share in found["held"].items():
        whole = fqn.endswith("bias")  # added on one of the ranks that hold rows of a matrix
        assert share <= 1 / max(found["ep"]) / (1 if whole else tp), fqn
