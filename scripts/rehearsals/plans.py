"""The table of plans: families x schedules x ZeRO x recompute x tensor, expert and data axes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

# family, ranks, rows of the global batch, decisions (m: micro-batches; cut: blocks of each stage)
TABLE = """
llama  1  4  m=1
llama  1  8  m=2
llama  1  4  m=1 recompute=full
llama  1  4  m=1 precision=bf16
llama  4 16  dp=4 zero=0 m=1
llama  4 16  dp=4 zero=1 m=1
llama  4 16  dp=4 zero=2 m=1
llama  4 16  dp=4 zero=3 m=1
llama  4 16  dp=4 zero=1 m=4
llama  4 16  dp=4 zero=2 m=4
llama  4 16  dp=4 zero=3 m=2 recompute=full
llama  4 16  dp=4 zero=2 m=1 recompute=pointwise
llama  4 16  dp=4 zero=0 m=1 recompute=widening
llama  4 16  dp=4 zero=1 m=1 precision=bf16
llama  4 16  dp=4 zero=3 m=1 precision=bf16
llama  4 16  tp=4 m=1
llama  4 16  dp=2 tp=2 zero=1 m=1
llama  4 16  pp=2 dp=2 schedule=1f1b zero=1 m=4
llama  4 16  pp=4 schedule=gpipe m=4
llama  4 16  pp=4 schedule=1f1b m=8
llama  4 16  pp=2 dp=2 schedule=1f1b zero=2 m=4
llama  4 16  pp=2 tp=2 schedule=1f1b m=4 recompute=full
llama  4 16  pp=2 dp=2 schedule=zb_h1 zero=0 m=8
llama  2 16  pp=2 schedule=interleaved_1f1b virtual_stages=2 m=4
llama  2 16  pp=2 schedule=1f1b m=4 cut=2,6
llama  2 16  pp=2 schedule=eager_1f1b m=4 cut=5,3
gpt    1  4  m=1
gpt    4 16  dp=4 zero=0 m=1
gpt    4 16  dp=4 zero=1 m=1 precision=bf16
gpt    4 16  dp=4 zero=2 m=2 precision=bf16
gpt    4 16  dp=4 zero=3 m=2 precision=bf16
gpt    4 16  dp=2 tp=2 zero=0 m=1
gpt    4 16  tp=4 m=1 recompute=full
gpt    4 16  pp=4 schedule=zb_h2 m=8
gpt    4 16  pp=2 dp=2 schedule=1f1b zero=1 m=4
gpt    2 16  pp=2 schedule=zb_v m=4
gpt    2 16  pp=2 schedule=gpipe m=4 recompute=full
bert   1  4  m=1
bert   4 16  dp=4 zero=0 m=1
bert   4 16  dp=4 zero=1 m=1
bert   4 16  dp=4 zero=2 m=2
bert   4 16  dp=4 zero=3 m=1 recompute=full
bert   4 16  tp=4 m=1
bert   4 16  pp=2 dp=2 schedule=1f1b zero=1 m=4
bert   2 16  pp=2 schedule=1f1b m=4 cut=2,6
t5     1  4  m=1
t5     4 16  dp=4 zero=1 m=1
t5     4 16  dp=4 zero=2 m=2
t5     4 16  dp=4 zero=3 m=1
t5     4 16  dp=2 tp=2 zero=1 m=1
t5     4 16  dp=4 zero=0 m=1 recompute=full
t5     2 16  pp=2 schedule=1f1b m=4
moe    1  4  m=1
moe    4 16  dp=4 zero=0 m=1
moe    4 16  dp=4 zero=1 m=1
moe    4 16  dp=4 zero=2 m=2
moe    4 16  dp=4 zero=3 m=1
moe    4 16  dp=4 ep=4 zero=0 m=1
moe    4 16  dp=4 ep=2 zero=1 m=1
moe    2 16  pp=2 schedule=1f1b m=4
resnet 1 16  m=1
resnet 4 64  dp=4 zero=0 m=1
resnet 4 64  dp=4 zero=1 m=1
resnet 4 64  dp=4 zero=2 m=2
resnet 4 64  dp=4 zero=3 m=1
resnet 2 64  pp=2 schedule=1f1b m=4
"""

# what the first one leaves out: dropout, segments, gathers again, more schedules, contexts, shards
MORE = """
dropout 1  4  m=1
dropout 1  8  m=2 recompute=full
dropout 4 16  dp=4 zero=1 m=1
dropout 4 16  dp=4 zero=2 m=2 precision=bf16
dropout 4 16  dp=4 zero=3 m=1 recompute=pointwise
dropout 4 16  dp=4 zero=3 m=2 precision=bf16 recompute=full
dropout 4 16  tp=4 m=1
dropout 4 16  dp=2 tp=2 zero=1 m=1 recompute=pointwise
dropout 4 16  pp=4 schedule=1f1b m=8
dropout 2 16  pp=2 schedule=zb_h1 m=4
dropout 4 16  pp=2 dp=2 schedule=gpipe zero=1 m=4
dropout 2 16  pp=2 schedule=interleaved_1f1b virtual_stages=2 m=4
llama  1  4  m=1 segments=2
llama  4 16  dp=4 zero=1 m=1 segments=2
llama  4 16  dp=4 zero=3 m=2 segments=3
llama  4 16  pp=2 dp=2 schedule=1f1b zero=1 m=4 segments=2
gpt    4 16  dp=4 zero=2 m=2 segments=2 recompute=full
gpt    2 16  pp=2 schedule=gpipe m=4 segments=2
bert   4 16  dp=4 zero=1 m=1 segments=2 precision=bf16
t5     4 16  dp=4 zero=0 m=2 segments=2
llama  4 16  tp=4 m=1 recompute=regather
llama  4 16  tp=4 m=2 recompute=pointwise+regather
llama  4 16  dp=2 tp=2 zero=3 m=1 recompute=products+regather
gpt    4 16  tp=2 pp=2 schedule=1f1b m=4 recompute=regather
gpt    4 16  tp=2 pp=2 schedule=zb_h1 m=4 recompute=regather
bert   4 16  dp=2 tp=2 zero=2 m=2 recompute=widening+regather
llama  2 16  pp=2 schedule=zb_h1 m=4
llama  4 16  pp=4 schedule=zb_h2 m=8
llama  2 16  pp=2 schedule=zb_v m=4
llama  2 16  pp=2 schedule=dualpipe_v m=4
bert   2 16  pp=2 schedule=zb_h1 m=8
bert   4 16  pp=2 dp=2 schedule=zb_v zero=1 m=4
gpt    2 16  pp=2 schedule=chimera m=4
gpt    2 16  pp=2 schedule=dualpipe m=4
gpt    4 16  pp=4 schedule=eager_1f1b m=8
t5     2 16  pp=2 schedule=gpipe m=2
moe    2 16  pp=2 schedule=zb_h1 m=4
moe    4 16  pp=2 dp=2 schedule=1f1b zero=1 m=4
llama  4 16  cp=4 dp=1 m=1
llama  4 16  cp=2 dp=2 zero=1 m=1
llama  4 16  cp=2 dp=2 zero=3 m=2 recompute=full
gpt    4 16  cp=2 tp=2 m=1
llama  4 16  dp=4 zero=1 dp_shard=2 m=1
llama  4 16  dp=4 zero=2 dp_shard=2 m=2
llama  4 16  dp=4 zero=3 dp_shard=2 m=1
llama  4 16  dp=4 zero=3 hpz=2 m=2 precision=bf16
bert   4 16  dp=4 zero=3 m=2 precision=bf16
bert   4 16  dp=4 zero=1 m=4 precision=bf16
bert   4 16  tp=2 pp=2 schedule=1f1b m=4
t5     4 16  dp=4 zero=2 m=1 precision=bf16
t5     4 16  dp=4 zero=3 m=2 recompute=pointwise
t5     4 16  tp=4 m=1
moe    4 16  dp=4 zero=1 m=2 recompute=full
moe    4 16  dp=4 ep=4 zero=1 m=2
moe    4 16  dp=4 ep=2 zero=3 m=1
moe    4 16  dp=2 tp=2 zero=1 m=1
resnet 4 64  dp=4 zero=1 m=2
resnet 1 16  m=2
resnet 2 64  pp=2 schedule=gpipe m=2
gpt    4 16  dp=4 zero=3 m=1 recompute=widening
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A plan to be priced and rehearsed: `overrides` as `Overrides` takes them; `cut` the numbers
    of blocks of each stage, where they are given."""

    family: str
    ranks: int
    rows: int
    precision: str
    overrides: dict[str, Any]
    cut: tuple[int, ...]
    decisions: str

    @property
    def name(self) -> str:
        return f"{self.family} {self.ranks} {self.decisions}"

    @staticmethod
    def parse(line: str) -> Case:
        """One line of the table. What it doesn't name is 1 (degrees), or none (recompute)."""
        family, ranks, rows, *words = line.split()
        given = dict(word.split("=") for word in words)
        cut = tuple(int(n) for n in given.pop("cut", "").split(",") if n)
        precision = given.pop("precision", "fp32")
        overrides: dict[str, Any] = {"dp": 1, "tp": 1, "pp": 1, "recompute": "none"}
        overrides["num_microbatches"] = int(given.pop("m"))
        overrides |= {name: int(v) if v.isdigit() else v for name, v in given.items()}
        return Case(
            family=family,
            ranks=int(ranks),
            rows=int(rows),
            precision=precision,
            overrides=overrides,
            cut=cut,
            decisions=" ".join(words),
        )


CASES = tuple(Case.parse(line) for line in (TABLE + MORE).split("\n") if line.strip())
