"""Saved bytes of models under plans: the prediction against what torch's saved-tensor hooks see, to
the byte, whatever the precision, the attention, the recompute and the shardings; which operators
recompute policies repeat, against all sets there are."""

import dataclasses
import itertools
import random
from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.blocks import known_steps
from meshwright.costmodel.blocks.block_memory import BlockMemory, block_memory
from meshwright.costmodel.blocks.known_steps import KnownSteps
from meshwright.costmodel.blocks.price import PassPrice, price_pass
from meshwright.costmodel.blocks.repeated import least_kept, repeated_ops
from meshwright.costmodel.graph import Block, Op
from meshwright.costmodel.kernels.collectives import Group, collective_time
from meshwright.costmodel.memory.storage import Storage
from meshwright.costmodel.operators.fusion import fuse
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.recompute import regathering
from meshwright.costmodel.sharding.layouts import Assignment, BlockLayouts, Entry
from meshwright.costmodel.sharding.moves import moves
from meshwright.costmodel.sharding.strategies import Placement
from meshwright.costmodel.target import Target
from meshwright.profiles.cluster import Cluster
from tests.costmodel.memory.saved_tensors import Setup, chosen, counted, predicted, pricer, setup
from tests.costmodel.traces import MODELS, graph_of
from tests.helpers.planning import cut, setting_on
from tests.helpers.threaded_ranks import Ranks, talking_ranks
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.traced import WIDTH, with_forward
from tests.models.architectures import SEQUENCE
from tests.models.models import CASES, GLOBAL_BATCH, Traced

# convolutions, recurrent kernels, an encoder beside its decoder, normed and plain, in 16 bits too;
# others are split over ranks below, and each model is in the second tier
FIRST = {"fp32": ("convnet", "recurrent", "t5"), "bf16": ("resnet", "plain_gpt")}
COVERED = "a few families stay in either precision, and others split over ranks"
CELLS = tiered(
    [(name, precision, parts) for precision in FIRST for parts in (4, 1) for name in MODELS],
    lambda cell: cell[0] in FIRST[cell[1]] and cell[2] == 4,
    COVERED,
)


@pytest.mark.parametrize("cell", CELLS)
def test_model_keeps_what_the_hooks_see(cell: tuple[str, str, int]) -> None:
    name, precision, parts = cell
    rows = GLOBAL_BATCH // parts
    for recompute in ("none", "selective", "full"):
        of = setup(graph_of(name, rows, precision), microbatches=parts, recompute=recompute)
        assert predicted(of) == counted(of, MODELS[name].batch(rows, 0))


def test_rows_are_no_dim_where_one_and_bytes_grow_with_them() -> None:
    """A batch of one is no dim to memory: tensors that are copied for two rows are views for
    one."""
    rows = {path: x[4:5] for path, x in MODELS["gpt2_eager"].batch(8, 0).items()}
    of = setup(graph_of("gpt2_eager", 1))
    assert predicted(of) == counted(of, rows)
    # A graph traced at one batch size is priced at another
    few, many = (setup(graph_of("llama", rows), microbatches=16 // rows) for rows in (4, 8))
    stretched = dataclasses.replace(few, rows=many.rows)
    assert predicted(stretched) == predicted(many)
    assert predicted(few) < predicted(many)


@pytest.mark.parametrize("name", ["gpt2_untied", "llama", "mlp"])
def test_prices_of_blocks_add_up_to_the_model(name: str) -> None:
    """Where every block reads one value, and for its backward: what one keeps, another holds."""
    of = setup(graph_of(name), microbatches=4)
    prices = [
        price_pass(pricer(of), of.layouts[b.name], of.assignments[b.name], {}) for b in of.blocks
    ]
    assert sum(p.saved_bytes + p.input_bytes for p in prices) == predicted(of)


class Layer(nn.Module):
    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.qkv(self.n1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (self.heads, -1)).transpose(1, 2) for t in parts)
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=self.dropout, is_causal=True)
        x = x + F.dropout(self.proj(mixed.transpose(1, 2).flatten(2)), self.dropout)
        return x + F.dropout(self.down(F.gelu(self.up(self.n2(x)))), self.dropout)


