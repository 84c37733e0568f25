"""A rank's parameters: ZeRO's shards, the tensors made of a parameter, and what the target "eager"
says is hidden: collectives start while there is still compute.

Collectives are recorded, not done: what counts is when they start, and when somebody waits.
"""

from collections.abc import Iterable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.costmodel.sharding.layouts import Placement
from meshwright.costmodel.sharding.strategies import R
from meshwright.costmodel.sharing import Sharing
from meshwright.costmodel.target import SENT_AT_ONCE
from meshwright.costmodel.targets import EAGER
from meshwright.executor.parameters import block_weights
from meshwright.executor.parameters import reducer as reducer_module
from meshwright.executor.parameters.block_weights import BlockWeights, WeightGather
from meshwright.executor.parameters.parameters import (
    ParameterSpec,
    StageParameter,
    accumulate_grads,
    expose,
    load,
    make_parameter,
    refresh_frozen,
    shard_placement,
)
from meshwright.executor.parameters.reducer import GradientsToHost, Reducer
from meshwright.executor.ranks.meshes import StageMesh, single_process
from meshwright.executor.resharding.reshard import Axis
from tests.models.models import CASES, GLOBAL_BATCH
from tests.parity.parity_cells import Cell
from tests.parity.parity_reference import built

Log = list[tuple[str, Any]]
CPU = torch.device("cpu")
ALONE = single_process(CPU, [StageMesh(ranks=(0,), dp=1, tp=1, shards=1)])
ROWS, COLUMNS = Placement("S", 0), Placement("S", 1)
WIDE = 1024  # a matrix of so many rows and columns is reduced by itself


@pytest.mark.parametrize(
    ("shape", "placement", "n", "shard"),
    [
        ((8, 6), R, 4, ROWS),
        ((4, 3), R, 4, ROWS),  # one each
        ((6, 8), R, 4, COLUMNS),
        ((2, 3), R, 4, R),
        ((8, 8), ROWS, 4, COLUMNS),  # the dim that the tensor axis leaves alone
        ((8, 3), ROWS, 4, ROWS),  # nested in the tensor axis' shard
        ((8, 3), Placement("S", 0, 3), 4, R),  # never in a strided one
        ((), R, 2, R),
    ],
)
def test_zero_shards_the_first_dim_that_divides(
    shape: tuple[int, ...], placement: Placement, n: int, shard: Placement
) -> None:
    assert shard_placement(shape, placement, n) == shard
    # it leaves the experts' dim and uneven parts alone
    assert shard_placement((8, 6), R, 2, first=1) == COLUMNS
    assert shard_placement((8, 3), ROWS, 4, even=False) == R


def made(source: nn.Parameter, *, zero: int = 0, **given: Any) -> StageParameter:
    spec = ParameterSpec(
        value="w", fqn="w", placement=R, sum_data=True, sum_tensor=False,
        sharing=Sharing(zero=zero), **given,
    )  # fmt: skip
    return make_parameter(spec, source, ALONE)


@pytest.mark.parametrize(("dtype", "aliased"), [(torch.float32, True), (torch.bfloat16, False)])
@pytest.mark.parametrize("trainable", [True, False])
def test_a_leaf_is_a_cast_of_what_is_stored(
    dtype: torch.dtype, aliased: bool, trainable: bool
) -> None:
    source = nn.Parameter(torch.arange(4.0), requires_grad=trainable)
    p = made(source, zero=2, dtype=dtype)
    expose(p, ALONE, source)
    assert p.api is source
    assert (p.shape, p.trainable, p.reached) == ((4,), trainable, trainable)
    assert (p.aliased, p.scattered, p.leaf.dtype) == (aliased, False, dtype)
    load(p, torch.ones(4), ALONE)
    refresh_frozen([p])
    assert source.tolist() == p.stored.tolist() == [1.0] * 4  # the user's own
    assert (p.leaf.tolist() == [1.0] * 4) == (aliased or not trainable)


def test_a_frozen_weight_has_no_copy_of_another_precision() -> None:
    """It is the user's own, in its dtype; a trained one is stepped in fp32."""
    frozen, trained = (nn.Parameter(torch.ones(4).bfloat16(), flag) for flag in (False, True))
    p, other = (made(x, dtype=torch.bfloat16) for x in (frozen, trained))
    assert p.aliased and p.stored.data_ptr() == frozen.data_ptr()
    assert (p.stored.dtype, other.stored.dtype) == (torch.bfloat16, torch.float32)


