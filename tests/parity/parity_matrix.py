"""The cells of parity, in the words of `parity_cells.py`.

The matrix is spread, not the full product: every legal pair of values of any two of case, schedule,
ZeRO stage, recompute and precision is here, on equal and unequal meshes. The mixture of experts
runs in fp32 only: in half precision, roundings decide between experts. The tables after it have
what goes beyond these knobs. `covering` chooses the cells of the change tier.
"""

from collections.abc import Sequence
from functools import cache
from itertools import combinations

from meshwright.costmodel.precisions import PRECISIONS
from meshwright.costmodel.recompute import PARTIAL, parts_of
from tests.parity.parity_cells import Cell

TWO_RANKS = """
gpt2_tied    dp2              1f1b m4 zero2 bf16
gpt2_tied    pp2              interleaved_1f1b m4 v2 pointwise fp16 front
gpt2_untied  dp2              1f1b m4 zero1
gpt2_untied  pp2              1f1b m2 pointwise back
gpt2_untied  tp2              1f1b m4 pointwise
llama        dp2              gpipe m4 zero1 pointwise bf16
llama        pp2              zb_h1 m4 pointwise front
bert         dp2              1f1b m4 mixed fp16
bert         pp2              eager_1f1b m4 back
bert         tp2              gpipe m4 pointwise
resnet       dp2              gpipe m4 zero3 fp16
resnet       pp2              1f1b m4 pointwise back
resnet       tp2              1f1b m2 mixed
mlp          dp2              gpipe m8 zero2 pointwise
mlp          pp2              gpipe m2 pointwise back
plain_gpt    dp2              gpipe m2 zero3 full
plain_gpt    pp2              dualpipe_v m4 full
plain_gpt    tp2              gpipe m4 pointwise bare
gpt2_deep    dp2              1f1b m4 zero1
gpt2_deep    pp2              eager_1f1b m4 mixed front
gpt2_deep    tp2              1f1b m4 sequence
t5           dp2              gpipe m4 zero1
t5           pp2              zb_v m4 bf16 back
t5           tp2              gpipe m4 fp16 bare
moe          dp2              gpipe m4 zero2 pointwise
moe          pp2              zb_h2 m8 mixed
moe          tp2              1f1b m8 full bare
unet         dp2              1f1b m8 zero3
unet         pp2              zb_h1 m4 pointwise front
unet         tp2              1f1b m4 pointwise bf16 bare
plain_gpt    pp2              zb_v m4 full
"""

