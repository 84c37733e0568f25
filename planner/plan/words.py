"""Plans, meshes, policies, seconds and counts as text, for reports and errors."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from meshwright.planner.decisions import DECISIONS, SHARING
from meshwright.planner.plan.plan import Plan, StagePlan

if TYPE_CHECKING:
    from meshwright.costmodel.sharding import Meeting

GIB = 2**30
MARGIN_STEPS = 1000  # parts to which a memory margin is said
MOST_LETTERS = 3  # layers of a stage that are spelled out
ALONE = "one device"  # of a stage
MAX_MEETINGS = 3  # operators in which rows meet that are named
LEAST_S = 1e-9  # no device does anything in less
ROUNDS_UP = 0.9995  # of a unit: three digits show it as 1
_OF_ZERO = tuple(d for d in SHARING if d.column == "ZeRO")


def margin_beside(peak_bytes: float, memory_bytes: float) -> float:
    """The largest memory margin that leaves room for a plan, as a message says it."""
    return math.floor(MARGIN_STEPS * (1 - peak_bytes / memory_bytes)) / MARGIN_STEPS


def counted(value: float) -> str:
    """1.3 B, 124 M, 808: a number of parameters."""
    for unit, scale in ((" B", 1e9), (" M", 1e6), (" k", 1e3)):
        if value >= ROUNDS_UP * scale:
            return f"{value / scale:.3g}{unit}"
    return f"{value:.0f}"


def sized(nbytes: float) -> str:
    """75.6 GiB, 12.3 MiB, 808 KiB, 1,024 GiB: bytes of a device."""
    for unit, scale in (("GiB", GIB), ("MiB", 2**20)):
        if nbytes >= ROUNDS_UP * scale:
            return f"{_digits(nbytes / scale)} {unit}"
    return f"{nbytes / 2**10:.3g} KiB"


def peak_words(moment: str, block: str | None) -> str:
    """`backward of h.11`, `optimizer`: when a device's memory is highest, as a report has it."""
    return moment.replace("_", " ") + (f" of {block}" if block else "")


def slower(part: float) -> str:
    """+12.3%, -4.5%: a part more than another; 2.5 times, from twice as much on."""
    return f"{part:+.1%}" if part <= 1 else f"{_digits(1 + part)} times"


def _digits(value: float) -> str:
    """Three digits, or all before the point."""
    return f"{value:.3g}" if value < 1000 * ROUNDS_UP else f"{value:,.0f}"


def seconds(value: float) -> str:
    """1.23 s, 4.56 ms, 7.89 µs; 0 µs for what rounding leaves of nothing."""
    value = float(value)
    if value < LEAST_S:
        return "0 µs"
    for unit, scale in (("s", 1.0), ("ms", 1e-3)):
        if value >= ROUNDS_UP * scale:
            return f"{_digits(value / scale)} {unit}"
    return f"{value / 1e-6:.3g} µs"


def made_words(made: Mapping[str, str]) -> str:
    """On 2026-11-29 by meshwright 0.1.0, torch 2.13.0; nothing of plans that don't say."""
    versions = ", ".join(f"{name} {made[name]}" for name in ("meshwright", "torch") if name in made)
    return f"on {made['date']} by {versions}" if "date" in made else ""


def describe(plan: Plan) -> str:
    """A plan in a line: degrees, schedule, micro-batches."""
    meshes = list(dict.fromkeys(map(mesh_words, plan.stages)))
    mesh = " | ".join(meshes[:4]) + (" ..." if len(meshes) > 4 else "")
    groups = len(plan.devices)
    per_group = len(plan.stages) // groups
    words = [
        mesh if groups == 1 else f"pp{groups}" if meshes == [ALONE] else f"pp{groups} × {mesh}"
    ]
    if groups > 1:
        words.append(plan.schedule + f" with {per_group} stages on each" * (per_group > 1))
    spoken = [(d, d.line) for d in DECISIONS.values() if d.line and d not in _OF_ZERO]
    words += [line([getattr(plan, d.name)]) for d, line in spoken if d.acts == "plan"]
    words += [
        f"{_many(plan.num_microbatches, 'micro-batch', 'es')} of "
        f"{_many(plan.of_one_replica.microbatch_rows, 'row')}",
        _zero_words(plan),
    ]
    words += [
        line([value for stage in plan.stages for value in stage.values(d.name)])
        for d, line in spoken
        if d.acts != "plan"
    ]
    return ", ".join(filter(None, words))


def stage_layout(plan: Plan) -> list[list[int]]:
    """The blocks of each stage of each device group."""
    return [
        [len(stage.blocks) for stage in plan.stages if stage.ranks == ranks]
        for ranks in plan.devices
    ]


