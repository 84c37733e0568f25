"""Packed documents: what a batch holds, that a stream loses and repeats nothing, and that models
train on it as on the documents alone."""

import copy
import pickle
from collections.abc import Iterator, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from meshwright import MeshwrightError, Overrides, auto_parallelize, packed
from meshwright.data import PackedStream
from meshwright.data.packing import arranged
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier, tiered
from tests.helpers.tiny import host
from tests.parity.parity_reference import difference
from tests.user_code.small_transformers import MEGATRON, VOCAB, built

TOLERANCE = 1e-5
PAD = 9999
SIZES = st.lists(st.integers(0, 40), min_size=1, max_size=30).filter(any)


def numbered(sizes: list[int]) -> list[list[int]]:
    """Documents of so many tokens; no two tokens are alike."""
    ends = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [list(range(a, b)) for a, b in pairwise(ends)]


def tokens_of(batch: dict[str, torch.Tensor]) -> list[int]:
    ids: list[int] = batch["input_ids"].flatten().tolist()
    return [x for x in ids if x != PAD]


def cut(given: list[list[int]], length: int) -> list[list[int]]:
    return [x[k : k + length] for x in given for k in range(0, len(x), length)]


@settings(max_examples=40)
@given(SIZES, st.integers(2, 17))
def test_every_token_is_there_once_in_order_with_its_label_and_position(
    sizes: list[int], length: int
) -> None:
    pieces = cut(numbered(sizes), length)
    batch = packed(length, attention="bool", pad_token_id=PAD)(numbered(sizes))
    ids, labels, positions = (batch[n] for n in ("input_ids", "labels", "position_ids"))
    rows = len(ids)
    assert ids.shape == labels.shape == positions.shape == (rows, length)
    assert sorted(tokens_of(batch)) == list(range(sum(sizes)))
    begun = {piece[0]: piece for piece in pieces}
    sees = torch.zeros(rows, 1, length, length, dtype=torch.bool)
    for row in range(rows):
        at = 0
        while at < length:
            piece = begun.get(int(ids[row, at]))
            count = len(piece) if piece else length - at
            assert ids[row, at : at + count].tolist() == (piece or [PAD] * count)
            wanted = [-100, *piece[1:]] if piece else [-100] * count
            assert labels[row, at : at + count].tolist() == wanted
            assert positions[row, at : at + count].tolist() == list(range(count))
            for i in range(count):
                sees[row, 0, at + i, at : at + i + 1] = True
            at += count
    assert torch.equal(batch["attention_mask"], sees)
    added = packed(length)(numbered(sizes))["attention_mask"]
    assert torch.equal(added == 0, sees) and torch.all(added[~sees] < -1e38)


@given(SIZES, st.integers(1, 17))
def test_rows_are_full_and_few(sizes: list[int], length: int) -> None:
    """No row too long, and none that another could take in: two of them never fit in one."""
    lengths = [len(piece) for piece in cut(numbered(sizes), length)]
    rows = arranged(lengths, length)
    assert sorted(k for row in rows for k in row) == list(range(len(lengths)))
    filled = sorted(sum(lengths[k] for k in row) for row in rows)
    assert filled[-1] <= length
    assert len(filled) < 2 or filled[0] + filled[1] > length


def test_labels_and_left_out_tokens_are_the_documents_own() -> None:
    labels, mask = [-100, -100, 7, 8], [0, 1, 1, 1]
    given = {"input_ids": [5, 6, 7, 8], "labels": labels, "attention_mask": mask}
    batch = packed(6, rows=2)([given, torch.tensor([1, 2], dtype=torch.int32), []])
    assert batch["input_ids"].tolist() == [[6, 7, 8, 1, 2, 0], [0] * 6]
    assert batch["labels"].tolist() == [[-100, 7, 8, -100, 2, -100], [-100] * 6]
    assert batch["position_ids"].tolist() == [[0, 1, 2, 0, 1, 0], [0, 1, 2, 3, 4, 5]]


def test_workers_of_a_loader_can_have_it() -> None:
    collate, given = packed(8, rows=2), numbered([3, 4, 5, 2])
    sent = pickle.loads(pickle.dumps(collate))
    assert torch.equal(sent(given)["input_ids"], collate(given)["input_ids"])


