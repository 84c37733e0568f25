"""transformers' mixtures of experts: written with our operators exactly, and run at parity.

Oracle: transformers' own loop over experts (`experts_implementation="eager"`) on one device.
"""

import itertools
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import PhimoeConfig, PhimoeForCausalLM
from transformers.integrations import moe

from meshwright import Overrides, ParallelModel
from meshwright.costmodel.rules.moe import COMBINE, DISPATCH, GROUPED
from meshwright.costmodel.sharding.data_axis import data_layout
from meshwright.costmodel.sharding.factors import analyse
from meshwright.executor.ranks import launch
from meshwright.planner.plan import Plan
from meshwright.planner.tracing.trace import trace
from meshwright.planner.tracing.transformers import adapted
from scripts.zoo.models import SMALL, ZOO
from scripts.zoo.registry import VOCAB
from tests.helpers import tiny
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier, tiered
from tests.parity.parity_reference import difference
from tests.user_code.user_runs import free_links

WIDTH, INNER, EXPERTS, TOPK, TOKENS = 6, 5, 4, 2, 7
ROWS, LENGTH = 8, 16
MODELS = ("Mixtral", "Qwen3-MoE", "DeepSeek-V3", "GPT-OSS")
LAYOUTS: Mapping[str, Overrides] = {
    **{f"dp4 ep{ep}": Overrides(dp=4, tp=1, pp=1, ep=ep) for ep in (1, 2, 4)},
    "tp4": Overrides(dp=1, tp=4, pp=1),
    "dp2 tp2": Overrides(dp=2, tp=2, pp=1, ep=1),
    "dp2 tp2 ep2": Overrides(dp=2, tp=2, pp=1, ep=2),
    "pp2 dp2 ep2": Overrides(dp=2, tp=1, pp=2, ep=2),
}


def model_of(name: str, implementation: str = "grouped_mm") -> nn.Module:
    """A small model with transformers' own experts, and its balancing loss where it has one."""
    torch.manual_seed(0)
    model = ZOO[name].build(SMALL, ROWS).model
    config: Any = model.config
    config._experts_implementation = implementation
    if hasattr(config, "output_router_logits"):
        config.output_router_logits, config.router_aux_loss_coef = True, 0.5
        model.router_aux_loss_coef = 0.5
    for path, x in model.named_parameters():
        if path.endswith("bias"):  # transformers starts them at zero, which would hide them
            nn.init.normal_(x, std=0.2)
    return model


def batch_of(masked: bool = False) -> dict[str, torch.Tensor]:
    ids = torch.randint(VOCAB, (ROWS, LENGTH), generator=torch.Generator().manual_seed(3))
    if not masked:
        return {"input_ids": ids, "labels": ids.clone()}
    mask = torch.ones_like(ids)
    mask[::3, LENGTH // 2 :] = 0
    labels = ids.masked_fill(mask == 0, -100)
    return {"input_ids": ids, "attention_mask": mask, "labels": labels}


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


def experts(
    gate: bool = True, bias: bool = False, transposed: bool = False, norm: bool = False,
    interleaved: bool = False,
) -> Any:  # fmt: skip
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
        Experts, has_gate=gate, has_bias=bias, is_transposed=transposed,
        has_post_expert_norm=norm, is_concatenated=not interleaved,
    )  # fmt: skip
    return Experts(SimpleNamespace(_experts_implementation="eager"))


def routed(dropped: bool = False) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
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


@pytest.mark.parametrize(
    "layout", [c for c in itertools.product([False, True], repeat=5) if c[0] or not c[4]]
)
def test_experts_of_every_layout_are_the_loop(layout: tuple[bool, ...]) -> None:
    module = experts(*layout)
    for dropped in (False, True):
        wanted = outcome(module, dropped)
        with adapted(module):
            found = outcome(module, dropped)
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)


def test_an_implementation_of_the_users_own_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    def own(module: nn.Module, x: torch.Tensor, *routing: torch.Tensor) -> torch.Tensor:
        return x * 3

    known = dict(moe.ALL_EXPERTS_FUNCTIONS._global_mapping)
    monkeypatch.setattr(type(moe.ALL_EXPERTS_FUNCTIONS), "_global_mapping", {**known, "own": own})
    module = experts()
    module.config._experts_implementation = "own"
    x, *routing = routed()
    with adapted(module):
        assert torch.equal(module(x, *routing), x * 3)


@second_tier("a step on ranks, whose config names grouped_mm, is kept")
@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_whatever_the_config_names_is_traced_as_our_operators(implementation: str) -> None:
    """And what was touched is restored."""
    model, before = model_of("Qwen3-MoE", implementation), dict(vars(moe.ALL_EXPERTS_FUNCTIONS))
    shorts = [op.short for op in trace(model, batch_of()).ops]
    assert vars(moe.ALL_EXPERTS_FUNCTIONS) == before
    assert model.config._experts_implementation == implementation
    layers = model.config.num_hidden_layers
    assert shorts.count(DISPATCH) == shorts.count(COMBINE) == layers
    assert shorts.count(GROUPED) == 2 * layers


