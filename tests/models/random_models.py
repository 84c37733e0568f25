"""Small random models and random legal plans for them, each drawn from one seed.

A module is built from a specification, which is drawn first and printed with a failure. It holds
what plans can get wrong: heads that the tensor axis does not divide, grouped queries, tied
embeddings, skips over several layers, an input that only a late layer reads, statistics over the
batch, labels that are ignored.

A plan draws the device groups, their meshes, cuts, schedule, micro-batches, ZeRO, recompute by
block, and shardings among those an operator offers; a sharding that `check_plan` refuses beside the
others is left out.
"""

import dataclasses
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.graph import Block
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.costmodel.sharding.layouts import BlockLayouts
from meshwright.planner.decisions import divisors
from meshwright.planner.plan.check import check_plan, check_runs
from meshwright.planner.plan.plan import Plan, PlanError, StagePlan, recompute_of
from tests.helpers.plan_building import Knobs, build_plan
from tests.models.architectures import token_loss
from tests.models.models import Case, Traced, sgd, uneven

ROWS = 24  # divided by 1 to 4 micro-batches and by most numbers of ranks
SEQUENCE, VOCAB, CLASSES, SIDE = 8, 24, 6, 5
SHARDINGS = 4  # tried per stage
ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu, "tanh": torch.tanh}


# --- specifications -------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Layer:
    """One residual layer. `skip` is how many layers before its input another is added, 0 for none;
    `side` says that it reads the second input too."""

    kind: str
    norm: str
    activation: str
    bias: bool
    gated: bool
    heads: int
    kv_heads: int
    causal: bool
    written: bool
    skip: int
    side: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Spec:
    """A model: `family` "tokens" (cross-entropy per position, some labels ignored), "vectors"
    (squared error per position) or "images" (one class each)."""

    family: str
    width: int
    layers: tuple[Layer, ...]
    tied: bool

    @property
    def side(self) -> bool:
        return any(layer.side for layer in self.layers)

    @property
    def batch_statistics(self) -> bool:
        return any(layer.norm == "batch" for layer in self.layers)


def draw_spec(random: Random) -> Spec:
    family = random.choice(("tokens", "tokens", "vectors", "images"))
    width = random.choice((8, 12, 16, 24))
    images = family == "images"
    norms = ("batch", "group", "none") if images else ("layer", "rms", "none")
    layers = []
    for k in range(random.randint(2, 5)):
        heads = random.choice([n for n in (1, 2, 3, 4) if width % n == 0])
        layers.append(
            Layer(
                kind="conv" if images else random.choice(("mlp", "attention")),
                norm=random.choice(norms),
                activation=random.choice(tuple(ACTIVATIONS)),
                bias=random.random() < 0.5,
                gated=random.random() < 0.4,
                heads=heads,
                kv_heads=random.choice(divisors(heads)),
                causal=random.random() < 0.5,
                written=random.random() < 0.4,
                skip=random.randint(1, k) if k and random.random() < 0.3 else 0,
                side=not images and random.random() < 0.2,
            )
        )
    tied = family == "tokens" and random.random() < 0.4
    return Spec(family=family, width=width, layers=tuple(layers), tied=tied)


# --- modules --------------------------------------------------------------------------------------


