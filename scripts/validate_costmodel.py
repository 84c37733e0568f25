"""Predicted against published step times: raw errors per source, with the split stated.

    python -m scripts.validate_costmodel [--data DIR] [--source TEXT] [--rows] [--errors]
                                         [--plot FILE] [--record]

DIR holds `step_times.csv` (default: the compact tables beside this script). Constants that were
fitted on a source were fitted on half of its models: its models in order of size, the first, third,
... (`fit`); the others are scored (`score`), and all steps in 8 or 4 bits, on which nothing is
fitted. Rows that were found later are halved by a hash of source and model.
A second table has the same rows by GPU, by dense models and mixtures of experts, by framework, and
by target, of those that `target=` takes. Errors are (predicted - measured) / measured, with no
shift and no constant per row. `regret` is the measured time of the plan predicted best, over the
best measured one, within groups of the same model, GPUs and batch.

Beside kinds of GPU and model of which several sources tell stands the error of the simplest model,
one constant MFU for all: that of the other sources' rows which is least wrong on them.

`--errors` prints root mean squares of the errors of the half that is scored: by GPU, of rows in
which communication is less than 5 % of the predicted step, for `costmodel/intervals.py`, and of the
others, where both kinds are mixed; of peak memory by framework. `--record` writes all tables to
`scripts/recording/results/accuracy.json`, from which the documents' page is made.
"""

from __future__ import annotations

import argparse
import collections
import itertools
import math
import re
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from meshwright.costmodel.targets import TARGETS
from meshwright.planner.pricing import Evaluation
from scripts.experts.rows import fitted_by_hash, fp8_rows, later_rows, memory_rows, published_rows
from scripts.experts.scatter import Point, scatter
from scripts.published import Unpriced, evaluate_row
from scripts.ranks.rank_correlation import spearman
from scripts.recording.results import record

MEASURES = ("error", "bias", "worst", "regret", "memory_error")
MOSTLY_COMPUTE = 0.05  # communication's part of a step below which its error does not count


def _in_fp8(row: Mapping[str, str]) -> bool:
    return "fp8" in row["precision"]


