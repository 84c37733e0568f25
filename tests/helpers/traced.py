"""Small models to trace, and the oracle: a graph run operator by operator against the model."""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from meshwright.costmodel.graph import Graph, map_refs
from meshwright.costmodel.rules import overload
from meshwright.planner.batch import input_leaves, split_batch
from meshwright.planner.tracing.trace import trace

WIDTH, ROWS, SEQUENCE, VOCAB = 8, 3, 6, 20


# --- the oracle ----------------------------------------------------------------------------------


def run(graph: Graph, model: nn.Module, batch: Any) -> dict[str, torch.Tensor]:
    """Every value of a graph, computed one operator after the other on the user's own tensors."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    buffers = {name: b.clone() for name, b in model.named_buffers()}
    leaves = dict(input_leaves(batch)[0])
    values: dict[str, Any] = {n: torch.as_tensor(leaves[path]) for n, path in graph.inputs.items()}
    values |= {name: parameters[fqn] for name, fqn in graph.parameters.items()}
    values |= {name: buffers[fqn] for name, fqn in graph.buffers.items()}
    values |= graph.constants
    for op in (*graph.derived, *graph.ops):
        args, kwargs = map_refs((op.args, dict(op.kwargs)), values.__getitem__)
        with torch.set_grad_enabled(any(graph.values[r].requires_grad for r in op.results)):
            made = overload(op.target)(*args, **kwargs)
        made = made if isinstance(made, (tuple, list)) else [made]
        values |= dict(zip(op.results, made, strict=True))
    return values


def eager_loss(model: nn.Module, batch: Any, loss_fn: Callable[..., Any] | None) -> torch.Tensor:
    args, kwargs, targets = split_batch(batch, loss_fn)
    output = model(*args, **kwargs)
    if loss_fn is not None:
        return loss_fn(output, *targets)
    return output if isinstance(output, torch.Tensor) else output["loss"]


def gradients(loss: torch.Tensor, model: nn.Module) -> dict[str, torch.Tensor]:
    names = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = torch.autograd.grad(loss, list(names.values()), allow_unused=True)
    return {name: g for name, g in zip(names, found, strict=True) if g is not None}


def agree(
    model: nn.Module, batch: Any, loss_fn: Callable[..., Any] | None = None, **tolerance: float
) -> Graph:
    """Trace; check loss, gradients, and the shape, dtype and gradient flow of every value."""
    graph = trace(model, batch, loss_fn=loss_fn)
    values = run(graph, model, batch)
    wrong = [
        (name, meta)
        for name, meta in graph.values.items()
        if (tuple(values[name].shape), values[name].dtype) != (meta.shape, meta.dtype)
        or (values[name].requires_grad and not meta.requires_grad)
    ]
    assert not wrong
    expected = eager_loss(model, batch, loss_fn)
    loss = values[graph.loss]
    torch.testing.assert_close(loss, expected.reshape(()), **tolerance)
    want, got = gradients(expected, model), gradients(loss, model)
    assert want.keys() == got.keys()
    for name, gradient in want.items():
        torch.testing.assert_close(
            got[name], gradient, msg=lambda m, n=name: f"{n}: {m}", **tolerance
        )
    return graph


def shorts(graph: Graph) -> list[str]:
    return [op.short for op in graph.ops]


def rows(*shape: int) -> torch.Tensor:
    return torch.rand(ROWS, *shape)


# --- models --------------------------------------------------------------------------------------


def with_forward(
    forward: Callable[..., torch.Tensor],
    prepare: Callable[[nn.Module], object] | None = None,
    **parts: Any,
) -> nn.Module:
    """A module with a Linear `l`, other modules, parameters and buffers, and the given forward."""
    code = forward.__code__.replace(co_name="forward")  # torch keeps source lines of that name
    named = types.FunctionType(
        code, forward.__globals__, "forward", forward.__defaults__, forward.__closure__
    )
    model = type("Plain", (nn.Module,), {"forward": named})()
    model.l = nn.Linear(WIDTH, WIDTH)
    for name, part in parts.items():
        setattr(model, name, part)
    if prepare is not None:
        prepare(model)
    return model


def ids() -> torch.Tensor:
    return torch.randint(1, VOCAB, (ROWS, SEQUENCE), generator=torch.Generator().manual_seed(0))


def hugging_face(name: str, layers: int = 2) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """gpt2, llama, bert or t5, tiny, and a batch."""
    transformers = pytest.importorskip("transformers")
    transformers.logging.set_verbosity_error()
    labels = ids().masked_fill(ids() == 3, -100)
    batch = {"input_ids": ids(), "labels": labels}
    special = {"bos_token_id": 0, "eos_token_id": 0, "pad_token_id": 0, "vocab_size": VOCAB}
    common = {
        "num_hidden_layers": layers, "hidden_size": 16, "num_attention_heads": 4,
        "intermediate_size": 24,
    }  # fmt: skip
    if name == "gpt2":
        config = transformers.GPT2Config(
            n_layer=layers, n_embd=16, n_head=4, n_positions=16, **special
        )
        return transformers.GPT2LMHeadModel(config), batch
    if name == "llama":
        config = transformers.LlamaConfig(num_key_value_heads=2, **common, **special)
        return transformers.LlamaForCausalLM(config), batch
    if name == "t5":  # the first layer of a stack makes the position bias of the others
        config = transformers.T5Config(
            d_model=16, d_kv=4, d_ff=24, num_layers=layers, num_heads=4, vocab_size=VOCAB,
            decoder_start_token_id=0,
        )  # fmt: skip
        return transformers.T5ForConditionalGeneration(config), batch
    config = transformers.BertConfig(vocab_size=VOCAB, max_position_embeddings=16, **common)
    mask = torch.ones_like(ids())
    mask[1, 4:] = 0
    return transformers.BertForMaskedLM(config), {**batch, "attention_mask": mask}
