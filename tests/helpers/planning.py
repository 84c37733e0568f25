"""Models large enough that splitting them pays, clusters of any speed, what a plan communicates.

Everything is traced on meta: sizes cost nothing.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, TypedDict, Unpack

import numpy as np
import torch
import transformers
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.blocks import Excess
from meshwright.costmodel.blocks.price import price_pass
from meshwright.costmodel.graph import Graph
from meshwright.costmodel.mesh import Batch, HostParts, Mesh
from meshwright.costmodel.operators import Cost, Problem, Setting
from meshwright.costmodel.operators.pricing import Pricer
from meshwright.costmodel.recompute import RECOMPUTE
from meshwright.costmodel.sharding.factors import FactorTable, analyse
from meshwright.costmodel.sharding.layouts import Assignment, BlockLayouts, Entry
from meshwright.costmodel.sharding.moves import Move, Run
from meshwright.costmodel.sharding.sequence import SequenceFactor
from meshwright.costmodel.sharding.strategies import Placement, transition
from meshwright.costmodel.sharing import Sharing
from meshwright.costmodel.stages.sums import Sums
from meshwright.costmodel.targets import EAGER
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.pricing.stage_costs import StageCoster
from meshwright.planner.stages.programs import BlockPrograms
from meshwright.planner.tracing.trace import trace
from meshwright.profiles.cluster import Cluster, Link
from tests.models.models import CASES, Traced
from tests.models.models import traced as trace_case


@cache
def case(name: str, rows: int = 4) -> Traced:
    """A model of the zoo, traced at `rows` rows and cut into blocks."""
    return trace_case(CASES[name], rows)


def cut(
    model: nn.Module,
    batch: Any,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    precision: str = "bf16",
) -> Traced:
    graph = trace(model, batch, loss_fn=loss_fn, precision=precision)
    table = analyse(graph)
    return Traced(graph=cut_blocks(graph, table), table=table)


def problem_of(of: Traced, on: Cluster, precision: str = "bf16", **given: Any) -> Problem:
    return Problem(graph=of.graph, factors=of.table, cluster=on, precision=precision, **given)


# plans fit by the most of each kind of memory, added up: oracles don't follow a step
SUMMED = dataclasses.replace(EAGER, gradients_come=False)


PARTS: dict[str, type[Any]] = {
    "mesh": Mesh, "batch": Batch, "sharing": Sharing, "host": HostParts, "problem": Problem,
}  # fmt: skip
NOTHING_TRACED = Graph(
    values={}, ops=(), derived=(), inputs={}, batched=frozenset(), parameters={}, buffers={},
    constants={}, loss="", batch_size=1,
)  # fmt: skip


def setting_on(on: Cluster, **given: Any) -> Setting:
    """One rank, one row, one micro-batch in fp32, but for what is given, as `changed` takes it."""
    tokens = SequenceFactor(atom=None)
    table = FactorTable(dims={}, ops={}, letters={}, sizes={}, batch=None, tokens=tokens)
    problem = Problem(graph=NOTHING_TRACED, factors=table, cluster=on, precision="fp32")
    plain = Setting(problem=problem, mesh=Mesh(dp=1, tp=1), batch=Batch(rows=1))
    return changed(plain, **given)


def changed(setting: Setting, **given: Any) -> Setting:
    """A setting with other fields, by their names in its parts."""
    parts: dict[str, dict[str, Any]] = {}
    for name, value in given.items():
        owner = next(
            (part for part in PARTS if name in {f.name for f in dataclasses.fields(PARTS[part])}),
            "",
        )
        parts.setdefault(owner, {})[name] = value
    own = parts.pop("", {})
    made = {
        part: dataclasses.replace(getattr(setting, part), **fields)
        for part, fields in parts.items()
    }
    return dataclasses.replace(setting, **own, **made)


def programs_of(
    of: Traced, on: Cluster, precision: str = "bf16", **entries: Entry
) -> BlockPrograms:
    return BlockPrograms(StageCoster(problem_of(of, on, precision)), entries)


def sums_of(**columns: float | tuple[float, float, float, float]) -> Sums:
    """Sums of one block: named columns, others 0; by name of a policy what it runs again: seconds,
    of which communication, the host's seconds, bytes freed, which its backward holds; `passing`
    bytes of that whatever the policy. Gradients and AdamW's moments are in fp32."""
    sums, again = Sums.zeros(), dict.fromkeys(RECOMPUTE, columns.pop("passing", 0.0))
    sums.blocks, sums.gradients = 1.0, 4.0 * columns.get("parameters", 0.0)
    sums.moments = 8.0 * columns.get("parameters", 0.0)
    sums.shard_moments = 8.0 * columns.get("shard_parameters", 0.0)
    for name, value in columns.items():
        if isinstance(value, tuple):
            sums.set_recompute(name, *value)
            again[name] += value[3]
        else:
            setattr(sums, name, value)
    sums.excess = np.tile([*again.values()], (len(Excess._fields), 1))
    return sums


# --- clusters ------------------------------------------------------------------------------------


class Waits(TypedDict, total=False):
    """Seconds before a message, and before a kernel; none unless given."""

    latency_s: float
    launch_s: float


