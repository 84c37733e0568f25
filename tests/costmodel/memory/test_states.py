"""Model states against formulas of the papers that name the stages; buffers and moments by hand.

Ψ parameters, n ranks, K bytes of optimizer states per parameter (12 for Adam in mixed precision:
fp32 copy and two moments). Rajbhandari et al., "ZeRO", 2020: 4Ψ + KΨ; ZeRO-1 4Ψ + KΨ/n; ZeRO-2
2Ψ + (2 + K)Ψ/n; ZeRO-3 (4 + K)Ψ/n, with gradients of two bytes.
"""

import dataclasses
from collections.abc import Collection
from typing import Any
from weakref import finalize

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from meshwright.costmodel.memory.optimizers import OPTIMIZERS, optimizer_named
from meshwright.costmodel.memory.states import fixed_bytes, model_states, working_bytes
from meshwright.costmodel.precisions import PRECISIONS
from meshwright.costmodel.sharing import Sharing
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER
from meshwright.optim import LAMB, LARS, Muon

HALF = Target(name="16-bit gradients", gradient_bytes=2)
RANKS = st.integers(1, 512)
SIZES = st.integers(1, 10**12)


def states(numel: float, zero: int, dp: int, precision: str = "bf16", target: Target = HALF):
    given = {**in_precision(precision), "target": target}
    return model_states(numel, sharing=Sharing(zero=zero), dp=dp, **given).nbytes


def in_precision(name: str) -> dict[str, Any]:
    """AdamW's states and the weights that are computed with."""
    precision = PRECISIONS[name]
    optimizer = optimizer_named("adamw", precision.kept_bytes)
    return {"weight_bytes": precision.weight_bytes, "optimizer": optimizer}


@given(SIZES, RANKS)
def test_states_are_those_of_the_zero_paper(psi: int, n: int) -> None:
    """But for the first stage, whose optimizer takes gradients in fp32, and the third, which keeps
    weights as fp32 shards alone: the 16-bit ones, 2Ψ/n, exist only while they are used."""
    k = 12
    assert states(psi, 0, n) == (4 + k) * psi
    assert states(psi, 1, n) == pytest.approx(4 * psi + (4 + k) * psi / n, rel=1e-12)
    assert states(psi, 2, n) == pytest.approx(2 * psi + (2 + k) * psi / n, rel=1e-12)
    assert states(psi, 3, n) == pytest.approx((4 + k - 2) * psi / n, rel=1e-12)


def test_bytes_of_a_parameter_with_adam() -> None:
    """Without a master copy mixed precision saves four bytes; pure bf16 has a half of fp32's."""
    for precision, gradient, each in (
        ("fp32", 4, 16), ("fp32", 2, 16), ("bf16", 4, 18), ("bf16_pure", 4, 8), ("bf16_pure", 2, 8),
    ):  # fmt: skip
        target = dataclasses.replace(EAGER, gradient_bytes=gradient)
        assert states(1000, 0, 1, precision, target) == 1000 * each
    bare = dataclasses.replace(HALF, master=False)
    assert states(1000, 0, 1) - states(1000, 0, 1, target=bare) == 4000


def test_arrays_are_priced_as_numbers() -> None:
    numels, ranks = np.array([1.0, 50.0, 1e9]), np.array([1.0, 4.0, 64.0])
    given = in_precision("bf16")
    for zero in (0, 1, 2, 3):
        given["sharing"] = Sharing(zero=zero)
        found = model_states(numels, dp=ranks, **given).nbytes
        assert found.tolist() == [
            model_states(n, dp=r, **given).nbytes
            for n, r in zip(numels.tolist(), ranks.tolist(), strict=True)
        ]


@pytest.mark.parametrize(
    ("zero", "dp", "numel", "nbytes"),
    [
        (0, 1, 10_000, 0),  # nobody to talk to
        (0, 4, 10_000, 2000),  # two buckets of 1000 bytes
        (1, 4, 10_000, 2000),
        (0, 4, 300, 1200),  # all gradients are less than two buckets
        (2, 4, 10_000, 4 * 700),  # a block's gradients before they are scattered
        (3, 4, 10_000, (4 + 2 * 2) * 700),  # and the weights of two blocks
        (3, 1, 10_000, 0),
    ],
)
def test_buffers_by_hand(zero: int, dp: int, numel: int, nbytes: int) -> None:
    target = Target(name="small buckets", bucket_bytes=1000, bucket_copies=2)
    given: Any = {"weight_bytes": 2, "gradient_bytes": 4, "sharing": Sharing(zero=zero), "dp": dp}
    assert working_bytes(numel, 700, 700, **given, target=target) == nbytes
    frozen = working_bytes(numel, 700, 900, **given, target=target) - nbytes
    assert frozen == (2 * 2 * 200 if zero == 3 and dp > 1 else 0)  # they have no gradients
    in_place = dataclasses.replace(target, bucket_copies=0)
    if zero < 2:  # gradients lie in their buckets
        assert not working_bytes(numel, 700, 700, **given, target=in_place)


