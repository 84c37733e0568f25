"""Outputs, data sets and generated tokens under the training layout, against one device."""

import dataclasses
import logging
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from meshwright import Overrides, ParallelModel, auto_parallelize
from meshwright.executor.errors import StateError
from meshwright.executor.ranks import launch
from tests.helpers import tiny
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier, tiered
from tests.user_code.user_runs import LAYOUTS, RANKS, ROWS, free_links

LENGTH, CLASSES, IGNORED = 8, 48, -100
ATTENTION = F.scaled_dot_product_attention
CONFIG: Mapping[str, Any] = {
    "vocab_size": CLASSES, "initializer_range": 0.3, "bos_token_id": 0, "eos_token_id": None
}  # fmt: skip


def gpt2() -> nn.Module:
    return GPT2LMHeadModel(GPT2Config(n_layer=2, n_embd=32, n_head=4, n_positions=64, **CONFIG))


def llama() -> nn.Module:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 4, "num_attention_heads": 4}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **CONFIG))


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
    asked = {"global_batch_size": ROWS, "precision": "fp32", "overrides": found, **given}
    return auto_parallelize(build(), free_links(RANKS), **asked)


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


def language(build: Callable[[], nn.Module], layout: str) -> None:
    """Outputs of a whole batch and of fewer rows, a data set's mean, generated tokens."""
    alone, data = plain(build), batches()
    result = planned(build, layout, example_inputs=data[0])
    with torch.no_grad():
        wanted = [alone(**b) for b in data]
    whole = result.forward(data[0], gather=True)
    assert far(whole.logits, wanted[0].logits) < 2e-5
    assert abs(float(whole.loss - wanted[0].loss)) < 2e-5
    few = result.forward({"input_ids": data[1]["input_ids"]}, gather=True)
    assert far(few.logits, wanted[1].logits) < 2e-5
    assert few.get("loss") is None
    compare_own_rows(result, data[0], wanted[0].logits)

    counts = [int((b["labels"][:, 1:] != IGNORED).sum()) for b in data]
    mean = sum(float(w.loss) * n for w, n in zip(wanted, counts, strict=True)) / sum(counts)
    of = result.evaluate(data)
    assert of.loss == pytest.approx(mean, rel=0, abs=1e-5)
    assert of.perplexity == pytest.approx(float(torch.tensor(mean).exp()), rel=1e-5)
    assert (of.counted, of.rows, of.batches) == (sum(counts), ROWS + 3, 2)
    compare_tokens(result, alone)
    with pytest.raises(ValueError, match=r"generate: ranks \[2, 3\] give other prompts"):
        result.generate(ids(2, 3, launch.rank() // 2), 2)
    with pytest.raises((ValueError, RuntimeError), match=r"ended on ranks \[2\]"):
        result.evaluate(uneven(data))


def compare_own_rows(result: ParallelModel, batch: Any, wanted: torch.Tensor) -> None:
    """What this rank has of the logits, beside the rows that it reads."""
    here = result.forward(batch).get("logits")
    place, plan = result.runtime.place, result.plan
    if len(plan.stages) - 1 not in place.stages:
        assert here is None
        return
    micros = wanted.split(plan.microbatch_rows)
    rows = torch.cat([m.tensor_split(place.data.size)[place.data.rank] for m in micros])
    assert far(here, rows) < 2e-5


def compare_tokens(result: ParallelModel, alone: Any) -> None:
    """Prompts of unequal lengths are continued as transformers' own `generate` does row by row,
    over the planned length."""
    prompts, lengths = ids(5, 6, 3), [6, 2, 4, 6, 1]
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
    assert torch.equal(found, wanted)
    eos = int(found[0, 7])
    until = result.generate(padded, 5, pad_token_id=0, eos_token_id=eos)
    assert torch.equal(result.generate(padded, 5, pad_token_id=0, use_cache=False), found)
    ended = []
    for row, n in zip(found, lengths, strict=True):
        new = row[n : n + 5].tolist()
        ended.append([*row[:n].tolist(), *(new[: new.index(eos) + 1] if eos in new else new)])
    width = max(map(len, ended))
    assert len(ended[0]) < 11 and until.tolist() == [
        row + [0] * (width - len(row)) for row in ended
    ]


def grouped_heads(*, attention: str = "sdpa") -> Any:
    """A Llama whose heads share keys and values."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 256}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(**sizes, **heads, **CONFIG, attn_implementation=attention))


def cached(build: Callable[[], Any], layout: Mapping[str, int], masked: bool, world: int) -> None:
    """Tokens by a cache are those of transformers' own, of prompts far beyond the planned length;
    a token costs a forward over few tokens."""
    torch.manual_seed(0)
    data = batches()[0]
    if masked:
        mask = torch.ones_like(data["input_ids"])
        mask[2, 5:] = 0  # of all ones no operator would be traced
        data["attention_mask"] = mask
    asked = {"global_batch_size": ROWS, "precision": "fp32", "overrides": Overrides(**layout)}
    result = auto_parallelize(build(), free_links(world), example_inputs=data, **asked)
    alone, prompts = plain(build), ids(5, 12, 3)
    compare_tokens(result, alone)
    wanted = alone.generate(prompts, max_new_tokens=20, do_sample=False, use_cache=True)
    assert torch.equal(result.generate(prompts, 20), wanted)
    with mock.patch.object(F, "scaled_dot_product_attention", wraps=ATTENTION) as attention:
        result.generate(prompts, 20)  # traced already
    lengths = [call.args[0].shape[-2] for call in attention.call_args_list]
    few, whole = 2 * layout.get("tp", 1), lengths.count(32)
    assert {*lengths} == {few, 32} and lengths.count(few) == 19 * whole > 0


TWO = [
    (gpt2, {"tp": 2, "dp": 1, "pp": 1}, False),
    (gpt2, {"dp": 2, "tp": 1, "pp": 1}, True),
    (gpt2, {"pp": 2, "tp": 1, "dp": 1, "num_microbatches": 2}, False),
    (grouped_heads, {"tp": 2, "dp": 1, "pp": 1}, True),
    (grouped_heads, {"dp": 2, "tp": 1, "pp": 1, "zero": 3}, False),
    (grouped_heads, {"pp": 2, "tp": 1, "dp": 1}, True),
]


FEW = "four ranks keep keys and values, too, in stages and by tensors (the outputs' test)"


def kept(cell: tuple[Any, ...]) -> str:
    degrees = "".join(f" {name}{value}" for name, value in cell[1].items() if value > 1)
    return cell[0].__name__ + degrees


@second_tier(FEW)
@pytest.mark.parametrize("cell", TWO, ids=kept)
def test_tokens_by_a_cache_are_those_of_transformers(cell: tuple[Any, ...]) -> None:
    on_ranks(2, cached, *cell, 2)


@second_tier("four ranks keep keys and values in the change tier")
def test_one_device_keeps_keys_and_values_and_eager_attention_does_not(
    caplog: pytest.LogCaptureFixture,
) -> None:
    cached(gpt2, {}, False, 1)
    torch.manual_seed(0)
    model = grouped_heads(attention="eager")
    result = tiny.planned(model, example_inputs=batches()[0], loss_fn=None)
    with caplog.at_level(logging.INFO, "meshwright"):
        found = result.generate(ids(2, 6), 4)
    assert "without a cache, as no operator of the model is an attention" in caplog.text
    wanted = plain(grouped_heads).generate(ids(2, 6), max_new_tokens=4, do_sample=False)
    assert torch.equal(found, wanted)


def uneven(data: list[Any]) -> Iterator[Any]:
    yield from data[: 1 if launch.rank() == 2 else 2]


def images(layout: str) -> None:
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(ROWS, 3, 8, 8, generator=draw)
    y = torch.randint(5, (ROWS,), generator=draw)
    loss_fn = lambda out, y: F.cross_entropy(out["scores"], y)  # noqa: E731
    result = planned(Images, layout, example_inputs=(x, y), loss_fn=loss_fn)
    result.train_step((x, y))
    alone = plain(Images)
    alone.load_state_dict(result.full_state_dict())
    with torch.no_grad():
        wanted = alone(x)
    out = result.forward((x,), gather=True)
    assert far(out["scores"], wanted["scores"]) < 1e-5
    assert far(out["pooled"], wanted["pooled"]) < 1e-5
    assert out["unread"] is None
    loss = pytest.approx(float(F.cross_entropy(wanted["scores"], y)), rel=0, abs=1e-5)
    assert float(result.eval_step((x, y))) == loss
    assert result.evaluate([(x, y)]).loss == loss
    with pytest.raises((ValueError, RuntimeError), match="generate: the model makes"):
        result.generate(ids(2, 3), 2)


OTHERS = "a vocabulary that is split and gathered, in stages and by tensors"
CELLS = [
    *((gpt2, layout) for layout in ("dp2×tp2", "pp2×tp2", "zero3")),
    *((llama, layout) for layout in ("dp2×tp2", "pp4", "zero3")),
]


@pytest.mark.parametrize(
    "cell",
    tiered(CELLS, lambda cell: cell == CELLS[1], OTHERS, lambda c: f"{c[0].__name__} {c[1]}"),
)
def test_outputs_data_sets_and_tokens_are_those_of_one_device(cell: tuple[Any, str]) -> None:
    on_ranks(RANKS, language, *cell)


@pytest.mark.parametrize(
    "layout", tiered(("dp2×tp2", "pp2×tp2"), lambda layout: layout == "pp2×tp2", OTHERS)
)
def test_batch_norm_reads_its_running_statistics(layout: str) -> None:
    on_ranks(RANKS, images, layout)


class Doubled(nn.Module):
    """Twice as much where it trains."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (2 if self.training else 1)


def on_one(
    loss_fn: Callable[..., Any], model: nn.Module | None = None, num_microbatches: int = 1
) -> ParallelModel:
    torch.manual_seed(0)
    given = {"example_inputs": BATCH, "loss_fn": loss_fn, "global_batch_size": ROWS}
    overrides = Overrides(num_microbatches=num_microbatches)
    return tiny.planned(model or nn.Linear(4, 4), overrides=overrides, **given)


BATCH = torch.randn(ROWS, 4), torch.randn(ROWS, 4)
CALLS: tuple[Callable[[ParallelModel], Any], ...] = (
    lambda r: r.eval_step(BATCH),
    lambda r: r.forward(BATCH),
    lambda r: r.evaluate([BATCH]),
)


@cache
def mean_of_squares() -> ParallelModel:
    return on_one(F.mse_loss)


def test_a_forward_of_another_course_in_evaluation_is_refused() -> None:
    result = on_one(F.mse_loss, Doubled())
    for call in CALLS:
        with pytest.raises(StateError, match=r"the first difference is .*mul.* in .* mode"):
            call(result)


def test_statistics_of_a_batch_are_not_those_of_its_parts() -> None:
    """A norm without running statistics takes those of the whole batch, or is not evaluated."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, track_running_stats=False))
    result = on_one(F.mse_loss, model)
    with torch.no_grad():
        wanted = F.mse_loss(result.runtime.model.eval()(BATCH[0]), BATCH[1])
    assert float(result.eval_step(BATCH)) == pytest.approx(float(wanted), rel=1e-6)
    in_parts = result.replan(Overrides(num_microbatches=2))
    for call in CALLS:
        with pytest.raises(StateError, match=r"no running statistics.*num_microbatches=1"):
            call(in_parts)


def test_rows_weigh_batches_of_a_mean() -> None:
    result = mean_of_squares()
    data = [BATCH, (BATCH[0][:3], BATCH[1][:3])]
    with torch.no_grad():
        losses = [float(F.mse_loss(result.runtime.model(x), y)) for x, y in data]
    mean = (losses[0] * ROWS + losses[1] * 3) / (ROWS + 3)
    found = result.evaluate(data)
    assert found.loss == pytest.approx(mean, rel=1e-6)
    assert (found.counted, found.perplexity) == (ROWS + 3, None)


def test_a_sum_over_a_count_weighs_by_the_count() -> None:
    def masked(x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        keep = y > 0
        return ((x - y).square() * keep).sum(), keep.sum()

    result = on_one(masked)
    data = [BATCH, (BATCH[0].flip(1), BATCH[1].abs())]
    with torch.no_grad():
        parts = [masked(result.runtime.model(x), y) for x, y in data]
    mean = float(sum(s for s, _ in parts) / sum(n for _, n in parts))
    assert result.evaluate(data).loss == pytest.approx(mean, rel=1e-6)


def test_what_counts_nothing_is_refused_or_weighed_by_hand() -> None:
    result = on_one(lambda x, y: (x - y).square().sum())
    with pytest.raises(StateError, match=r"evaluate: the loss ends in .*weigh="):
        result.evaluate([BATCH])
    assert result.evaluate([BATCH], weigh=lambda batch: 2.0).counted == 2.0
    with pytest.raises(StateError, match=r"0 batches count 0"):
        mean_of_squares().evaluate([])