def stack(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(OrderedDict(layers=nn.Sequential(*layers)))


B, S, H, A = 2, 64, 128, 8  # micro-batch, sequence, width, heads
SPLIT = Placement("S", 1)


@cache
def layers(dropout: float) -> Traced:
    with torch.device("meta"):
        model = stack(*(Layer(H, A, dropout) for _ in range(3)))
        batch = torch.empty(2, B, S, H, dtype=torch.bfloat16).unbind()
    return cut(model, batch, F.mse_loss, precision="bf16")


def layer_price(dropout: float, tp: int, *, sequence: bool) -> PassPrice:
    """A layer in 16 bits on GPUs, split as Megatron does; with `sequence` all between its products
    along that, too."""
    of = layers(dropout)
    graph, table = of.graph, of.table
    block = next(block for block in graph.blocks if block.name == "layers.1")
    layouts = BlockLayouts(graph, table, block, tp)
    split = {op.name: Entry(strategy="colwise") for op in block.ops if op.key.endswith("up:linear")}
    split |= {op.name: Entry(strategy="colwise.1") for op in block.ops if "qkv:linear" in op.key}
    inputs = {value: SPLIT for value in block.inputs} if sequence else {}
    if sequence:
        between = {"add", "dropout", "layers.1.proj:linear", "layers.1.down:linear"}
        split |= {op.name: Entry(state=SPLIT) for op in block.ops if between & {op.short, op.key}}
    assignment = layouts.complete(split if tp > 1 else {}, inputs)
    target, on = Target(name="plain kernels"), Cluster.from_catalog("h100-sxm")
    setting = setting_on(on, tp=tp, rows=B, precision="bf16", target=target)
    prices = Pricer(graph=graph, table=table, setting=setting)
    return price_pass(prices, layouts, assignment, inputs)


@pytest.mark.parametrize("dropout", [0.0, 0.1])
@pytest.mark.parametrize("tp", [1, 4])
def test_layer_on_gpus_is_the_closed_form(tp: int, dropout: float) -> None:
    """Korthikanti et al. 2022 with fused attention, 16 bits: s·b·h·(10 + 24/t) with the input, of
    which 2 are masks; besides four statistics of norms and a normaliser per head and row, in single
    precision."""
    price = layer_price(dropout, tp, sequence=False)
    whole = 10 if dropout else 8
    statistics = 4 * 4 * B * S + 4 * B * S * A / tp
    assert price.saved_bytes + price.input_bytes == B * S * H * (whole + 24 / tp) + statistics


@pytest.mark.parametrize("tp", [2, 8])
def test_sequence_parallel_layer_is_the_closed_form(tp: int) -> None:
    """Section 4.2.2 there: s·b·h·34/t, of which the two inputs that are gathered, 2 bytes each, are
    whole unless they are gathered again."""
    price = layer_price(0.1, tp, sequence=True)
    statistics = (4 * 4 * B * S + 4 * B * S * A) / tp
    kept = price.saved_bytes + price.input_bytes
    assert kept == B * S * H * (4 + 30 / tp) + statistics
    assert kept - price.repeats["regather"].freed_bytes == B * S * H * 34 / tp + statistics


def test_gathers_again_are_hidden_beside_products_alone() -> None:
    """The seconds of two gathers, less what the last product's weight gradient hides of them."""
    again = layer_price(0.1, 4, sequence=True).repeats["regather"]
    group = Group(size=4, per_node=4, concurrent=1)
    cluster = Cluster.from_catalog("h100-sxm")
    whole = 2 * float(collective_time("all_gather", B * S * H * 2, group, cluster))
    assert 0 < again.seconds == again.comm_s < whole


def test_values_inside_a_fused_kernel_are_not_kept() -> None:
    """The gate's activation is read by the product alone, and made again from the gate."""
    rows, layers = 6, 3
    gated = lambda self, x: x + self.l(F.silu(self.l(x)) * self.l(x))  # noqa: E731
    with torch.device("meta"):
        model = stack(*(with_forward(gated) for _ in range(layers)))
        batch = torch.empty(2, rows, WIDTH).unbind()
    of = setup(cut(model, batch, F.mse_loss, precision="fp32"))
    plain, fused = pricer(of), pricer(of)
    fused.fusion = fuse(of.of.graph, of.of.table, "pointwise")
    for block in of.blocks[:layers]:
        steps = moves(of.layouts[block.name], of.assignments[block.name], {})
        apart, together = (block_memory(prices, steps).saved_bytes for prices in (plain, fused))
        assert apart == 4 * 4 * rows * WIDTH  # gate, its activation, up, their product
        assert together == 3 * 4 * rows * WIDTH


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with talking_ranks() as made:
        yield made


def agrees(of: Setup, name: str, ranks: Ranks) -> None:
    """Prediction and count on every rank; ranks differ where one holds a partial value that is zero
    on the others."""
    batch = MODELS[name].batch(of.of.graph.batch_size, 0)
    got = ranks.run(of.mesh, lambda data, tensor: counted(of, batch, data, tensor))
    assert predicted(of) == max(got.values())


SHARES = {  # models on each mesh: every kind of parameter split, statistics synchronised
    (1, 2): ("gpt2_untied_dropout", "bert_eager_dropout", "moe", "unet"),
    (2, 1): ("resnet", "convnet"),
    (2, 2): ("llama", "t5"),
}


LIKE_OTHERS = second_tier("BERT has dropout, Llama fused attention; T5 is counted on one device")


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        pytest.param(name, mesh, marks=LIKE_OTHERS if name in ("gpt2_untied_dropout", "t5") else ())
        for mesh in SHARES
        for name in SHARES[mesh]
    ],
)
def test_ranks_keep_their_shares(name: str, mesh: tuple[int, int], ranks: Ranks) -> None:
    shardings = MODELS[name].shardings if mesh[1] > 1 and name != "convnet" else {}
    for recompute in ("none", "full"):
        of = setup(graph_of(name), shardings, mesh=mesh, microbatches=4, recompute=recompute)
        agrees(of, name, ranks)


