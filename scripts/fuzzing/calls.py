"""Cases of calls: overrides, the command line, models with their batches."""

from __future__ import annotations

import contextlib
import dataclasses
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from meshwright.api import auto_parallelize
from meshwright.cli import perform
from meshwright.plan_search import search_plan
from meshwright.planner.decisions import BY_BLOCK, forbiddable
from meshwright.planner.overrides import Overrides, check_overrides, restrict
from meshwright.profiles.inputs import shown
from scripts.fuzzing import ground
from scripts.fuzzing.mutations import json_case, toml_text, value
from scripts.fuzzing.user_code import BATCHES, LOSSES, MODELS

Case = tuple[str, Callable[[], object]]
SEARCHED = 0.1  # of the cases of overrides

RIGHT: dict[str, tuple[Any, ...]] = {
    "tp": (1, 2, 4, 3, 7, 64),
    "dp": (1, 2, 4, 3, 64),
    "cp": (1, 2),
    "ep": (1, 2),
    "pp": (1, 2, 4, 5),
    "virtual_stages": (1, 2, 3),
    "microbatch_size": (1, 2, 16, 10**18),
    "num_microbatches": (1, 2, 16, 10**18),
    "branches": (1, 2, (2, 1, 1), 10**18),
    "schedule": ("1f1b", "gpipe", "interleaved_1f1b", "zb_h1"),
    "placement": ("tp,dp,pp", "tp,pp,dp"),
    "zero": (0, 1, 2, 3),
    "dp_shard": (1, 2, 7, 10**18),
    "hpz": (1, 2, 7, 10**18),
    "quantized": ("none", "weights", "both", "int8"),
    "compressed": ("none", "powersgd-4", "topk-10", "topk-3"),
    "staleness": (0, 1, 2**31),
    "servers": (0, 1, 3, 10**18),
    "replicas": (1, 2, 3, 10**18),
    "sync_every": (1, 3, 100),
    "outer_bits": (32, 8, 4),
    "fragments": (1, 2, 7),
    "recompute": ("none", "full", "selective"),
    "stages": ([["embed", "layers.0-1"], ["layers.2", "head"]], [["embed-head"]]),
    "shardings": ({"layers.*.up": "colwise"}, {"head": "S(0)@tp"}, {"**": "replicate"}),
    "forbid": (("tp",), ("pp", "zero"), forbiddable()),
}
GLOBS = ("layers.*", "**", "embed", "layers.0-1", "layers.0-99999999999", "*" * 60, "*a" * 30, "",
         "l**s.1", "head", "[", "layers.?", "h.0-9", "nothing")  # fmt: skip


def overrides(rng: Random, folder: Path) -> Case:
    """Overrides, checked against cluster, batch and model, and some searched with."""
    given: dict[str, Any] = {}
    for name in rng.sample(sorted(RIGHT), rng.choice((1, 1, 2, 2, 3, 4))):
        found = value(rng, python=True) if rng.random() < 0.3 else rng.choice(RIGHT[name])
        if name in (*BY_BLOCK, "shardings") and rng.random() < 0.4:
            found = {rng.choice(GLOBS): _decision(name, rng) for _ in range(rng.choice((1, 2, 3)))}
        given[name] = found
    searched = rng.random() < SEARCHED

    def run() -> None:
        made = Overrides(**given)
        problem = ground.problem()
        check_overrides(
            made,
            num_devices=ground.DEVICES,
            global_batch_size=16,
            num_blocks=len(problem.graph.blocks),
        )
        restrict(made, problem.graph)
        if searched:
            str(search_plan(problem, ground.request(made), {}).report)

    return f"{'searched ' * searched}{shown(given)}", run


def _decision(name: str, rng: Random) -> Any:
    if rng.random() < 0.3:
        return value(rng, python=True)
    if name == "shardings":
        return rng.choice(("colwise", "rowwise", "-> S(1)", "S(0)@tp", "replicate", "S(9/0)", "x"))
    return rng.choice(RIGHT[name])


# --- the command line -----------------------------------------------------------------------------

MODULE = """
import torch
from torch import nn
from scripts.fuzzing.pool import UserBug


def mlp():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 8))
    return model, (torch.randn(4, 16), torch.randint(0, 8, (4,))), nn.functional.cross_entropy


def broken():
    raise UserBug("the user's own")


def nothing():
    return None


def alone():
    return nn.Linear(2, 2)


def texts():
    return "model", "batch"


def needs(argument):
    return argument


value = 3
"""
FLAGS: dict[str, tuple[str, ...]] = {
    "--cluster": ("local:2", "h100-sxm:2", "x.toml", "h100-sxm:999999999999999999", "local:-1",
                  "local:" + "9" * 5000, "detect", "", ":", "h100-sxm:0", "tpu", "dir.toml"),
    "--batch": ("8", "0", "-1", "9" * 30, "1e3", "", "9" * 5000, "7"),
    "--precision": ("fp32", "fp8", ""), "--optimizer": ("adamw", "sgd", "none", ""),
    "--target": ("megatron", "x"), "--expert-imbalance": ("1.0", "nan", "inf", "0", "-1", "x"),
    "--memory-margin": ("0.1", "nan", "1", "-inf", "x"), "--time-limit": ("0", "nan", "-1", "inf"),
    "--tp": ("2", "3", "a=2", "=", "layers.0-99999999999=2", "*" * 60 + "=2", "9" * 30, "x"),
    "--zero": ("1", "9", "0=1", "x=y"), "--stage": ("0,1", "", "0,,1", "0-2", "a.0-99999999999"),
    "--sharding": ("0=colwise", "=", "**=x", "*a" * 30 + "=colwise"), "--forbid": ("tp", "x", ""),
    "--schedule": ("1f1b", "x"), "--num-microbatches": ("2", "9" * 30, "0"), "--json": ("",),
    "--objective": ("fastest", "x"), "--rows-meet": ("exact", "x"),
    "-o": ("out.json", "no/such/folder/out.json", "", "/"),
}  # fmt: skip
TARGETS = ("fuzzed:mlp", "fuzzed:broken", "fuzzed:nothing", "fuzzed:alone", "fuzzed:value",
           "fuzzed", "fuzzed:", ":mlp", "no_such:mlp", "fuzzed:texts", "fuzzed:needs", "", "..x:y",
           "json:dumps", "syntax:mlp", "fuzzed:mlp.x", "\0:a")  # fmt: skip


