"""What a stage costs whose blocks send, in part, what they save to host memory.

Of block k with forward f, backward b and c = bytes / link's bandwidth seconds of copies each way,
what is sent goes beside the next block's forward, and comes back beside its backward:

    a forward waits      added(f[k+1], c[k]),      nothing lies beside the last block's
    a backward waits     added(b[k+1], c[k])
    added(w, c)          max(w + slowdown · min(w, c), c) - w,      c on a CPU

A micro-batch in flight holds on the device what is not sent, and one at a time what two neighbours
sent, which is on its way. In a search whose blocks are not known yet, all blocks are alike.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from meshwright.costmodel.operators import Setting
from meshwright.costmodel.stages.offload import host_bandwidth
from meshwright.costmodel.stages.sums import Floats


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """Bytes of a micro-batch that lie in host memory (`nbytes`), the most of them that are on a
    device on their way, and the seconds that both passes wait for them."""

    nbytes: Floats
    passing_bytes: Floats
    forward_s: Floats
    backward_s: Floats


def sent_evenly(
    kept: Floats,
    blocks: Floats,
    forward: Floats,
    backward: Floats,
    setting: Setting,
    alone: tuple[Floats, Floats] = (np.zeros(()), np.zeros(())),
) -> Sent:
    """Of stages with so many blocks that are all alike, and keep `kept` bytes together, but for
    so many blocks and bytes of the last ones (`alone`)."""
    part = setting.host.activations
    if not part or setting.cluster.host is None:
        none = np.zeros(np.shape(kept))
        return Sent(nbytes=none, passing_bytes=none, forward_s=none, backward_s=none)
    blocks = np.maximum(blocks, 1.0)
    beside = np.minimum(part, 1 - 1 / blocks)
    like = np.maximum(blocks - alone[0], 1.0)
    each = np.maximum(kept - alone[1], 0.0) / like
    nbytes = np.minimum(part * blocks, like) * each
    # parts that reach the last ones send of them, too
    nbytes = np.where(part * blocks > like, np.maximum(nbytes, part * kept), nbytes)
    return Sent(
        nbytes=nbytes,
        passing_bytes=np.minimum(2 * each, nbytes),
        forward_s=_added(beside * forward, nbytes, "to_host", setting),
        backward_s=_added(beside * backward, nbytes, "to_device", setting),
    )


def sent_by_block(moved: Floats, forward: Floats, backward: Floats, setting: Setting) -> Sent:
    """Of one stage whose blocks send `moved` bytes each, and take so many seconds, (K,)."""

    def waits(seconds: Floats, kind: str) -> Floats:
        following = np.append(seconds[1:], 0.0)
        return np.asarray(_added(following, moved, kind, setting).sum())

    return Sent(
        nbytes=np.asarray(moved.sum()),
        passing_bytes=np.asarray((moved + np.append(0.0, moved[:-1])).max(initial=0.0)),
        forward_s=waits(forward, "to_host"),
        backward_s=waits(backward, "to_device"),
    )


def _added(compute: Floats, nbytes: Floats, kind: str, setting: Setting) -> Floats:
    """Seconds that copies add to the compute beside them."""
    device, copies = setting.cluster.device, nbytes / host_bandwidth(setting, kind)
    if device.kind == "cpu":
        return copies
    both = np.maximum(compute + device.overlap_slowdown * np.minimum(compute, copies), copies)
    added: Floats = both - compute
    return added
