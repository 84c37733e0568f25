"""LAMB and LARS beside their papers' formulas, written out for numbers, Muon beside torch's; rules
of learning rates."""

import math
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from meshwright import MeshwrightError
from meshwright.optim import LAMB, LARS, Muon, betas_of_adam, linear_rate, square_root_rate, warmup

SHAPES, STEPS = ((3, 4), (5,)), 4


def drawn() -> tuple[list[nn.Parameter], list[list[torch.Tensor]]]:
    draw = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(s, generator=draw, dtype=torch.float64)) for s in SHAPES]
    steps = [
        [torch.randn(s, generator=draw, dtype=torch.float64) for s in SHAPES] for _ in range(STEPS)
    ]
    return weights, steps


def norm(x: list[float]) -> float:
    return math.sqrt(sum(each * each for each in x))


def of_lamb(w: list[float], slopes: list[list[float]], o: dict[str, Any]) -> list[float]:
    """Algorithm 2 of arXiv 1904.00962, element by element."""
    m, v = [0.0] * len(w), [0.0] * len(w)
    beta1, beta2 = o["betas"]
    for t, g in enumerate(slopes, 1):
        m = [beta1 * a + (1 - beta1) * b for a, b in zip(m, g, strict=True)]
        v = [beta2 * a + (1 - beta2) * b * b for a, b in zip(v, g, strict=True)]
        r = [
            a / (1 - beta1**t) / (math.sqrt(b / (1 - beta2**t)) + o["eps"])
            for a, b in zip(m, v, strict=True)
        ]
        r = [a + o["weight_decay"] * b for a, b in zip(r, w, strict=True)]
        trust = norm(w) / norm(r) if o["adapt"] else 1.0
        w = [a - o["lr"] * trust * b for a, b in zip(w, r, strict=True)]
    return w


def of_lars(w: list[float], slopes: list[list[float]], o: dict[str, Any]) -> list[float]:
    """Algorithm 1 of arXiv 1708.03888, element by element."""
    v = [0.0] * len(w)
    for g in slopes:
        decay = o["weight_decay"]
        rate = o["trust"] * norm(w) / (norm(g) + decay * norm(w)) if o["adapt"] else 1.0
        v = [
            o["momentum"] * a + o["lr"] * rate * (b + decay * c)
            for a, b, c in zip(v, g, w, strict=True)
        ]
        w = [a - b for a, b in zip(w, v, strict=True)]
    return w


LAMBS = {"lr": 0.02, "betas": (0.8, 0.95), "eps": 1e-3, "weight_decay": 0.1}
LARSES = {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.05, "trust": 0.02}


@pytest.mark.parametrize("adapt", [True, False])
@pytest.mark.parametrize(
    ("kind", "oracle", "options"), [(LAMB, of_lamb, LAMBS), (LARS, of_lars, LARSES)]
)
def test_steps_are_those_of_the_paper(
    kind: Any, oracle: Any, options: dict[str, Any], adapt: bool
) -> None:
    weights, steps = drawn()
    options = {**options, "adapt": adapt}
    expected = [
        oracle(w.detach().flatten().tolist(), [each[k].flatten().tolist() for each in steps],
               options)
        for k, w in enumerate(weights)
    ]  # fmt: skip
    optimizer = kind(weights, **options)
    for slopes in steps:
        for w, slope in zip(weights, slopes, strict=True):
            w.grad = slope.clone()
        optimizer.step()
    for w, values in zip(weights, expected, strict=True):
        assert w.detach().flatten().tolist() == pytest.approx(values, rel=1e-12)


@pytest.mark.parametrize("kind", [LAMB, LARS])
def test_without_a_norm_the_ratio_is_one(kind: Any) -> None:
    zero, ones = (nn.Parameter(torch.full((2,), x, dtype=torch.float64)) for x in (0.0, 1.0))
    zero.grad, ones.grad = torch.ones(2).double(), torch.zeros(2).double()
    optimizer = kind([zero, ones], lr=0.1, weight_decay=0.0)
    optimizer.step()
    assert zero.tolist() == pytest.approx([-0.1] * 2, rel=1e-4) and ones.tolist() == [1.0] * 2


def test_groups_have_their_own_options_and_states_go_on() -> None:
    weights, steps = drawn()
    made = [
        LAMB([{"params": [w[0]]}, {"params": [w[1]], "adapt": False, "lr": 0.5}], **LAMBS)
        for w in (weights, [nn.Parameter(each.detach().clone()) for each in weights])
    ]
    for k, slopes in enumerate(steps):
        for optimizer in made:
            for group, slope in zip(optimizer.param_groups, slopes, strict=True):
                group["params"][0].grad = slope.clone()
        made[0].step()
        if k == 1:
            made[1].load_state_dict(deepcopy(made[0].state_dict()))
            for ours, theirs in zip(made[1].param_groups, made[0].param_groups, strict=True):
                ours["params"][0].data.copy_(theirs["params"][0].data)
        elif k > 1:
            made[1].step()
    first, second = ([g["params"][0] for g in optimizer.param_groups] for optimizer in made)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        (LAMB, {"lr": -1.0}, "LAMB: lr=-1.0; legal: from 0.0"),
        (
            LAMB,
            {"betas": (0.9, 1.0)},
            r"LAMB: betas=\(0.9, 1.0\); legal: two numbers from 0.0, below 1.0",
        ),
        (LARS, {"momentum": "x"}, "LARS: momentum='x'"),
        (LARS, {"trust": float("nan")}, "LARS: trust=nan"),
    ],
)
def test_options_out_of_range_are_refused(kind: Any, options: dict[str, Any], says: str) -> None:
    with pytest.raises(MeshwrightError, match=says):
        kind(drawn()[0], **options)
    with pytest.raises(MeshwrightError, match=says):
        kind([{"params": drawn()[0], **options}])