def test_ranks_keep_their_part_of_the_sequence_and_of_what_they_gather(ranks: Ranks) -> None:
    of, whole = graph_of("llama"), MODELS["llama"].shardings
    split = {**whole, "model.layers.*:add": "-> S(1)", "model.layers.*:add#1": "-> S(1)"}
    for policy in ("none", "selective", "pointwise", "widening", "products"):
        plain, regathered = (
            setup(of, split, mesh=(1, 2), recompute=own) for own in (policy, regathering(policy))
        )
        if policy == "none":
            agrees(plain, "llama", ranks)
            assert predicted(plain) < predicted(setup(of, whole, mesh=(1, 2)))
        agrees(regathered, "llama", ranks)
        assert predicted(regathered) < predicted(plain)


def any_assignments(name: str) -> Mapping[str, Assignment]:
    """Random strategies for a third of the operators; the rest follows."""
    rng, of = random.Random(0), graph_of(name)
    prices = pricer(setup(of, mesh=(1, 2)))
    found: dict[str, Assignment] = {}
    states: dict[str, Placement] = {}
    for block in of.graph.blocks:
        layouts = BlockLayouts(of.graph, of.table, block, 2)
        inputs = {value: states[value] for value in block.inputs}
        for share in (0.3, 0.3, 0.2, 0.1, 0.0):
            entries = {
                op.name: Entry(strategy=rng.choice(layouts.options(op)).name)
                for op in block.ops
                if rng.random() < share
            }
            try:
                found[block.name] = layouts.complete(entries, inputs)
                price_pass(prices, layouts, found[block.name], inputs)
                break
            except ValueError:  # no re-shard leads from one choice to the next
                continue
        states |= {value: found[block.name].states[value] for value in block.outputs}
    return found


@pytest.mark.parametrize("name", ["gpt2_untied_dropout", "llama", "resnet"])
def test_ranks_keep_the_same_under_any_strategies(name: str, ranks: Ranks) -> None:
    of = chosen(graph_of(name), any_assignments(name), mesh=(1, 2))
    agrees(of, name, ranks)


def again(policy: str, block: Block, of: Traced) -> list[Op]:
    """The operators of a block that a policy repeats."""
    return [block.ops[k] for k in sorted(repeated_ops(block, of.graph, of.table)[policy])]


