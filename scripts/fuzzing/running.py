"""Cases of what a running model is asked for: evaluation, generation, exports; and of reports."""

from __future__ import annotations

import contextlib
import io
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch

from meshwright.cli import perform
from meshwright.executor.export import from_pretrained_files, to_pretrained_files
from meshwright.plan_search import search_plan
from meshwright.planner.page import render_page
from meshwright.profiles.inputs import shown
from scripts.fuzzing import ground, saved
from scripts.fuzzing.mutations import json_case, value
from scripts.fuzzing.training import DATA, _raises, _some
from tests.helpers.tiny import ROWS, batch, net

Case = tuple[str, Callable[[], object]]

IDS, TARGETS = batch(ROWS)
BATCHES: dict[str, Callable[[], Any]] = {
    "pair": lambda: (IDS, TARGETS),
    "no targets": lambda: (IDS,),
    "alone": lambda: IDS,
    "fewer": lambda: (IDS[:3], TARGETS[:3]),
    "more": lambda: (torch.cat([IDS, IDS]), torch.cat([TARGETS, TARGETS])),
    "longer": lambda: (IDS.repeat(1, 2), TARGETS.repeat(1, 2)),
    "no rows": lambda: (IDS[:0], TARGETS[:0]),
    "no tokens": lambda: (IDS[:, :0], TARGETS[:, :0]),
    "out of range": lambda: (IDS + 10**6, TARGETS),
    "wrong targets": lambda: (IDS, TARGETS + 10**6),
    "floats": lambda: (IDS.float(), TARGETS),
    "meta": lambda: (IDS.to("meta"), TARGETS.to("meta")),
    "swapped rows": lambda: (IDS, TARGETS[:3]),
    "none": lambda: None,
    "number": lambda: 3,
    "text": lambda: "x",
    "dict": lambda: {"ids": IDS, "targets": TARGETS},
    "number keys": lambda: {0: IDS, 1: TARGETS},
    "empty": tuple,
    "nested": lambda: ([IDS], [[TARGETS]]),
    "sparse": lambda: (IDS.to_sparse(), TARGETS),
    "grad": lambda: (IDS.float().requires_grad_(), TARGETS),
    "half": lambda: (IDS.half(), TARGETS),
    "vector": lambda: (IDS[0], TARGETS[0]),
    "scalar": lambda: (torch.tensor(1), torch.tensor(1)),
    "complex": lambda: (IDS.to(torch.complex64), TARGETS),
    "array": lambda: (IDS.numpy(), TARGETS.numpy()),
}
TIMES: tuple[Any, ...] = (1, 2, 0, -1, 1.5, "x", None, True)
TOKENS: tuple[Any, ...] = (None, 0, 3, -1, 10**30, "x", 1.5, [1], torch.tensor(1))


def asked(rng: Random, folder: Path) -> Case:
    """`evaluate`, `generate`, `forward` and steps, with batches and arguments of all kinds."""
    verb = rng.choice(("evaluate", "generate", "forward", "eval_step", "train_step", "other"))
    name = rng.choice(("pair", rng.choice(sorted(BATCHES)), rng.choice(sorted(BATCHES))))
    flag = rng.choice((True, False, None, "x"))
    data = rng.choice(sorted(DATA))
    weigh = rng.choice((None, None, _raises, lambda _: "x", lambda _: float("nan"), 3,
                        lambda _: 1.0, lambda _: -1.0))  # fmt: skip
    new = rng.choice((1, 2, 0, -1, "x", None, 1.5, True))
    tokens = {"eos_token_id": rng.choice(TOKENS), "pad_token_id": rng.choice(TOKENS)}
    targets = rng.choice((None, None, TARGETS, 3, "x"))
    other = rng.choice(sorted(_OTHERS))
    anything = value(rng, python=True)

    def run() -> None:
        result, optimizer = saved.model()
        given = BATCHES[name]()
        if verb == "evaluate":
            each = DATA[data]() if rng.random() < 0.5 else [given]
            result.evaluate(each, weigh=weigh, local=flag)
        elif verb == "generate":
            prompts = given[0] if isinstance(given, tuple) and given else given
            result.generate(prompts, new, **tokens)
        elif verb == "forward":
            result.forward(given, targets, gather=flag)
        elif verb == "other":
            _OTHERS[other](result, optimizer, anything)
        else:
            getattr(result, verb)(given, targets, local=flag)

    return f"{verb} {name} {flag} {data} {new} {shown(tokens)} {other} {shown(anything)}", run


