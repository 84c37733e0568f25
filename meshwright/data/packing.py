"""Documents packed to rows of one length, none of which sees another.

A row of `length` tokens holds whole documents one after the other, then padding:

    input_ids      a0 a1 a2 b0 b1  _
    labels          . a1 a2  . b1  .     . is -100, which no loss counts
    position_ids    0  1  2  0  1  0

Decoders of transformers compare a token's output with the label after it, so that a label of -100
at a document's first token keeps the last one of the document before from predicting it. Token i
sees token j where j <= i and both are of one document; padding is a document of its own, so that
every token sees one.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Literal, get_args

import torch

from meshwright.data.loader_arguments import DataError
from meshwright.executor.errors import StateDictError
from meshwright.profiles.inputs import MeshwrightError, shown
from meshwright.profiles.inputs.limits import MAX_COUNT, MAX_ROWS

Attention = Literal["mask", "bool"]
IGNORED = -100  # the label that cross-entropies leave out
ENTRIES = ("input_ids", "labels", "attention_mask")
STATE = ("documents", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """A document, or a part of one that is longer than a row: ids and labels, both [tokens]."""

    ids: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, slots=True, kw_only=True)
class Packing:
    """Rules by which documents become a batch; the fields are the arguments of `packed`."""

    length: int
    rows: int | None
    attention: Attention
    pad_token_id: int

    def __call__(self, documents: Sequence[Any]) -> dict[str, torch.Tensor]:
        """The batch of these documents, best fit first by decreasing length. Raises MeshwrightError
        for what is no document, and where they take more than `rows` rows."""
        if not isinstance(documents, Sequence) or isinstance(documents, str | bytes):
            raise DataError(
                f" are a {type(documents).__name__}",
                place="packed: documents",
                legal="a list of documents",
                way_out="give a list, or iterate .stream(documents)",
            )
        pieces = [piece for document in documents for piece in self.pieces(document)]
        rows = arranged([len(piece) for piece in pieces], self.length)
        if not rows:
            raise DataError(
                f"{len(documents)} documents without a token",
                place="packed",
                legal="batches of at least one token",
                way_out="leave empty documents out",
            )
        if self.rows is not None and len(rows) > self.rows:
            raise DataError(
                f"{len(documents)} documents of {sum(map(len, pieces))} tokens take {len(rows)} "
                f"rows of {self.length}",
                place="packed",
                legal=f"what {self.rows} rows hold",
                way_out="give a batch fewer documents, or iterate .stream(documents), which takes "
                "as many as fit",
            )
        return self.batch([[pieces[k] for k in row] for row in rows])

    def stream(self, documents: Any) -> PackedStream:
        """Batches of `rows` rows of a whole data set, with a state: a `PackedStream`."""
        return PackedStream(self, documents)

    def pieces(self, document: Any, start: int = 0) -> list[Piece]:
        """A document from token `start` on, cut where a row is full; none of an empty one."""
        ids, labels = _tokens(document)
        return [
            Piece(ids=ids[k : k + self.length], labels=labels[k : k + self.length])
            for k in range(start, len(ids), self.length)
        ]

    def batch(self, rows: Sequence[Sequence[Piece]]) -> dict[str, torch.Tensor]:
        """The batch of pieces that are arranged already: ids, labels and positions int64 [rows,
        length], the mask [rows, 1, length, length]. Missing rows are padding alone."""
        shape = (self.rows or len(rows), self.length)
        ids = torch.full(shape, self.pad_token_id)
        labels = torch.full(shape, IGNORED)
        positions = torch.arange(self.length).repeat(shape[0], 1)
        for k, row in enumerate(rows):
            end = 0
            for piece in row:
                start, end = end, end + len(piece)
                ids[k, start:end] = piece.ids
                labels[k, start + 1 : end] = piece.labels[1:]
                positions[k, end:] = torch.arange(self.length - end)
        batch = {"input_ids": ids, "labels": labels, "position_ids": positions}
        return batch | self._attention(positions)

    def _attention(self, positions: torch.Tensor) -> dict[str, torch.Tensor]:
        document = (positions == 0).cumsum(-1)
        sees = (document[:, :, None] == document[:, None, :]).tril()[:, None]
        if self.attention == "bool":
            return {"attention_mask": sees}
        # the least number, not -inf: a kernel that multiplies a mask by 0 would make NaN of that
        unseen = torch.zeros(sees.shape).masked_fill_(~sees, torch.finfo(torch.float32).min)
        return {"attention_mask": unseen}


def packed(
    length: int, *, rows: int | None = None, attention: Attention = "mask", pad_token_id: int = 0
) -> Packing:
    """A collate function that packs documents to rows of `length` tokens, for decoders of
    transformers and what takes batches as they do.

    A document is a list or 1-D tensor of token ids, or a mapping of `input_ids` and perhaps
    `labels` (as long, not shifted) and `attention_mask` (tokens where it is 0 are left out). No
    token is dropped; one longer than a row is cut into pieces of `length`, each a document of its
    own: its first token is not predicted. With `rows` every batch has as many, filled up with
    padding that no loss counts: always one shape, for one plan.

    `attention` is the form of the mask that keeps documents apart. "mask": additive, fp32 [rows, 1,
    length, length] of 0 and the least number, for "sdpa" and "eager" attention. "bool": True where
    a token sees another, a quarter of the bytes, for "sdpa" alone ("eager" would add it). Either
    takes the place of a model's sliding window: rows longer than that are for models without.
    Raises MeshwrightError for other values.
    """
    options = {"length": length, "pad_token_id": pad_token_id} | (
        {} if rows is None else {"rows": rows}
    )
    for name, least in (("length", 2), ("rows", 1), ("pad_token_id", 0)):
        value = options.get(name, least)
        if type(value) is not int or not least <= value <= MAX_ROWS:
            legal = f"integers from {least} to {MAX_ROWS}"
            raise DataError(f"= {shown(value)}", place=name, legal=legal)
    if attention not in get_args(Attention):
        raise DataError(f"= {shown(attention)}", place="attention", legal=get_args(Attention))
    return Packing(length=length, rows=rows, attention=attention, pad_token_id=pad_token_id)


def arranged(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Pieces (by index) in rows of `length`: by decreasing length, each into the fullest row that
    holds it. In a row they are in their order."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (tokens that fit in yet, row), sorted
    for k in sorted(range(len(lengths)), key=lambda k: -lengths[k]):
        at = bisect_left(open_rows, (lengths[k], 0))
        if at == len(open_rows):
            room, row = length, len(rows)
            rows.append([])
        else:
            room, row = open_rows.pop(at)
        rows[row].append(k)
        insort(open_rows, (room - lengths[k], row))
    return [sorted(row) for row in rows]


class PackedStream:
    """Batches of `rows` packed rows, which take documents in their order for as long as they fit,
    so that no token is lost or repeated.

    Iterating goes on where it was left; after the end it begins anew. The state is how far the
    batches that were handed out reach: whole documents, and tokens of the next. It holds no data,
    and is good for other `rows` and `length`, and any number of ranks. Every rank iterates the same
    documents and gives `train_step` the batch; `save_checkpoint(..., extra={"data": stream})` keeps
    the state. Documents with `len` and `[k]` are read from the state on; others are read over up to
    it.
    """

    def __init__(self, packing: Packing, documents: Any) -> None:
        """Raises MeshwrightError without `rows`, and for what can't be read again."""
        if packing.rows is None:
            raise DataError(
                "= None", place="rows", legal="the rows of a batch", way_out="packed(..., rows=8)"
            )
        once = isinstance(documents, Iterator | Mapping | str | bytes | type)
        once = once or getattr(documents, "ndim", 1) == 0  # a number
        if once or not (isinstance(documents, Iterable) or _is_indexed(documents)):
            raise DataError(
                f" are a {type(documents).__name__}",
                place="documents",
                legal="what can be read again: a list, a data set, an object with __iter__",
                way_out="give the object that the iterator comes from",
            )
        self._packing = packing
        self._most = packing.rows
        self._documents = documents
        self._reached = (0, 0)

    def __iter__(self) -> Iterator[dict[str, torch.Tensor]]:
        rows: list[list[Piece]] = []
        end = (0, 0)
        for start, piece in self._pieces():
            if not self._placed(rows, piece):
                self._reached = start
                yield self._packing.batch(rows)
                rows = [[piece]]
            end = (start[0] + 1, 0)
        if rows:
            self._reached = end
            yield self._packing.batch(rows)
        self._reached = (0, 0)

    def state_dict(self) -> dict[str, int]:
        """Position of the batches handed out."""
        return dict(zip(STATE, self._reached, strict=True))

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state: the next batch is the first after it. Raises MeshwrightError for what
        is none, or of more documents than there are."""
        if (
            not isinstance(state, Mapping)
            or set(state) != set(STATE)
            or any(type(x) is not int or not 0 <= x <= MAX_COUNT for x in state.values())
        ):
            raise StateDictError(
                f" is {shown(state)}",
                place="state of a packed stream",
                legal=f"counts of {' and '.join(STATE)}",
                way_out="give what state_dict() of such a stream returned",
            )
        documents: int = state["documents"]
        if _is_indexed(self._documents) and documents > len(self._documents):
            raise self._fewer(documents, len(self._documents))
        self._reached = (documents, state["tokens"])

    def _pieces(self) -> Iterator[tuple[tuple[int, int], Piece]]:
        """Pieces from the state on, each with the document and token where it begins."""
        first, token = self._reached
        for k, document in enumerate(self._from(first), first):
            for piece in self._packing.pieces(document, token):
                yield (k, token), piece
                token += len(piece)
            token = 0

    def _from(self, first: int) -> Iterator[Any]:
        if _is_indexed(self._documents):
            yield from (self._documents[k] for k in range(first, len(self._documents)))
            return
        documents = iter(self._documents)
        if (there := sum(1 for _ in islice(documents, first))) < first:
            raise self._fewer(first, there)
        yield from documents

    def _placed(self, rows: list[list[Piece]], piece: Piece) -> bool:
        """Put a piece into the fullest row that holds it, or a new one, or arrange all anew; False
        where the batch has no place for it."""
        rooms = [self._packing.length - sum(map(len, row)) for row in rows]
        holding = [(room, k) for k, room in enumerate(rooms) if room >= len(piece)]
        if holding:
            rows[min(holding)[1]].append(piece)
            return True
        if len(rows) < self._most:
            rows.append([piece])
            return True
        pieces = [*chain.from_iterable(rows), piece]
        anew = arranged([len(x) for x in pieces], self._packing.length)
        if len(anew) > self._most:
            return False
        rows[:] = [[pieces[k] for k in row] for row in anew]
        return True

    @staticmethod
    def _fewer(wanted: int, there: int) -> MeshwrightError:
        return StateDictError(
            f" is of {wanted} documents, and there are {there}",
            place="state of a packed stream",
            legal="states of these documents",
            way_out="give the documents that it was saved with, or leave the state out to begin "
            "anew",
        )


def _is_indexed(documents: Any) -> bool:
    return hasattr(documents, "__getitem__") and hasattr(documents, "__len__")


def _tokens(document: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """The ids of a document and its labels, both [tokens]."""
    if not isinstance(document, Mapping):
        ids = _integers(document, "document")
        return ids, ids
    unknown = sorted(set(map(str, document)) - set(ENTRIES))
    if unknown or document.get("input_ids") is None:
        raise DataError(
            f" has the entries {shown(sorted(map(str, document)))}",
            place="document",
            legal="input_ids, and perhaps labels and attention_mask",
            way_out=f"drop {', '.join(unknown)}" if unknown else "give input_ids",
        )
    entries = {
        name: _integers(document[name], f"document[{name!r}]")
        for name in ENTRIES
        if document.get(name) is not None
    }
    ids = entries["input_ids"]
    for name, entry in entries.items():
        if len(entry) != len(ids):
            raise DataError(
                f" has {len(entry)} tokens",
                place=f"document[{name!r}]",
                legal=f"as many as input_ids, {len(ids)}",
            )
    labels, present = entries.get("labels", ids), entries.get("attention_mask")
    return (ids, labels) if present is None else (ids[present != 0], labels[present != 0])


def _integers(tokens: Any, place: str) -> torch.Tensor:
    try:
        x = tokens if isinstance(tokens, torch.Tensor) else torch.as_tensor(tokens)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise _no_tokens(shown(tokens), place) from error
    if x.dim() == 1 and not x.numel():
        return x.long()  # of an empty list torch makes floats
    if x.dim() != 1 or x.is_floating_point() or x.is_complex() or x.is_meta:
        raise _no_tokens(f"{x.dtype} of shape {tuple(x.shape)} on {x.device}", place)
    return x.to("cpu", torch.int64)


def _no_tokens(what: str, place: str) -> MeshwrightError:
    return DataError(
        f" is {what}",
        place=place,
        legal="a list or a 1-D tensor of integers",
        way_out="tokenize it, one document an element of the batch",
    )
