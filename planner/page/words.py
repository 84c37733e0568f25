"""What the words of the page mean, for who reads one for the first time."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

WORDS: Mapping[str, str] = MappingProxyType({
    "rank": "one process, which drives one device; ranks are numbered node by node",
    "row": "one example of the batch: a sequence, an image",
    "micro-batch": "the part of a batch that goes forward and backward at a time; gradients add up",
    "dp": "data parallelism: so many groups of ranks take rows of their own",
    "tp": "tensor parallelism: so many ranks share each operator out",
    "pp": "pipeline parallelism: so many groups of ranks run parts of the model in turn",
    "cp": "context parallelism: so many ranks share out the tokens of a row",
    "ep": "expert parallelism: so many ranks of the data axis share out the experts",
    "mesh": "the ranks of a stage by their degrees: dp × cp × tp, with ep where there are experts",
    "ZeRO": (
        "what ranks of the data axis divide among them rather than hold each: 0 nothing, 1 the "
        "optimizer's states, 2 gradients too, 3 weights too"
    ),
    "block": "a run of operators, mostly one layer; stages are made of blocks",
    "stage": "consecutive blocks that the same ranks run",
    "device group": "the ranks that run the same stage, or several of an interleaved schedule",
    "in flight": "micro-batches that a stage has gone forward with and not yet backward",
    "schedule": (
        "the order of a pipeline's forwards and backwards: gpipe all forwards first; 1f1b in turn; "
        "eager_1f1b the same, further ahead; interleaved_1f1b several stages on each group; "
        "zb_h1, zb_h2 and zb_v put gradients of weights off to fill gaps; chimera and dualpipe run "
        "two copies of the model in opposite directions"
    ),
    "recompute": (
        "what a backward makes again rather than keeps, of how many blocks: none; selective "
        "(attention that is written out); pointwise (norms, activations, casts); widening "
        "(products larger than what goes in); products; full; alternate (every other block in "
        "full); regather: also what was gathered from tensor-parallel ranks is gathered again"
    ),
    "MFU": "the model's FLOPs a second over what the device can do at most",
    "HFU": "the same with the FLOPs of recompute",
    "exposed communication": "seconds in which a device waits for others, with nothing to compute",
    "hidden": "seconds of communication during which the device computes",
    "gradient reduction": "seconds of summing gradients over the data axis that nothing hides",
    "bubble": "the part of a pipeline's time in which its devices wait, on average",
    "waiting": "seconds in which a device group waits for the others",
    "activations": "what forwards keep for backwards, of all micro-batches in flight",
    "buffers": "messages between stages",
    "transient": "what a backward makes again, gathers, or works on, at the fullest moment",
    "reserved": "the device's context and the communicators' buffers",
    "predicted peak": "what is held at the fullest moment of a step; plans are chosen by it",
    "rehearsed": (
        "of the plan's own steps, run on tensors without values; what a device reserves is added"
    ),
    "price": "what the cost model predicts; nothing was run on the devices",
    "interval": (
        "measured over predicted is between these for 80 % of the published measurements of "
        "models and plans like this"
    ),
    "gap": "how much more than the bound the plan takes; the bound is no plan, and may be too low",
    "family": "plans with one decision in common that the chosen one hasn't, as tp=2 or ZeRO-2",
    "runner-up": "a plan that came near the chosen one, of its own families",
    "tie": "a difference smaller than prices resolve; the simpler plan of those is chosen",
    "measured": "seconds of operators that were measured on this device (meshwright profile)",
    "interpolated": "seconds between measured sizes",
    "modelled": "seconds from the device's speed and a curve of efficiency, of the catalog",
})  # fmt: skip