_OTHERS: dict[str, Callable[[Any, Any, Any], object]] = {
    "log_to": lambda result, optimizer, x: result.log_to(x),
    "log_to every": lambda result, optimizer, x: result.log_to("x.jsonl", every=x),
    "clip": lambda result, optimizer, x: result.clip_grad_norm_(x),
    "clip type": lambda result, optimizer, x: result.clip_grad_norm_(1.0, x),
    "init": lambda result, optimizer, x: result.init_weights(x),
    "load": lambda result, optimizer, x: result.load_weights(x),
    "save": lambda result, optimizer, x: result.save_checkpoint(x, optimizer),
    "save optimizer": lambda result, optimizer, x: result.save_checkpoint("x", x),
    "save extra": lambda result, optimizer, x: result.save_checkpoint("x", extra=x),
    "load checkpoint": lambda result, optimizer, x: result.load_checkpoint(x, optimizer),
    "replan": lambda result, optimizer, x: result.replan(x),
    "replan time": lambda result, optimizer, x: result.replan(time_limit_s=x),
    "rank": lambda result, optimizer, x: result.full_state_dict(rank=x),
    "state": lambda result, optimizer, x: result.load_state_dict(x),
    "timeline": lambda result, optimizer, x: result.timeline(x),
    "rehearse": lambda result, optimizer, x: result.rehearse(optimizer=x),
    "recalibrate": lambda result, optimizer, x: result.recalibrate(),
    "whole": lambda result, optimizer, x: result.whole_tensor_optimizer(torch.optim.SGD, x),
    "html": lambda result, optimizer, x: result.report.html(x),
    "trace": lambda result, optimizer, x: result.report.trace(x),
    "cost": lambda result, optimizer, x: result.report.cost(tokens=x),
    "plan save": lambda result, optimizer, x: result.plan.save(x),
}


# --- exports --------------------------------------------------------------------------------------

EXPORTED: dict[str, tuple[Any, ...]] = {
    "max_shard_size": ("5GB", 10_000, "1KB", 0, -1, "x", 1.5, None, 10**30, "", "5 GB"),
    "trainable_only": (True, False, "x", None),
    "dtype": (None, torch.bfloat16, torch.int64, torch.complex64, "bfloat16", 3, torch.qint8,
              torch.float8_e4m3fn, torch.bool),
    "submodule": (None, "", "layers", "layers.0", "x", 3, "layers.0.up.weight", ".", "a\0b"),
}  # fmt: skip
PATHS = ("new", "full", "", "a\0b", "x" * 300, "no/such/new", "file", "file/x", "/", 3, None)


@cache
def exported() -> dict[str, bytes]:
    """The files of `save_pretrained` in several shards, by name."""
    with TemporaryDirectory() as folder:
        saved.model()[0].save_pretrained(Path(folder) / "hf", max_shard_size="4KB")
        return {path.name: path.read_bytes() for path in (Path(folder) / "hf").iterdir()}


def export(rng: Random, folder: Path) -> Case:
    """`save_pretrained` and conversions, with options, paths and files that are wrong."""
    (folder / "file").write_text("x")
    (folder / "full").mkdir()
    (folder / "full" / "mine.txt").write_text("x")
    verb = rng.choice(("save", "to hf", "to hf", "to checkpoint", "to checkpoint"))
    options = _some(rng, EXPORTED, 2)
    path = rng.choice(("new", "new", rng.choice(PATHS)))
    files = dict(saved.saved() if verb == "to hf" else exported())
    name, how = rng.choice(sorted(files)), rng.choice(("bytes", "json", "gone", "other", "nothing"))
    if how == "bytes":
        files[name] = saved.damaged(files[name], rng)
    elif how == "json" and name.endswith(".json"):
        files[name] = json_case(json.loads(files[name]), rng)
    elif how == "gone":
        del files[name]
    elif how == "other":
        files[name] = files[rng.choice(sorted(files))]
    if rng.random() < 0.5:
        files.pop("manifest.json", None)
    (folder / "source").mkdir()
    for own, data in files.items():
        (folder / "source" / own).write_bytes(data)
    source = rng.choice(("source", "source", "source", "source", rng.choice(PATHS)))

    def run() -> None:
        try:
            if verb == "save":
                saved.model()[0].save_pretrained(path, **options)
            elif verb == "to hf":
                options.pop("trainable_only", None)
                to_pretrained_files(source, path, net(), **options)
            else:
                from_pretrained_files(source, path, net())
        finally:
            assert not Path("exploited").exists(), "a file ran code"
            assert (folder / "full" / "mine.txt").exists(), "a file that no save wrote is gone"

    return f"{verb} {how} of {name}, {source!r} to {path!r} {shown(options)}", run


# --- reports --------------------------------------------------------------------------------------


@cache
def report() -> dict[str, Any]:
    """What `plan --json` prints."""
    found = search_plan(ground.problem(), ground.request(), {}).report.to_dict()
    with contextlib.suppress(ImportError):
        render_page(found)  # what a page needs is loaded before the cases
    plain: dict[str, Any] = json.loads(json.dumps(found))
    return plain


def reported(rng: Random, folder: Path) -> Case:
    """Files of reports and plans, of which pages and differences are asked."""
    (folder / "a.json").write_bytes(json_case(report(), rng))
    (folder / "b.json").write_text(json.dumps(rng.choice((report(), ground.plans()[0]))))
    if rng.random() < 0.2:
        (folder / "b.json").write_bytes(json_case(rng.choice(ground.plans()), rng))
    pair = rng.choice((["a.json", "b.json"], ["b.json", "a.json"]))
    argv = rng.choice((["report", "a.json", "-o", "x.html"], ["diff", *pair], ["show", "a.json"]))
    argv = argv + ["--json"] * rng.choice((0, 1))

    def run() -> None:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            perform(argv)

    return f"meshwright {' '.join(argv)}", run
