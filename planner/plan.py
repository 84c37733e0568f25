"""The Plan: decisions only, keyed by names and globs, in JSON that a person can read, edit and diff.

A plan says for every stage which blocks it runs, on which ranks, on what (dp, tp) mesh, with which
ZeRO stage and recompute, and the shardings that do not follow from others (`layouts.py`). Costs are not in it:
they belong to the report.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from costmodel.factors import FactorTable
from costmodel.graph import Block, Graph
from costmodel.schedule import SCHEDULES
from planner.layouts import FOLLOW, Assignment, BlockLayouts, Entry

FORMAT = 1
RECOMPUTE = ("none", "full")
ZERO = (0, 1)
PRECISIONS = ("fp32", "bf16", "fp16")


class PlanError(ValueError):
    """A plan that can't hold: says which value, where, what is legal and the way out."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StagePlan:
    """One pipeline stage. `ranks` are global, laid out (dp, tp) with tp innermost. `shardings` maps globs
    over operator keys (`transformer.h.*.mlp.c_fc:addmm`) or parameter FQNs to decisions (`colwise`, `S(0)@tp`)."""

    blocks: tuple[str, ...]
    ranks: tuple[int, ...]
    dp: int
    tp: int
    zero: int = 0
    recompute: str = "none"
    shardings: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """How to train one model: micro-batches of `global_batch_size / num_microbatches` rows through `stages`.

    `model` is the fingerprint of the model it was made for.
    """

    model: str
    global_batch_size: int
    num_microbatches: int
    schedule: str
    precision: str
    stages: tuple[StagePlan, ...]

    @property
    def num_ranks(self) -> int:
        return sum(len(stage.ranks) for stage in self.stages)

    @property
    def microbatch_rows(self) -> int:
        """Rows of one micro-batch over all data-parallel ranks of a stage."""
        return self.global_batch_size // self.num_microbatches

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; an existing file is replaced."""
        Path(path).write_text(self.to_json())

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan. Raises `PlanError` for a missing or malformed file or a newer format."""
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise PlanError(
                f"plan file {str(path)!r}: {error.strerror}; `meshwright plan` writes one"
            ) from None
        return Plan.from_json(text, name=str(path))

    def to_json(self) -> str:
        stages = [
            {
                "blocks": compress_names(stage.blocks),
                "ranks": compress_ranks(stage.ranks),
                "mesh": {"dp": stage.dp, "tp": stage.tp},
                "zero": stage.zero,
                "recompute": stage.recompute,
                "shardings": dict(sorted(stage.shardings.items())),
            }
            for stage in self.stages
        ]
        top = {
            "format": FORMAT,
            "model": self.model,
            "global_batch_size": self.global_batch_size,
            "num_microbatches": self.num_microbatches,
            "schedule": self.schedule,
            "precision": self.precision,
            "stages": stages,
        }
        text = json.dumps(top, indent=2)
        return (
            re.sub(r"\{\s+\"dp\": (\d+),\s+\"tp\": (\d+)\s+\}", r'{"dp": \1, "tp": \2}', text)
            + "\n"
        )

    @staticmethod
    def from_json(text: str, *, name: str = "plan") -> Plan:
        try:
            data = json.loads(text)
        except json.JSONDecodeError as error:
            raise PlanError(f"{name}: line {error.lineno} is not JSON ({error.msg})") from None
        if not isinstance(data, dict) or not isinstance(data.get("format"), int):
            raise PlanError(f"{name}: not a Meshwright plan (no integer 'format')")
        if data["format"] > FORMAT:
            raise PlanError(
                f"{name}: format {data['format']} is newer than the {FORMAT} this version reads; upgrade meshwright"
            )
        fields = {f.name for f in dataclasses.fields(Plan)} | {"format"}
        _same_keys(data, fields, name)
        stages = tuple(_stage(s, f"{name}: stage {k}") for k, s in enumerate(data["stages"]))
        values = {key: data[key] for key in fields - {"format", "stages"}}
        for key in ("global_batch_size", "num_microbatches"):
            if not isinstance(values[key], int) or values[key] < 1:
                raise PlanError(f"{name}: {key}={values[key]!r}; legal: an integer from 1")
        return Plan(stages=stages, **values)


