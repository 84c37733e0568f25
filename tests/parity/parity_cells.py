"""The parity matrix as data: one line a cell, of the knobs that differ from the defaults.

    gpt2_tied  pp2xdp2  zb_h1 m4 zero1 full bf16 sequence front spread

A line is a case of the zoo, the meshes of the pipeline's device groups (`pp2xdp2xtp2`, or one by
one: `1|dp3`, `dp2xtp2|tp2`; `cp2` is of all groups), then words in any order: a schedule; `m4`
micro-batches; `v3` stages on each device group; `zero1`; `shard2`, the ranks among which ZeRO
divides; `hpz2`, those with a secondary shard; `quantized`, both of what it may be; `powersgd-4` or
another of what may stand for gradients; a recompute
policy, or `mixed` by block; `seg3`, the blocks in a segment; a precision; a kind of context
parallelism; shardings ("megatron", the case's own, where nothing is said; "bare", none; "sequence",
the case's own with the activations between layers split along the sequence); where the pipeline is
cut; `spread`, the placement that puts a pipeline's neighbours next to each other; `rows12`, the
global batch; `host50`, percent of the optimizer states in host memory, `weights50` of the weights,
`nvme50` of the states in files;
`away50`, of each stage's blocks those whose activations go there; `chunks3`, the parts of the loss;
`slices7+5+4`, the tokens of each slice.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from meshwright.costmodel.compressed import COMPRESSED
from meshwright.costmodel.mesh import ALL_GATHER, CONTEXT_KINDS, ContextKind
from meshwright.costmodel.precisions import PRECISIONS
from meshwright.costmodel.recompute import RECOMPUTE
from meshwright.costmodel.schedules import SCHEDULES
from meshwright.planner.plan.loss_parts import in_parts
from meshwright.planner.plan.plan import Plan
from tests.helpers.plan_building import CUTS, Knobs, build_plan
from tests.helpers.stored import stored
from tests.models import architectures, branching_models, models, sequence_models
from tests.models.models import CASES, GLOBAL_BATCH, Traced, traced

Meshes = tuple[tuple[int, int], ...]

_COUNTS = {
    "m": "microbatches", "v": "virtual", "zero": "zero", "shard": "dp_shard", "hpz": "hpz",
    "rows": "rows", "seg": "segments", "host": "host", "weights": "weights",
    "away": "away", "nvme": "nvme", "chunks": "chunks",
}  # fmt: skip
_SEQUENCE = {
    "gpt2": {"transformer.h.*:add": "-> S(1)", "transformer.h.*:add#1": "-> S(1)"},
    "llama": {"model.layers.*:add": "-> S(1)", "model.layers.*:add#1": "-> S(1)"},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One run of the matrix; `meshes` are (dp, tp) by device group."""

    case: str
    meshes: Meshes = ((1, 1),)
    schedule: str = "1f1b"
    microbatches: int = 4
    virtual: int = 1
    cp: int = 1
    cp_kind: ContextKind = ALL_GATHER
    zero: int = 0
    dp_shard: int | None = None
    hpz: int | None = None
    quantized: str = "none"
    compressed: str = "none"
    recompute: str = "none"
    segments: int = 1
    precision: str = "fp32"
    shardings: str = "megatron"
    cut: str = "even"
    placement: str = "tp,dp,pp"
    rows: int = GLOBAL_BATCH
    host: int = 0
    weights: int = 0
    away: int = 0
    nvme: int = 0
    chunks: int = 1
    slices: tuple[int, ...] = ()
    name: str = ""

    @staticmethod
    def parse(line: str) -> Cell:
        """Read one line. Raises ValueError for a word that is no knob's."""
        case, meshes, *words = line.split()
        known = {
            **dict.fromkeys(SCHEDULES, "schedule"), **dict.fromkeys(PRECISIONS, "precision"),
            **dict.fromkeys((*RECOMPUTE, "mixed"), "recompute"), **dict.fromkeys(CUTS, "cut"),
            **dict.fromkeys(CONTEXT_KINDS, "cp_kind"),
            **dict.fromkeys(COMPRESSED[1:], "compressed"),
            **dict.fromkeys(("bare", "megatron", "sequence"), "shardings"),
        }  # fmt: skip
        found: dict[str, str | int | tuple[int, ...]] = {}
        for word in words:
            count = re.fullmatch(rf"({'|'.join(_COUNTS)})(\d+)", word)
            if word == "quantized":
                found["quantized"] = "both"
            elif word.startswith("slices"):
                found["slices"] = tuple(map(int, word.removeprefix("slices").split("+")))
            elif word == "spread":
                found["placement"] = "tp,pp,dp"
            elif count:
                found[_COUNTS[count[1]]] = int(count[2])
            elif word in known:
                found[known[word]] = word
            else:
                raise ValueError(
                    f"cell {line!r}: {word!r}; legal: {', '.join(known)}, spread, or a number "
                    f"after {', '.join(_COUNTS)}"
                )
        cp = re.search(r"cp(\d+)", meshes)
        name = "-".join(line.split())
        cell = Cell(case=case, meshes=_meshes(meshes), cp=int(cp[1]) if cp else 1, name=name)
        if SCHEDULES[str(found.get("schedule", "1f1b"))].stages_per_device == 2:
            found["virtual"] = 2
        return replace(cell, **found)  # type: ignore[arg-type]

    @property
    def world(self) -> int:
        """Ranks it runs on."""
        return sum(dp * tp for dp, tp in self.meshes) * self.cp

    @property
    def alone(self) -> Cell:
        """The same step on one device."""
        return Cell(
            case=self.case, microbatches=self.microbatches, precision=self.precision, rows=self.rows
        )

    @property
    def patterns(self) -> dict[str, str]:
        own = dict(CASES[self.case].shardings)
        extra = _SEQUENCE.get(self.case.split("_")[0], {})
        return {"megatron": own, "bare": {}, "sequence": own | extra}[self.shardings]


