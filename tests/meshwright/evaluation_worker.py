"""One rank of a launch: outputs, data sets and generated tokens of several models under several
layouts, against the same model on one device."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from meshwright import ParallelModel, auto_parallelize
from meshwright.executor.ranks import launch
from tests.parity.parity_launch import on_ranks, run_all
from tests.user_code.user_runs import LAYOUTS, RANKS, ROWS, free_links

LENGTH, CLASSES, IGNORED = 8, 48, -100


def gpt2() -> nn.Module:
    config = GPT2Config(
        n_layer=4, n_embd=32, n_head=4, vocab_size=CLASSES, n_positions=64, initializer_range=0.3,
        bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def llama() -> nn.Module:
    config = LlamaConfig(
        num_hidden_layers=4, hidden_size=32, intermediate_size=48, num_attention_heads=4,
        vocab_size=CLASSES, max_position_embeddings=64, initializer_range=0.3,
        bos_token_id=0, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


class Images(nn.Module):
    """Convolutions with batch norm and dropout; its output is a dict, one entry without rows."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(8, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        self.drop = nn.Dropout(0.5)
        self.head = nn.Linear(8, 5)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        pooled = self.second(self.first(x)).mean((2, 3))
        return {"scores": self.head(self.drop(pooled)), "pooled": pooled, "unread": pooled.exp()}


def planned(build: Callable[[], nn.Module], layout: str, **given: Any) -> ParallelModel:
    torch.manual_seed(0)
    found = LAYOUTS[layout]
    if found.tp == 2 and build is gpt2:  # the vocabulary split, which is gathered
        found = dataclasses.replace(found, shardings={"lm_head": "colwise"})
    return auto_parallelize(
        build(),
        free_links(RANKS),
        global_batch_size=ROWS,
        precision="fp32",
        overrides=found,
        **given,
    )


def plain(build: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    return build().eval()


def ids(rows: int, length: int, seed: int = 1) -> torch.Tensor:
    draw = torch.Generator().manual_seed(seed)
    return torch.randint(1, CLASSES, (rows, length), generator=draw)


def batches() -> list[dict[str, torch.Tensor]]:
    """Two batches of uneven numbers of targets, the last of fewer rows."""
    first, last = ids(ROWS, LENGTH), ids(3, LENGTH, 2)
    labels = first.clone()
    labels[0, 2:], labels[5, :4] = IGNORED, IGNORED
    return [{"input_ids": first, "labels": labels}, {"input_ids": last, "labels": last}]


def far(a: torch.Tensor, b: torch.Tensor) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a - b).abs().max())


def language(build: Callable[[], nn.Module], layout: str) -> dict[str, Any]:
    alone, data = plain(build), batches()
    result = planned(build, layout, example_inputs=data[0])
    with torch.no_grad():
        wanted = [alone(**b) for b in data]
    found: dict[str, Any] = {}
    whole = result.forward(data[0], gather=True)
    found["logits"] = far(whole.logits, wanted[0].logits)
    found["loss"] = abs(float(whole.loss - wanted[0].loss))
    few = result.forward({"input_ids": data[1]["input_ids"]}, gather=True)
    found["fewer rows, no labels"] = far(few.logits, wanted[1].logits)
    found["no loss"] = few.get("loss") is None
    found |= own_rows(result, data[0], wanted[0].logits)

    counts = [int((b["labels"][:, 1:] != IGNORED).sum()) for b in data]
    mean = sum(float(w.loss) * n for w, n in zip(wanted, counts, strict=True)) / sum(counts)
    of = result.evaluate(data)
    found["data set"] = abs(of.loss - mean)
    found["perplexity"] = abs((of.perplexity or 0.0) / float(torch.tensor(mean).exp()) - 1)
    found["counted"] = [of.counted == sum(counts), of.rows, of.batches]
    found["tokens"] = tokens(result, alone)
    found["other prompts"] = said(lambda: result.generate(ids(2, 3, launch.rank() // 2), 2))
    found["ended"] = said(lambda: result.evaluate(uneven(data)))
    return found


def own_rows(result: ParallelModel, batch: Any, wanted: torch.Tensor) -> dict[str, Any]:
    """What this rank has of the logits, beside the rows that it reads."""
    here = result.forward(batch).get("logits")
    place, plan = result.runtime.place, result.plan
    if len(plan.stages) - 1 not in place.stages:
        return {"own rows": 0.0 if here is None else 1.0}
    micros = wanted.split(plan.microbatch_rows)
    rows = torch.cat([m.tensor_split(place.data.size)[place.data.rank] for m in micros])
    return {"own rows": far(here, rows)}


def tokens(result: ParallelModel, alone: nn.Module) -> bool:
    """Whether prompts of unequal lengths are continued as transformers' own `generate` does row by
    row, over the planned length."""
    prompts = ids(5, 6, 3)
    lengths = [6, 2, 4, 6, 1]
    padded = prompts.clone()
    for row, n in enumerate(lengths):
        padded[row, n:] = 0
    rows = [
        alone.generate(prompts[k : k + 1, :n], max_new_tokens=5, do_sample=False, pad_token_id=0)
        for k, n in enumerate(lengths)
    ]
    found = result.generate(padded, 5, pad_token_id=0)
    wanted = torch.zeros_like(found)
    for k, row in enumerate(rows):
        wanted[k, : row.shape[1]] = row[0]
    eos = int(found[0, 7])
    until = result.generate(padded, 5, pad_token_id=0, eos_token_id=eos)
    ended = all(
        eos not in row[n : n + 5] or not row[n + int((row[n:] == eos).nonzero()[0]) + 1 :].any()
        for row, n in zip(until, lengths, strict=True)
    )
    return torch.equal(found, wanted) and ended and eos in until[0]


def uneven(data: list[Any]) -> Iterator[Any]:
    yield from data[: 1 if launch.rank() == 2 else 2]


def images(layout: str) -> dict[str, Any]:
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(ROWS, 3, 8, 8, generator=draw)
    y = torch.randint(5, (ROWS,), generator=draw)
    result = planned(
        Images,
        layout,
        example_inputs=(x, y),
        loss_fn=lambda out, y: F.cross_entropy(out["scores"], y),
    )
    result.train_step((x, y))
    alone = copy.deepcopy(plain(Images))
    alone.load_state_dict(result.full_state_dict())
    with torch.no_grad():
        wanted = alone(x)
    out = result.forward((x,), gather=True)
    found: dict[str, Any] = {name: far(out[name], wanted[name]) for name in ("scores", "pooled")}
    found["unread"] = out["unread"] is None
    loss = float(F.cross_entropy(wanted["scores"], y))
    found["eval_step"] = abs(float(result.eval_step((x, y))) - loss)
    found["data set"] = abs(result.evaluate([(x, y)]).loss - loss)
    found["language"] = said(lambda: result.generate(ids(2, 3), 2))
    return found


def said(call: Callable[[], Any]) -> str:
    try:
        call()
    except (ValueError, RuntimeError) as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


CELLS = {
    "gpt2": (gpt2, ("dp2×tp2", "pp2×tp2", "zero3")),
    "llama": (llama, ("dp2×tp2", "pp4", "zero3")),
}


def main(folder: Path) -> None:
    work: dict[str, Any] = {}
    for name, (build, layouts) in CELLS.items():
        for layout in layouts:
            work[f"{name} {layout}"] = partial(language, build, layout)
    for layout in ("dp2×tp2", "pp2×tp2"):
        work[f"images {layout}"] = partial(images, layout)
    run_all(work, folder, "")


if __name__ == "__main__":
    on_ranks(main)