def _stage(data: Any, place: str) -> StagePlan:
    if not isinstance(data, dict):
        raise PlanError(f"{place}: expected an object, found {data!r:.40}")
    _same_keys(data, {"blocks", "ranks", "mesh", "zero", "recompute", "shardings"}, place)
    mesh = data["mesh"]
    if not isinstance(mesh, dict) or set(mesh) != {"dp", "tp"}:
        raise PlanError(f'{place}: mesh={mesh!r:.60}; legal: {{"dp": n, "tp": n}}')
    return StagePlan(
        blocks=expand_names(data["blocks"]),
        ranks=expand_ranks(data["ranks"], place),
        dp=mesh["dp"],
        tp=mesh["tp"],
        zero=data["zero"],
        recompute=data["recompute"],
        shardings=dict(data["shardings"]),
    )


def _same_keys(data: Mapping[str, Any], expected: set[str], place: str) -> None:
    missing, unknown = sorted(expected - set(data)), sorted(set(data) - expected)
    if missing or unknown:
        parts = [f"missing {missing}"] * bool(missing) + [f"unknown {unknown}"] * bool(unknown)
        raise PlanError(f"{place}: {', '.join(parts)}; legal keys: {sorted(expected)}")


# --- names and ranks, short ------------------------------------------------------------------------


def compress_names(names: Sequence[str]) -> list[str]:
    """`h.0, h.1, h.2, head` -> `h.0-2, head`."""
    out: list[str] = []
    run: tuple[str, int, int] | None = None
    for name in [*names, ""]:
        match = re.fullmatch(r"(.*\.)(\d+)", name)
        if run and match and match[1] == run[0] and int(match[2]) == run[2] + 1:
            run = (run[0], run[1], int(match[2]))
            continue
        if run:
            out.append(f"{run[0]}{run[1]}" + (f"-{run[2]}" if run[2] > run[1] else ""))
        run = (match[1], int(match[2]), int(match[2])) if match else None
        if not match and name:
            out.append(name)
    return out


def expand_names(names: Iterable[str]) -> tuple[str, ...]:
    """The inverse of `compress_names`."""
    out: list[str] = []
    for name in names:
        match = re.fullmatch(r"(.*\.)(\d+)-(\d+)", name)
        out += (
            [f"{match[1]}{i}" for i in range(int(match[2]), int(match[3]) + 1)] if match else [name]
        )
    return tuple(out)


def compress_ranks(ranks: Sequence[int]) -> str:
    """`(0, 1, 2, 3)` -> `"0-3"`; irregular ranks stay a list."""
    if list(ranks) == list(range(ranks[0], ranks[0] + len(ranks))):
        return f"{ranks[0]}-{ranks[-1]}" if len(ranks) > 1 else str(ranks[0])
    return ",".join(map(str, ranks))


def expand_ranks(text: str, place: str = "plan") -> tuple[int, ...]:
    out: list[int] = []
    for part in str(text).split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if not match:
            raise PlanError(f"{place}: ranks={text!r}; legal: '0-3' or '0,2,4'")
        out += range(int(match[1]), int(match[2] or match[1]) + 1)
    return tuple(out)


# --- shardings: globs <-> operators ----------------------------------------------------------------


def fingerprint(graph: Graph) -> str:
    """Hash of a model's parameters and program: the same for any batch size and precision."""
    parameters = sorted(
        f"{fqn}{graph.values[value].shape}" for value, fqn in graph.parameters.items()
    )
    program = [op.key for op in graph.ops if op.short not in ("to", "_to_copy")]
    text = "\n".join([*parameters, *program])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def glob(pattern: str) -> re.Pattern[str]:
    """A pattern over FQNs and operator keys: `*` stays within one component, `**` crosses dots."""
    parts = [
        {"**": ".*", "*": "[^.:]*", "?": "[^.:]"}.get(part, re.escape(part))
        for part in re.split(r"(\*\*|\*|\?)", pattern)
    ]
    return re.compile("".join(parts) + r"\Z")


