"""The tables of docs/systems/: formulas of what is here against the price's bytes, the states and
the simulator's bubble; flags against the command line; the index against the pages."""

import math
import re
from collections.abc import Callable, Mapping
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
import transformers

from meshwright.cli import parser_of
from meshwright.costmodel.graph import TensorMeta
from meshwright.costmodel.kernels.collectives import Group, bytes_sent, exchanged_bytes, routes
from meshwright.costmodel.memory import fixed_bytes, frozen_bytes, model_states, optimizer_named
from meshwright.costmodel.mesh import Batch, Mesh, Stepping
from meshwright.costmodel.operators import Pricer, Problem, Setting, matrices_of
from meshwright.costmodel.schedules import (
    SCHEDULES,
    Pipeline,
    build_schedule,
    moments,
    simulate_step,
)
from meshwright.costmodel.schedules.schedule import SENDS
from meshwright.costmodel.sharding import R
from meshwright.costmodel.sharing import Sharing
from meshwright.costmodel.stages.sums import LATER
from meshwright.costmodel.target import Target
from meshwright.costmodel.targets import EAGER, FSDP, MEGATRON
from meshwright.planner.plan.plan import OuterLoop
from meshwright.planner.pricing import Evaluation, Evaluator, Ledger
from meshwright.planner.pricing.segment_costs import segment_recompute
from meshwright.profiles.cluster import Cluster
from meshwright.shell.override_flags import overrides_of
from scripts.drawing.systems import FAMILIES, FOLDER, HERE, System, systems, with_table
from tests.costmodel.schedules.pipelines import times
from tests.executor.rehearsal.rehearsal_runs import checked_experts
from tests.helpers import planning
from tests.helpers.formulas import formulas, value
from tests.helpers.plan_building import Knobs, build_plan
from tests.helpers.replicas import Copies, copies_of_a_step
from tests.helpers.tiers import second_tier
from tests.helpers.tiny import cut, net, plan_for, with_stage
from tests.models.models import CASES as MODELS
from tests.parity.parity_cells import Cell, plan_of
from tests.planner.pricing.test_segments import INPUT, SAVED, segment
from tests.planner.serving import served

Measured = tuple[Mapping[str, float], list[float]]  # symbols; a number for each formula of a cell
EVERY = [system for family in FAMILIES for system in systems(family)]
NODES = Cluster.from_catalog("h100-sxm", num_nodes=2)
N, K, M, T = 16, 8, 2, 2
NUMEL = 1000.0
NEAR = 3e-3  # statistics of norms are in no formula
BY_TOKENS = {"transformer.h.*:add": "-> S(1)", "transformer.h.*:add#1": "-> S(1)"}


# --- collectives, states, the data axis -----------------------------------------------------------


