"""The error of a measurement."""

from __future__ import annotations

from meshwright.profiles.inputs import MeshwrightError


class MeasuringError(MeshwrightError, RuntimeError):
    """A measurement that this machine did not finish."""

    PLACE = "profile: collectives"
    LEGAL = "a machine that can start the ranks and processes of a measurement"
    WAY_OUT = "measure again when the machine is less busy"