FOUR_RANKS = """
gpt2_tied    1|dp2|1          1f1b m8 zero2 full front
gpt2_tied    1|dp3            zb_h2 m2 zero1 back rows12
gpt2_tied    dp2xtp2          gpipe m4 mixed bf16 sequence
gpt2_tied    dp2|tp2          dualpipe_v m4 zero2 full fp16 back
gpt2_tied    dp4              gpipe m4 zero2 shard2 mixed bf16
gpt2_tied    dp4              1f1b m2 zero3 hpz2 full bf16
gpt2_tied    pp2xdp2          zb_h1 m4 zero1 pointwise front spread
gpt2_tied    pp2xtp2          interleaved_1f1b m4 v2 full bare
gpt2_tied    pp4              eager_1f1b m8 full front
gpt2_tied    tp2|dp2          1f1b m4 zero3 full fp16 sequence back
gpt2_tied    tp2|dp2          zb_v m4 zero2 bf16 front
gpt2_tied    tp4              1f1b m2 sequence
gpt2_untied  1|dp2|1          1f1b m2 zero2
gpt2_untied  1|dp3            zb_v m4 zero1 pointwise rows12
gpt2_untied  1|tp2|1          zb_h2 m4
gpt2_untied  dp2|tp2          interleaved_1f1b m4 v2 zero1 full bare front
gpt2_untied  dp4              gpipe m4 zero3 shard2 pointwise
gpt2_untied  pp2xdp2          dualpipe_v m2 zero2 mixed spread
gpt2_untied  pp2xtp2          eager_1f1b m8 full bare back
gpt2_untied  tp2|dp2          zb_h1 m4 mixed
llama        1|dp2|1          gpipe m4 mixed back
llama        1|dp3            dualpipe_v m2 zero1 full rows12
llama        1|tp2|1          1f1b m4 mixed bare back
llama        dp2xtp2          1f1b m4 zero1 full fp16
llama        dp2|tp2          eager_1f1b m4 zero3 pointwise bf16 sequence
llama        dp4              gpipe m4 zero3 shard2
llama        dp4              1f1b m2 zero3 hpz2 mixed
llama        pp2xdp2          zb_v m4 zero1 spread
llama        pp2xdp2          interleaved_1f1b m4 v2 zero3 pointwise spread
llama        pp2xtp2          zb_h2 m4 fp16 sequence front
llama        pp4              zb_h1 m4 mixed fp16 front
llama        tp2|dp2          1f1b m4 zero2 mixed fp16 sequence back
llama        tp4              gpipe m4 fp16
bert         1|dp2|1          eager_1f1b m4 zero1 pointwise fp16 back
bert         1|dp3            zb_v m4 zero1 pointwise back rows12
bert         dp2xtp2          1f1b m4 zero2 full
bert         dp2|tp2          interleaved_1f1b m2 v2 zero3 back
bert         dp4              gpipe m4 mixed bf16
bert         pp2xdp2          zb_h1 m4 zero1 bf16 front spread
bert         pp2xtp2          dualpipe_v m4 bf16 bare back
bert         tp2|dp2          zb_h2 m8 zero1 mixed front
resnet       1|dp2|1          gpipe m4 zero3 back
resnet       1|dp3            interleaved_1f1b m4 v2 zero2 bf16 back rows12
resnet       1|tp2|1          zb_v m4 pointwise fp16
resnet       1|tp2|1          dualpipe_v m2 full
resnet       dp2|tp2          eager_1f1b m2 mixed
resnet       dp4              gpipe m2 zero3 shard2 pointwise
resnet       pp2xdp2          1f1b m4 zero1 full fp16 back spread
resnet       pp2xtp2          gpipe m8 pointwise
resnet       pp4              zb_h1 m4 pointwise bf16 front
resnet       tp2|dp2          zb_h2 m4 zero2 pointwise bf16 bare
resnet       tp4              gpipe m4 full bare
mlp          1|dp2|1          interleaved_1f1b m8 v2 zero3 mixed back
mlp          1|dp2|1          zb_v m4 pointwise front
mlp          1|dp3            gpipe m4 zero2 front rows12
mlp          1|tp2|1          interleaved_1f1b m4 v2 back
mlp          dp2|tp2          zb_h1 m4 zero2 pointwise
mlp          dp4              1f1b m2 full
mlp          pp2xdp2          zb_h2 m2 full back spread
mlp          pp2xdp2          eager_1f1b m4 zero3 mixed spread
mlp          pp2xtp2          interleaved_1f1b m4 v2 pointwise
mlp          tp2|dp2          dualpipe_v m8 zero1 mixed
plain_gpt    1|dp2|1          1f1b m8 pointwise back
plain_gpt    1|dp3            zb_h1 m4 back rows12
plain_gpt    1|tp2|1          zb_h1 m8 front
plain_gpt    dp2|tp2          gpipe m2 zero3
plain_gpt    dp4              gpipe m4 zero1 shard2 full
plain_gpt    pp2xdp2          eager_1f1b m4 zero2 mixed front spread
plain_gpt    pp2xtp2          1f1b m4 mixed front
plain_gpt    pp4              zb_h2 m2 front
plain_gpt    tp2|dp2          gpipe m8 zero2 pointwise bare back
plain_gpt    tp4              gpipe m4 mixed bare
gpt2_deep    1|dp2|1          zb_h2 m4 zero2 pointwise front
gpt2_deep    1|dp3            eager_1f1b m4 zero3 front rows12
gpt2_deep    1|tp2|1          zb_h1 m4 sequence front
gpt2_deep    dp2xtp2          1f1b m8 zero3 pointwise sequence
gpt2_deep    dp2|tp2          dualpipe_v m8 zero1 pointwise sequence front
gpt2_deep    dp4              1f1b m2 zero1
gpt2_deep    pp2xdp2          zb_v m4 zero1 mixed back spread
gpt2_deep    pp2xtp2          interleaved_1f1b m4 v2 full front
gpt2_deep    pp4              gpipe m8 full front
gpt2_deep    tp2|dp2          zb_h2 m4 zero1 sequence back
t5           1|dp2|1          zb_h1 m4 zero2 full bf16 front
t5           1|dp3            eager_1f1b m4 zero3 mixed front rows12
t5           1|dp3            1f1b m2 mixed front rows12
t5           1|tp2|1          zb_h2 m8 mixed bare back
t5           dp2xtp2          gpipe m4 zero1 bare
t5           dp2|tp2          dualpipe_v m2 zero2 mixed
t5           dp4              1f1b m4 zero2 shard2
t5           pp2xdp2          interleaved_1f1b m4 v2 pointwise fp16
t5           pp2xdp2          zb_v m8 zero2 spread
t5           pp2xtp2          eager_1f1b m4 mixed front
t5           pp4              1f1b m4 back
t5           tp2|dp2          zb_h1 m2 bare
t5           tp4              gpipe m8 pointwise bare
moe          1|dp2|1          zb_h1 m4 mixed
moe          1|dp3            interleaved_1f1b m4 v2 zero1 rows12
moe          1|tp2|1          eager_1f1b m4 pointwise front
moe          dp2xtp2          1f1b m4 zero1 mixed
moe          dp2|tp2          zb_v m4 zero2 bare
moe          dp2|tp2          zb_h2 m4 pointwise
moe          dp4              gpipe m2 zero3
moe          pp2xdp2          gpipe m4 zero3 back
moe          pp2xtp2          dualpipe_v m4 full bare back
moe          tp2|dp2          eager_1f1b m4 zero1 full bare front
moe          tp4              1f1b m4 bare
unet         1|dp2|1          dualpipe_v m8 back
unet         1|dp3            zb_h2 m4 zero2 mixed fp16 front rows12
unet         1|tp2|1          gpipe m4 bf16
unet         dp2|tp2          1f1b m4 zero3 bare
unet         dp4              gpipe m4 zero2 fp16
unet         pp2xdp2          eager_1f1b m4 zero2 bf16 spread
unet         pp2xtp2          zb_v m8 full bare front
unet         pp2xtp2          zb_h1 m2 pointwise bare
unet         pp4              eager_1f1b m4 bf16
unet         tp2|dp2          interleaved_1f1b m2 v2 zero1 full back
"""

