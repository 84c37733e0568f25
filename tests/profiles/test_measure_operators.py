"""Timing of single operators: what is run, what is refused, the company they have. No test depends
on how fast it is."""

import math
import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import pytest
import torch

from meshwright.profiles.measure import operators as measure_ops
from meshwright.profiles.measure.operators import (
    Skipped,
    TooLarge,
    measure,
    measure_all,
    neighbours,
    operator,
)
from meshwright.profiles.op_signature import Operand, OperandIndex, OpSignature
from meshwright.profiles.timings import Timing
from tests.helpers.tiers import second_tier

CPU = torch.device("cpu")
SHORT_S = 1e-3


def call(target: str, *operands: Operand, args: tuple[Any, ...] = ()) -> OpSignature:
    given = [*(OperandIndex(k) for k in range(len(operands))), *args]
    return OpSignature.of_call(target, operands, given, {})


def f32(*shape: int, grad: bool = True) -> Operand:
    return "float32", shape, grad


LINEAR = call("aten.linear.default", f32(4, 8), f32(16, 8), f32(16))
GATHER = OpSignature.of_call(  # its dim stands between its tensors
    "aten.gather.default",
    [f32(4, 6), ("int64", (4, 2), False)],
    [OperandIndex(0), 1, OperandIndex(1)],
    {},
)


@pytest.mark.parametrize(
    "signature",
    [
        LINEAR,
        call("aten.embedding.default", f32(10, 4), ("int64", (3, 5), False)),
        call("aten.cross_entropy_loss.default", f32(6, 10), ("int64", (6,), False)),
        call("aten.layer_norm.default", f32(2, 3, 8), args=([8],)),
        call("aten.conv2d.default", f32(2, 3, 8, 8), f32(4, 3, 3, 3)),
        GATHER,
        call("aten.linear.default", ("bfloat16", (4, 8), True), ("bfloat16", (16, 8), True)),
    ],
    ids=lambda s: s.short,
)
def test_a_differentiable_call_has_a_forward_and_a_backward(signature: OpSignature) -> None:
    found = measure(signature, CPU, budget_s=SHORT_S)
    assert found.forward_s > 0 and found.backward_s > 0
    assert found.repetitions >= measure_ops.MIN_REPETITIONS
    assert math.isfinite(found.spread)


@pytest.mark.parametrize(
    "signature",
    [
        call("aten.linear.default", f32(4, 8, grad=False), f32(16, 8, grad=False)),
        call("aten.eq.Tensor", ("int64", (4, 4), False), ("int64", (4, 4), False)),
        call("aten.argmax.default", f32(4, 4)),
        OpSignature.of_call("aten.zeros.default", [], [[4, 4]], {"device": torch.device("meta")}),
    ],
    ids=lambda s: s.short,
)
def test_without_a_gradient_there_is_no_backward(signature: OpSignature) -> None:
    found = measure(signature, CPU, budget_s=SHORT_S)
    assert found.forward_s > 0
    assert found.backward_s == 0


Seen = list[list[torch.Tensor]]


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> Seen:
    calls: Seen = []
    real = measure_ops.operator

    def watched(target: str) -> Callable[..., Any]:
        function = real(target)

        def run(*args: Any, **kwargs: Any) -> Any:
            if args[0].device.type == "cpu":
                calls.append([x for x in args if isinstance(x, torch.Tensor)])
            return function(*args, **kwargs)

        return run

    monkeypatch.setattr(measure_ops, "operator", watched)
    return calls


def test_calls_are_as_signatures_say(seen: Seen) -> None:
    measure(LINEAR, CPU, budget_s=SHORT_S)
    wanted = [(shape, getattr(torch, dtype), grad) for dtype, shape, grad in LINEAR.operands]
    for tensors in seen:
        assert [(x.shape, x.dtype, x.requires_grad) for x in tensors] == wanted
    seen.clear()
    table = call("aten.embedding.default", f32(50, 4), ("int64", (64, 64), False))
    measure(table, CPU, budget_s=SHORT_S)
    ids = seen[0][1]
    assert int(ids.min()) == 0 and int(ids.max()) == 49


