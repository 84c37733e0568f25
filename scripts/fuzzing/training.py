"""Cases of training runs: `fit`, its data, packed documents, the Trainer of transformers."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch.utils.data import Dataset

from meshwright import fit
from meshwright.data import data_loader, packed
from meshwright.hf import Trainer
from meshwright.profiles.inputs import shown
from scripts.fuzzing import saved
from scripts.fuzzing.mutations import mutated, value
from scripts.fuzzing.pool import UserBug
from tests.helpers.tiny import SEQUENCE, VOCAB, batch, host, net

Case = tuple[str, Callable[[], object]]
SAMPLES, MOST_BATCHES = 24, 4
FEW = ("drop_last", "shuffle")


def _raises(*_: Any, **__: Any) -> Any:
    raise UserBug("the user's own")


class Samples(Dataset[Any]):
    """Pairs of ids and targets; `made` makes the sample of one."""

    def __init__(self, size: Any = SAMPLES, made: Callable[[Any], Any] | None = None) -> None:
        self.size, self.made = size, made

    def __len__(self) -> int:
        found: int = self.size() if callable(self.size) else self.size
        return found

    def __getitem__(self, k: int) -> Any:
        ids, targets = batch(1, seed=k)
        pair = ids[0], targets[0]
        return pair if self.made is None else self.made(pair)


class Endless:
    """Batches without an end."""

    def __iter__(self) -> Iterator[Any]:
        return itertools.repeat(batch(8))


DATA: dict[str, Callable[[], Any]] = {
    "samples": Samples,
    "few": lambda: Samples(3),
    "none": lambda: Samples(0),
    "huge": lambda: Samples(10**12),
    "negative": lambda: Samples(-1),
    "length raises": lambda: Samples(_raises),
    "sample raises": lambda: Samples(made=_raises),
    "texts": lambda: Samples(made=lambda _: "text"),
    "nothing": lambda: Samples(made=lambda _: None),
    "objects": lambda: Samples(made=lambda _: object()),
    "other width": lambda: Samples(made=lambda pair: (pair[0][:3], pair[1])),
    "floats": lambda: Samples(made=lambda pair: (pair[0].float(), pair[1])),
    "three": lambda: Samples(made=lambda pair: (*pair, pair[0])),
    "dict": lambda: Samples(made=lambda pair: {"ids": pair[0], "targets": pair[1]}),
    "out of range": lambda: Samples(made=lambda pair: (pair[0] + 10**6, pair[1])),
    "unequal": lambda: Samples(made=lambda pair: (pair[0][: int(pair[0][0]) % 5], pair[1])),
    "batches": lambda: [batch(8)] * 3,
    "no batches": list,
    "odd batches": lambda: [batch(8), 3, None],
    "larger batches": lambda: [batch(9)],
    "iterator": lambda: iter([batch(8)]),
    "endless": Endless,
    "dict of batches": lambda: {"a": batch(8)},
    "none at all": lambda: None,
    "number": lambda: 3,
    "text": lambda: "data",
    "tensor": lambda: torch.zeros(3),
    "class": lambda: Samples,
}
LOADING: dict[str, tuple[Any, ...]] = {
    "shuffle": (True, False, None, "x"),
    "seed": (0, 7, -1, 2**64, 10**30, 1.5, "x", None),
    "drop_last": (True, False, None, "x"),
    "collate_fn": (None, _raises, 3, lambda samples: None, lambda samples: samples),
    "lengths": (None, [SEQUENCE] * SAMPLES, [1], 3, "x" * SAMPLES, _raises, lambda _: "x",
                lambda _: 10**30, [None] * SAMPLES, [-1] * SAMPLES, [1.5] * SAMPLES),
    "buckets": (None, (SEQUENCE,), (4, 8), (8, 4), (), (0,), 3, "ab", (10**30,), (2,), [None]),
    "tokens_per_batch": (None, 16, 0, -1, 10**30, "x", 1.5, SEQUENCE),
    "padding": (None, {"0": 1}, {"0": "x"}, 3, "x", {0: None}, [("labels", 1)]),
    "num_workers": (0, -1, "x", 1.5, None),
    "prefetch_factor": (2, -1, "x"),
    "pin_memory": (False, "x"),
    "timeout": (0, -1, "x"),
    "batch_size": (8,),
    "sampler": ([1],),
    "local": (True,),
    "x": (1,),
}  # fmt: skip


def _some(rng: Random, table: dict[str, tuple[Any, ...]], most: int) -> dict[str, Any]:
    """Some arguments of a table, a few with a value of anything."""
    return {
        name: value(rng, python=True) if rng.random() < 0.2 else rng.choice(table[name])
        for name in rng.sample(sorted(table), rng.randrange(most + 1))
    }


def loader(rng: Random, folder: Path) -> Case:
    """`data_loader`, its batches, and states that it is given."""
    data, given = rng.choice(("samples", rng.choice(sorted(DATA)))), _some(rng, LOADING, 3)
    stated = rng.random() < 0.5
    change = rng.random()

    def run() -> None:
        result, _ = saved.model()
        made = data_loader(DATA[data](), result, **given)
        for each in itertools.islice(made, MOST_BATCHES):
            result.eval_step(each, local=True)
        if stated:
            state = made.state_dict()
            made.load_state_dict(mutated(state, rng) if change < 0.8 else value(rng, python=True))
            for each in itertools.islice(made, MOST_BATCHES):
                result.eval_step(each, local=True)

    return f"{data} {shown(given)}{' and a state' * stated}", run


DOCUMENTS: tuple[Any, ...] = (
    [1, 2, 3], [1] * 40, [], torch.arange(5), torch.zeros(2, 2), torch.zeros(3), None, "ab", 3,
    {"input_ids": [1, 2]}, {"input_ids": [1, 2], "labels": [1]}, {"labels": [1]}, {"x": [1]},
    {"input_ids": [1, 2], "attention_mask": [0, 1]}, {"input_ids": [1], "attention_mask": "x"},
    [10**30], [-1, 2], [1.5], [None], [[1], [2]], [True, False], {1: 2}, {None: None},
    torch.zeros(3, device="meta"), torch.tensor(1), {"input_ids": None}, {"input_ids": [1, None]},
)  # fmt: skip
PACKED: dict[str, tuple[Any, ...]] = {
    "length": (8, 2, 1, 0, -1, 10**12, 2.0, "8", None, True),
    "rows": (None, 2, 1, 0, 10**12, "x", 1.5),
    "attention": ("mask", "bool", "x", None, 3, []),
    "pad_token_id": (0, 3, -1, 10**30, None, "x"),
}


def packing(rng: Random, folder: Path) -> Case:
    """`packed`, documents of all kinds, streams of them and their states."""
    given = {"length": 8, "rows": 2, **_some(rng, PACKED, 2)}
    documents: Any = [rng.choice(DOCUMENTS) for _ in range(rng.choice((0, 1, 3, 6)))]
    if rng.random() < 0.5:
        documents = [x for x in documents if isinstance(x, list) and x in DOCUMENTS[:3]]
    whole = rng.choice((documents, documents, documents, rng.choice(DOCUMENTS), iter(documents)))
    streamed = rng.random() < 0.6
    change = rng.random()

    def run() -> None:
        made = packed(**given)
        if not streamed:
            made(whole)
            return
        stream = made.stream(whole)
        for _ in itertools.islice(stream, MOST_BATCHES):
            pass
        state = stream.state_dict()
        stream.load_state_dict(mutated(state, rng) if change < 0.8 else value(rng, python=True))
        for _ in itertools.islice(stream, MOST_BATCHES):
            pass

    return f"{shown(given)} of {shown(documents)}{', streamed' * streamed}", run


# --- fit ------------------------------------------------------------------------------------------


def _adamw(result: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(result.parameters(), foreach=False)


def _other(result: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD([torch.nn.Parameter(torch.zeros(2))])


def _constant(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.ConstantLR(optimizer)


class _NoState:
    def step(self) -> None:
        pass

    def state_dict(self) -> Any:
        return 3

    def load_state_dict(self, state: Any) -> None:
        pass


FITTED: dict[str, tuple[Any, ...]] = {
    "planning": (None, {"global_batch_size": 8}, {}, 3, "x", {"global_batch_size": "x"},
                 {"x": 1, "global_batch_size": 8}, {1: 2}),
    "optimizer": (_adamw, None, 3, _raises, _other, lambda result: None, lambda result: 3,
                  torch.optim.AdamW, lambda: None),
    "steps": (2, 0, -1, None, 10**30, "x", 1.5, True),
    "schedule": (None, _constant, 3, _raises, lambda optimizer: 3, lambda optimizer: _NoState(),
                 "cosine"),
    "max_grad_norm": (1.0, None, 0, -1, float("nan"), float("inf"), "x", [], 10**400, True),
    "evaluation": (None, *(DATA[name]() for name in ("samples", "few", "batches", "no batches",
                   "odd batches", "number", "text", "iterator", "sample raises", "none"))),
    "evaluate_every": (1, 0, "x", 1.0, None, 10**30),
    "patience": (None, 1, 0, "x", 1.5),
    "folder": ("run", "", "no/such/run", "a\0b", "x" * 300, 3, b"run", "file", "\ud800"),
    "save_every": (None, 1, 0, "x", 1.5),
    "keep": (1, 3, 0, None, "x", 10**30),
    "resume": (True, False, None, "x", 3),
    "log_to": (None, "run.jsonl", "run.txt", 3, _raises, "a\0.jsonl", "file/x.jsonl", [], ".jsonl"),
    "log_every": (1, 0, "x", None, 1.5),
}  # fmt: skip


def fitting(rng: Random, folder: Path) -> Case:
    """`fit` with data and arguments that are wrong, in a folder with something in it."""
    (folder / "file").write_text("x")
    given = {"optimizer": _adamw, "steps": 2, **_some(rng, FITTED, 3)}
    given |= _some(rng, LOADING, 1) if rng.random() < 0.2 else {}
    data = rng.choice(("samples", "samples", rng.choice(sorted(DATA))))
    plain = rng.random() < 0.05
    if plain:
        given.setdefault("planning", {"global_batch_size": 8})
    before = rng.random() < 0.2
    if before:
        given["folder"] = "run"

    def run() -> None:
        if before:
            fit(saved.model()[0], Samples(), optimizer=_adamw, steps=1, folder="run")
            path = rng.choice(sorted(p for p in Path("run").rglob("*") if p.is_file()))
            path.write_bytes(saved.damaged(path.read_bytes(), rng))
        fit(net() if plain else saved.model()[0], DATA[data](), **given)

    return f"{data}{' plain' * plain}{' resumed' * before} {shown(given)}", run


# --- the Trainer ----------------------------------------------------------------------------------


@cache
def loaded() -> Any:
    """What takes seconds to import, before the forks."""
    from transformers import TrainingArguments, get_scheduler

    return TrainingArguments, get_scheduler


TRAINED: dict[str, tuple[Any, ...]] = {
    "per_device_train_batch_size": (8, 1, 0, -1, 10**30, "x", None),
    "gradient_accumulation_steps": (1, 2, 0, "x", 10**30),
    "num_train_epochs": (1.0, 0.0, -1.0, float("nan"), float("inf"), "x", 10**400),
    "max_steps": (2, 0, -1, "x", 1.5, 10**30),
    "learning_rate": (1e-3, -1.0, "x", float("nan"), None),
    "lr_scheduler_type": ("linear", "x", 3, None),
    "lr_scheduler_kwargs": (None, {"x": 1}, 3, "x"),
    "warmup_steps": (0, 0.5, -1, "x", float("nan")),
    "optim": ("adamw_torch", "sgd", "x", None, 3),
    "weight_decay": (0.0, -1.0, "x"),
    "adam_beta1": (0.9, 2.0, "x"),
    "max_grad_norm": (1.0, 0.0, -1.0, "x", None),
    "bf16": (False, True, "x"),
    "tf32": (None, "x"),
    "logging_strategy": ("steps", "epoch", "x", 3),
    "logging_steps": (1, 0, 0.5, -1, "x", float("nan")),
    "report_to": ((), ("x",), "none", 3, None),
    "eval_strategy": ("steps", "epoch", "x", 3),
    "eval_steps": (1, 0, -1, "x", None, 0.5, float("inf")),
    "save_strategy": ("steps", "epoch", "best", 3),
    "save_steps": (1, 0, -1, "x", 0.5),
    "save_total_limit": (None, 0, -1, "x", 1),
    "seed": (0, -1, "x", 10**30),
    "data_seed": (None, 1, "x"),
    "dataloader_num_workers": (0, -1, "x"),
    "label_names": (None, 3, ("x",)),
    "resume_from_checkpoint": (None, True, "x", 3),
    "output_dir": ("out", "", "a\0b", 3, None),
    "fsdp": ("full_shard",),
    "deepspeed": ("x.json",),
}


def trainer(rng: Random, folder: Path) -> Case:
    """`meshwright.hf.Trainer`: arguments set to anything after transformers has checked them."""
    changed, data = _some(rng, TRAINED, 3), rng.choice(("dict", rng.choice(sorted(DATA))))
    evaluated = rng.choice((None, "dict", rng.choice(sorted(DATA))))
    which = rng.random()

    def run() -> None:
        args: Any = loaded()[0](
            output_dir="out", use_cpu=True, per_device_train_batch_size=8, max_steps=2,
            save_strategy="no", report_to="none", remove_unused_columns=False,
        )  # fmt: skip
        for name, given in changed.items():
            setattr(args, name, given)
        if which < 0.05:
            args = changed
        made = Trainer(
            net(), args, train_dataset=DATA[data](), cluster=host(1), loss_fn=_loss,
            eval_dataset=None if evaluated is None else DATA[evaluated](), profile=False,
        )  # fmt: skip
        made.train()
        made.evaluate()

    return f"{data} {evaluated} {shown(changed)}", run


def _loss(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.cross_entropy(logits.reshape(-1, VOCAB), targets.flatten())
