"""The operators of mixtures of experts: against every expert for every token, masked."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from meshwright.moe import GroupedLinear, MoE, combine, dispatch, grouped_linear
from meshwright.planner.operators.moe import expert_order, grouped_rows, grouped_weights, inverse_of


def draws(data: st.DataObject) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens [b, s, i], matrices [E, i, o] and experts [b, s, k]; some experts get none."""
    b, s, k, e, i, o = (data.draw(st.integers(1, 4), label=name) for name in "bskeio")
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 9)))
    x = torch.randn(b, s, i, dtype=torch.double, generator=generator)
    weight = torch.randn(e, i, o, dtype=torch.double, generator=generator)
    popular = data.draw(st.integers(1, e))
    return x, weight, torch.randint(0, popular, (b, s, k), generator=generator)


@given(st.data())
def test_sparse_equals_dense_forward_and_backward(data: st.DataObject) -> None:
    x, weight, chosen = draws(data)
    biases = [torch.randn_like(weight[:, 0])] * data.draw(st.booleans(), label="bias")

    def sparse(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        return combine(torch.tanh(grouped_linear(dispatch(x, chosen), weight, chosen, *bias)))

    def dense(x: torch.Tensor, weight: torch.Tensor, *bias: torch.Tensor) -> torch.Tensor:
        times = F.one_hot(chosen, weight.shape[0]).sum(2).to(x.dtype)
        made = torch.einsum("bsi,eio->bseo", x, weight) + (bias[0] if bias else 0)
        return torch.einsum("bse,bseo->bso", times, made.tanh())

    found, wanted = (_with_gradients(f, x, weight, *biases) for f in (sparse, dense))
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


def _with_gradients(f: object, *given: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in given]
    out = f(*leaves)  # type: ignore[operator]
    weights = torch.linspace(-1, 1, out.numel(), dtype=out.dtype).view(out.shape)
    return [out.detach(), *torch.autograd.grad((out * weights).sum(), leaves)]


@given(st.data())
def test_sorted_rows_meet_their_experts(data: st.DataObject) -> None:
    x, weight, chosen = draws(data)
    copies = dispatch(x, chosen).flatten(0, 2)
    order, counts = expert_order(chosen, weight.shape[0])
    assert counts.tolist() == [(chosen == e).sum() for e in range(weight.shape[0])]
    assert torch.equal(order[inverse_of(order)], torch.arange(len(order)))
    rows, flat = copies[order], chosen.flatten()
    made = grouped_rows(rows, weight, counts.tolist())
    torch.testing.assert_close(made, torch.einsum("ni,nio->no", rows, weight[flat[order]]))
    # rows beyond those of all experts have none
    more = grouped_rows(torch.cat([rows, rows]), weight, counts.tolist())
    assert torch.equal(more[: len(rows)], made) and not more[len(rows) :].any()
    summed = grouped_weights(rows, made, counts.tolist())
    hit = F.one_hot(flat[order], weight.shape[0]).to(rows.dtype)
    torch.testing.assert_close(summed, torch.einsum("ne,ni,no->eio", hit, rows, made))


def test_torch_finds_nothing_to_object_to() -> None:
    """Schemas, fake kernels, autograd and what a compiler makes of them, by torch's own check."""
    x = torch.randn(2, 3, 4, requires_grad=True)
    weight = torch.randn(5, 4, 3, requires_grad=True)
    chosen = torch.randint(0, 5, (2, 3, 2))
    rows = dispatch(x, chosen).detach().requires_grad_()
    torch.library.opcheck(dispatch, (x, chosen))
    torch.library.opcheck(grouped_linear, (rows, weight, chosen))
    bias = torch.randn(5, 3, requires_grad=True)
    torch.library.opcheck(grouped_linear, (rows, weight, chosen, bias))
    torch.library.opcheck(combine, (rows,))


def test_a_frozen_weight_gets_no_gradient() -> None:
    x, chosen = torch.randn(1, 2, 3, 4, requires_grad=True), torch.zeros(1, 2, 3, dtype=torch.int64)
    weight = torch.randn(2, 4, 4)
    grouped_linear(x, weight, chosen).sum().backward()
    assert x.grad is not None and weight.grad is None


def test_the_layer_is_its_formula() -> None:
    """Σ over the chosen experts of p_e · down_e(silu(gate_e x) ⊙ up_e x), and the shared MLP."""
    torch.manual_seed(0)
    layer = MoE(hidden=6, ffn=5, experts=4, topk=2, shared=3)
    x = torch.randn(2, 3, 6)
    weights = layer.router(x).softmax(-1)
    kept = weights * (weights >= weights.topk(2).values[..., -1:])
    gate, up, down = (layer.experts[name].weight for name in ("gate", "up", "down"))
    inner = F.silu(torch.einsum("bsh,ehf->bsef", x, gate)) * torch.einsum("bsh,ehf->bsef", x, up)
    wanted = torch.einsum("bse,bsef,efh->bsh", kept, inner, down)
    always = F.silu(layer.shared["gate"](x)) * layer.shared["up"](x)
    torch.testing.assert_close(layer(x), wanted + layer.shared["down"](always))


def test_matrices_start_as_those_of_a_linear_layer() -> None:
    torch.manual_seed(0)
    weight = GroupedLinear(8, 64, 32).weight.detach()
    assert weight.abs().max() <= 1 / 8
    assert float(weight.std()) == pytest.approx(1 / 8 / 3**0.5, rel=0.05)


@pytest.mark.parametrize("topk", [0, 5])
def test_more_experts_than_there_are_is_refused(topk: int) -> None:
    with pytest.raises(ValueError, match=f"topk={topk} of experts=4; legal: 1 to 4"):
        MoE(hidden=4, ffn=4, experts=4, topk=topk)