class Mlp(nn.Module):
    def __init__(self, width: int, spec: Layer) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.up = nn.Linear(width, 2 * width, bias=spec.bias)
        self.gate = nn.Linear(width, 2 * width, bias=False) if spec.gated else None
        self.down = nn.Linear(2 * width, width, bias=spec.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.activation(self.up(x))
        return self.down(y if self.gate is None else y * self.gate(x))


class Attention(nn.Module):
    """Grouped-query attention, `written` out in matrix products or by torch's own operator."""

    def __init__(self, width: int, spec: Layer) -> None:
        super().__init__()
        self.spec, size = spec, width // spec.heads
        self.q = nn.Linear(width, width, bias=spec.bias)
        self.k, self.v = (nn.Linear(width, spec.kv_heads * size, bias=spec.bias) for _ in range(2))
        self.o = nn.Linear(width, width, bias=spec.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        spec, (b, s, width) = self.spec, x.shape
        q = self.q(x).view(b, s, spec.heads, -1).transpose(1, 2)
        k, v = (m(x).view(b, s, spec.kv_heads, -1).transpose(1, 2) for m in (self.k, self.v))
        if not spec.written:
            grouped = spec.heads != spec.kv_heads
            made = F.scaled_dot_product_attention(
                q, k, v, is_causal=spec.causal, enable_gqa=grouped
            )
            return self.o(made.transpose(1, 2).reshape(b, s, width))
        group = spec.heads // spec.kv_heads
        k, v = (t.repeat_interleave(group, dim=1) for t in (k, v))
        scores = q @ k.transpose(-2, -1) * (width // spec.heads) ** -0.5
        if spec.causal:
            future = torch.ones(s, s, dtype=torch.bool, device=x.device).triu(1)
            scores = scores.masked_fill(future, float("-inf"))
        return self.o((scores.softmax(-1) @ v).transpose(1, 2).reshape(b, s, width))


class Conv(nn.Module):
    def __init__(self, width: int, spec: Layer) -> None:
        super().__init__()
        self.activation = ACTIVATIONS[spec.activation]
        self.c1 = nn.Conv2d(width, 2 * width, 3, padding=1, bias=spec.bias)
        self.c2 = nn.Conv2d(2 * width, width, 1, bias=spec.bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c2(self.activation(self.c1(x)))


class Residual(nn.Module):
    """x + body(norm(x)), to which an earlier layer's output and the side input may be added."""

    def __init__(self, width: int, spec: Layer) -> None:
        super().__init__()
        kinds = {"mlp": Mlp, "attention": Attention, "conv": Conv}
        norms = {
            "layer": nn.LayerNorm, "rms": nn.RMSNorm, "batch": nn.BatchNorm2d,
            "group": lambda width: nn.GroupNorm(2, width), "none": lambda width: nn.Identity(),
        }  # fmt: skip
        self.norm = norms[spec.norm](width)
        self.body = kinds[spec.kind](width, spec)
        self.side = nn.Linear(SIDE, width) if spec.side else None

    def forward(
        self, x: torch.Tensor, skip: torch.Tensor | None, side: torch.Tensor | None
    ) -> torch.Tensor:
        y = x + self.body(self.norm(x))
        if skip is not None:
            y = y + skip * 0.5
        if self.side is not None:
            y = y + self.side(side)
        return y


class Net(nn.Module):
    """The module of a specification; its output goes to the family's loss."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        self.spec = spec
        entries = {
            "tokens": lambda: nn.Embedding(VOCAB, spec.width),
            "vectors": lambda: nn.Linear(CLASSES, spec.width),
            "images": lambda: nn.Conv2d(3, spec.width, 3, padding=1),
        }
        self.entry = entries[spec.family]()
        self.layers = nn.ModuleList(Residual(spec.width, layer) for layer in spec.layers)
        outputs = VOCAB if spec.family == "tokens" else CLASSES
        self.out = nn.Linear(spec.width, outputs, bias=not spec.tied)
        if spec.tied:
            self.out.weight = self.entry.weight

    def forward(self, x: torch.Tensor, side: torch.Tensor | None = None) -> torch.Tensor:
        made = [self.entry(x)]
        for layer, spec in zip(self.layers, self.spec.layers, strict=True):
            skip = made[-1 - spec.skip] if spec.skip else None
            made.append(layer(made[-1], skip, side))
        last = made[-1].mean((2, 3)) if self.spec.family == "images" else made[-1]
        return self.out(last)


def case_of(spec: Spec) -> Case:
    """A specification as a case: model, batches and loss."""

    def batch(rows: int, step: int) -> tuple[torch.Tensor, ...]:
        made = torch.Generator().manual_seed(1000 + step)
        side = (torch.randn(rows, SEQUENCE, SIDE, generator=made),) if spec.side else ()
        if spec.family == "tokens":
            ids = torch.randint(0, VOCAB, (rows, SEQUENCE), generator=made)
            return (ids, *side, uneven(ids.roll(-1, 1)))
        if spec.family == "vectors":
            x, y = torch.randn(2, rows, SEQUENCE, CLASSES, generator=made)
            return (x, *side, y)
        image = torch.randn(rows, 3, 6, 6, generator=made)
        return image, torch.randint(0, CLASSES, (rows,), generator=made)

    losses: dict[str, Any] = {
        "tokens": token_loss, "vectors": F.mse_loss, "images": F.cross_entropy,
    }  # fmt: skip
    return Case(
        build=lambda: Net(spec),
        batch=batch,
        optimizer=sgd,
        loss_fn=losses[spec.family],
        batch_statistics=spec.batch_statistics,
    )


# --- plans ----------------------------------------------------------------------------------------


def draw_microbatches(random: Random) -> int:
    return random.choice(divisors(ROWS)[:4])


def draw_plan(random: Random, of: Traced, *, ranks: int, microbatches: int) -> Plan:
    """A legal plan over `ranks` ranks; `of` is traced at ROWS / microbatches rows."""
    while True:
        try:
            plan = _skeleton(random, of, ranks, microbatches)
            check_plan(plan, of.graph, of.table)
            check_runs(plan)
        except PlanError:  # drawn again: what is illegal is for `check_plan` to say
            continue
        return _with_shardings(random, plan, of)


FLUSHING = tuple(name for name, record in SCHEDULES.items() if record.flushes)


def _skeleton(random: Random, of: Traced, ranks: int, microbatches: int) -> Plan:
    """Everything but shardings, not checked yet."""
    blocks = of.graph.blocks
    trained = [k for k, block in enumerate(blocks) if block.parameters]
    meshes = [_mesh(random, size) for size in _sizes(random, min(ranks, len(trained)), ranks)]
    several = len(meshes) > 1
    schedule = random.choice(FLUSHING if several else ("gpipe", "1f1b"))
    each = SCHEDULES[schedule].stages_per_device or random.randint(1, 3)
    if len(meshes) * each > len(trained):
        raise PlanError("more stages than blocks with parameters")
    starts = sorted(random.sample(trained[1:], len(meshes) * each - 1))
    equal = len(set(meshes)) == 1 and several and meshes[0][0] > 1
    zero = random.choice((0, 1, 2, 3))
    plan = build_plan(
        of.graph,
        Knobs(
            meshes=meshes,
            rows=ROWS,
            num_microbatches=microbatches,
            schedule=schedule,
            virtual=each,
            cut=starts,
            zero=zero,
            placement="tp,pp,dp" if equal and random.random() < 0.5 else "tp,dp,pp",
        ),
    )
    shards = {m.ranks: random.choice(divisors(m.dp)) for m in plan.stages}
    stages = [
        dataclasses.replace(
            stage,
            dp_shard=shards[stage.ranks] if stage.zero and shards[stage.ranks] > 1 else None,
            recompute=recompute_of(
                stage.blocks,
                [random.choice(("none", "none", "selective", "full")) for _ in stage.blocks],
            ),
        )
        for stage in plan.stages
    ]
    return dataclasses.replace(plan, stages=tuple(stages))


def _sizes(random: Random, most: int, ranks: int) -> list[int]:
    """Ranks of each device group: a random composition, equal parts as often as not."""
    count = random.randint(1, most)
    if ranks % count == 0 and random.random() < 0.5:
        return [ranks // count] * count
    ends = [0, *sorted(random.sample(range(1, ranks), count - 1)), ranks]
    return [b - a for a, b in itertools.pairwise(ends)]


def _mesh(random: Random, size: int) -> tuple[int, int]:
    tp = random.choice(divisors(size))
    return size // tp, tp


def _with_shardings(random: Random, plan: Plan, of: Traced) -> Plan:
    """The plan with a few random decisions, each kept where the plan stays legal."""
    for k, stage in enumerate(plan.stages):
        blocks = [block for block in of.graph.blocks if block.name in stage.blocks]
        for pattern, decision in _decisions(random, of, stage, blocks):
            shardings = {**plan.stages[k].shardings, pattern: decision}
            changed = dataclasses.replace(plan.stages[k], shardings=shardings)
            stages = (*plan.stages[:k], changed, *plan.stages[k + 1 :])
            tried = dataclasses.replace(plan, stages=stages)
            try:
                check_plan(tried, of.graph, of.table)
            except PlanError:
                continue
            plan = tried
    return plan


def _decisions(
    random: Random, of: Traced, stage: StagePlan, blocks: Sequence[Block]
) -> Iterator[tuple[str, str]]:
    """Operators of a stage, each with one of its strategies or a state for its result."""
    if stage.tp == 1:
        return
    for _ in range(SHARDINGS):
        block = random.choice(blocks)
        op = random.choice(block.ops)
        options = BlockLayouts(of.graph, of.table, block, stage.tp).options(op)
        rank = len(of.graph.values[op.results[0]].shape)
        if rank and random.random() < 0.3:
            yield op.key, f"-> S({random.randrange(rank)})"
        else:
            yield op.key, random.choice(options).name
