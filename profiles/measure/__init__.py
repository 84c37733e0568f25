"""Measurements of this machine, and those that others took: operators, collectives, what a node's
host does, imports."""

from meshwright.profiles.measure.collectives import COLLECTIVES, SIZES_BYTES, launch_local, shapes
from meshwright.profiles.measure.host_work import FILE_BYTES, check_folder, measure_host
from meshwright.profiles.measure.imports import (
    CollectiveRow,
    is_gpu,
    read_collectives_csv,
    read_nccl_tests,
    timings_for,
    world_of_log,
)
from meshwright.profiles.measure.operators import Skipped, measure_all, neighbours