class ReadOver:
    """Documents that can only be iterated."""

    def __init__(self, documents: list[list[int]]) -> None:
        self.documents = documents

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.documents)


@settings(max_examples=25)
@given(SIZES, st.integers(2, 9), st.integers(1, 4), st.integers(0, 40), st.booleans())
def test_a_stream_goes_on_where_its_state_says(
    sizes: list[int], length: int, rows: int, stop: int, indexed: bool
) -> None:
    """Through a state, under other rows and another length, no token is lost or repeated."""
    given = numbered(sizes) if indexed else ReadOver(numbered(sizes))
    first = packed(length, rows=rows, attention="bool", pad_token_id=PAD).stream(given)
    seen, batches = [], iter(first)
    for _, batch in zip(range(stop), batches, strict=False):
        assert batch["input_ids"].shape == (rows, length)
        seen += tokens_of(batch)
    if len(seen) == sum(sizes):
        return  # handed out whole: what follows is the next pass, of which there is a test below
    state = first.state_dict()
    again = packed(length, rows=rows, attention="bool", pad_token_id=PAD).stream(given)
    again.load_state_dict(state)
    assert [tokens_of(x) for x in again] == [tokens_of(x) for x in batches]
    other = packed(length + 3, rows=rows + 1, attention="bool", pad_token_id=PAD).stream(given)
    other.load_state_dict(state)
    seen += [x for batch in other for x in tokens_of(batch)]
    assert sorted(seen) == list(range(sum(sizes)))


def test_a_stream_begins_anew_after_its_end() -> None:
    stream = packed(4, rows=1).stream(numbered([3, 3, 2]))
    first = [x["input_ids"].tolist() for x in stream]
    assert len(first) == 3 and first == [x["input_ids"].tolist() for x in stream]
    *_, (_, state) = ((batch, stream.state_dict()) for batch in stream)  # at the last batch
    ended = packed(4, rows=1).stream(numbered([3, 3, 2]))
    ended.load_state_dict(state)
    assert not [*ended] and [x["input_ids"].tolist() for x in ended] == first


def test_a_stream_arranges_anew_what_came_before() -> None:
    """3 + 3 and 5 + 5 come so that 3 of 8 tokens are left in either row, where 8 = 5 + 3."""
    (batch,) = packed(8, rows=2).stream(numbered([3, 3, 5, 5]))
    assert (batch["labels"] != -100).sum() == 16 - 4


def at(state: dict[str, int], given: Any) -> PackedStream:
    """A stream at a document."""
    stream = packed(4, rows=1).stream(given)
    stream.load_state_dict(state)
    return stream