# family -> (text in the row's source, test on the row)
FAMILIES = (
    ("fp8: NeMo, long sequences", "NeMo docs long-sequence", _in_fp8),
    ("fp8: NeMo", "NeMo docs", _in_fp8),
    ("fp8: DGXC", "DGXC", _in_fp8),
    ("fp8: Megatron-Bridge", "Megatron-Bridge", _in_fp8),
    (
        "fp8: torchtitan, contexts split",
        "torchtitan",
        lambda row: _in_fp8(row) and row["cp"] != "1",
    ),
    ("fp8: torchtitan", "torchtitan", _in_fp8),
    ("fp8: FlagPerf", "FlagPerf", _in_fp8),
    ("fp4: Megatron-Bridge", "Megatron-Bridge", lambda row: "fp4" in row["precision"]),
    ("vTrain multi-node", "vTrain", lambda row: int(row["num_gpus"]) > 8),
    ("vTrain single-node", "vTrain", lambda row: int(row["num_gpus"]) <= 8),
    ("Megatron SC21", "SC21", lambda row: True),
    ("llm-foundry H100 FSDP", "llm-foundry", lambda row: "H100" in row["gpu"]),
    ("llm-foundry A100 FSDP", "llm-foundry", lambda row: True),
    ("DGXC, Grok-1", "DGXC", lambda row: "Grok" in row["model"]),
    ("DGXC, Megatron-Bridge H100", "DGXC", lambda row: True),
    ("Megatron-Bridge, GPT-OSS", "Megatron-Bridge (Apache", lambda row: "OSS" in row["model"]),
    ("DGXC, Megatron-Bridge H100", "Megatron-Bridge (Apache", lambda row: True),
    ("torchtitan", "torchtitan benchmarks", lambda row: True),
    ("torchtitan A100, asynchronous TP", "torchtitan", lambda row: True),
    ("Alpa V100", "Alpa OSDI22", lambda row: True),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    row: Mapping[str, str]
    measured_s: float
    predicted_s: float
    error: float
    memory_error: float | None
    communication: float  # its part of a step, not hidden
    target: str
    mfu: float  # measured

    @property
    def gpu(self) -> str:
        return self.row["gpu"].split("-")[0].split(" ")[0]


def family_of(row: Mapping[str, str]) -> str:
    for name, text, fits in FAMILIES:
        if text in row["source"] and fits(row):
            return name
    return row["source"].split(" (")[0][:40]


def later_halves(source: str) -> Iterator[tuple[str, bool, Mapping[str, str]]]:
    """The rows found later by source, as `halves` gives the others."""
    rows = later_rows(source)
    for row in sorted(rows, key=lambda row: (row["source"], row["model"], row["seq_len"])):
        yield f"later: {row['source'].split(' (')[0][:27]}", fitted_by_hash(row), row


def halves(rows: Iterable[Mapping[str, str]]) -> Iterator[tuple[str, bool, Mapping[str, str]]]:
    """Rows by family, each with its family and whether constants may have been fitted on it."""
    families = collections.defaultdict(list)
    for row in rows:
        families[family_of(row)].append(row)
    for name, members in families.items():
        fitted = used_to_fit(members) if not name.startswith(("fp8", "fp4")) else set()
        for row in sorted(members, key=lambda row: (row["model"], row["seq_len"])):
            yield name, row["model"] in fitted, row


def kind_of(row: Mapping[str, str]) -> str:
    """GPU, dense or experts, and the framework's first word."""
    gpu = re.split(r"[- ]", row["gpu"])[0]
    experts = "experts" if row["moe_experts"] not in ("", "0", "1") else "dense"
    return f"{gpu} {experts}, {re.split(r'[ (;/]', row['framework'])[0]}"


def used_to_fit(rows: Sequence[Mapping[str, str]]) -> set[str]:
    """Models of a source that constants were fitted on: every other one, in order of size."""
    sizes: dict[str, float] = {}
    for row in rows:
        size = float(row["params_b"] or 0)
        sizes[row["model"]] = min(size, sizes.get(row["model"], size))
    models = sorted(sizes, key=lambda model: (sizes[model], model))
    return set(models[::2]) if len(models) > 1 else set()


def score(row: Mapping[str, str]) -> Scored:
    evaluation = evaluate_row(row)
    prediction = evaluation.prediction
    measured = float(row["iteration_time_s"])
    published = row.get("peak_mem_gib") or ""
    memory = max(prediction.peak_memory_bytes) / 2**30
    return Scored(
        row=row,
        measured_s=measured,
        predicted_s=prediction.step_time_s,
        error=prediction.step_time_s / measured - 1,
        memory_error=memory / float(published) - 1 if published else None,
        communication=communication_part(evaluation),
        target=evaluation.target.name,
        mfu=prediction.mfu * prediction.step_time_s / measured,
    )


def communication_part(evaluation: Evaluation) -> float:
    """The part of all stages' seconds that is communication."""
    m, stages = evaluation.plan.num_microbatches, evaluation.stages
    comm = sum(m * (s.forward_comm_s + s.backward_comm_s) + s.reduce_s for s in stages)
    return comm / sum(m * s.amortised_s(m) for s in stages)


def error_lines(scored: Sequence[Scored]) -> list[str]:
    """Errors by GPU, of computing and where it is mixed with communication, and of memory by
    framework."""
    errors = collections.defaultdict(list)
    for s in scored:
        kind = "computing" if s.communication < MOSTLY_COMPUTE else "with communication"
        errors[f"{s.gpu}, {kind}"].append(s.error)
        if s.memory_error is not None:
            errors[f"{s.row['framework']}, memory"].append(s.memory_error)
    return [
        f"{name[:60]:60} {math.sqrt(statistics.mean(e * e for e in of)):6.1%} ({len(of)} rows)"
        for name, of in sorted(errors.items())
    ]


def regret(scored: Iterable[Scored]) -> float:
    """Mean over groups of the same model, GPUs, batch and sequence: how much slower the plan
    predicted to be best is than the best."""
    groups = collections.defaultdict(list)
    for s in scored:
        key = [s.row[c] for c in ("source", "model", "gpu", "num_gpus", "global_batch", "seq_len")]
        groups[tuple(key)].append(s)
    lost = [
        min(group, key=lambda s: s.predicted_s).measured_s / min(s.measured_s for s in group) - 1
        for group in groups.values()
        if len(group) > 1
    ]
    return statistics.mean(lost) if lost else float("nan")


def by_constant_mfu(scored: Sequence[Scored]) -> float | None:
    """Mean error of steps at one MFU, for each source the best one for the rows of the others; None
    for a single source."""
    sources = {s.row["source"] for s in scored}
    if len(sources) < 2:
        return None
    errors = list[float]()
    for source in sources:
        others = [s.mfu for s in scored if s.row["source"] != source]
        best = min(others, key=lambda mfu: sum(abs(other / mfu - 1) for other in others))
        errors += [abs(s.mfu / best - 1) for s in scored if s.row["source"] == source]
    return statistics.mean(errors)


def numbers(name: str, part: str, scored: Sequence[Scored]) -> dict[str, Any]:
    """A row of a table; fractions are of 1, None where there is nothing to tell."""
    errors = [s.error for s in scored]
    memory = [abs(s.memory_error) for s in scored if s.memory_error is not None]
    measured, predicted = [s.measured_s for s in scored], [s.predicted_s for s in scored]
    found = {"name": name, "part": part, "rows": len(scored)}
    if not scored:
        return found
    values = {
        "error": statistics.mean(map(abs, errors)),
        "bias": statistics.mean(errors),
        "worst": max(errors, key=abs),
        "spearman": spearman(measured, predicted),
        "regret": regret(scored),
        "memory_error": statistics.mean(memory) if memory else None,
    }
    known = {k: v for k, v in values.items() if v is not None and not math.isnan(v)}
    return found | dict.fromkeys(values) | known | {"memory_rows": len(memory)}


def line(row: Mapping[str, Any]) -> str:
    if not row["rows"]:
        return f"{row['name']:34} {row['part']:6} {0:5}"
    percent = {k: math.nan if row[k] is None else 100 * row[k] for k in MEASURES}
    spearman = math.nan if row["spearman"] is None else row["spearman"]
    memory = f"{percent['memory_error']:7.1f} ({row['memory_rows']})"
    return (
        f"{row['name']:34} {row['part']:6} {row['rows']:5} {percent['error']:7.1f} "
        f"{percent['bias']:+7.1f} {percent['worst']:+7.0f} {spearman:9.3f} "
        f"{percent['regret']:7.1f} " + (memory if row["memory_rows"] else "      –")
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="folder with step_times.csv")
    parser.add_argument("--source", default="", help="only sources that contain this text")
    parser.add_argument("--rows", action="store_true", help="print every row")
    parser.add_argument("--errors", action="store_true", help="print errors by GPU")
    parser.add_argument("--plot", type=Path, help="file for a plot of all rows, as SVG")
    parser.add_argument("--record", action="store_true", help="keep all tables for the documents")
    args = parser.parse_args()
    if args.record and (args.source or args.data):
        parser.error("--record is of all rows: without --source and --data")
    refused: collections.Counter[str] = collections.Counter()
    parts: dict[str, list[Scored]] = {"fit": [], "score": []}
    families = list[dict[str, Any]]()
    heading()
    rows = published_rows(args.source, args.data)
    rows += fp8_rows(args.source) if args.data is None else []
    found_later = later_halves(args.source) if args.data is None else ()
    by_family = itertools.chain(halves(rows), found_later)
    for name, members in itertools.groupby(by_family, key=lambda each: each[0]):
        found: dict[str, list[Scored]] = {"fit": [], "score": []}
        for _, fitted, row in members:
            try:
                scored = score(row)
            except Unpriced as reason:
                refused[f"{name}: {reason}"] += 1
                continue
            found["fit" if fitted else "score"].append(scored)
            if args.rows:
                print(described(scored))
        for part, scores in found.items():
            families.append(numbers(name, part, scores))
            print(line(families[-1]), flush=True)
            parts[part] += scores
    for part, scores in parts.items():
        families.append(numbers("all", part, scores))
        print(line(families[-1]))
    kinds = by_kind(parts)
    memory = [] if args.source or args.data else list(memory_errors())
    if memory:
        print("", *map(memory_line, memory), sep="\n")
    if args.errors:
        print("", *error_lines(parts["score"]), sep="\n")
    if args.plot:
        args.plot.write_text(plot(parts))
    if args.record:
        tables = {"families": families, "kinds": kinds, "memory": memory}
        command = "python -m scripts.validate_costmodel --record"
        record("accuracy", command, title="Accuracy", **tables)
    print(f"\nnot priced: {sum(refused.values())} rows")
    for reason, count in refused.most_common():
        print(f"  {count:4} {reason}")


def memory_errors() -> Iterator[dict[str, Any]]:
    """Errors of peak memory by framework, of what allocators said and of what nvidia-smi did: that
    has the driver's context and what the allocator keeps, too, up to some GB."""
    for kind, by_allocator in (("allocator", True), ("nvidia-smi or not said", False)):
        errors = collections.defaultdict(list)
        for row in memory_rows(by_allocator=by_allocator):
            try:
                peaks = evaluate_row(row).prediction.peak_memory_bytes
            except Unpriced:
                continue
            error = max(peaks) / 2**30 / float(row["peak_mem_gib"]) - 1
            for name in ("all", row["source"].split(" (")[0][:34]):
                errors[name].append(error)
        for name, of in errors.items():
            means = {"error": statistics.mean(map(abs, of)), "bias": statistics.mean(of)}
            yield {"said_by": kind, "name": name, "rows": len(of), **means}


def memory_line(row: Mapping[str, Any]) -> str:
    return (
        f"memory by {row['said_by']:24} {row['name']:34} {row['rows']:4} "
        f"{100 * row['error']:6.1f} {100 * row['bias']:+6.1f}"
    )


def heading() -> None:
    print(f"{'':34} {'':6} {'rows':>5} {'|err| %':>7} {'bias %':>7} {'worst %':>7} ", end="")
    print(f"{'Spearman':>9} {'regret%':>7} {'|mem| %':>7}")


def by_kind(parts: Mapping[str, Sequence[Scored]]) -> list[dict[str, Any]]:
    """Print the table by GPU, dense or experts, and framework, without the last for what has
    several; and by target, of those that `target=` takes."""
    print()
    heading()
    kinds: dict[str, dict[str, list[Scored]]] = {}
    for part, scores in parts.items():
        for scored in scores:
            kind, target = kind_of(scored.row), f"target {scored.target}"
            names = (kind, kind.split(",")[0], *([target] if scored.target in TARGETS else ()))
            for name in names:
                of = kinds.setdefault(name, {"fit": [], "score": []})
                of[part].append(scored)
    rows = list[dict[str, Any]]()
    for name in sorted(kinds):
        for part, scores in kinds[name].items():
            constant = None if "," in name else by_constant_mfu(scores)
            if scores:
                rows.append(numbers(name, part, scores) | {"constant_mfu": constant})
                beside = "" if constant is None else f"   constant MFU {100 * constant:.1f}"
                print(line(rows[-1]) + beside)
    return rows


def plot(parts: Mapping[str, Sequence[Scored]]) -> str:
    """Predicted against measured, as SVG."""
    points = [
        Point(
            group=kind_of(s.row).split(",")[0],
            measured_s=s.measured_s,
            predicted_s=s.predicted_s,
            fitted=part == "fit",
            label=configuration(s.row),
        )
        for part, scores in parts.items()
        for s in scores
    ]
    return scatter(points, "Predicted against published seconds of a step; filled: nothing fitted")


def described(scored: Scored) -> str:
    return (
        f"  {configuration(scored.row)}: {scored.measured_s:.4g} s, "
        f"predicted {scored.predicted_s:.4g} ({100 * scored.error:+.1f} %)"
    )


def configuration(row: Mapping[str, str]) -> str:
    degrees = " ".join(f"{c}{row[c]}" for c in ("tp", "pp", "cp", "vp", "dp", "micro_batch"))
    return f"{row['model']} {row['num_gpus']} GPUs {degrees}"


if __name__ == "__main__":
    main()
