"""What a run measures of itself beside what was predicted, and where that is written."""

from meshwright.monitor.deviation import Deviation
from meshwright.monitor.loggers import (
    JsonLinesLogger,
    Metrics,
    MetricsLogger,
    TensorBoardLogger,
    WandbLogger,
)
from meshwright.monitor.metrics import WARM_UP, Monitor, Predicted

__all__ = [
    "WARM_UP", "Deviation", "JsonLinesLogger", "Metrics", "MetricsLogger", "Monitor", "Predicted",
    "TensorBoardLogger", "WandbLogger",
]  # fmt: skip
