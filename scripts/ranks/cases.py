"""The cases of the executor's benchmark: our plans, and the same by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from meshwright.planner.overrides import Overrides
from scripts.ranks import baselines as by_hand
from scripts.ranks.baselines import Setting, Trainer


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Of the model and the global batch, where the command line does not say."""

    layers: int
    hidden: int
    rows: int


# A step of some 0.4 CPU-s a rank. What a stage sends takes, against its forward, time proportional
# to 1 / (layers x hidden): on one machine nothing, between hosts enough to be worth hiding.
NEAR, FAR = Size(layers=8, hidden=512, rows=8), Size(layers=4, hidden=256, rows=32)

MEGATRON: Mapping[str, str] = {
    **{f"layers.*.attention.{name}": "colwise" for name in "qkv"},
    "layers.*.attention.o": "rowwise",
    "layers.*.up": "colwise",
    "layers.*.down": "rowwise",
    "layers.*:add": "replicate",
    "layers.*:add#1": "replicate",
    "embed": "vocab",
    "positions": "replicate",
    "head": "colwise",
    ":cross_entropy_loss": "vocab",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Our plan, by overrides that leave nothing to search, and the same by hand."""

    what: str
    theirs: Callable[[Setting], Trainer]
    dp: int = 1
    tp: int = 1
    pp: int = 1
    zero: int = 0
    schedule: str | None = None
    stages_per_group: int = 1
    microbatches: int = 1
    compile: bool = False
    adapters: int = 0  # their rank
    target: float = 1.0
    link_target: float | None = None  # between hosts on slow links, where it differs

    @property
    def ranks(self) -> int:
        return self.dp * self.tp * self.pp

    def overrides(self, layers: int) -> Overrides:
        count = self.pp * self.stages_per_group
        return Overrides(
            dp=self.dp,
            tp=self.tp,
            pp=self.pp,
            zero=self.zero,
            recompute="none",
            num_microbatches=self.microbatches,
            schedule=self.schedule,
            virtual_stages=self.stages_per_group,
            stages=[blocks_of(layers, k, count) for k in range(count)],
            shardings=MEGATRON if self.tp > 1 else {},
        )


def blocks_of(layers: int, index: int, stages: int) -> list[str]:
    """The blocks of a stage: as many layers in each, which is how the baselines cut."""
    here = by_hand.layers_of(layers, index, stages)
    return [
        *(["embed"] if index == 0 else []),
        f"layers.{here.start}-{here.stop - 1}",
        *(["head"] if index == stages - 1 else []),
    ]


CASES: Mapping[str, Case] = {
    "one": Case(what="eager", theirs=by_hand.eager),
    "one-m4": Case(what="eager, 4 micro-batches", theirs=by_hand.eager, microbatches=4),
    "dp2": Case(what="DistributedDataParallel", theirs=by_hand.ddp, dp=2),
    "zero1": Case(
        what="DistributedDataParallel + ZeroRedundancyOptimizer", theirs=by_hand.ddp_zero1,
        dp=2, zero=1,
    ),
    "zero3": Case(what="fully_shard per layer", theirs=by_hand.fsdp, dp=2, zero=3),
    "compiled": Case(what="torch.compile", theirs=by_hand.compiled, compile=True),
    "compiled-dp2": Case(
        what="DistributedDataParallel of torch.compile", theirs=by_hand.compiled_ddp, dp=2,
        compile=True,
    ),
    "compiled-zero3": Case(
        what="fully_shard per layer, compiled", theirs=by_hand.compiled_fsdp, dp=2, zero=3,
        compile=True,
    ),
    "lora-zero3": Case(
        what="fully_shard per layer, adapters of rank 8", theirs=by_hand.fsdp, dp=2, zero=3,
        adapters=8,
    ),
    "tp2": Case(what="parallelize_module", theirs=by_hand.tensor_parallel, tp=2, target=0.95),
    "pp2": Case(
        what="PipelineStage + Schedule1F1B", theirs=by_hand.pipeline(), pp=2, schedule="1f1b",
        microbatches=8,
    ),
    "pp2-eager": Case(  # what the search takes where messages between hosts are worth hiding
        what="PipelineStage + Schedule1F1B", theirs=by_hand.pipeline(), pp=2,
        schedule="eager_1f1b", microbatches=8, link_target=0.85,
    ),
    "interleaved": Case(
        what="ScheduleInterleaved1F1B", theirs=by_hand.pipeline("Interleaved1F1B", 2), pp=2,
        schedule="interleaved_1f1b", stages_per_group=2, microbatches=8,
    ),
    "zb-h1": Case(
        what="ScheduleInterleavedZeroBubble, one stage a rank",
        theirs=by_hand.pipeline("InterleavedZeroBubble"), pp=2, schedule="zb_h1", microbatches=8,
    ),
    "zb-v": Case(
        what="ScheduleZBVZeroBubble", theirs=by_hand.pipeline("ZBVZeroBubble", 2), pp=2,
        schedule="zb_v", stages_per_group=2, microbatches=8,
    ),
    "dualpipe-v": Case(
        what="ScheduleDualPipeV", theirs=by_hand.pipeline("DualPipeV", 2), pp=2,
        schedule="dualpipe_v", stages_per_group=2, microbatches=8,
    ),
    "dp2-tp2-pp2": Case(
        what="parallelize_module + fully_shard + Schedule1F1B",
        theirs=by_hand.combined(dp=2, tp=2, pp=2), dp=2, tp=2, pp=2, zero=1, schedule="1f1b",
        microbatches=4,
    ),
}  # fmt: skip

# Every rank lowers all layers, split both ways.
STARTUP_CASE = Case(what="", theirs=by_hand.eager, dp=2, tp=2, zero=1)