EIGHT_RANKS = """
gpt2_tied    pp2xdp2xtp2      zb_v m4 zero1 bf16 sequence front spread
gpt2_tied    pp2xdp4          zb_v m4 zero2 shard2 pointwise front spread
gpt2_tied    pp4xdp2          gpipe m2 zero1 front
gpt2_untied  dp2|dp4|dp2      eager_1f1b m2 zero1 pointwise back
gpt2_untied  pp2xdp2xtp2      zb_h1 m8 pointwise back
llama        1|dp2|tp4|1      eager_1f1b m8 zero1 mixed
llama        dp4xtp2          1f1b m4 pointwise bf16 sequence
llama        dp4xtp2          1f1b m2 zero3 hpz2 sequence
llama        pp4xtp2          zb_h1 m4 full bf16 sequence back
bert         pp2xdp4          zb_h2 m4 zero1 shard2 mixed fp16 front
resnet       dp2xtp2|tp2|tp2  dualpipe_v m4 pointwise bf16 bare
resnet       tp2|dp2xtp2|tp2  zb_v m2 full back
plain_gpt    pp2xdp2xtp2      interleaved_1f1b m4 v2 zero2 full
plain_gpt    pp4xdp2          eager_1f1b m4 zero2 pointwise back
plain_gpt    pp2xdp4          1f1b m4 zero3 hpz2
gpt2_deep    dp4xtp2          gpipe m4 zero2 shard2 bare
gpt2_deep    pp8              zb_h1 m4 pointwise front
t5           1|dp2|tp4|1      zb_h1 m4 fp16 bare front
t5           dp2xtp2|tp2|tp2  interleaved_1f1b m4 v2 zero1 fp16 bare front
t5           dp2|dp4|dp2      zb_h1 m4 bf16 front
t5           pp4xtp2          eager_1f1b m4 mixed
t5           tp2|dp2xtp2|tp2  1f1b m4 zero1 bf16 front
moe          dp2xtp2|tp2|tp2  eager_1f1b m8 zero2 mixed back
moe          dp8              gpipe m2 zero1 shard2 full
moe          pp4xdp2          1f1b m4 full front spread
unet         1|dp2|tp4|1      1f1b m4 zero3 pointwise back
unet         pp2xdp4          gpipe m4 zero1 full bf16 back spread
unet         tp2|dp2xtp2|tp2  eager_1f1b m4 zero2 pointwise bare back
"""