def resolve_shardings(
    graph: Graph, blocks: Sequence[Block], shardings: Mapping[str, str], place: str = "plan"
) -> dict[str, Entry]:
    """Globs to entries by operator name or parameter value name; the longest pattern wins.

    `*` stays within one component of a name, `**` crosses dots. A pattern without `:` names a module (its matrix products and embeddings) or a parameter. Raises
    `PlanError` with the nearest names where a pattern matches nothing.
    """
    entries: dict[str, Entry] = {}
    names: set[str] = set()
    unmatched = dict.fromkeys(shardings)
    order = sorted(shardings, key=lambda p: (len(p.replace("*", "")), p))
    compiled = [(p, glob(p), ":" in p) for p in order]
    main = {"linear", "addmm", "mm", "bmm", "matmul", "embedding", "conv1d", "conv2d", "conv3d"}
    for block in blocks:
        for op in block.ops:
            names.add(op.key)
            for pattern, regex, exact in compiled:
                if regex.match(op.key) if exact else op.short in main and regex.match(op.module):
                    entries[op.name] = _entry(shardings[pattern], pattern, place)
                    unmatched.pop(pattern, None)
        for value in block.parameters:
            fqn = graph.parameters[value]
            names.add(fqn)
            for pattern, regex, exact in compiled:
                if not exact and regex.match(fqn):
                    entries[value] = _parameter_entry(shardings[pattern], pattern, place)
                    unmatched.pop(pattern, None)
    if unmatched:
        pattern = next(iter(unmatched))
        modules = {name.split(":")[0] for name in names} | names
        near = difflib.get_close_matches(pattern, modules, n=3, cutoff=0.3)
        raise PlanError(
            f"{place}: sharding {pattern!r} matches no module, operator or parameter; nearest: {near}"
        )
    return entries


def _entry(text: str, pattern: str, place: str) -> Entry:
    try:
        return Entry.parse(text.replace("@tp", ""))
    except ValueError as error:
        raise PlanError(f"{place}: sharding {pattern!r}: {error}") from None


def _parameter_entry(text: str, pattern: str, place: str) -> Entry:
    return _entry(f"-> {text}" if "->" not in text else text, pattern, place)


def express_shardings(
    graph: Graph, blocks: Sequence[Block], entries: Mapping[str, Entry]
) -> dict[str, str]:
    """Entries as globs: a decision taken alike in most repeats of a block is written once with `*`, what
    differs after it under its own name (the longest pattern wins)."""
    texts: dict[str, str | None] = {}
    groups: dict[str, list[str]] = {}
    for block in blocks:
        stem = re.fullmatch(r"(.*\.)\d+", block.name)
        keys = {op.name: op.key for op in block.ops} | {
            v: graph.parameters[v] for v in block.parameters
        }
        for name, key in keys.items():
            entry = entries.get(name)
            text = None if entry is None else _text(entry, name in graph.parameters)
            texts[key] = text
            if stem and key.startswith(block.name):
                groups.setdefault(f"{stem[1]}*{key.removeprefix(block.name)}", []).append(key)
    out: dict[str, str] = {}
    done: set[str] = set()
    for pattern, keys in groups.items():
        regex = glob(pattern)
        if len(keys) < 2 or {key for key in texts if regex.match(key)} != set(keys):
            continue
        common, count = Counter(texts[key] for key in keys).most_common(1)[0]
        if common is None or count < 2:
            continue
        out[pattern] = common
        exceptions = {key: texts[key] or FOLLOW for key in keys if texts[key] != common}
        out |= exceptions
        done |= set(keys)
    out |= {key: text for key, text in texts.items() if text is not None and key not in done}
    return out


def _text(entry: Entry, parameter: bool) -> str:
    return f"{entry.state}@tp" if parameter else str(entry)


# --- the check -------------------------------------------------------------------------------------


def check_plan(plan: Plan, graph: Graph, table: FactorTable) -> list[dict[str, Assignment]]:
    """Guard a solved, loaded or hand-written plan; returns per stage the assignments by block name.

    `graph` may be traced at any batch size. Raises `PlanError` naming the value, the place, the legal values.
    """
    _check_numbers(plan, graph)
    _check_blocks(plan, graph)
    _check_ranks(plan)
    return [stage_assignments(plan, k, graph, table) for k in range(len(plan.stages))]


