"""The sequence that cp splits: found behind shifted labels, ruled out by what needs it whole."""

from collections.abc import Callable
from functools import cache

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding import factors
from meshwright.costmodel.sharding.factors import FactorTable, analyse
from meshwright.planner.tracing.trace import trace
from tests.costmodel.traces import analysed
from tests.helpers.tiers import tiered
from tests.helpers.traced import with_forward

LENGTH, WIDTH, WORDS = 12, 16, 40
Head = Callable[[nn.Module, Tensor, Tensor], Tensor]


def loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits.reshape(-1, WORDS), labels.reshape(-1))


def padded(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """As transformers' ForCausalLMLoss."""
    return loss(net.words(net.embed(tokens)), F.pad(labels, (0, 1), value=-100)[..., 1:])


def cropped(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Logits without the last token, as in older models."""
    return loss(net.words(net.embed(tokens))[..., :-1, :], labels[..., 1:])


def one_more(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """A token more than is predicted, cut inside."""
    return loss(net.words(net.embed(tokens[:, :-1])), tokens[:, 1:])


def mixed(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    """Each token with the one before it (RWKV), which is another rank's at the border."""
    x = net.embed(tokens)
    return loss(net.words(x + F.pad(x, (0, 0, 1, -1))), labels)


def rolled(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return loss(net.words(net.embed(tokens).roll(-1, 1)), labels)


def late(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return loss(net.words(net.embed(tokens))[:, 1:], labels[:, 1:])


def last(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return loss(net.words(net.embed(tokens)[:, -1]), labels[:, -1])


@cache
def decoder(head: Head) -> tuple[Graph, FactorTable]:
    with torch.device("meta"):
        ids = torch.zeros(2, LENGTH, dtype=torch.long)
        parts = {
            "embed": nn.Embedding(WORDS, WIDTH),
            "words": nn.Linear(WIDTH, WORDS),  # which predicts them
            "time": nn.GRU(WIDTH, WIDTH, batch_first=True),
        }
        graph = trace(with_forward(head, **parts), (ids, ids))
    return graph, analyse(graph)


@pytest.mark.parametrize(
    ("head", "lengths"),
    [
        (padded, [LENGTH]), (cropped, [LENGTH - 1, LENGTH]), (one_more, [LENGTH - 1]),
        (last, [LENGTH]), (mixed, [LENGTH]), (rolled, [LENGTH]), (late, [LENGTH - 1, LENGTH]),
    ],
)  # fmt: skip
def test_a_shift_by_one_token_keeps_the_sequence(head: Head, lengths: list[int]) -> None:
    graph, table = decoder(head)
    assert table.sequence is not None and not table.tokens.why
    assert sorted({table.sizes[atom] for atom in table.context}) == lengths
    if head is not last:  # everything with tokens has it
        for value in {v for op in graph.ops for v in op.results if graph.values[v].shape}:
            assert any(not table.context.isdisjoint(atoms) for atoms in table.dims[value])


def recurrent(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return loss(net.words(net.time(net.embed(tokens))[0]), labels)


def summed(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return loss(net.words(net.embed(tokens).cumsum(1)), labels)


def skipping(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
    return loss(net.words(net.embed(tokens))[:, :-2], labels[:, 2:])


@pytest.mark.parametrize(
    ("head", "why"),
    [
        (recurrent, r"time:gru needs whole sequences"),
        (summed, r":cumsum needs whole sequences"),
        (skipping, r":slice needs whole sequences"),
    ],
)
def test_what_needs_whole_sequences_rules_cp_out(head: Head, why: str) -> None:
    _, table = decoder(head)
    assert table.sequence is None and not table.context
    assert why in table.tokens.why


def test_two_sequences_are_named_and_images_have_none() -> None:
    _, table = analysed("t5")
    assert table.sequence is None
    assert "inputs without one sequence dim: input_ids [5, " in table.tokens.why
    batch = (torch.rand(2, 3, 8, 8), torch.rand(2, 4, 8, 8))
    table = analyse(trace(nn.Conv2d(3, 4, 3, padding=1), batch, loss_fn=F.mse_loss))
    assert table.sequence is None and "no input has a sequence dim" in table.tokens.why


PADS: dict[str, Callable[[Tensor], Tensor]] = {
    "reflect": lambda x: F.pad(x, (1, 1), mode="reflect"),
    "replicate": lambda x: F.pad(x, (1, 1), mode="replicate"),
    "circular": lambda x: F.pad(x, (1, 1), mode="circular"),
    "constant, without a value": lambda x: F.pad(x, (1, 1)),
    "constant, with its default": lambda x: F.pad(x, (1, 1), "constant", 0.0),
    "as a module": nn.ZeroPad2d((1, 1, 0, 0)),
}


@pytest.mark.parametrize(
    "kind", tiered(PADS, lambda kind: kind in ("reflect", "as a module"), "a mode and zeros stay")
)
@pytest.mark.parametrize("along", ["features", "tokens"])
def test_pads_of_any_mode_are_analysed(kind: str, along: str) -> None:
    """Of features they leave the sequence, of tokens it is whole."""

    def head(net: nn.Module, tokens: Tensor, labels: Tensor) -> Tensor:
        x = net.embed(tokens)
        x = PADS[kind](x) if along == "features" else PADS[kind](x.mT).mT[:, 1:-1]
        return loss(net.words(x[..., :WIDTH]), labels)

    with torch.device("meta"):
        ids = torch.zeros(2, LENGTH, dtype=torch.long)
        parts = {"embed": nn.Embedding(WORDS, WIDTH), "words": nn.Linear(WIDTH, WORDS)}
        table = analyse(trace(with_forward(head, **parts), (ids, ids)))
    assert (table.sequence is None) == (along == "tokens"), table.tokens.why


def test_an_analysis_of_sequences_that_breaks_ends_no_planning(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, _ = decoder(padded)

    def broken(*_: object) -> None:
        raise IndexError("of an operator")

    monkeypatch.setattr(factors, "sequence_factor", broken)
    table = analyse(graph)
    assert table.sequence is None
    assert table.tokens.why == "the analysis of sequences ends with IndexError: of an operator"
