"""What a run measures of itself beside what was predicted, and where that is written."""

from meshwright.monitor.batch_size import BatchSize, TokenCount
from meshwright.monitor.loggers import (
    JsonLinesLogger,
    Metrics,
    MetricsLogger,
    TensorBoardLogger,
    WandbLogger,
    logger_for,
)
from meshwright.monitor.metrics import WARM_UP, Deviation, Monitor, Predicted