# sequences split: four models (causal, with shared keys, windows, both directions) and `tokens`,
# which has what decoders have beside attention (shifts, learned positions, means over tokens)
CONTEXT = """
gpt2_tied    cp2              ring m4
llama        cp2              all_gather m4 zero1
llama        cp2              ring m4 zero3
mistral      cp2              ulysses m4
mistral      cp2              ring m4
bert         cp2              all_gather m4
tokens       cp2              all_gather m4
tokens       cp2              ulysses m2 zero2
moe          cp2              ring m4
plain_gpt    cp2              all_gather m4 bf16
gpt2_tied    cp4              ulysses m2 mixed
gpt2_tied    cp2xtp2          ulysses m4 sequence
gpt2_tied    cp2xtp2          ring m4 sequence
gpt2_tied    dp2xcp2          ring m2 zero1
gpt2_tied    pp2xcp2          all_gather m4 mixed
llama        cp4              ring m4 zero3
llama        cp4              all_gather m2 zero2 full
llama        cp2xtp2          all_gather m4 sequence
llama        dp2xcp2          ulysses m2 zero3
llama        pp2xcp2          ring zb_h1 m4 zero1 bf16
mistral      cp4              ring m4
mistral      cp2xtp2          all_gather m4 zero1
mistral      dp2xcp2          ring m4 zero3
mistral      pp2xcp2          ulysses m4 full
bert         cp4              ulysses m4 full
bert         cp4              ring m2 zero1
bert         cp2xtp2          ring m4
bert         dp2xcp2          all_gather m4 zero3 shard2
bert         pp2xcp2          ulysses interleaved_1f1b v2 m4 fp16
tokens       cp4              ring m4
tokens       cp2xtp2          ring m4
tokens       pp2xcp2          all_gather zb_v m4
llama        pp2xdp2xcp2      ring m2 zero1 spread
gpt2_tied    dp2xcp2xtp2      ulysses m2 zero3 sequence
mistral      pp2xcp2xtp2      all_gather interleaved_1f1b v2 m4 zero1
"""

# schedules with two copies of the model, which run in opposite directions
COPIES = """
gpt2_tied    pp2          chimera m4
gpt2_untied  pp2          chimera m2 bf16
llama        pp2          chimera m4 full
gpt2_tied    pp2          dualpipe m4 bf16
llama        pp2          dualpipe m8
gpt2_tied    pp4          chimera m8
gpt2_tied    pp2xdp2      chimera m4 zero1
gpt2_tied    pp2xdp2      chimera m4 fp16 pointwise spread
gpt2_tied    pp2xtp2      chimera m4
llama        pp2xdp2      chimera m4 zero2 bf16
llama        pp4          chimera m4
gpt2_untied  pp4          dualpipe m8
gpt2_tied    pp2xdp2      dualpipe m4 zero1
llama        pp2xtp2      dualpipe m4 fp16
gpt2_untied  pp2xdp2      dualpipe m2 zero1
"""

REGATHERED = """
gpt2_deep  tp4       1f1b m2 sequence regather
gpt2_deep  dp2xtp2   1f1b m4 zero3 sequence pointwise+regather
gpt2_deep  pp2xtp2   zb_v m4 sequence regather
gpt2_deep  pp2xtp2   interleaved_1f1b m4 v2 sequence selective+regather
gpt2_tied  dp2xtp2   gpipe m2 zero2 sequence widening+regather bf16
llama      tp4       1f1b m2 sequence regather
llama      dp2xtp2   1f1b m2 zero3 sequence products+regather
llama      pp2xtp2   zb_h2 m4 sequence regather front
"""

