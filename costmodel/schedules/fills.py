"""Estimates of a schedule: lower bounds of its step, and what filling and draining its pipeline
adds."""

import math
from typing import NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Floats: TypeAlias = NDArray[np.float64]


class PipelineShape(NamedTuple):
    """m micro-batches on p devices with v stages each."""

    m: int
    p: int
    v: int = 1


# --- fills: seconds that filling and draining adds for each device but one ---


def fill_whole(f: Floats, b: Floats, w: Floats, shape: PipelineShape) -> Floats:
    return f + b


def fill_never(f: Floats, b: Floats, w: Floats, shape: PipelineShape) -> Floats:
    """Steps follow each other without an end."""
    return np.zeros_like(f)


def fill_interleaved(f: Floats, b: Floats, w: Floats, shape: PipelineShape) -> Floats:
    """One pass through a stage of each device, and idle turns in the last round."""
    m, p, v = shape
    missing = -m % p * (v - 1) / max(1, p - 1)
    return f + b + missing * (f + b if m < p else np.maximum(f, b))


def fill_less_weights(f: Floats, b: Floats, w: Floats, shape: PipelineShape) -> Floats:
    """W fills the warm-up and the cool-down; with few micro-batches part of them."""
    once = min(1.0, (shape.m - 1) / max(1, shape.p - 1))
    return np.maximum(f + b - (1 + once) * w, 0.0)


def fill_v_shaped(f: Floats, b: Floats, w: Floats, shape: PipelineShape) -> Floats:
    """From two passes less W with one micro-batch to a backward's first part with p and more."""
    early = max(0.0, 1.0 - (shape.m - 1) / max(1, shape.p - 1))
    least = np.maximum(b - w + (f - w) / 2, 0.0)
    return least + early * np.maximum(2 * (f + b - w) - least, 0.0)


def fill_less_weights_twice(f: Floats, b: Floats, w: Floats, shape: PipelineShape) -> Floats:
    """W fills twice as much, until waiting for the first F alone is left."""
    often = min(2.0, (shape.m - 1) / max(1, shape.p - 1))
    return np.maximum(f + b - (1 + often) * w, f)


def fill_chimera(f: Floats, b: Floats, w: Floats, shape: PipelineShape) -> Floats:
    """(p - 2)(F + K (B - F)) in all, with K units of p micro-batches."""
    units = math.ceil(shape.m / shape.p)
    fill: Floats = (shape.p - 2) * (f + units * np.maximum(b - f, 0.0)) / max(1, shape.p - 1)
    return fill


def fill_dualpipe(f: Floats, b: Floats, w: Floats, shape: PipelineShape) -> Floats:
    """(p/2 - 1)(F + I - W) in all."""
    return np.maximum((shape.p / 2 - 1) * (f + b - 2 * w) / max(1, shape.p - 1), 0.0)


# --- lower bounds on the step ---


def bound_of_slowest(work_s: float, slowest_s: float, m: int, p: int) -> float:
    """T >= m · the slowest device."""
    return m * slowest_s


def bound_of_chain(work_s: float, slowest_s: float, m: int, p: int) -> float:
    """Stage k starts after one micro-batch went forward through all stages before it, which then
    wait for its way back, and works m times: T >= t₁ + .. + t_{k-1} + m·t_k for every k. The least
    T for which such t add up to W, the work, is where all of these hold with equality:

        T  >=  W / (1 - (1 - 1/m)^p)
    """
    return max(m * slowest_s, work_s / (1 - (1 - 1 / m) ** p))
