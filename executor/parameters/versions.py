"""Versions of a stage's weights, where backwards of earlier steps are still to come.

Autograd holds leaves by reference, and views of them by their memory: a backward reads what lies
in a leaf's memory then. So each version has leaves of its own, which no optimizer steps, and the
blocks of the stage have those of the step whose forward or backward they run (what runs again in a
backward reads them, too). With v versions, step t has those of number t mod v, which the step t - v
is done with.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from meshwright.executor.parameters.parameters import StageParameter


class Versions:
    """Leaves of a stage's trained parameters, by version."""

    def __init__(
        self, modules: Sequence[nn.Module], parameters: Sequence[StageParameter], count: int
    ) -> None:
        """`modules` read the parameters as attributes. One version is what there is already."""
        self.count = count
        self.parameters = [p for p in parameters if p.trainable] if count > 1 else []
        readers: dict[int, list[tuple[nn.Module, str]]] = {}
        for module in modules:
            for name, leaf in module.named_parameters(recurse=False):
                readers.setdefault(id(leaf), []).append((module, name))
        self.readers = [readers.get(id(p.leaf), []) for p in self.parameters]
        for p in self.parameters:
            p.versions = tuple(nn.Parameter(torch.empty_like(p.leaf)) for _ in range(count))
        self.current = -1
        self.take(0)

    def take(self, step: int) -> None:
        """Have the leaves of a step, by number from 0."""
        version = step % self.count
        if version == self.current:
            return
        self.current = version
        for p, places in zip(self.parameters, self.readers, strict=True):
            p.leaf = p.versions[version]
            for module, name in places:
                setattr(module, name, p.leaf)