SEGMENTED = """
gpt2_deep  dp4       1f1b m2 zero3 seg3 full
gpt2_deep  dp2xtp2   1f1b m2 zero2 seg4 sequence pointwise+regather
gpt2_deep  pp2xdp2   1f1b m4 zero3 seg2
gpt2_deep  pp2xtp2   interleaved_1f1b m4 v2 seg2 pointwise bf16
gpt2_tied  pp2xdp2   eager_1f1b m4 zero1 seg2 mixed
llama      pp2xdp2   1f1b m4 zero1 seg2 full
t5         pp2xdp2   gpipe m4 zero3 seg4 full
moe        dp4       1f1b m2 zero3 seg2
resnet     dp4       1f1b m2 zero1 seg2
"""

EIGHT_BITS = """
gpt2_tied    tp4        1f1b m2 sequence fp8
gpt2_tied    dp2xtp2    1f1b m2 zero2 mixed sequence fp8_rowwise
gpt2_untied  dp4        1f1b m2 zero3 full fp8
gpt2_untied  pp2xdp2    zb_h1 m4 zero1 fp8
llama        pp2xtp2    zb_v m4 sequence regather fp8_rowwise
llama        dp2xcp2    1f1b m2 zero3 ring fp8
llama        dp2|tp2    eager_1f1b m4 fp8
t5           dp4        gpipe m2 zero1 fp8_rowwise
llama        pp2xtp2    zb_h1 m4 sequence mxfp8
moe          dp2        1f1b m2 zero2 mxfp8
gpt2_untied  dp2xtp2    1f1b m2 zero2 nvfp4
llama        dp4        1f1b m2 zero3 full nvfp4
moe          dp2        1f1b m2 zero1 nvfp4
"""

PURE = """
gpt2_untied  dp2xtp2    1f1b m2 bf16_pure
gpt2_tied    dp4        1f1b m2 zero1 bf16_pure
llama        dp2xtp2    1f1b m4 zero2 mixed sequence bf16_pure
llama        dp4        1f1b m2 zero3 full bf16_pure
llama        pp2xtp2    zb_v m4 sequence bf16_pure
gpt2_tied    pp2xdp2    interleaved_1f1b m4 v2 zero1 bf16_pure
llama_lora   dp2        1f1b m2 zero3 bf16_pure
moe          dp4        1f1b m2 zero2 bf16_pure
gpt2_untied  dp2        1f1b m2 zero2 host2 bf16_pure
"""

# a loss in parts, of which some have fewer rows than others
CHUNKED = """
gpt2_tied    tp2        gpipe m2 chunks3
gpt2_untied  pp2xdp2    interleaved_1f1b m4 v2 zero1 chunks3 bf16
gpt2_untied  dp4        1f1b m2 zero3 full chunks3
llama        dp2xtp2    1f1b m2 zero2 sequence chunks5
llama        pp2xtp2    zb_h1 m4 mixed chunks2 fp16
llama        dp2xcp2    1f1b m2 zero3 ring chunks3
llama        dp4        1f1b m2 zero3 chunks4 bf16_pure
bert         dp2xtp2    1f1b m4 zero1 chunks3
plain_gpt    tp2        gpipe m4 chunks3
llama_lora   dp2xtp2    1f1b m2 zero2 chunks3 bf16
"""

# adapters beside frozen weights, which ZeRO-3 divides like the others
ADAPTERS = """
llama_lora   dp2          gpipe m2 zero3 full bf16
llama_lora   dp2xtp2      1f1b m4 zero3 pointwise
llama_lora   dp2xtp2      1f1b m2 zero2 bf16
llama_lora   pp2xdp2      1f1b m4 zero3
llama_lora   pp2xdp2      eager_1f1b m4 zero3 mixed spread
llama_lora   dp2|tp2      eager_1f1b m4 zero3 fp16
llama_lora   dp4          1f1b m2 zero3 hpz2 bf16
llama_lora   dp4          gpipe m2 zero3 shard2
llama_lora   dp4          1f1b m2 zero3 seg2
llama_lora   dp2xcp2      1f1b m2 zero3 ring
llama_tower  dp2xtp2      1f1b m2 zero3
"""


def cells_in(table: str) -> tuple[Cell, ...]:
    return tuple(Cell.parse(line) for line in table.splitlines() if line)


