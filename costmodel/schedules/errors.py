"""ScheduleError: streams, times or a stage graph that are no pipeline."""

from __future__ import annotations

from meshwright.profiles.inputs import MeshwrightError


class ScheduleError(MeshwrightError):
    """Streams, times or a stage graph that are no pipeline: says which of them, and what lacks."""

    PLACE = "pipeline schedule"
    LEGAL = "streams that compute each stage once and receive what is sent, with times for each"
    WAY_OUT = "take a schedule of SCHEDULES, or mend the streams"
