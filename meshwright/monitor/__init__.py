"""Measurements of a run beside its prediction, and where they are written."""

from meshwright.monitor.batch_size import BatchSize, TokenCount
from meshwright.monitor.loggers import (
    JsonLinesLogger,
    Metrics,
    MetricsLogger,
    MlflowLogger,
    TensorBoardLogger,
    WandbLogger,
    logger_for,
)
from meshwright.monitor.metrics import WARM_UP, Deviation, Monitor, Predicted