@pytest.mark.parametrize(
    ("precision", "zero", "shards", "host", "per_parameter"),
    [
        ("bf16", 0, 4, False, 2 + 4 + 8),
        ("fp32", 1, 4, False, 4 + 12 / 4),
        ("bf16", 2, 4, False, 2 + 12 / 4),
        ("bf16", 3, 4, False, 12 / 4),
        ("bf16", 1, 1, False, 2 + 4 + 8),  # of one rank
        ("bf16", 0, 4, True, 2),
        ("fp32", 2, 4, True, 4),
        ("bf16", 3, 4, True, 0),
        ("bf16_pure", 0, 4, False, 2 + 4),  # one copy of the weights
        ("bf16_pure", 2, 4, False, 2 + 6 / 4),
        ("bf16_pure", 3, 4, False, 6 / 4),
    ],
)
def test_what_stays_between_steps(
    precision: str, zero: int, shards: int, host: bool, per_parameter: float
) -> None:
    given: Any = in_precision(precision)
    kept = given["optimizer"].kept_bytes
    moments = (2 * kept * 1000.0, 2 * kept * 1000.0 / shards)
    found = fixed_bytes(
        1000, shards, weight_bytes=given["weight_bytes"], sharing=Sharing(zero=zero), kept=kept,
        moments=moments, host=host,
    )  # fmt: skip
    assert sum(found) == 1000 * per_parameter


def test_a_step_is_undone_from_weights_and_moments_of_its_optimizer() -> None:
    assert optimizer_named("adamw").state_bytes == 12
    assert optimizer_named("sgd").state_bytes == 4
    assert optimizer_named("adamw", 2).state_bytes == 2 + 2 * 2
    assert optimizer_named("adamw8bit", 2).state_bytes == 2 + 2 * 1
    assert [Sharing(zero=zero).parts(4) for zero in range(4)] == [1, 4, 4, 4]
    # in single precision but where the name says less
    moments = {"adamw": 2, "adam": 2, "momentum": 1, "lion": 1, "adagrad": 1, "sgd": 0,
               "lamb": 2, "lars": 1, "muon": 2, "adafactor": 1, "shampoo": 2}  # fmt: skip
    whole = {**moments, "adamw_fused": 2, "adam_fused": 2}
    less = {"adamw_bf16": 2 * 2, "adamw8bit": 2 * 1}
    kept = {name: optimizer_named(name).moments for name in OPTIMIZERS}
    assert kept == {name: 4 * count for name, count in whole.items()} | less
    with pytest.raises(ValueError, match=r"optimizer='rprop'; legal: adafactor.*moments as yours"):
        optimizer_named("rprop")


class Traffic(TorchDispatchMode):
    """Words that operators read and write of tensors of `numel` elements, and bytes of these but
    for products'."""

    def __init__(self, numel: int, products: Collection[str] = ()) -> None:
        super().__init__()
        self.numel, self.words, self.nbytes, self.products = numel, 0, 0, products

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for read in ({id(x): x for x in tree_leaves((args, kwargs))}.values(), tree_leaves(out)):
            tensors = [x for x in read if isinstance(x, torch.Tensor) and x.numel() >= self.numel]
            self.words += sum(x.numel() for x in tensors)
            beside = func.overloadpacket.__name__ not in self.products
            self.nbytes += beside * sum(x.nbytes for x in tensors)
        return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["adamw", "adam"])