def algorithm(place: int, size: int, nodes: int) -> Measured:
    """What a rank sends inside its node by an algorithm of an all-reduce."""
    on = Cluster.from_catalog("h100-sxm", num_nodes=nodes)
    route = routes("all_reduce", Group(size=size, per_node=size // nodes), on)[place]
    return {"n": size, "S": NUMEL}, [route.legs[0].share * NUMEL]


def states(zero: int, part: int = N, target: Target = EAGER, **more: Any) -> Measured:
    """Bytes of a rank's states, divided among `part`."""
    given: dict[str, Any] = {"weight_bytes": 2, "optimizer": optimizer_named("adamw")}
    sharing = Sharing(zero=zero)
    held = model_states(NUMEL, **{**given, **more}, sharing=sharing, dp=part, target=target)
    gradients = 4 if target.gradients_come else target.gradient_bytes
    symbols = {"Psi": NUMEL, "n": part, "k": part, "r": part, "g": gradients}
    return symbols, [held.nbytes]


@cache
def traced() -> Any:
    return cut(net(), precision="bf16")


def matrix(optimizer: str) -> tuple[Pricer, str, dict[str, float]]:
    """A model's matrix that an optimizer steps whole, on N ranks."""
    graph, factors = traced()
    problem = Problem(
        graph=graph, factors=factors, cluster=NODES, precision="bf16", optimizer=optimizer
    )
    setting = Setting(problem=problem, mesh=Mesh(dp=N, tp=1), batch=Batch(rows=1))
    pricer = Pricer(graph=graph, table=factors, setting=setting)
    named, sides = next(iter(matrices_of(graph, problem.stepped).items()))
    numel = graph.values[named].numel
    symbols = {"Psi": numel, "S": 4.0 * numel, "n": N, "g": 4, "r": sides.rows, "c": sides.columns}
    return pricer, named, symbols


def matrix_states(optimizer: str) -> Measured:
    """Bytes of a rank's states of a matrix, which ZeRO does not divide."""
    pricer, named, symbols = matrix(optimizer)
    given: dict[str, Any] = {"weight_bytes": 2, "optimizer": optimizer_named(optimizer)}
    moments = pricer.parameters.moment_bytes(named, R)
    held = model_states(symbols["Psi"], **given, sharing=Sharing(), dp=N, moments=moments)
    return symbols, [held.nbytes]


def matrix_sent(optimizer: str) -> Measured:
    """Bytes that a rank sends for a matrix in a step without ZeRO."""
    pricer, named, symbols = matrix(optimizer)
    entries, _ = pricer.parameters.priced(named, R)
    step = [entry for entry in entries if entry.column in ("reduce_s", "optimizer_s")]
    return symbols, [sum(entry.sent_bytes for entry in step)]


def compressed(name: str, column: str) -> Measured:
    """What a rank sends for a matrix by what stands for its gradient, or its states."""
    graph, factors = traced()
    problem = Problem(graph=graph, factors=factors, cluster=NODES, precision="bf16")
    sharing = Sharing(compressed=name)
    setting = Setting(problem=problem, mesh=Mesh(dp=N, tp=1), batch=Batch(rows=1), sharing=sharing)
    parameters = Pricer(graph=graph, table=factors, setting=setting).parameters
    named = next(v for v, of in graph.parameters.items() if of == "layers.0.up.weight")
    (rows, columns), how = graph.values[named].shape, sharing.compression
    assert how is not None
    symbols: dict[str, float] = {"a": rows, "b": columns, "Psi": rows * columns, "n": N, "g": 4}
    symbols |= {"r": how.rank, "k": math.floor(how.part * rows * columns)}
    if column == "volume":
        entries, _ = parameters.priced(named, R)
        return symbols, [sum(e.sent_bytes for e in entries if e.column == "reduce_s")]
    given: dict[str, Any] = {"weight_bytes": 2, "optimizer": optimizer_named("adamw")}
    moments = parameters.moment_bytes(named, R)
    held = model_states(symbols["Psi"], **given, sharing=sharing, dp=N, moments=moments)
    return symbols, [held.nbytes]


def by_servers(staleness: int, column: str, workers: int = 3) -> Measured:
    """What a worker and a server send and receive, or hold, of a model with one server."""
    graph, factors = traced()
    given: dict[str, Any] = {"precision": "bf16", "optimizer": "adamw_fused"}
    problem = Problem(graph=graph, factors=factors, cluster=NODES, **given)
    one = plan_for(graph, dp=1, tp=1, precision="bf16")
    priced = Evaluator(problem).price(one.served_by(1, workers, staleness))
    assert priced.served is not None
    (costs,), psi = priced.stages, graph.num_parameters()
    symbols = {"n": workers, "k": 1, "S": 4.0 * psi, "Psi": psi, "g": 4}
    if column == "volume":
        return symbols, [2 * priced.served.sent.sent_bytes, priced.served.link_bytes]
    beside = NODES.device.reserved_bytes + costs.communicator_bytes
    return symbols, [costs.kept_bytes, priced.served.server_bytes - beside]


def apart(column: str, bits: int = 32) -> Measured:
    """What a rank sends to other replicas in a step, or what its host keeps for them."""
    graph, factors = traced()
    loop, cluster = OuterLoop(replicas=2, sync_every=10, outer_bits=bits), NODES
    inner = plan_for(graph, dp=8, tp=1, global_batch_size=8, num_microbatches=1, precision="bf16")
    problem = Problem(graph=graph, factors=factors, cluster=cluster, precision="bf16")
    priced = Evaluator(problem).price(inner.repeated(loop))
    numel = graph.num_parameters()
    symbols: dict[str, float] = {"Psi": numel, "n": 8, "R": 2, "H": 10}
    assert priced.meeting is not None
    if column == "volume":
        return symbols, [priced.meeting.sent_bytes / loop.sync_every]
    return symbols, [priced.prediction.host_memory_bytes[0] / 8]


def kept_of_tokens(name: str) -> Measured:
    """Bytes that three rows of 16 tokens keep."""
    found = served.forwards(name, Cluster.from_catalog("h100-sxm"), precision="bf16")
    symbols = {
        "b": 3, "l": served.SMALL["num_hidden_layers"], "h": served.SMALL["hidden_size"], "s": 10,
        "n": 6, "k": 2, "a": served.SMALL["num_attention_heads"],
        "r": served.LATENT["kv_lora_rank"] + served.LATENT["qk_rope_head_dim"],
    }  # fmt: skip
    return symbols, [3 * sum(found.kept_bytes(1, 16))]


def priced(
    m: int = M, target: Target = EAGER, stepping: Stepping = "at_end", **stage: Any
) -> tuple[Evaluation, Problem]:
    """A small net on two nodes of 8 in bf16."""
    graph, factors = traced()
    given = {"num_microbatches": m, "precision": "bf16", "global_batch_size": N * m}
    plan = with_stage(plan_for(graph, dp=N, tp=1, **given), ranks=tuple(range(N)), dp=N, **stage)
    plan = plan.stepped(stepping)
    problem = Problem(graph=graph, factors=factors, cluster=NODES, precision="bf16", target=target)
    return Evaluator(problem).price(plan), problem


def sent(
    m: int = M, target: Target = EAGER, stepping: Stepping = "at_end", **stage: Any
) -> Measured:
    """Bytes on the data axis, and where there are any on the host's link."""
    evaluation, problem = priced(m, target, stepping, **stage)
    rows, psi = Ledger.of(evaluation).traffic(problem), problem.graph.num_parameters()
    by_axis = [[r.sent_bytes for r in rows if r.axis == axis] for axis in ("data", "host")]
    gradients = psi * target.gradient_bytes
    symbols = {"n": N, "k": K, "m": m, "S": gradients, "W": 2.0 * psi, "Psi": psi}
    return symbols, [sum(found) for found in by_axis if found]


def secondary() -> Measured:
    """States under ZeRO-3, and the secondary shards beside them."""
    evaluation, _ = priced(zero=3, hpz=K)
    symbols, (nbytes,) = states(3)
    return {**symbols, "k": K}, [nbytes + evaluation.priced[0].setting.secondary_bytes * NUMEL]


def stepped_in_the_backward() -> Measured:
    moments = optimizer_named("adamw_fused").moments * NUMEL
    given: dict[str, Any] = {"weight_bytes": 2, "kept": 4, "moments": (moments, moments)}
    return {"Psi": NUMEL}, [sum(fixed_bytes(NUMEL, 1, **given, sharing=Sharing()))]


def frozen() -> Measured:
    meta = TensorMeta(shape=(1,), dtype=torch.bfloat16, requires_grad=False)
    return {"Psi": NUMEL}, [frozen_bytes(meta, NUMEL)]


# --- passes ---------------------------------------------------------------------------------------


@cache
def cell(line: str) -> tuple[Evaluation, Problem]:
    plan, of = plan_of(Cell.parse(line))
    given = {"cluster": Cluster.from_catalog("h100-sxm"), "precision": plan.precision}
    problem = Problem(graph=of.graph, factors=of.table, **given)
    return Evaluator(problem).price(plan), problem


def passed(of: tuple[Evaluation, Problem], axis: str, block: str, where: str = "") -> float:
    """Bytes of a block's collectives on an axis in the passes of a micro-batch, or in one pass."""
    evaluation, _ = of
    (lines,) = Ledger.of(evaluation).stages
    found = sum(
        line.times * line.entry.sent_bytes
        for line in lines
        if (line.block, line.entry.axis) == (block, axis)
        and line.where in ([where] if where else ["forward", "backward"])
    )
    return found / evaluation.plan.num_microbatches


def operand(of: tuple[Evaluation, Problem], short: str, place: int = 0) -> float:
    """Bytes of an operand of the first such operator, in full, of a micro-batch."""
    graph = of[1].graph
    op = next(op for op in graph.ops if op.short == short)
    return 4.0 * graph.values[op.operands[place]].numel


def layer(line: str, block: str) -> Measured:
    """A Transformer's layer on the tensor axis."""
    of = cell(line)
    return {"t": T, "A": operand(of, "linear")}, [passed(of, "tensor", block)]


def plain_layer() -> Measured:
    of = cell("gpt2_tied tp2 1f1b m2")
    return {"t": T, "A": operand(of, "addmm", 1)}, [passed(of, "tensor", "transformer.h.1")]


def split_classes() -> Measured:
    """Labels are numbers of 8 bytes; the loss is the head's one collective in the forward."""
    of = cell("llama tp4 1f1b m2")
    logits = of[1].graph.values[
        next(op for op in of[1].graph.ops if op.short == "cross_entropy_loss").operands[0]
    ]
    rows = float(logits.shape[0])
    return {"t": 4, "b": rows, "s": 1.0}, [passed(of, "tensor", "head", "forward")]


def split_matrices() -> Measured:
    """States of the matrices of a layer under tp."""
    evaluation, problem = cell("gpt2_tied tp2 1f1b m2")
    values = problem.graph.values
    (stage,) = evaluation.priced
    matrices = [
        (value, state)
        for block in stage.blocks
        for value, state in block.parameters
        if len(values[value].shape) == 2 and block.block.name == "transformer.h.1"
    ]
    whole = float(sum(values[value].numel for value, _ in matrices))
    (per,) = states(0)[1]
    local = sum(stage.pricer.numel(value, state) for value, state in matrices)
    return {"Psi": whole, "t": T, "g": 4}, [local * per / NUMEL]


@cache
def transformer(attention: str) -> Problem:
    """A GPT-2 with its activation in one operator, in bf16."""
    config = transformers.GPT2Config(
        n_layer=2, n_embd=512, n_head=4, vocab_size=128, n_positions=256, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
        activation_function="gelu", attn_implementation=attention,
    )  # fmt: skip
    with torch.device("meta"):
        of = planning.cut(transformers.GPT2LMHeadModel(config), planning.token_batch(2, 256))
    return planning.problem_of(of, Cluster.from_catalog("h100-sxm"))


def kept(
    policy: str = "none", *, attention: str = "sdpa", t: int = 1, sequence: bool = False
) -> Measured:
    """Bytes that a layer keeps of a micro-batch, with its input."""
    problem = transformer(attention)
    own = {**MODELS["gpt2_tied"].shardings, **(BY_TOKENS if sequence else {})}
    knobs = {"rows": 2, "num_microbatches": 1, "precision": "bf16", "shardings": own}
    plan = build_plan(problem.graph, Knobs(meshes=((1, t),), **knobs))
    block = Evaluator(problem).price(plan).priced[0].blocks[-2]
    freed = block.passes.repeats[policy].freed_bytes if policy != "none" else 0.0
    entering = 2.0 * 2 * 256 * 512 / (t if sequence else 1)
    symbols = {"t": t, "s": 256, "b": 2, "h": 512, "a": 4}
    return symbols, [block.passes.saved_bytes - freed + entering]


def states_and_kept(*, sequence: bool) -> Measured:
    """Of a rank under tp: states, and what a layer keeps."""
    (symbols, first), (more, second) = split_matrices(), kept(t=T, sequence=sequence)
    return {**more, **symbols}, [*first, *second]


def fused_attention() -> Measured:
    """Bytes that written-out attention keeps beside."""
    (symbols, written), (_, fused) = kept(attention="eager"), kept()
    return symbols, [written[0] - fused[0]]


def attended(kind: str) -> Measured:
    of = cell(f"gpt2_tied cp4 {kind} m2")
    queries = operand(of, "scaled_dot_product_attention") / 4
    return {"n": 4, "L": queries}, [passed(of, "context", "transformer.h.1")]


SPLIT = {"layers.*.experts.gate": "S(2)", "layers.*.experts.up": "S(2)",
         "layers.*.experts.down": "S(1)"}  # fmt: skip


@cache
def experts(layout: str, ep: int, *, split: bool = False) -> tuple[Evaluation, Problem]:
    of = checked_experts(layout, ep, SPLIT if split else {})
    given = {"cluster": Cluster.from_catalog("h100-sxm"), "precision": of.plan.precision}
    problem = Problem(graph=of.of.graph, factors=of.of.table, **given)
    return Evaluator(problem).price(of.plan), problem


def exchanged(layout: str, ep: int, ranks: int, *, split: bool = False) -> Measured:
    of = experts(layout, ep, split=split)
    op = next(op for op in of[1].graph.ops if op.short == "dispatch")
    copies = 4.0 * of[1].graph.values[op.results[0]].numel / ranks
    return {"n": ep, "C": copies}, [passed(of, "experts", "layers.1")]


def held_experts(layout: str, ep: int, zero: int = 0, *, split: bool = False) -> Measured:
    """States of the experts' matrices."""
    evaluation, problem = experts(layout, ep, split=split)
    (stage,) = evaluation.priced
    stored = [stored for block in stage.blocks for stored in block.parameters]
    own = [pair for pair in stored if problem.factors.has_experts(pair[0])]
    whole = float(sum(problem.graph.values[value].numel for value, _ in own))
    local = sum(stage.pricer.numel(value, state) for value, state in own)
    symbols, (per,) = states(zero, part=2)
    return {**symbols, "Psi_e": whole, "n": ep, "t": T}, [local * per / NUMEL]


def once_a_node() -> Measured:
    """The part of a rank's copies that leaves the node, of 8 a token to 4 nodes."""
    sizes = {"copies": 8, "group": Group(size=4, per_node=1), "once_per_node": True}
    return {"N": 4, "k": 8, "C": 1.0}, [exchanged_bytes(1.0, **sizes)]


# --- pipelines ------------------------------------------------------------------------------------

GENERAL, EVEN = (4.0, 5.0, 3.0), (4.0, 4.0, 3.0)  # F, I, W; those for which the formula holds


def pipelined(
    name: str,
    column: str,
    own: tuple[float, float, float] = GENERAL,
    *,
    m: int = 16,
    p: int = 4,
    slices: int = 1,
) -> Measured:
    each = SCHEDULES[name].stages_per_device or 3
    of, (f, i, w) = Pipeline(name, p * each, m * slices, p, slices), [s / slices for s in own]
    copies = of.record.pipelines(of.num_stages)
    edges = dict.fromkeys((edge for copy in copies for edge in pairwise(copy)), 0.0)
    streams = build_schedule(of, edges)
    ideal_s = of.num_microbatches * each / of.record.copies * (f + i + w)
    seconds = {"F": f, "I": i, "W": w, "B": i + w, "T_0": ideal_s}
    symbols = {"p": p, "v": each, "m": m, "c": slices, "A": 1.0, **seconds}
    if column == "volume":
        return symbols, [sum(one.action in SENDS for one in streams[1]) / slices]
    if column == "memory":
        most = max(sum(x.active) + sum(x.put_off) for held in moments(of) for x in held)
        weights = [] if of.record.flushes else [float(of.versions(0))]
        return symbols, [most * of.record.copies / each / slices, *weights]
    step = simulate_step(of, streams, [times(f, i + w, weight=w)] * of.num_stages, edges)
    if column == "seconds":
        return {**symbols, "K": m / p}, [step.pipeline_s - ideal_s, step.period_s - ideal_s]
    took_s = step.period_s if of.record.staggered else step.pipeline_s
    return symbols, [(took_s - ideal_s) / ideal_s]


def branched(column: str, *, m: int = 16, b: int = 2, p: int = 5) -> Measured:
    """Branches of equal stages before a trunk, each stage on a group of its own, under 1F1B."""
    of_branch = (p - 1) // b
    depths = (*range(1 + of_branch, 1, -1),) * b + (1,)
    of = Pipeline("1f1b", p, m, p, depths=depths, groups=tuple(range(p)))
    chains = [(*range(k * of_branch, (k + 1) * of_branch), p - 1) for k in range(b)]
    edges = dict.fromkeys((edge for chain in chains for edge in pairwise(chain)), 0.0)
    streams, (f, i, w) = build_schedule(of, edges), GENERAL
    symbols = {"p": p, "b": b, "m": m, "A": 1.0}
    if column == "volume":
        return symbols, [sum(one.action in SENDS for one in streams[of_branch - 1])]
    if column == "memory":
        return symbols, [max(sum(x.active) for held in moments(of) for x in held)]
    step, ideal_s = (
        simulate_step(of, streams, [times(f, i + w, weight=w)] * p, edges),
        m * (f + i + w),
    )
    return symbols, [(step.pipeline_s - ideal_s) / ideal_s]


BUBBLES = (FOLDER.parent / "decides" / "schedules.md").read_text(encoding="utf-8")
ROWS = re.findall(r"^\| (`.*`) \| (.*?) \|.*\|$", BUBBLES, re.MULTILINE)
WRITTEN = {name: cell for names, cell in ROWS for name in re.findall(r"`(\w+)`", names)}


@pytest.mark.parametrize("name", SCHEDULES)
def test_bubbles_are_those_of_the_simulation(name: str) -> None:
    own = EVEN if name in ("zb_v", "dualpipe_v", "dualpipe") else GENERAL
    symbols, (common, validated) = pipelined(name, "seconds", own)
    found = [value(formula, symbols) for formula in formulas(WRITTEN[name])]
    wanted = [common, validated] if SCHEDULES[name].staggered else [common]
    assert found == pytest.approx(wanted[-len(found) :]) and found


# --- what is compared -----------------------------------------------------------------------------


def segmented(size: int, policy: str, blocks: int = 16) -> Measured:
    """Bytes of a stage of blocks in segments, at the highest point of a backward."""
    found = segment_recompute(segment(policy, size))
    held = blocks * SAVED - blocks / size * found.freed_bytes + found.excess[LATER]
    return {"l": blocks, "k": size, "A": INPUT, "K": SAVED}, [float(held)]


def one_process(m: int = 3) -> tuple[dict[str, float], list[float], Copies]:
    """Bytes of a device's broadcasts and reductions by price; of states, the first device's and the
    others'; what torch's own code copies."""
    rows, tokens, classes = 2, 5, 12
    with torch.device("meta"):
        module = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.Linear(16, classes))
        copies = copies_of_a_step(module, torch.empty(rows, tokens, 8), devices=N, microbatches=m)
    psi = sum(p.numel() for p in module.parameters())
    symbols = {"Psi": psi, "S": 4.0 * psi, "n": N, "m": m, "b": rows, "s": tokens, "V": classes}
    (held,) = states(0, weight_bytes=4)[1]
    rings = m * 2 * bytes_sent("broadcast", 4.0 * psi, N)
    return symbols, [rings, held * psi / NUMEL, copies.replica], copies


def exchanged_in_one_process() -> Measured:
    symbols, (sent, *_), _ = one_process()
    return symbols, [sent]


def held_in_one_process() -> Measured:
    symbols, (_, *held), _ = one_process()
    return symbols, held


def checkpoints() -> Measured:
    """Bytes that recomputed blocks keep of a micro-batch."""
    blocks, again = 16, segment("full", 1)[0].sums.recompute("full")
    return {"l": blocks, "A": INPUT}, [blocks * (SAVED - float(again.freed_bytes))]


def run_again() -> Measured:
    """Every block by itself: what is made again is all but its input."""
    blocks, again = 16, segment("full", 1)[0].sums.recompute("full")
    held = blocks * SAVED - blocks * again.freed_bytes + again.excess[LATER]
    return {"l": blocks, "A": INPUT, "K": SAVED}, [float(held)]


ZERO_1, ZERO_2, ZERO_3 = (partial(sent, zero=zero) for zero in (1, 2, 3))
SHARDED = {"volume": partial(sent, zero=3, dp_shard=K), "memory": partial(states, 3, K)}
COLUMNS: Mapping[str, Mapping[str, Callable[[], Measured]]] = {
    "DDP": {"volume": partial(sent, zero=0), "memory": partial(states, 0)},
    "nn.DataParallel": {"volume": exchanged_in_one_process, "memory": held_in_one_process},
    "Ring all-reduce, Horovod": {"volume": partial(algorithm, 0, 8, 1)},
    "Double binary tree": {"volume": partial(algorithm, 1, 64, 8)},
    "In-network reduction (SHARP)": {"volume": partial(algorithm, 1, 8, 1)},
    "Hierarchical all-reduce": {
        "volume": partial(sent, zero=1, dp_shard=K), "memory": partial(states, 1, K),
    },
    "Gradient accumulation": {"volume": partial(sent, 4, zero=0)},
    "PowerSGD of rank r": {
        column: partial(compressed, "powersgd-4", column) for column in ("volume", "memory")
    },
    "Top-k with a memory of errors": {
        column: partial(compressed, "topk-1", column) for column in ("volume", "memory")
    },
    **{
        name: {column: partial(by_servers, late, column) for column in ("volume", "memory")}
        for name, late in (
            ("Parameter server", 0), ("Stale synchronous parallel (SSP)", 1),
            ("Asynchronous SGD (Downpour)", 2**31),
        )
    },
    "Local SGD": {column: partial(apart, column) for column in ("volume", "memory")},
    "DiLoCo": {column: partial(apart, column) for column in ("volume", "memory")},
    "Streaming DiLoCo": {column: partial(apart, column, 8) for column in ("volume", "memory")},
    "ZeRO-1": {"volume": ZERO_1, "memory": partial(states, 1)},
    "Weight-update sharding": {"volume": ZERO_1, "memory": partial(states, 1)},
    "Distributed optimizer (Megatron)": {
        "volume": partial(sent, target=MEGATRON, zero=1),
        "memory": partial(states, 1, target=MEGATRON),
    },
    "ZeRO-2": {"volume": ZERO_2, "memory": partial(states, 2)},
    "FSDP, SHARD_GRAD_OP": {
        "volume": partial(sent, target=FSDP, zero=2), "memory": partial(states, 2, target=FSDP),
    },
    "ZeRO-3": {"volume": ZERO_3, "memory": partial(states, 3)},
    "FSDP, FULL_SHARD": {"volume": ZERO_3, "memory": partial(states, 3)},
    "HSDP": SHARDED,
    "MiCS": SHARDED,
    "ZeRO++ hpZ": {"volume": partial(sent, zero=3, hpz=K), "memory": secondary},
    "ZeRO++ qwZ": {
        "volume": partial(sent, zero=3, quantized="weights"), "memory": partial(states, 3),
    },
    "ZeRO++ qgZ": {
        "volume": partial(sent, zero=3, quantized="gradients"), "memory": partial(states, 3),
    },
    "ZeRO-Offload": {
        "volume": partial(sent, 1, zero=2, offload={"optimizer": 1.0}),
        "memory": partial(states, 2, away=(1.0, 1.0)),
    },
    "ZeRO-R, activations": {
        "volume": partial(layer, "llama tp2 1f1b m2 sequence full", "model.layers.1"),
    },
    "ZeRO-R, defragmentation": {"memory": checkpoints},
    "Optimizer in the backward (LOMO)": {
        "volume": partial(sent, 1, stepping="in_backward"), "memory": stepped_in_the_backward,
    },
    "Megatron, 1D": {"volume": plain_layer, "memory": partial(states_and_kept, sequence=False)},
    "Sequence parallelism": {
        "volume": partial(layer, "llama tp2 1f1b m2 sequence", "model.layers.1"),
        "memory": partial(states_and_kept, sequence=True),
    },
    "Sequence parallelism, gathers again": {
        "volume": partial(layer, "llama tp2 1f1b m2 sequence regather", "model.layers.1"),
        "memory": partial(kept, "regather", t=4, sequence=True),
    },
    "Vocabulary-parallel embedding and loss": {"volume": split_classes},
    "Ring Attention": {"volume": partial(attended, "ring")},
    "All-gather of keys and values (Llama 3)": {"volume": partial(attended, "all_gather")},
    "Ulysses": {"volume": partial(attended, "ulysses")},
    "Layers by hand, one batch": {
        column: partial(pipelined, "gpipe", column, m=1)
        for column in ("volume", "memory", "bubble")
    },
    **{
        words: {
            column: partial(pipelined, name, column, own)
            for column in ("volume", "memory", "bubble")
        }
        for words, name, own in (
            ("GPipe", "gpipe", GENERAL), ("1F1B (PipeDream-Flush, DAPPLE)", "1f1b", GENERAL),
            ("Eager 1F1B", "eager_1f1b", GENERAL), ("ZB-H1", "zb_h1", GENERAL),
            ("Interleaved 1F1B", "interleaved_1f1b", GENERAL), ("ZB-H2", "zb_h2", GENERAL),
            ("ZB-V", "zb_v", EVEN), ("DualPipeV", "dualpipe_v", EVEN),
            ("DualPipe", "dualpipe", EVEN), ("Chimera", "chimera", GENERAL),
            ("PipeDream-2BW", "pipedream_2bw", GENERAL),
        )
    },
    "PipeDream": {
        column: partial(pipelined, "pipedream", column, m=1)
        for column in ("volume", "memory", "bubble")
    },
    **{
        words: {
            column: partial(pipelined, name, column, m=2, slices=5)
            for column in ("volume", "memory", "bubble")
        }
        for words, name in (
            ("TeraPipe", "gpipe"), ("Seq1F1B", "1f1b"), ("SlimPipe", "interleaved_1f1b"),
        )
    },
    "GraphPipe (branches apart)": {
        column: partial(branched, column) for column in ("volume", "memory", "bubble")
    },
    "Mixture of experts, unsplit": {
        "volume": partial(exchanged, "dp4 m2", 1, 4), "memory": partial(held_experts, "dp4 m2", 1),
    },
    "GShard": {
        "volume": partial(exchanged, "dp4 m2", 4, 4), "memory": partial(held_experts, "dp4 m2", 4),
    },
    "Switch": {
        "volume": partial(exchanged, "dp4 m2", 4, 4), "memory": partial(held_experts, "dp4 m2", 4),
    },
    "Experts and ZeRO over all ranks (DeepSpeed-MoE)": {
        "volume": partial(exchanged, "dp4 m2", 2, 4),
        "memory": partial(held_experts, "dp4 m2", 2, 1),
    },
    "Experts and tensor parallelism (TED)": {
        "volume": partial(exchanged, "dp2xtp2 m2", 2, 2, split=True),
        "memory": partial(held_experts, "dp2xtp2 m2", 2, split=True),
    },
    "Dispatch once a node (DeepEP)": {"volume": once_a_node},
    "Checkpointing, √n": {"memory": partial(segmented, 4, "none")},
    "Checkpointing, √n, twice": {"memory": partial(segmented, 4, "full")},
    "Checkpointing, every block": {"memory": run_again},
    "Selective recompute": {"memory": partial(kept, "selective", attention="eager")},
    "FlashAttention": {"memory": fused_attention},
    "Mixed precision": {"memory": partial(states, 0)},
    "Pure bf16": {"memory": partial(states, 0, optimizer=optimizer_named("adamw", 2))},
    "8-bit optimizers": {"memory": partial(states, 0, optimizer=optimizer_named("adamw8bit"))},
    "LAMB": {"memory": partial(states, 0, optimizer=optimizer_named("lamb"))},
    "LARS": {"memory": partial(states, 0, optimizer=optimizer_named("lars"))},
    "Adafactor": {"memory": partial(matrix_states, "adafactor")},
    "Muon": {
        "volume": partial(matrix_sent, "muon"), "memory": partial(matrix_states, "muon"),
    },
    "Shampoo": {
        "volume": partial(matrix_sent, "shampoo"), "memory": partial(matrix_states, "shampoo"),
    },
    "Keys and values kept": {"memory": partial(kept_of_tokens, "llama")},
    "Grouped heads": {"memory": partial(kept_of_tokens, "grouped")},
    "Latent attention": {"memory": partial(kept_of_tokens, "latent")},
    "LoRA": {"memory": frozen},
}  # fmt: skip
# of what is here, with the reason
UNMEASURED = {
    ("Folding", "volume"): "GShard's, over the ranks of two axes",
    ("Folding", "memory"): "GShard's, over the ranks of two axes",
    ("Offload of activations", "volume"): "of unequal blocks, as few as pay",
    ("Offload of activations", "memory"): "of unequal blocks, as few as pay",
}
CASES = [(name, column) for name, of in COLUMNS.items() for column in of]
# a trace of a Transformer with either attention
KEPT = {"Megatron, 1D", "Sequence parallelism", "Sequence parallelism, gathers again",
        "Selective recompute", "FlashAttention"}  # fmt: skip
BY_HAND = second_tier("what a layer keeps is a closed form in test_block_memory, too")
BY_NAME = {system.name: system for system in EVERY}


@pytest.mark.parametrize(
    ("name", "column"),
    [
        pytest.param(*case, marks=BY_HAND if case[0] in KEPT and case[1] == "memory" else ())
        for case in CASES
    ],
    ids=str,
)
def test_formulas_are_those_of_the_product(name: str, column: str) -> None:
    symbols, measured = COLUMNS[name][column]()
    written = formulas(BY_NAME[name].cells[column])
    assert written, f"{name} has no formula of its {column}"
    assert [value(formula, symbols) for formula in written] == pytest.approx(measured, rel=NEAR)


def test_every_formula_of_what_is_here_is_compared() -> None:
    costs = ("volume", "memory", "bubble")
    written = {
        (system.name, column)
        for system in EVERY
        for column in costs
        if system.here == "yes" and formulas(system.cells.get(column, ""))
    }
    assert written - {*CASES} == {*UNMEASURED}


def test_rows_say_whether_a_system_is_here_and_if_not_what_is() -> None:
    for family in FAMILIES:
        text = (FOLDER / f"{family}.md").read_text(encoding="utf-8")
        for system in systems(family):
            assert system.here in HERE, system.name
            assert system.here == "no" or system.cells["as"], system.name
            noted = f"- **{system.name}**: " in text
            assert noted == (system.here != "yes"), system.name


def flags_of(system: System) -> list[str]:
    """Commands of a row, letters as numbers."""
    spans = re.findall(r"`(--[^`]+)`", system.cells["as"])
    fixed = [span.replace("GLOB", "layers.*").replace("DECISION", "colwise") for span in spans]
    parts = [re.sub(r"(?<=[=])x\b", "0.5", span) for span in fixed]
    return [re.sub(r"(?<= )[a-z]\b", "2", span) for span in parts]


@pytest.mark.parametrize("system", EVERY, ids=lambda system: system.name)
def test_flags_are_legal(system: System) -> None:
    parser = parser_of(["plan"])
    for flags in flags_of(system):
        given = parser.parse_args(["plan", "module:model", "--batch", "8", *flags.split()])
        assert overrides_of(given) is not None


def test_the_index_lists_all_pages() -> None:
    index = (FOLDER / "index.md").read_text(encoding="utf-8")
    assert with_table(index) == index


def test_formulas_are_read_as_written() -> None:
    symbols = {"n": 4.0, "S": 3.0, "Psi_e": 5.0, "p": 2.0}
    assert value("2(n-1)S/n", symbols) == 4.5
    assert value("(2+12/n)\\Psi_e", symbols) == 25.0
    assert value("(n/p-1)S^p", symbols) == 9.0
    assert value(r"2\max(n, p+S)", symbols) == 10.0
    with pytest.raises(ValueError, match="more than"):
        value("n = p", symbols)