def _check_numbers(plan: Plan, graph: Graph) -> None:
    found = fingerprint(graph)
    if plan.model != found:
        raise PlanError(
            f"plan: made for model {plan.model}, but this model is {found} (other layers, sizes or operators); "
            "plan again, or use the model it was made for"
        )
    for name, value, legal in (
        ("schedule", plan.schedule, tuple(SCHEDULES)),
        ("precision", plan.precision, PRECISIONS),
    ):
        if value not in legal:
            raise PlanError(f"plan: {name}={value!r}; legal: {', '.join(legal)}")
    if plan.global_batch_size % plan.num_microbatches:
        raise PlanError(
            f"plan: num_microbatches={plan.num_microbatches} does not divide global_batch_size={plan.global_batch_size}; "
            f"legal: {_divisors(plan.global_batch_size)}"
        )
    for k, stage in enumerate(plan.stages):
        if stage.zero not in ZERO:
            raise PlanError(
                f"plan: stage {k}: zero={stage.zero!r}; legal: {', '.join(map(str, ZERO))}"
            )
        if stage.recompute not in RECOMPUTE:
            raise PlanError(
                f"plan: stage {k}: recompute={stage.recompute!r}; legal: {', '.join(RECOMPUTE)}"
            )
        for axis in ("dp", "tp"):
            if not isinstance(getattr(stage, axis), int) or getattr(stage, axis) < 1:
                raise PlanError(
                    f"plan: stage {k}: {axis}={getattr(stage, axis)!r}; legal: an integer from 1"
                )
        if plan.microbatch_rows % stage.dp:
            raise PlanError(
                f"plan: stage {k}: dp={stage.dp} does not divide a micro-batch of {plan.microbatch_rows} rows "
                f"(global_batch_size={plan.global_batch_size} / num_microbatches={plan.num_microbatches}); "
                f"legal: {_divisors(plan.microbatch_rows)}, or fewer micro-batches"
            )


def _check_blocks(plan: Plan, graph: Graph) -> None:
    names = [block.name for block in graph.blocks]
    planned = [name for stage in plan.stages for name in stage.blocks]
    unknown = [name for name in planned if name not in names]
    if unknown:
        near = difflib.get_close_matches(unknown[0], names, n=3, cutoff=0.3)
        raise PlanError(
            f"plan: block {unknown[0]!r} is not in the model; nearest: {near}; legal: {compress_names(names)}"
        )
    if planned != names:
        wrong = next(
            (i for i, (a, b) in enumerate(zip(planned, names, strict=False)) if a != b),
            min(len(planned), len(names)),
        )
        raise PlanError(
            f"plan: stages must cover the blocks once, in order; position {wrong} is "
            f"{planned[wrong] if wrong < len(planned) else 'missing'!r}, expected "
            f"{names[wrong] if wrong < len(names) else 'nothing'!r}; legal order: {compress_names(names)}"
        )
    if any(not stage.blocks for stage in plan.stages):
        raise PlanError("plan: a stage without blocks; every stage needs at least one")


def _check_ranks(plan: Plan) -> None:
    for k, stage in enumerate(plan.stages):
        if len(stage.ranks) != stage.dp * stage.tp:
            raise PlanError(
                f"plan: stage {k}: {len(stage.ranks)} ranks for mesh dp={stage.dp} × tp={stage.tp} = {stage.dp * stage.tp}"
            )
    ranks = sorted(r for stage in plan.stages for r in stage.ranks)
    if ranks != list(range(len(ranks))):
        raise PlanError(
            f"plan: ranks must be 0 to {len(ranks) - 1}, each in one stage; found {ranks}"
        )


def stage_assignments(
    plan: Plan, k: int, graph: Graph, table: FactorTable
) -> dict[str, Assignment]:
    """Every choice on the tensor axis of stage `k`, by block name."""
    stage = plan.stages[k]
    blocks = [block for block in graph.blocks if block.name in set(stage.blocks)]
    place = f"plan: stage {k}"
    entries = resolve_shardings(graph, blocks, stage.shardings, place)
    later = {n for b in graph.blocks if b.name not in set(stage.blocks) for n in b.inputs}
    found: dict[str, Assignment] = {}
    states: dict[str, Any] = {}
    for block in blocks:
        layouts = BlockLayouts(graph, table, block, stage.tp)
        inputs = {name: states[name] for name in block.inputs if name in states}
        try:
            found[block.name] = layouts.complete(entries, inputs, later)
        except ValueError as error:
            raise PlanError(f"{place}: {error}") from None
        states |= {name: found[block.name].states[name] for name in block.outputs}
    return found


def _divisors(n: int) -> str:
    return ", ".join(str(d) for d in range(1, n + 1) if n % d == 0)
