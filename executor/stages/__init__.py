"""Pipeline stages on a rank: built, run by instruction streams, connected."""

from meshwright.executor.stages.batches import Batches, Rows
from meshwright.executor.stages.build import Builder, BuiltStage
from meshwright.executor.stages.pipeline import Observer, Phase, PipelineRun, RunStage

__all__ = [
    "Batches", "Builder", "BuiltStage", "Observer", "Phase", "PipelineRun", "Rows", "RunStage",
]  # fmt: skip