# token slices, uneven ones: every schedule that takes them, every axis and policy beside
SLICED = """
gpt2_tied    pp2              1f1b m2 slices7+5+4
llama        pp2              1f1b m1 slices9+7 chunks2
llama        pp2xtp2          zb_h1 m2 slices8+6+2
gpt2_tied    pp2xtp2          gpipe m2 slices8+4+4 pointwise sequence front
gpt2_tied    pp2xdp2          interleaved_1f1b m2 v2 zero2 slices7+5+4 full
llama        pp2xdp2          zb_h2 m2 zero1 slices10+6 bf16
llama        pp2xdp2          eager_1f1b m2 zero1 slices1+9+6 full
gpt2_untied  pp4              1f1b m1 slices4+4+4+4
llama        pp2xtp2          1f1b m2 slices8+8 away50
llama        pp2xdp2          1f1b m2 zero1 slices9+7 host50
llama        tp2|dp2          1f1b m2 slices10+6
llama        1|dp2|1          1f1b m2 slices9+7
gpt2_tied    dp2xtp2          1f1b m2 slices12+4
"""

MATRIX = cells_in(TWO_RANKS + FOUR_RANKS + EIGHT_RANKS)
BEYOND = SLICED + CONTEXT + COPIES + REGATHERED + SEGMENTED + EIGHT_BITS + PURE + CHUNKED + ADAPTERS
ALL = (*MATRIX, *cells_in(BEYOND))

# --- the change tier ------------------------------------------------------------------------------

_LIKE = {"llama_tower": "llama_lora"}  # weights that are not trained
_RANKS_COST = {2: 2, 4: 3, 8: 8}


def covering(cells: Sequence[Cell]) -> set[Cell]:
    """Few cells that have every pair of values of axis, schedule, ZeRO and recompute that any cell
    has, but of schedule with recompute, and every value of the other knobs: the cheapest of what is
    still missing, again and again. Policies that recompute a part are one value, and precisions of
    as many bits: tests of blocks and of products take each."""
    missing = frozenset[Covered]().union(*map(_covers, cells))
    found: set[Cell] = set()
    while missing:
        best = max(cells, key=lambda cell: len(_covers(cell) & missing) / _cost(cell))
        missing -= _covers(best)
        found.add(best)
    return found


def _cost(cell: Cell) -> int:
    """About, by what it starts, gathers and rounds, and by the size of its model."""
    rounds = PRECISIONS[cell.precision].narrow or cell.precision == "bf16_pure"
    small = cell.case in ("mlp", "unet")
    return _RANKS_COST[cell.world] + 2 * (cell.zero == 3) + bool(rounds) + (not small)


Covered = tuple[tuple[str, object], ...]


@cache
def _covers(cell: Cell) -> frozenset[Covered]:
    meshes = cell.meshes
    used = {
        "pp": len(meshes) > 1, "dp": any(dp > 1 for dp, _ in meshes),
        "tp": any(tp > 1 for _, tp in meshes), "cp": cell.cp > 1,
    }  # fmt: skip
    policy, regathers = parts_of(cell.recompute)
    of_pairs = {
        *(("axis", axis) for axis, is_used in used.items() if is_used),
        ("schedule", cell.schedule), ("zero", cell.zero),
        ("recompute", "a part" if policy in PARTIAL else policy),
    }  # fmt: skip
    others = {
        *((k, getattr(cell, k)) for k in ("cut", "placement", "shardings", "rows")),
        ("case", _LIKE.get(cell.case, cell.case)), ("regathers", regathers),
        ("precision", PRECISIONS[cell.precision].narrow or cell.precision),
        ("unequal", len(set(meshes)) > 1),
        ("segments", cell.segments > 1), ("chunked", cell.chunks > 1),
        ("sliced", (used["tp"], cell.zero > 0) if cell.slices else ()),
        ("divided", cell.dp_shard is not None), ("hpz", cell.hpz is not None),
        *([("cp_kind", cell.cp_kind)] if cell.cp > 1 else []),
    }  # fmt: skip
    pairs = [
        pair
        for pair in combinations(sorted(of_pairs, key=str), 2)
        if {knob for knob, _ in pair} != {"schedule", "recompute"}
    ]
    return frozenset([*pairs, *((one,) for one in (*of_pairs, *others))])