BEYOND = {"documents": 2, "tokens": 0}
REFUSED = {
    "too many documents": (lambda: packed(4, rows=1)([[1, 2, 3], [4, 5]]), "stream"),
    "no token": (lambda: packed(4)([[]]), "without a token"),
    "text": (lambda: packed(4)(["a text"]), "tokenize it"),
    "rows of ids": (lambda: packed(4)([[[1, 2]]]), r"shape \(1, 2\)"),
    "other entries": (lambda: packed(4)([{"input_ids": [1], "text": "x"}]), "drop text"),
    "no ids": (lambda: packed(4)([{"labels": [1]}]), "give input_ids"),
    "labels": (lambda: packed(4)([{"input_ids": [1, 2], "labels": [1]}]), "as many as input_ids"),
    "length": (lambda: packed(1), "length= 1; legal: integers from 2"),
    "padding": (lambda: packed(4, pad_token_id=-1), "pad_token_id= -1; legal"),
    "attention": (lambda: packed(4, attention="causal"), "mask, bool"),  # type: ignore[arg-type]
    "a stream without rows": (lambda: packed(4).stream([[1]]), "rows=8"),
    "an iterator": (lambda: packed(4, rows=1).stream(iter([[1]])), "read again"),
    "another state": (lambda: at({"epoch": 1}, [[1]]), "documents and tokens"),
    "more documents": (lambda: at(BEYOND, [[1]]), "there are 1"),
    "more than are read": (lambda: next(iter(at(BEYOND, ReadOver([[1]])))), "there are 1"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_way_out(case: str) -> None:
    make, said = REFUSED[case]
    with pytest.raises(MeshwrightError, match=said) as caught:
        make()
    assert caught.value.place and caught.value.legal and caught.value.way_out


KINDS, WAYS = ("llama", "gpt2"), ("sdpa mask", "eager mask", "sdpa bool")
IN_FIRST = (("gpt2", "sdpa mask"), ("llama", "eager mask"), ("llama", "sdpa bool"))
CELLS = [(kind, way) for kind in KINDS for way in WAYS]


@pytest.mark.parametrize(
    "cell", tiered(CELLS, lambda cell: cell in IN_FIRST, "two kinds and all ways to mask", " ".join)
)
def test_transformers_alone_keep_documents_apart(cell: tuple[str, str]) -> None:
    """The mask is what transformers takes, without Meshwright too."""
    implementation, attention = cell[1].split()
    model: Any = built(cell[0])
    model.set_attn_implementation(implementation)
    alone(model, documents()).backward()
    wanted = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    model(**packed(LENGTH, attention=attention)(documents())).loss.backward()
    found = {n: p.grad for n, p in model.named_parameters()}
    assert difference(found, wanted)[0] < TOLERANCE


LENGTH, ROWS, RANKS = 16, 12, 4  # of models
DOCUMENTS = (7, 5, 3, 16, 1, 21, 9, 9, 4, 12, 2, 6, 15, 8, 8, 11)
LAYOUTS: Mapping[str, Overrides] = {
    "dp2 tp2": Overrides(dp=2, tp=2, pp=1, num_microbatches=2),
    "pp2 dp2": Overrides(dp=2, tp=1, pp=2, num_microbatches=2, schedule="1f1b"),
}
ON_RANKS = (
    ("llama", "dp2 tp2", "mask"),
    ("llama", "pp2 dp2", "bool"),
    ("gpt2", "dp2 tp2", "bool"),
    ("gpt2", "pp2 dp2", "mask"),
)


def documents() -> list[torch.Tensor]:
    drawn = torch.Generator().manual_seed(0)
    return [torch.randint(1, VOCAB, (size,), generator=drawn) for size in DOCUMENTS]


def alone(model: nn.Module, given: list[torch.Tensor]) -> torch.Tensor:
    """The mean loss over all predicted tokens, each document (of a row at most) by itself. The
    shift is written out here, and no label is ignored."""
    losses, count = [], 0
    for ids in (piece for x in given for piece in x.split(LENGTH) if len(piece) > 1):
        logits = model(input_ids=ids[None]).logits[0]
        losses.append(F.cross_entropy(logits[:-1], ids[1:], reduction="sum"))
        count += len(ids) - 1
    return torch.stack(losses).sum() / count


def train_apart(kind: str, layout: str, attention: str) -> None:
    """Losses and gradients are those of the documents alone: of a batch of all documents, and of
    one whose rows are mostly empty."""
    model = built(kind)
    plain = copy.deepcopy(model)
    overrides = LAYOUTS[layout]
    if overrides.tp == 2:
        overrides = replace(overrides, shardings=MEGATRON[kind])
    collate = packed(LENGTH, rows=ROWS, attention=attention)
    given = {"global_batch_size": ROWS, "precision": "fp32", "overrides": overrides}
    result = auto_parallelize(model, host(RANKS), example_inputs=collate(documents()), **given)
    mine = torch.optim.SGD(result.parameters(), lr=0.5)
    reference = torch.optim.SGD(plain.parameters(), lr=0.5)
    # of three documents most rows are empty: a whole micro-batch counts nothing
    for some in (documents(), documents()[:3]):
        mine.zero_grad()
        reference.zero_grad()
        loss = float(result.train_step(collate(some)))
        wanted = alone(plain, some)
        wanted.backward()
        assert abs(loss - float(wanted)) < TOLERANCE
        gradients = {n: p.grad for n, p in plain.named_parameters() if p.grad is not None}
        off, where = difference(result.runtime.full_gradients(), gradients)
        assert off < TOLERANCE, where
        mine.step()
        reference.step()


@second_tier("models alone keep documents apart by every mask, which is an input as others")
@pytest.mark.parametrize("cell", ON_RANKS, ids=", ".join)
def test_plans_keep_documents_apart(cell: tuple[str, str, Any]) -> None:
    on_ranks(RANKS, train_apart, *cell)