def layout_words(plan: Plan) -> str:
    """0: 3+2, 1-5: 2+2, 6: 2+3: the blocks of each stage by device group."""
    words, last = list[str](), -1
    for blocks, groups in itertools.groupby(stage_layout(plan)):
        first, last = last + 1, last + len([*groups])
        words.append(f"{first}{f'-{last}' * (last > first)}: {'+'.join(map(str, blocks))}")
    return ", ".join(words)


def megatron_layout(plan: Plan) -> str | None:
    """Megatron-Core's `--pipeline-model-parallel-layout`: E is the embedding, t a layer, L the loss
    with what is before it, each stage but the last ends with |, and `*n` repeats what is before it
    (megatron/core/transformer/pipeline_parallel_layer_layout.py). None where the model is no row of
    layers between the two, or stage k of p device groups lies on another than k mod p."""
    names = [name for stage in plan.stages for name in stage.blocks]
    stack = names[1].rpartition(".")[0]
    row = ["embed", *(f"{stack}.{k}" for k in range(len(names) - 2)), "head"]
    in_turn = plan.devices * (len(plan.stages) // len(plan.devices))
    if names != row or tuple(stage.ranks for stage in plan.stages) != in_turn:
        return None
    stages = []
    for stage in plan.stages:
        first, last = ("embed" in stage.blocks, "head" in stage.blocks)
        count = len(stage.blocks) - first - last
        layers = "t" * count if count <= MOST_LETTERS else f"t*{count}"
        stages.append("E" * first + layers + "L" * last)
    layout = ""
    for text, repeats in itertools.groupby(stages[:-1]):
        count = len([*repeats])
        layout += f"{text}|" if count == 1 else f"({text}|)*{count}"
    return layout + stages[-1]


def mesh_words(stage: StagePlan) -> str:
    """dp4×tp2; dp8 (ep4)×cp4 (ring)×tp2: the factors of a stage's devices, and by each what lies
    within it, experts where their ranks are complete."""
    words, ranks, ep = list[str](), 1, stage.ep
    for axis in ("dp", "cp", "tp"):
        if (degree := getattr(stage, axis)) > 1:
            ranks *= degree
            inside = [getattr(stage, d.name) for d in DECISIONS.values() if d.beside == axis]
            if ep > 1 and ranks % ep == 0:
                inside, ep = [*inside, f"ep{ep}"], 1
            words.append(f"{axis}{degree}" + "".join(f" ({name})" for name in inside))
    return "×".join(words) or ALONE


def _zero_words(plan: Plan) -> str:
    """ZeRO-1, ZeRO-3 within 8 ranks, ZeRO-3 (secondary shards among 8), ZeRO-1 on some stages;
    nothing where there is none."""
    stages = [stage for stage in plan.stages if stage.divides]
    lines = ((d.line, [getattr(stage, d.name) for stage in stages]) for d in _OF_ZERO)
    text = "".join(line(values) for line, values in lines if line and values)
    return text + " on some stages" * (0 < len(stages) < len(plan.stages))


def decision_words(stage: StagePlan, policy: str = "") -> dict[str, str]:
    """Decisions of a stage, or of a block of it with a `policy`, in the columns of a report: mesh
    "dp4×tp2", ZeRO "3 within 8, hpZ 4", recompute "6 full 2 none, in 4s"."""
    words = defaultdict[str, str](str, mesh=mesh_words(stage))
    for name, decision in DECISIONS.items():
        if decision.acts == "block":
            words[decision.column] = policy or policy_counts(stage.policies)
        elif decision.written == "stage" or decision in SHARING:
            value = getattr(stage, name)
            if decision.always or value != decision.off:
                words[decision.column or name] += decision.cell(value)
    return dict(words)


def _many(count: int, thing: str, ending: str = "s") -> str:
    return f"{count} {thing}" + (ending if count > 1 else "")


def policy_counts(policies: Sequence[str]) -> str:
    """The policies of blocks: full, or 6 full 2 none."""
    counts = Counter(policies)
    return policies[0] if len(counts) == 1 else " ".join(f"{n} {p}" for p, n in counts.items())


def meeting_words(meetings: Sequence[Meeting]) -> str:
    """The first operators in which rows meet, with their source lines."""
    rest = len(meetings) - MAX_MEETINGS
    named = ", ".join(map(str, meetings[:MAX_MEETINGS]))
    return named + (f" and {rest} more" if rest > 0 else "")


def kept_together(meetings: Sequence[Meeting]) -> str:
    """The reason that a batch stays in one micro-batch, and the way out."""
    return (
        f"rows of the batch meet in {meeting_words(meetings)}, so that the loss of several "
        'micro-batches is another one; rows_meet="per_microbatch" consents to rows that meet '
        "within each micro-batch only"
    )