@st.composite
def memories_and_costs(draw: st.DrawFn) -> tuple[BlockMemory, dict[str, int]]:
    """Up to seven operators that each read some values before them and make one or two."""
    values = [Storage(float(draw(st.integers(1, 9))), "input")]
    entering, makers, reads = set(values), {}, {}
    for k in range(draw(st.integers(1, 7))):
        name = f"op{k}"
        reads[name] = tuple(draw(st.lists(st.sampled_from(values), min_size=1, max_size=2)))
        for _ in range(draw(st.integers(1, 2))):
            made = Storage(float(draw(st.integers(1, 9))))
            makers[made] = name
            values.append(made)
    kept = frozenset(draw(st.sets(st.sampled_from(values))))
    outside = frozenset(entering | draw(st.sets(st.sampled_from(values), max_size=1)))
    memory = BlockMemory(kept=kept, leaving={}, outside=outside, makers=makers, reads=reads)
    may = draw(st.sets(st.sampled_from(sorted(reads))))
    return memory, {name: draw(st.integers(0, 6)) for name in sorted(may)}


@given(memories_and_costs())
def test_no_set_of_operators_keeps_less_for_its_cost(
    given: tuple[BlockMemory, dict[str, int]],
) -> None:
    memory, costs = given

    def price(names: Collection[str]) -> float:
        return memory.saved_bytes_repeating(names) + sum(costs[name] for name in names)

    sets = itertools.chain.from_iterable(
        itertools.combinations(sorted(costs), count) for count in range(len(costs) + 1)
    )
    found = least_kept(memory, costs)
    assert found <= costs.keys()
    assert price(found) == min(map(price, sets))
    # a cheaper repeat is no reason to repeat less
    assert found <= least_kept(memory, {name: cost // 2 for name, cost in costs.items()})


@pytest.mark.parametrize(
    ("name", "repeated"),
    [
        ("gpt2_eager", {"matmul", "softmax"}),
        ("gpt2_eager_dropout", {"matmul", "softmax", "dropout"}),
        ("bert_eager_dropout", {"matmul", "softmax", "dropout"}),
        ("gpt2_dropout", {"scaled_dot_product_attention"}),  # its dropout is written out
        ("gpt2_tied", set()),
        ("mlp", set()),
    ],
)
def test_selective_recompute_repeats_scores(name: str, repeated: set[str]) -> None:
    of = graph_of(name)
    for block in of.graph.blocks[1:2] if repeated else of.graph.blocks:
        picked = again("selective", block, of)
        squares = {op.short for op in picked}
        if "matmul" not in repeated:
            assert len(picked) == len(repeated) and squares == repeated
            continue
        assert squares >= repeated
        assert not squares & {"linear", "addmm", "gelu", "layer_norm"}
        shapes = {of.graph.values[v].shape[-2:] for op in picked for v in op.results}
        assert shapes == {(SEQUENCE, SEQUENCE)}
        assert sum(op.short == "matmul" for op in picked) == 1
        assert ("dropout" in squares) == ("dropout" in repeated)


ROWS = (4.0, 1.0, 2.0, 3.0, 16.0, 1.0, 7.0)


@pytest.mark.parametrize(("name", "tp"), [("llama", 2), ("resnet", 1), ("moe", 2)])
def test_other_rows_are_as_walked(name: str, tp: int, monkeypatch: pytest.MonkeyPatch) -> None:
    of = setup(graph_of(name), CASES[name].shardings if tp > 1 else None, mesh=(1, tp))
    walks: list[float] = []

    def walked(prices: object, steps: object) -> object:
        walks.append(rows)
        return block_memory(prices, steps)

    monkeypatch.setattr(known_steps, "block_memory", walked)
    for block in of.blocks:
        steps = moves(of.layouts[block.name], of.assignments[block.name], of.inputs(block))
        known = KnownSteps(steps)
        walks.clear()
        for rows, count in (*((rows, 1) for rows in ROWS), (ROWS[0], 4)):
            prices = pricer(dataclasses.replace(of, rows=rows, microbatches=count))
            found, true = known.memory(prices), block_memory(prices, steps)
            assert found.saved_bytes == true.saved_bytes
            for again in ([op.name for op in block.ops[::2]], [op.name for op in block.ops[1::2]]):
                assert found.saved_bytes_repeating(again) == true.saved_bytes_repeating(again)
        assert len(walks) <= 4  # what a loss keeps depends on there being several micro-batches