@second_tier("a step of GPT-OSS on ranks is kept, whose biases and interleaved rows others lack")
@pytest.mark.parametrize("name", MODELS)
def test_every_operator_has_a_rule_and_the_batch_stays_split(name: str) -> None:
    graph = trace(model_of(name), batch_of())
    table = analyse(graph)
    assert [op.key for op in graph.ops if not table.ops[op.name].known] == []
    assert data_layout(graph, table, 2).gathered == ()


# --- on four ranks --------------------------------------------------------------------------------


def reference(name: str, masked: bool, parts: int) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of transformers' loop over experts, in micro-batches of equal weight."""
    model, total, whole = model_of(name, "eager"), 0.0, batch_of(masked)
    for k in range(parts):
        loss = model(**{n: x.chunk(parts)[k] for n, x in whole.items()}).loss / parts
        loss.backward()
        total += float(loss.detach())
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def planned(name: str, layout: str, masked: bool, plan: Plan | None = None) -> ParallelModel:
    given = {"example_inputs": batch_of(masked), "loss_fn": None, "plan": plan, "profile": False}
    overrides = None if plan else LAYOUTS[layout]
    return tiny.planned(model_of(name), cluster=free_links(4), overrides=overrides, **given)


def steps_as_the_loop(name: str, layout: str, masked: bool, plan: Plan) -> None:
    """A step's loss and gradients are those of the loop on one device, router and experts included,
    and the balancing loss of the whole micro-batch. A rank holds 1/(ep·tp) of the experts, or less
    with ZeRO."""
    result, model = planned(name, layout, masked, plan), model_of(name)
    loss = float(result.train_step(batch_of(masked)))
    gradients = result.runtime.full_gradients()
    held = {
        p.fqn: p.stored.numel() / model.get_parameter(p.fqn).numel()
        for p in result.runtime.stage_parameters if ".experts." in p.fqn
    }  # fmt: skip
    ep, tp = LAYOUTS[layout].ep or 1, LAYOUTS[layout].tp
    assert isinstance(ep, int) and isinstance(tp, int) and held
    assert all(stage.ep == ep for stage in result.plan.stages)
    for fqn, share in held.items():
        whole = fqn.endswith("bias")  # added on one of the ranks that hold rows of a matrix
        assert share <= 1 / ep / (1 if whole else tp), fqn
    if launch.rank() == 0:
        wanted, grads = reference(name, masked, result.plan.num_microbatches)
        routers = [g for n, g in grads.items() if "gate." in n or "router." in n]
        assert max(float(g.abs().max()) for g in routers) > 1e-4
        assert loss == pytest.approx(wanted, rel=1e-5)
        assert grads.keys() <= gradients.keys()
        assert difference(gradients, grads)[0] < 2e-5


CELLS = [("Mixtral", layout, False) for layout in LAYOUTS]
CELLS += [(n, x, False) for n in MODELS[1:] for x in ("tp4", "dp2 tp2 ep2", "pp2 dp2 ep2")]
FIRST = ("GPT-OSS", "dp2 tp2 ep2", False)  # biases and matrices split
PADDED = ("Mixtral", "dp4 ep2", True)  # a batch whose padding the balancing loss leaves out
MORE = "experts with biases on all axes are kept"


@pytest.mark.parametrize("cell", tiered([*CELLS, PADDED], FIRST.__eq__, MORE, str))
def test_a_step_is_that_of_the_loop_on_one_device(cell: tuple[str, str, bool]) -> None:
    on_ranks(4, steps_as_the_loop, *cell, planned(*cell).plan)


# --- a router that draws --------------------------------------------------------------------------


def sampled_step(layout: str | None) -> tuple[float, dict[str, torch.Tensor]]:
    """Loss and gradients of a step of PhiMoE, whose router samples experts; None is one device."""
    torch.manual_seed(0)
    config = PhimoeConfig(
        vocab_size=VOCAB, hidden_size=32, intermediate_size=16, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=4, num_local_experts=EXPERTS,
        sliding_window=None, input_jitter_noise=0.01,
    )  # fmt: skip
    on = free_links(4) if layout else tiny.host(1)
    overrides = LAYOUTS[layout] if layout else Overrides(num_microbatches=1)
    given = {"example_inputs": batch_of(), "loss_fn": None, "overrides": overrides}
    result = tiny.planned(PhimoeForCausalLM(config).train(), cluster=on, profile=False, **given)
    return float(result.train_step(batch_of())), result.runtime.full_gradients()


@second_tier("each draw of the router is a case of the rules, on shards")
@pytest.mark.parametrize("layout", ["dp4 ep2", "dp2 tp2", "pp2 dp2 ep2"])
def test_a_router_draws_alike_on_every_rank(layout: str) -> None:
    (loss, gradients), (wanted, grads) = on_ranks(4, sampled_step, layout), sampled_step(None)
    assert loss == pytest.approx(wanted, rel=1e-5)
    assert difference(gradients, grads)[0] < 2e-5