def _meshes(text: str) -> Meshes:
    """`pp2xdp2` -> ((2, 1), (2, 1)); `1|dp3` -> ((1, 1), (3, 1))."""
    found: list[tuple[int, int]] = []
    for group in text.split("|"):
        axes = {axis: int(n) for axis, n in re.findall(r"(pp|dp|tp|cp)(\d+)", group)}
        if not axes and group != "1":
            raise ValueError(f"meshes {text!r}: {group!r}; legal: 1, or axes like dp2xtp2")
        found += [(axes.get("dp", 1), axes.get("tp", 1))] * axes.get("pp", 1)
    return tuple(found)


def graph_of(case: str, rows: int, precision: str = "fp32") -> Traced:
    """A case traced for micro-batches of `rows` rows, by whoever asks first."""
    return stored(
        case,
        rows,
        precision,
        make=lambda: traced(CASES[case], rows, precision),
        models=(models, architectures, branching_models, sequence_models),
    )


def plan_of(cell: Cell, of: Traced | None = None) -> tuple[Plan, Traced]:
    """The plan that a cell names, and the graph it is for: `of` where it was traced elsewhere."""
    of = of or graph_of(cell.case, cell.rows // cell.microbatches, cell.precision)
    plan = build_plan(
        of.graph,
        Knobs(
            meshes=cell.meshes,
            rows=cell.rows,
            num_microbatches=cell.microbatches,
            schedule=cell.schedule,
            virtual=cell.virtual,
            cp=cell.cp,
            cp_kind=cell.cp_kind,
            placement=cell.placement,
            cut=cell.cut,
            zero=cell.zero,
            dp_shard=cell.dp_shard,
            hpz=cell.hpz,
            quantized=cell.quantized,
            compressed=cell.compressed,
            recompute=cell.recompute,
            segments=cell.segments,
            precision=cell.precision,
            shardings=cell.patterns,
            offload=cell.host / 100,
            weights=cell.weights / 100,
            away=cell.away / 100,
            nvme=cell.nvme / 100,
        ),
    )
    graph, table = in_parts(of.graph, of.table, cell.chunks)
    plan = replace(plan, chunked_loss=cell.chunks, slices=cell.slices)
    return plan, replace(of, graph=graph, table=table)