def test_repetitions_walk_through_several_sets(seen: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as fit the rotated bytes; one where a single call exceeds them."""
    measure(LINEAR, CPU, budget_s=0.02)
    assert len({x[0].data_ptr() for x in seen}) > 1
    seen.clear()
    monkeypatch.setattr(measure_ops, "ROTATED_BYTES", 1)
    measure(LINEAR, CPU, budget_s=0.02)
    assert len({x[0].data_ptr() for x in seen}) == 1


def test_threads_are_as_before() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        measure(LINEAR, CPU, budget_s=SHORT_S)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_a_call_beyond_free_memory_is_refused_unmade(seen: Seen) -> None:
    huge = call("aten.relu.default", f32(2**22, 2**20))
    with pytest.raises(TooLarge, match=r"aten\.relu\.default needs 65536\.00 GiB"):
        measure(huge, CPU)
    assert not seen


def test_results_count_as_well_in_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """An outer product of two small operands; with gradients all is needed twice."""
    outer = call("aten.mul.Tensor", f32(100, 1), f32(1, 100))
    needed, half = 2 * 4 * (100 + 100 + 100 * 100), measure_ops.MEMORY_FRACTION
    monkeypatch.setattr(measure_ops, "free_bytes", lambda device: math.ceil(needed / half))
    assert measure_ops.check_memory(outer, operator(outer.target), CPU) == needed
    monkeypatch.setattr(measure_ops, "free_bytes", lambda device: math.floor(needed / half) - 1)
    with pytest.raises(TooLarge):
        measure_ops.check_memory(outer, operator(outer.target), CPU)
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    assert 0 < measure_ops.free_bytes(CPU) <= total


Asked = list[tuple[OpSignature, float]]


@pytest.fixture
def instant(monkeypatch: pytest.MonkeyPatch) -> Asked:
    """`measure` answers at once; what it was asked, and for how long."""
    asked: Asked = []

    def answer(signature: OpSignature, device: torch.device, *, budget_s: float) -> Timing:
        asked.append((signature, budget_s))
        if signature.short == "linear":
            raise RuntimeError("not today")
        return Timing(forward_s=1.0, backward_s=1.0, repetitions=5, spread=0.0)

    monkeypatch.setattr(measure_ops, "measure", answer)
    return asked


def relu(n: int) -> OpSignature:
    return call("aten.relu.default", f32(n))


def test_equal_calls_are_timed_once_and_failing_ones_left_out(instant: Asked) -> None:
    found = list(measure_all([relu(2), relu(3), relu(2)], CPU, deadline_s=math.inf))
    assert [s for s, _ in instant] == [relu(2), relu(3)]
    assert len(found) == 2
    found = list(measure_all([LINEAR, relu(2)], CPU, deadline_s=math.inf))
    assert found[0] == Skipped(signature=LINEAR, reason="not today")
    assert not isinstance(found[1], Skipped)


def clock(monkeypatch: pytest.MonkeyPatch, *times: float) -> None:
    """The times that `time.monotonic` tells, one after the other."""
    told = iter(times)
    monkeypatch.setattr(measure_ops.time, "monotonic", lambda: next(told))


def test_nothing_is_timed_late(instant: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, 0.0, 5.0, 10.0, 15.0)
    found = list(measure_all(map(relu, range(1, 5)), CPU, deadline_s=10.0))
    assert [isinstance(x, Skipped) for x in found] == [False, False, True, True]
    assert len(instant) == 2


def test_the_time_left_is_shared(instant: Asked, monkeypatch: pytest.MonkeyPatch) -> None:
    clock(monkeypatch, *[0.0] * 10)
    list(measure_all(map(relu, range(1, 11)), CPU, deadline_s=0.1))
    shares = [budget for _, budget in instant]
    assert all(0 < share <= measure_ops.BUDGET_S for share in shares)
    assert shares[0] <= 0.1 / 10 and shares == sorted(shares)


@pytest.mark.parametrize("target", ["aten.nonesuch.default", "aten.relu.nonesuch", "no.such.op"])
def test_an_operator_that_torch_does_not_have_is_named(target: str) -> None:
    with pytest.raises(ValueError, match=target):
        operator(target)


F32 = [("float32", (64, 64), True), ("float32", (64, 64), False)]
ADD = OpSignature.of_call("aten.add.Tensor", F32, [OperandIndex(0), OperandIndex(1)], {})


@second_tier("processes beside the block; how calls are timed stays")
def test_neighbours_run_beside_the_block_and_not_after_it() -> None:
    with pytest.raises(ZeroDivisionError), neighbours(1, [ADD]):
        assert len(multiprocessing.active_children()) == 1
        raise ZeroDivisionError
    assert multiprocessing.active_children() == []
    for count, signatures in ((0, [ADD]), (2, [])):  # no company without need
        with neighbours(count, signatures):
            assert multiprocessing.active_children() == []