def test_an_optimizer_moves_what_torch_s_does(name: str, dtype: torch.dtype) -> None:
    """Without `fused=True` torch's kernels, one after the other; with it one, which reads weight,
    gradient and moments once and writes all but the gradient."""
    weight = torch.randn(100, dtype=dtype).requires_grad_()
    weight.grad = torch.randn(100, dtype=dtype)
    kind = {"adamw": torch.optim.AdamW, "adam": torch.optim.Adam}[name]
    optimizer = kind([weight], foreach=False)
    optimizer.step()
    with Traffic(100) as traffic:
        optimizer.step()
    nbytes = dtype.itemsize
    moments = optimizer.state[weight]["exp_avg"], optimizer.state[weight]["exp_avg_sq"]
    assert {x.dtype for x in moments} == {dtype}
    slow, fast = (optimizer_named(n, nbytes) for n in (name, f"{name}_fused"))
    assert 100 * slow.moved == nbytes * traffic.words
    assert fast.moved == nbytes * (4 + 3)
    made = [
        record.temporary_bytes([10, 30], device)
        for record in (slow, fast)
        for device in ("cuda", "cpu")
    ]
    assert made == [nbytes * 40, 2 * nbytes * 30, 0, 0]


@pytest.mark.parametrize(("name", "kind"), [("lamb", LAMB), ("lars", LARS)])
def test_ours_move_and_make_what_they_are_counted_with(name: str, kind: Any) -> None:
    """Words of a step parameter by parameter, on GPUs, too, and the most that it makes at once."""
    weights = [torch.randn(n).requires_grad_() for n in (100, 300)]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    optimizer, record = kind(weights), optimizer_named(name)
    optimizer.step()
    with Traffic(100) as traffic:
        optimizer.step()
    assert 400 * record.moved == 4 * traffic.words
    with Made(100) as made:
        optimizer.step()
    assert {record.temporary_bytes([100, 300], on) for on in ("cpu", "cuda")} == {4 * made.most}
    assert record.issues("cuda") == record.issues("cpu") > optimizer_named("adamw").issues("cuda")


@pytest.mark.parametrize(("name", "kind"), [("muon", Muon), ("adafactor", torch.optim.Adafactor)])
def test_matrices_move_and_make_what_they_are_counted_with(name: str, kind: Any) -> None:
    """Words beside large products, which read and write theirs; vectors apart."""
    record, products = optimizer_named(name), ("mm", "addmm", "transpose") * (name == "muon")
    assert record.matrices
    for shape, words in ((24, 25), record.matrices.moved), ((600,), record.moved / 4):
        weight = torch.randn(shape).requires_grad_()
        weight.grad = torch.randn(shape)
        optimizer = kind([weight])
        optimizer.step()
        with Traffic(400, products) as traffic:
            optimizer.step()
        assert traffic.nbytes == 4 * 600 * words
        with Made(400) as made:
            optimizer.step()
        if len(shape) == 1:
            assert record.temporary_bytes([600], "cuda") == 4 * made.most
        else:
            assert 0.95 * 600 * record.matrices.made < 4 * made.most <= 600 * record.matrices.made


class Made(TorchDispatchMode):
    """The most words of new tensors of `numel` elements or more that are there at once; halves of
    them in bf16."""

    def __init__(self, numel: int) -> None:
        super().__init__()
        self.numel, self.most, self.now = numel, 0.0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {x.data_ptr() for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)}
        out = func(*args, **(kwargs or {}))
        new = isinstance(out, torch.Tensor) and out.data_ptr() not in given
        if new and out.numel() >= self.numel:
            words = out.nbytes / 4
            self.now += words
            self.most = max(self.most, self.now)
            finalize(out.untyped_storage(), self._gone, words)
        return out

    def _gone(self, words: float) -> None:
        self.now -= words


def test_moments_of_a_type_of_their_own_stay() -> None:
    """Weight read and written and gradient read in 2 bytes; moments read and written as ever."""
    assert optimizer_named("adamw_bf16", 2).moved == 3 * 2 + 2 * 4
    assert optimizer_named("adamw8bit", 2).moved == 3 * 2 + 2 * 2


@pytest.mark.parametrize(("copies", "gradient", "shard"), [(0, 4, 0), (2, 4, 4), (0, 2, 4)])
def test_zero_1_steps_in_single_precision(copies: int, gradient: int, shard: int) -> None:
    target = Target(name="", bucket_copies=copies, gradient_bytes=gradient)
    given: Any = {**in_precision("bf16"), "dp": 4, "target": target}
    found = model_states(100.0, sharing=Sharing(zero=1), **given)
    assert found.optimizer == 100 / 4 * (4 + 8 + shard)