def test_gradients_add_up_over_steps() -> None:
    p = made(nn.Parameter(torch.zeros(2)))
    expose(p, ALONE)
    for _ in range(2):
        p.gradient = torch.ones(2)
        accumulate_grads([p], CPU)
        assert p.gradient is None
    assert p.api.grad.tolist() == [2.0, 2.0]


# --- what is hidden -------------------------------------------------------------------------------


class Work:
    """Of a collective that takes until it is waited for."""

    def __init__(self, log: Log, name: Any) -> None:
        self.log, self.name = log, name

    def wait(self) -> None:
        self.log.append(("wait", self.name))


def parameter(name: str, leaf: torch.Tensor, *, shards: int = 1, zero: int = 0) -> StageParameter:
    stored = leaf.detach().float()[: len(leaf) // shards]
    return StageParameter(
        value=name, fqn=name, placement=R, sum_data=True, sum_tensor=False,
        sharing=Sharing(zero=zero),
        shape=tuple(leaf.shape), trainable=True, leaf=nn.Parameter(leaf), stored=stored,
        shard_placement=ROWS if shards > 1 else R,
    )  # fmt: skip


def place(*, shard: int = 1, data: int = 2) -> Any:
    def axis(size: int) -> Axis:
        return Axis("data", size, 0, None)

    holders = SimpleNamespace(shard=axis(shard), replicate=axis(data // shard), data=axis(data))
    return SimpleNamespace(tensor=axis(1), holders=lambda experts: holders, device=CPU)


def test_gradients_are_reduced_while_the_backward_makes_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert EAGER.overlap_gradients
    assert EAGER.alone_bytes <= 4 * WIDE**2
    log: Log = []
    members = [parameter(f"w{k}", torch.eye(WIDE)) for k in range(3)]

    def all_reduce(x: torch.Tensor, group: Any, async_op: bool = False) -> Work:
        assert async_op
        log.append(("start", starts := sum(what == "start" for what, _ in log)))
        return Work(log, starts)

    monkeypatch.setattr(reducer_module.dist, "all_reduce", all_reduce)
    found = Reducer(members, place())
    for p in members:  # after the reducer's own hook
        p.leaf.register_post_accumulate_grad_hook(lambda _, n=p.fqn: log.append(("made", n)))
    found.begin()
    for last in (False, True):
        x = torch.ones(1, WIDE)
        for p in members:
            x = x @ p.leaf
        found.before_backward(last=last, whole=True)
        x.sum().backward()
        if not last:
            assert not [what for what, _ in log if what == "start"]
            found.after_backward()
            log.clear()
    found.flush()
    wanted = [pair for k in range(3) for pair in (("start", k), ("made", f"w{2 - k}"))]
    assert log == wanted
    found.finish()
    assert [name for what, name in log if what == "wait"] == [0, 1, 2]


def test_replicas_of_scattered_gradients_are_reduced_once_and_after_the_backward(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert EAGER.overlap_replicas == (3,)
    log: Log = []
    one = parameter("w", torch.eye(WIDE), shards=2, zero=2)

    def scatter(parts: torch.Tensor, axis: Any) -> tuple[torch.Tensor, Work]:
        log.append(("scatter", None))
        return parts[0].clone(), Work(log, "scatter")

    def all_reduce(x: torch.Tensor, group: Any, async_op: bool = False) -> None:
        log.append(("replicas", x.numel()))

    monkeypatch.setattr(reducer_module, "reduce_scatter_flat", scatter)
    monkeypatch.setattr(reducer_module.dist, "all_reduce", all_reduce)
    found = Reducer([one], place(shard=2, data=4))
    found.begin()
    for last in (False, False, True):
        found.before_backward(last=last, whole=True)
        (torch.ones(1, WIDE) @ one.leaf).sum().backward()
        if not last:
            found.after_backward()
    found.flush()
    assert [what for what, _ in log if what != "wait"] == ["scatter"] * 3
    found.finish()
    assert log[-1] == ("replicas", WIDE**2 // 2)
    assert one.gradient is not None
    assert torch.equal(one.gradient, torch.full((WIDE // 2, WIDE), 3.0))


def test_weights_are_gathered_a_block_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    assert EAGER.overlap_parameters
    blocks, each = 3, 4
    log: Log = []

    def all_gather(x: torch.Tensor, axis: Any, into: Any = None) -> tuple[torch.Tensor, Work]:
        log.append(("start", starts := sum(what == "start" for what, _ in log)))
        return x.repeat(2, 1), Work(log, starts)

    monkeypatch.setattr(block_weights, "all_gather_flat", all_gather)
    monkeypatch.setattr(block_weights, "BUCKET_BYTES", 1)  # each parameter is a bucket
    reader = {f"b{b}.w{k}": f"b{b}" for b in range(blocks) for k in range(each)}
    members = [
        parameter(name, torch.ones(4, 2, dtype=torch.bfloat16), shards=2, zero=1) for name in reader
    ]
    found = WeightGather(members, place(shard=2), reader)
    found.begin()
    assert len(log) == each  # the first block's have nothing to hide behind
    for b in range(blocks):
        found.wait(f"b{b}")
        started, waited = ([n for what, n in log if what == w] for w in ("start", "wait"))
        assert waited == list(range((b + 1) * each))
        assert started == list(range(min(b + 2, blocks) * each))


def sizes(groups: Iterable[Sequence[StageParameter]]) -> list[list[int]]:
    return [[p.leaf.numel() for p in group] for group in groups]


def test_buckets_are_filled_in_order_and_the_large_are_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of gradients in fp32, and of weights in the dtype that is gathered."""
    for module in (reducer_module, block_weights):
        monkeypatch.setattr(module, "BUCKET_BYTES", 48)
        monkeypatch.setattr(module, "ALONE_BYTES", 64)
    members = [parameter(f"w{k}", torch.ones(n)) for k, n in enumerate((4, 8, 1, 16, 4))]
    assert sizes(reducer_module._by_size(members)) == [[4, 8], [16], [1, 4]]
    halves = [
        parameter(f"w{k}", torch.ones(n, dtype=torch.bfloat16), shards=2, zero=1)
        for k, n in enumerate((8, 16, 2, 32, 4))
    ]
    assert sizes(block_weights._by_size(halves)) == [[8, 16], [2], [32], [4]]
    wide = [parameter(f"w{k}", torch.ones(n), shards=2, zero=1) for k, n in enumerate((2, 16, 4))]
    assert sizes(block_weights._by_size(wide)) == [[2], [16], [4]]  # in place: alone
    halves[1].home = "host"
    assert sizes(block_weights._by_size(halves[:2])) == [[8], [16]]


def test_so_many_gradients_are_on_their_way_to_the_host_and_add_up() -> None:
    way = GradientsToHost(CPU)
    for k in range(SENT_AT_ONCE + 3):
        way.send(k % 2, torch.full((2,), 2.0**k))
        assert len(way.under_way) == min(k + 1, SENT_AT_ONCE)
    found = way.finish()
    for key in (0, 1):
        assert found[key].tolist() == [sum(2.0**k for k in range(key, SENT_AT_ONCE + 3, 2))] * 2
    assert way.finish() == {}


def test_weights_of_a_block_and_of_the_one_after_it_are_on_the_device() -> None:
    """Forward and backward; a backward that comes again finds nothing to do."""
    order = ("a", "b", "c")
    own = BlockWeights({n: [parameter(n, torch.ones(4))] for n in order}, CPU)
    own.begin()
    seen = []
    for block in order:
        own.forward(block)
        own.gathered(block)
        seen.append("".join(sorted(own.here)))
    own.begin_backward()
    for block in ("c", "b", "c", "a"):
        own.backward(block)
        seen.append("".join(sorted(own.here)))
    assert seen == ["ab", "bc", "c", "bc", "ab", "ab", "a"]
    own.let_go()
    assert not any(p.leaf.untyped_storage().nbytes() for (p,) in own.away.values())


def test_pure_bf16_has_one_copy_in_bf16() -> None:
    """Weights as computed with and as stepped, and gradients."""
    cell = Cell(case="gpt2_untied", microbatches=2, precision="bf16_pure")
    runtime = built(cell)
    runtime.train_step(CASES[cell.case].batch(GLOBAL_BATCH, 0))
    held = [x for p in runtime.stage_parameters for x in (p.leaf, p.stored, p.api, p.api.grad)]
    assert {x.dtype for x in held} == {torch.bfloat16}
    assert all(p.aliased for p in runtime.stage_parameters)