def test_sparse_gradients_are_refused() -> None:
    table = nn.Embedding(4, 2, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(MeshwrightError, match="LAMB: a gradient is sparse"):
        LAMB(table.parameters()).step()


def stepped(kind: Any, shape: tuple[int, ...], **options: Any) -> torch.Tensor:
    draw = torch.Generator().manual_seed(3)
    weight = nn.Parameter(torch.randn(shape, generator=draw))
    optimizer = kind([weight], **options)
    for _ in range(STEPS):
        weight.grad = torch.randn(shape, generator=draw)
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("shape", [(6, 10), (10, 6), (7, 7)])
def test_matrices_are_stepped_as_by_torch_s_muon(shape: tuple[int, ...]) -> None:
    given: Any = {"lr": 0.02, "weight_decay": 0.1, "momentum": 0.9}
    wanted = stepped(torch.optim.Muon, shape, **given, adjust_lr_fn="match_rms_adamw")
    torch.testing.assert_close(stepped(Muon, shape, **given), wanted, rtol=1e-5, atol=1e-5)


def test_vectors_and_what_does_not_adapt_are_stepped_by_adamw() -> None:
    given: Any = {"lr": 0.02, "weight_decay": 0.1, "betas": (0.8, 0.9), "eps": 1e-6}
    for shape, adapt in ((5,), True), ((4, 3), False):
        wanted = stepped(torch.optim.AdamW, shape, **given)
        torch.testing.assert_close(stepped(Muon, shape, **given, adapt=adapt), wanted)


def test_a_stack_is_stepped_matrix_by_matrix_and_a_convolution_as_one() -> None:
    for shape, alike in (((3, 6, 10), None), ((6, 5, 2, 1), (6, 10))):
        draw = torch.Generator().manual_seed(3)
        whole = nn.Parameter(torch.randn(shape, generator=draw))
        parts = (
            [nn.Parameter(whole.detach().reshape(alike).clone())]
            if alike
            else [nn.Parameter(x.clone()) for x in whole.detach()]
        )
        optimizer, others = Muon([whole], lr=0.1), [Muon([p], lr=0.1) for p in parts]
        whole.grad = torch.randn(shape, generator=draw)
        for p, x in zip(parts, [whole.grad] if alike else whole.grad, strict=True):
            p.grad = x.reshape(p.shape).clone()
        for each in (optimizer, *others):
            each.step()
        found = torch.stack([p.detach() for p in parts]).reshape(shape)
        torch.testing.assert_close(whole.detach(), found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize(
    "call",
    [
        lambda: LAMB([nn.Parameter(torch.zeros(2))], betas=0.9),
        lambda: LAMB([nn.Parameter(torch.zeros(2))], betas=(0.9,)),
        lambda: Muon([nn.Parameter(torch.zeros(2))], adapt="no"),
        lambda: linear_rate("x", 2, 1),
        lambda: linear_rate(-1.0, 2, 1),
        lambda: betas_of_adam((0.9,), 2, 1),
        lambda: warmup(2, 4, power=-1),
        lambda: warmup(2, 4, power="x"),
    ],
)
def test_malformed_options_are_refused(call: Any) -> None:
    with pytest.raises(MeshwrightError, match="legal"):
        call()


def test_rates_follow_the_rows() -> None:
    assert linear_rate(0.1, 8192, 256) == pytest.approx(3.2)  # ResNet-50 of arXiv 1706.02677
    assert square_root_rate(0.1, 1024, 256) == pytest.approx(0.2)
    assert betas_of_adam((0.9, 0.999), 512, 256) == pytest.approx((0.8, 0.998))
    with pytest.raises(MeshwrightError, match="would need betas"):
        betas_of_adam((0.9, 0.999), 256 * 11, 256)
    with pytest.raises(MeshwrightError, match="rows_before=0"):
        linear_rate(0.1, 8, 0)


def test_rates_warm_up_and_fall() -> None:
    plain, falling = warmup(4), warmup(4, 12, power=2)
    assert [plain(k) for k in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    assert [falling(k) for k in (3, 4, 8, 12, 20)] == [1.0, 1.0, 0.25, 0.0, 0.0]
    schedule = torch.optim.lr_scheduler.LambdaLR(LARS([nn.Parameter(torch.ones(1))], lr=2.0), plain)
    assert schedule.get_last_lr() == [0.5]
    for wrong in ((0,), (4, 4), (2.0,)):
        with pytest.raises(MeshwrightError, match="warmup"):
            warmup(*wrong)  # type: ignore[arg-type]
