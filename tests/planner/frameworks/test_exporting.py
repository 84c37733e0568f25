"""Plans as configurations: round trips of what each software can say, and what it can't."""

from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from meshwright.planner.decisions import DECISIONS
from meshwright.planner.frameworks import FORMATS, Exported, exported, read_configuration
from meshwright.planner.frameworks.megatron import layers_of_layout, layout_of
from meshwright.planner.plan import Plan, StagePlan
from tests.helpers.tiers import tiered

LAYERS = 8
NAMES = ("embed", *(f"layers.{k}" for k in range(LAYERS)), "head")
FEW, MANY = 6, 60


def plan_of(
    rng: Random,
    *,
    pp: int = 1,
    virtual: int = 1,
    counts: list[int] | None = None,
    policies: Callable[[list[str]], list[str]] = lambda names: ["none"] * len(names),
    schedule: str = "1f1b",
    precision: str = "bf16",
    **stage: Any,
) -> Plan:
    """A plan of equal meshes, its axes of random degrees where they are not given."""
    mesh = {axis: stage.pop(axis, 1) for axis in ("dp", "tp", "cp", "ep")}
    size = mesh["dp"] * mesh["tp"] * mesh["cp"]
    counts = counts or [LAYERS // (pp * virtual)] * (pp * virtual)
    stages, first = [], 0
    for k, count in enumerate(counts):
        layers = NAMES[1 + first : 1 + first + count]
        names = [*NAMES[:1]] * (k == 0) + [*layers] + [*NAMES[-1:]] * (k == len(counts) - 1)
        chosen = policies([*layers])
        wanted = dict(zip(layers, chosen, strict=True))
        at = (k % pp) * size
        made = StagePlan(blocks=tuple(names), ranks=tuple(range(at, at + size)), **mesh, **stage)
        stages.append(made.repeating([wanted.get(name, "none") for name in names],
                                     stage.get("segments", 1)))  # fmt: skip
        first += count
    rows, m = rng.choice((1, 2, 4)), pp * rng.choice((1, 2, 4))
    return Plan(
        model="a", global_batch_size=rows * m * mesh["dp"], num_microbatches=m, precision=precision,
        schedule=schedule, stages=tuple(stages),
    )  # fmt: skip


def _all(policy: str) -> Callable[[list[str]], list[str]]:
    return lambda names: [policy] * len(names)


def _sharded(rng: Random, zeros: tuple[int, ...], ranks: int) -> dict[str, Any]:
    zero = rng.choice(zeros) if ranks > 1 else 0
    among = rng.choice([n for n in (2, 4, 8) if n < ranks] or [None])
    return {"zero": zero, "dp_shard": among if zero and rng.random() < 0.4 else None}


def of_deepspeed(rng: Random) -> Plan:
    dp = rng.choice((1, 2, 4, 8))
    more: dict[str, Any] = {"zero": rng.choice((0, 1, 2, 3)) if dp > 1 else 0}
    if more["zero"] == 3:
        more |= {"quantized": rng.choice(("none", "weights", "gradients", "both"))}
        more |= {"hpz": rng.choice((None, 2) if dp > 2 else (None,))}
    if more["zero"] in (1, 2):
        more["offload"] = rng.choice(({}, {"optimizer": 1.0}))
    if more["zero"] == 3:
        more["offload"] = rng.choice(({}, {"optimizer": 0.5}, {"optimizer": 1.0}))
    tp = rng.choice((1, 2)) if more["zero"] < 3 else 1
    policies = _all(rng.choice(("none", "full")))
    return plan_of(rng, dp=dp, tp=tp, policies=policies, **more)


def of_hugging_face(rng: Random) -> Plan:
    dp, tp, cp = rng.choice((2, 4, 8)), rng.choice((1, 2)), rng.choice((1, 1, 2))
    kind = rng.choice(("ring", "all_gather")) if cp > 1 else "all_gather"
    more = _sharded(rng, (2, 3), dp * cp)
    if more["dp_shard"] and (more["dp_shard"] % cp or more["dp_shard"] == cp):
        more["dp_shard"] = None
    if not more["zero"]:
        tp = cp = 1
    policies = _all(rng.choice(("none", "full")) if more["zero"] else "none")
    precision = rng.choice(("bf16", "fp16", "fp32"))
    return plan_of(
        rng, dp=dp, tp=tp, cp=cp, cp_kind=kind, policies=policies, precision=precision, **more
    )


def of_torchtitan(rng: Random) -> Plan:
    dp, pp = rng.choice((2, 4, 8)), rng.choice((1, 2, 4))
    schedule, virtual = "1f1b", 1
    if pp > 1:
        schedule, virtual = rng.choice(
            (("1f1b", 1), ("gpipe", 1), ("interleaved_1f1b", 2), ("zb_v", 2), ("dualpipe_v", 2))
        )
    if pp * virtual > LAYERS:
        schedule, virtual = "1f1b", 1
    more = _sharded(rng, (2, 3), dp)
    if schedule in ("zb_v", "dualpipe_v"):
        more["zero"], more["dp_shard"] = 0, None
    policies = _all(rng.choice(("none", "full", "alternate")))
    counts = [LAYERS // (pp * virtual)] * (pp * virtual)
    if pp > 1 and rng.random() < 0.5:
        counts[0], counts[1] = counts[0] - 1, counts[1] + 1
    return plan_of(rng, dp=dp, tp=rng.choice((1, 2)), pp=pp, virtual=virtual, schedule=schedule,
                   policies=policies, counts=counts, **more)  # fmt: skip


def of_megatron(rng: Random) -> Plan:
    dp, pp, cp = rng.choice((2, 4)), rng.choice((1, 2, 4)), rng.choice((1, 2))
    virtual = rng.choice((1, 2)) if pp > 1 else 1
    counts = [LAYERS // (pp * virtual)] * (pp * virtual)
    if pp > 1 and rng.random() < 0.5:  # one less at the ends, as the embedding and the head count
        counts[0], counts[-1], counts[1] = counts[0] - 1, counts[-1], counts[1] + 1
    kind = rng.choice(("ring", "all_gather", "ulysses")) if cp > 1 else "all_gather"
    more: dict[str, Any] = _sharded(rng, (1, 2, 3), dp * cp) if rng.random() < 0.7 else {"zero": 0}
    run = rng.choice(("none", "selective", "full", "some"))
    policies = _all(run)
    if run == "some":
        policies = lambda names: ["full" if k < 1 else "none" for k in range(len(names))]  # noqa: E731
        counts = [LAYERS // (pp * virtual)] * (pp * virtual)
        if counts[0] == 1:
            policies = _all("full")
    schedule = "interleaved_1f1b" if virtual > 1 else "1f1b"
    precision = rng.choice(("bf16", "fp16", "fp8", "mxfp8", "nvfp4"))
    return plan_of(rng, dp=dp, tp=rng.choice((1, 2, 8)), cp=cp, cp_kind=kind, pp=pp,
                   virtual=virtual, counts=counts, policies=policies, schedule=schedule,
                   precision=precision, **more)  # fmt: skip


MADE: dict[str, Callable[[Random], Plan]] = {
    "deepspeed": of_deepspeed, "accelerate": of_hugging_face, "transformers": of_hugging_face,
    "torchtitan": of_torchtitan, "megatron": of_megatron, "megatron-bridge": of_megatron,
}  # fmt: skip
# what stands beside a format: its name in the plan, and the values that it can take there
UNSAID = {"accelerate": {"fp8", "mxfp8"}, "transformers": {"fp8", "mxfp8"}}


@pytest.mark.parametrize("count", tiered((FEW, MANY), FEW.__eq__, "more draws of the same plans"))
@pytest.mark.parametrize("name", MADE)
def test_a_plan_that_can_be_said_is_the_same_again(name: str, count: int, tmp_path: Path) -> None:
    kind, tried = FORMATS[name], 0
    for seed in range(count):
        plan = MADE[name](Random(f"{name} {seed}"))
        found = exported(plan, kind)
        assert not found.lost, (seed, plan.to_json(), list(map(str, found.lost)))
        (tmp_path / found.file).write_text(found.text)
        script = {key: found.configuration.values[key] for key in kind.by_script
                  if key in found.configuration.values}  # fmt: skip
        again = read_configuration(
            tmp_path / found.file, plan.num_ranks,
            global_batch_size=None if name != "accelerate" else plan.global_batch_size,
            script=script,
        )  # fmt: skip
        check_same(plan, again.values)
        tried += 1
    assert tried == count


def check_same(plan: Plan, values: Any) -> None:
    """The values are the plan's, as far as they matter on its meshes."""
    first, pp = plan.stages[0], len(plan.devices)
    assert values["global_batch_size"] == plan.global_batch_size
    assert values["num_microbatches"] == plan.num_microbatches
    assert values["precision"] == plan.precision
    assert (values.get("pp") or 1) == pp
    if pp > 1:
        assert values["schedule"] == plan.schedule
        assert values["virtual_stages"] == len(plan.stages) // pp
    for axis in ("dp", "tp", "cp", "ep"):
        assert (values.get(axis) or 1) == getattr(first, axis), axis
    if first.cp > 1:
        assert (values.get("cp_kind") or DECISIONS["cp_kind"].off) == first.cp_kind
    assert (values.get("zero") or 0) == first.zero
    holders = first.dp * first.cp
    assert (values.get("dp_shard") or holders) == (first.dp_shard or holders)
    assert values.get("hpz") == first.hpz
    assert (values.get("quantized") or "none") == first.quantized
    offload = {k: v for k, v in (values.get("offload") or {}).items() if v}
    assert offload == {k: v for k, v in first.offload.items() if v}
    by_stage = [[p for n, p in zip(s.blocks, s.policies, strict=True) if n.startswith("layers.")]
                for s in plan.stages]  # fmt: skip
    policy = values.get("recompute") or "none"
    if isinstance(policy, tuple):
        assert [row.count(policy[0]) for row in by_stage] == [policy[1]] * len(by_stage)
    else:
        assert {p for row in by_stage for p in row} == {policy}


SPLIT: dict[str, Any] = {
    "dp": 2, "tp": 2, "pp": 2, "virtual": 2, "counts": [1, 3, 2, 2], "schedule": "interleaved_1f1b",
    "policies": _all("full"),
}  # fmt: skip
WRITTEN: dict[str, dict[str, Any]] = {
    "deepspeed": {"dp": 4, "zero": 3, "hpz": 2, "offload": {"optimizer": 0.5}},
    "accelerate": {"dp": 4, "cp": 2, "cp_kind": "ring", "zero": 3, "dp_shard": 4,
                   "policies": _all("full")},
    "transformers": {"dp": 4, "tp": 2, "zero": 2, "policies": _all("full")},
    "torchtitan": {**SPLIT, "zero": 2},
    "megatron": {**SPLIT, "cp": 2, "cp_kind": "all_gather", "zero": 1, "precision": "fp8"},
    "megatron-bridge": {**SPLIT, "cp": 2, "cp_kind": "ring", "zero": 1, "dp_shard": 2},
}  # fmt: skip


@pytest.mark.parametrize("name", WRITTEN)
def test_files_are_written_as_they_were(name: str) -> None:
    """The text as it was when its software's own parser read it (`test_parsers.py`)."""
    found = exported(plan_of(Random(0), **WRITTEN[name]), FORMATS[name])
    assert not found.lost
    assert found.text == (Path(__file__).with_name("golden") / found.file).read_text()


def lost(found: Exported) -> dict[str, str]:
    return {each.what: each.instead for each in found.lost}


def test_what_can_not_be_said_is_listed_with_what_is_written_instead() -> None:
    rng = Random(0)
    half = plan_of(rng, dp=2, policies=lambda names: ["pointwise", *["none"] * (len(names) - 1)])
    assert lost(exported(half, FORMATS["torchtitan"])) == {"recompute": "full of all layers"}
    pipeline = plan_of(rng, dp=2, pp=2, zero=1)
    found = exported(pipeline, FORMATS["deepspeed"])
    assert lost(found) == {"pp": "1, with dp=4"}
    assert found.configuration.values["dp"] == 4
    assert lost(exported(pipeline, FORMATS["torchtitan"]))["zero"] in ("2", "3")
    split = plan_of(rng, dp=2, tp=2, shardings={"layers.*": "colwise"})
    assert lost(exported(split, FORMATS["megatron"])) == {"shardings": "those rules"}
    uneven = plan_of(rng, dp=4, pp=2, counts=[3, 5], schedule="zb_h1")
    for name in ("torchtitan", "megatron"):
        found = exported(uneven, FORMATS[name])
        assert set(lost(found)) == {"schedule"} and found.configuration.values["layers"] == [3, 5]


def test_layouts_are_megatrons_strings() -> None:
    for counts in ([1, 2, 3], [0, 4, 0], [1], [2] * 16):
        assert layers_of_layout(layout_of(counts), "layout") == counts
    assert layers_of_layout("Ettt|(tt|)*29,|L", "layout") == [3, *[2] * 29, 0, 0]
    assert layout_of([0, 2, 1]) == "E|t*2|tL"
