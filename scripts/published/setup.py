"""Published configurations, and the plans that they stand for.

Frameworks cut a model by rule: equal runs of layers on every stage, Megatron's tensor parallelism
inside them. `rows.py` reads rows into a `Setup`; here it becomes a `Plan`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.mesh import RING, Mesh
from meshwright.costmodel.sharing import Sharing
from meshwright.planner.plan import Plan, fingerprint, recompute_of, stage_on
from meshwright.planner.plan.shardings import resolve_block
from meshwright.profiles.cluster import Cluster
from scripts.published.frameworks import Framework, Unpriced
from scripts.published.models import TransformerDims


@dataclass(frozen=True, slots=True, kw_only=True)
class Setup:
    """A published configuration: model, cluster, framework and degrees.

    `chunks` are stages per device; they and `micro_batch` (rows) are 0 where they are unknown.
    `recompute` is the policy of `recompute_part` of the layers.
    """

    dims: TransformerDims
    cluster: Cluster
    framework: Framework
    precision: str
    tp: int
    pp: int
    cp: int
    ep: int
    dp: int
    chunks: int
    sharing: Sharing
    recompute: str
    micro_batch: int
    global_batch: int
    assumptions: tuple[str, ...]
    recompute_part: float = 1.0
    experts_by_tensor: bool = False  # experts' matrices are split over the tensor axis
    loss_parts: int = 1


def make_plan(setup: Setup, graph: Graph) -> Plan:
    """The plan of a configuration: equal runs of layers, the embedding with the first and the head
    with the last; tensor parallelism innermost, then context, then data, the pipeline outermost."""
    names = [block.name for block in graph.blocks]
    stages = setup.pp * setup.chunks
    size = setup.dp * setup.cp * setup.tp
    head = head_in_layers(setup.dims) if setup.framework.balances_stages else 0.0
    cuts = _cuts(names, setup.dims.layers, stages, head)
    shardings, block_of = _shardings(setup), {block.name: block for block in graph.blocks}
    plans = []
    experts = setup.ep if setup.dims.experts else 1
    mesh = Mesh(dp=setup.dp, tp=setup.tp, cp=setup.cp, ep=experts)
    for k in range(stages):
        blocks = tuple(names[cuts[k] : cuts[k + 1]])
        first = (k % setup.pp) * size
        named = {p for b in blocks for p in resolve_block(graph, block_of[b], shardings, "plan")[1]}
        plans.append(
            replace(
                stage_on(
                    mesh.of_kind(RING), blocks, tuple(range(first, first + size)), setup.sharing
                ),
                recompute=of_layers(setup.recompute, blocks, setup.recompute_part),
                shardings={p: shardings[p] for p in shardings if p in named},
            )
        )
    return Plan(
        model=fingerprint(graph),
        global_batch_size=setup.global_batch,
        num_microbatches=setup.global_batch // (setup.micro_batch * setup.dp),
        schedule="interleaved_1f1b" if setup.chunks > 1 else "1f1b",
        precision=setup.precision,
        stages=tuple(plans),
        chunked_loss=setup.loss_parts,
    )


def of_layers(policy: str, blocks: Sequence[str], part: float = 1.0) -> Any:
    """A stage's `recompute` with this policy for its layers, or for a part of them spread evenly:
    frameworks wrap these alone, not the embedding or the head."""
    return recompute_of(blocks, [policy if _wrapped(name, part) else "none" for name in blocks])


def _wrapped(block: str, part: float) -> bool:
    if not block.startswith("layers."):
        return False
    number = int(block.split(".")[1])
    return math.floor((number + 1) * part + 1e-9) > math.floor(number * part + 1e-9)


def head_in_layers(dims: TransformerDims) -> float:
    """The products of the head over those of a layer."""
    wide = (2 * dims.heads + 2 * dims.kv_heads) * dims.head_dim
    width = dims.ffn * (3 if dims.activation == "swiglu" else 2)
    return dims.vocab / (wide + width)


def _cuts(names: list[str], layers: int, stages: int, head: float = 0.0) -> list[int]:
    """Block index at which each stage starts, and the end. The last stage has fewer layers where
    the `head` counts as so many, and none where it counts as more than a stage has; where layers
    don't divide, the stages at the ends, which have the embedding and the head, get fewer."""
    is_layer = [bool(re.fullmatch(r"layers\.\d+", name)) for name in names]
    if sum(is_layer) != layers:
        raise Unpriced(f"the model was cut into {names}, not into {layers} layers")
    fewer = round(head * (stages - 1) / stages) if stages > 1 else 0
    alone = fewer * (stages - 1) >= layers > 0  # the others have less than the head
    sharing = stages - alone
    base, extra = divmod(layers + (0 if alone else fewer), sharing)
    counts = [base] * sharing
    middle_first = sorted(range(sharing), key=lambda k: (k in (0, stages - 1), k))
    for k in middle_first[:extra]:
        counts[k] += 1
    if alone:
        counts.append(0)
    else:
        counts[-1] -= fewer
    cuts, position = [0], is_layer.index(True)
    for count in counts[:-1]:
        position += count
        cuts.append(position)
    return [*cuts, len(names)]


def _shardings(setup: Setup) -> dict[str, str]:
    """Megatron's tensor parallelism, of all kinds of layers."""
    if setup.tp == 1:
        return {}
    colwise = ["mlp.up", "mlp.gate", "mlp.shared.up", "mlp.shared.gate"]
    colwise += [f"attention.{name}" for name in ("qkv", "q_up", "kv_up")]
    rowwise = ("attention.proj", "mlp.down", "mlp.shared.down")
    decisions = {
        **{f"layers.*.{name}": "colwise" for name in colwise},
        **{f"layers.*.{name}": "rowwise" for name in rowwise},
        "embedding": "vocab",
        "head": "colwise",
    }
    if setup.experts_by_tensor:
        split = {"gate": "S(2)", "up": "S(2)", "down": "S(1)"}
        decisions |= {f"layers.*.mlp.experts.{name}.weight": at for name, at in split.items()}
    if setup.framework.sequence_parallel:
        decisions |= {f"layers.*:{add}": "-> S(1)" for add in ("add", "add#1")}
    return decisions