def command(rng: Random, folder: Path) -> Case:
    """A command line, in a folder with models and files."""
    (folder / "fuzzed.py").write_text(MODULE)
    (folder / "syntax.py").write_text("def mlp(:\n")
    (folder / "x.toml").write_text(toml_text(ground.TOML))
    (folder / "dir.toml").mkdir()
    (folder / "plan.json").write_bytes(
        json.dumps(ground.plans()[0]).encode() if rng.random() < 0.5
        else json_case(rng.choice(ground.plans()), rng)
    )  # fmt: skip
    (folder / "p.json").write_bytes(json_case(ground.PROFILE, rng))
    verb = rng.choice(("plan", "plan", "show", "run", "rehearse", "profile", "x"))
    file = rng.choice(("plan.json", "plan.json", "fuzzed.py", "no.json", "dir.toml", ".", "\0"))
    target = rng.choice(("fuzzed:mlp", rng.choice(TARGETS)))
    argv = [verb]
    if verb == "show":
        argv += [file] + ["--json"] * rng.choice((0, 1))
    elif verb == "profile":
        argv += ["--import", rng.choice((file, "p.json"))]
        argv += rng.choice(([], ["--export", "no/such/x.json"], ["--ranks", "9" * 30]))
    else:
        argv += [target, "--batch", "8", "--precision", "fp32", "--no-profile"]
        if verb in ("run", "rehearse"):
            argv += ["--plan", file]
        for flag in rng.sample(sorted(FLAGS), rng.choice((1, 1, 2))):
            argv += [flag] + [text for text in [rng.choice(FLAGS[flag])] if text or flag == "-o"]

    def run() -> None:
        os.environ["MESHWRIGHT_CACHE"] = str(folder)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            try:
                perform(argv)
            except SystemExit as ended:
                assert ended.code == 0, "a command ends by an error, not by SystemExit"

    return f"meshwright {' '.join(text[:80] for text in argv)}", run


# --- models and batches ---------------------------------------------------------------------------

ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "global_batch_size": (8, 7, 10**30, 0, -1, True, 2.0, "8", 2**31, 10**18, None),
    "optimizer": ("adamw", "sgd", "x", None, 3, [], object()),
    "precision": ("fp32", "bf16", "fp8", 3, [], object()),
    "overrides": (None, Overrides(tp=2), {"tp": 2}, 3),
    "plan": (None, 3, "no.json", ".", "\0", b"x"),
    "target": (None, "eager", "megatron", "x", 3, []),
    "objective": ("robust", "x", None, 3, []),
    "memory_margin": (None, 0.1, 1, float("nan"), "x", -1),
    "compile": (False, "x", 3, []),
    "tf32": (False, 3, "x"),
    "profile": (False, "x"),
    "time_limit_s": (None, 0, float("nan"), "x", -1, 10**400, float("inf")),
    "expert_imbalance": (1.0, 0, float("nan"), "x", None, 10**400),
    "rows_meet": ("exact", "x", 3, []),
    "check_replicas": (False, "x"),
}


def model(rng: Random, folder: Path) -> Case:
    """A call of `auto_parallelize`, with a model, a batch, a loss or an argument that is wrong."""
    which = rng.choice(("model", "batch", "batch", "loss", "argument", "argument", "cluster"))
    name = rng.choice(sorted(MODELS)) if which == "model" else "net"
    batch = rng.choice(sorted(BATCHES)) if which == "batch" else "pair"
    loss = rng.choice(sorted(LOSSES)) if which == "loss" else "cross_entropy"
    given: dict[str, Any] = {"global_batch_size": 8, "precision": "fp32", "profile": False}
    if which == "argument":
        given |= {n: rng.choice(ARGUMENTS[n]) for n in rng.sample(sorted(ARGUMENTS), 1)}
        if rng.random() < 0.3:
            given[rng.choice(sorted(ARGUMENTS))] = value(rng, python=True)
    devices = rng.choice((1, 2))
    here: Any = dataclasses.replace(ground.local(), devices_per_node=devices)
    if which == "cluster":
        here = rng.choice((value(rng, python=True), "h100-sxm", {"device": 3}))

    def run() -> None:
        result = auto_parallelize(
            MODELS[name](), here, example_inputs=BATCHES[batch](), loss_fn=LOSSES[loss], **given
        )
        str(result.report)
        if devices == 1:
            result.train_step(BATCHES[batch]())

    return f"model={name} batch={batch} loss={loss} devices={devices} {shown(given)}", run
