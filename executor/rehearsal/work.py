"""Bytes that a rank's log gives to links in a step."""

from __future__ import annotations

from collections import defaultdict

from meshwright.costmodel.kernels import bytes_sent
from meshwright.executor.prices import collective_of
from meshwright.executor.rehearsal.events import Kind, RankLog


def link_bytes(log: RankLog) -> dict[str, float]:
    """Bytes that the rank gives to links in a step, by description of the group: its messages, and
    its part of collectives round a ring, or to each member."""
    by_link: defaultdict[str, float] = defaultdict(float)
    for event in log.events[slice(*log.step)]:
        name, ranks = event.group
        if event.kind is Kind.SEND:
            by_link[name] += event.nbytes
        elif event.kind is Kind.COLLECTIVE:
            said = collective_of(event.operation, event.nbytes, len(ranks))
            by_link[name] += bytes_sent(*said, len(ranks))
    return dict(by_link)