def cluster(
    devices: int = 4,
    *,
    nodes: int = 1,
    flops: float = 1e12,
    memory_bandwidth: float = 1e12,
    bandwidth: float = 1e10,
    memory_bytes: float = 2.0**40,
    node_bandwidth: float = 1e10,
    **waits: Unpack[Waits],
) -> Cluster:
    """`nodes` nodes of `devices` devices that reach what they promise, whatever the shape, reserve
    nothing and wait for no host."""
    base, latency_s = Cluster.from_catalog("h100-sxm"), waits.get("latency_s", 0.0)
    device = dataclasses.replace(
        base.device,
        peak_flops={"fp32": flops, "bf16": flops},
        memory_bandwidth=memory_bandwidth,
        matmul_efficiency=1.0,
        attention_efficiency=1.0,
        memory_efficiency=1.0,
        tiles=(),
        launch_overhead_s=waits.get("launch_s", 0.0),
        host_overhead_s=0.0,
        overlap_slowdown=0.0,
        reserved_bytes=0,
        communicator_bytes=0,
        memory_bytes=int(memory_bytes),
    )
    return dataclasses.replace(
        base,
        device=device,
        num_nodes=nodes,
        devices_per_node=devices,
        intra_link=Link(name="wire", latency_s=latency_s, bandwidth=bandwidth),
        inter_link=Link(name="net", latency_s=latency_s, bandwidth=node_bandwidth),
    )


def odd_cluster(seed: int, devices: int = 8) -> Cluster:
    """Rates that differ by orders of magnitude: every way to split pays on some such cluster."""
    rng = random.Random(seed)

    def rate(low: int, high: int) -> float:
        return 10 ** rng.uniform(low, high)

    return cluster(
        devices,
        flops=rate(8, 13),
        memory_bandwidth=rate(7, 13),
        bandwidth=rate(7, 13),
        latency_s=rng.choice([0.0, 1e-7, 1e-5]),
        launch_s=rng.choice([0.0, 1e-6]),
    )


# --- models --------------------------------------------------------------------------------------


def token_batch(rows: int, sequence: int) -> dict[str, torch.Tensor]:
    ids = torch.empty(rows, sequence, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


@cache
def gpt2(
    layers: int, hidden: int, heads: int, words: int, length: int, *, dropout: float = 0.1
) -> Traced:
    """Embedding and head tied."""
    config = transformers.GPT2Config(
        n_layer=layers, n_embd=hidden, n_head=heads, vocab_size=words, n_positions=length,
        bos_token_id=0, eos_token_id=0,
        resid_pdrop=dropout, embd_pdrop=dropout, attn_pdrop=dropout,
    )  # fmt: skip
    with torch.device("meta"):
        return cut(transformers.GPT2LMHeadModel(config), token_batch(2, length))


@cache
def llama(
    hidden: int, ffn: int, heads: int, kv_heads: int, *, words: int = 32000, length: int = 2048
) -> Traced:
    """Two layers."""
    config = transformers.LlamaConfig(
        num_hidden_layers=2, hidden_size=hidden, intermediate_size=ffn, num_attention_heads=heads,
        num_key_value_heads=kv_heads, vocab_size=words, max_position_embeddings=length,
    )  # fmt: skip
    with torch.device("meta"):
        return cut(transformers.LlamaForCausalLM(config), token_batch(2, length))


def large_gpt2() -> Traced:
    return gpt2(2, 2048, 16, 50304, 1024, dropout=0.0)


def large_llama() -> Traced:
    """With grouped queries."""
    return llama(4096, 11008, 32, 8)


@cache
def large_bert() -> Traced:
    """Two post-norm layers of hidden size 2048."""
    config = transformers.BertConfig(
        num_hidden_layers=2,
        hidden_size=2048,
        num_attention_heads=16,
        intermediate_size=8192,
        vocab_size=30592,
        max_position_embeddings=1024,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    with torch.device("meta"):
        model = transformers.BertForMaskedLM(config)
    return cut(model, token_batch(2, 1024))


class Linears(nn.Module):
    """`layers` linear layers of one width with an activation between them."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers[:-1]:
            x = F.gelu(layer(x))
        return self.layers[-1](x)


@cache
def linears(width: int, layers: int, rows: int, length: int | None = None) -> Traced:
    """On vectors in half precision, or on sequences of `length` of them."""
    shape = (rows, width) if length is None else (rows, length, width)
    with torch.device("meta"):
        batch = torch.empty(2, *shape, dtype=torch.bfloat16).unbind()
        return cut(Linears(width, layers), batch, F.mse_loss)


# --- what is communicated ------------------------------------------------------------------------


class Recorder:
    """A pricer that writes down the collectives of activations that it is asked to price."""

    def __init__(self, pricer: Pricer) -> None:
        self.pricer = pricer
        self.forward: Counter[str] = Counter()
        self.backward: Counter[str] = Counter()
        self.moved: list[tuple[str, Placement, Placement]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self.pricer, name)

    def step_cost(self, step: Run | Move) -> Cost:
        if isinstance(step, Move) and not step.once:
            kinds = transition(step.source, step.target)
            assert kinds is not None
            self.forward[kinds[0]] += 1
            self.backward[kinds[1]] += self.pricer.graph.values[step.value].requires_grad
            if any(kinds):
                self.moved.append((step.value, step.source, step.target))
        return self.pricer.step_cost(step)

    def all_reduces(self) -> tuple[float, float]:
        """All-reduces forward and backward; a reduce-scatter or an all-gather is half of one."""
        return _all_reduces(self.forward), _all_reduces(self.backward)


def _all_reduces(count: Counter[str]) -> float:
    return count["all_reduce"] + (count["all_gather"] + count["reduce_scatter"]) / 2


def communication(
    pricer: Pricer, layouts: BlockLayouts, assignment: Assignment, inputs: Mapping[str, Placement]
) -> Recorder:
    recorder = Recorder(pricer)  # of one forward and backward: recompute has its own re-shards
    price_pass(recorder, layouts, assignment, inputs, repeated={})  # type: ignore[arg-type]
    return recorder
