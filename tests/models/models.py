"""A zoo of tiny models for tests, each with batches, loss, optimizer and Megatron-style shardings.

Sizes are chosen so that fp32 rounding stays far below the tolerance of a comparison between two
orders of summation. That rules out kinks where many values pass (SiLU for ReLU, average for maximum
pooling): a value that rounding moves across one changes a gradient by 1e-3.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding.factors import FactorTable, analyse
from meshwright.executor.runtime.runtime import RunOptions, Runtime
from meshwright.executor.stages import CheckedPlan
from meshwright.planner.blocks import cut_blocks
from meshwright.planner.plan.plan import Plan
from meshwright.planner.tracing.trace import trace
from tests.models.architectures import (
    MLP,
    SEQUENCE,
    VOCAB,
    PlainGPT,
    Recurrent,
    ResNet,
    bert,
    gpt2,
    llama,
    llama_lora,
    llama_tower,
    token_loss,
)
from tests.models.branching_models import MoE, UNet, moe_loss, t5
from tests.models.sequence_models import Tokens, mistral

transformers.logging.set_verbosity_error()

GLOBAL_BATCH = 16

Optimizer = Callable[[Iterable[torch.Tensor]], torch.optim.Optimizer]


# --- batches --------------------------------------------------------------------------------------


def _ids(rows: int, step: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, (rows, SEQUENCE), generator=_generator(step))


def _generator(step: int) -> torch.Generator:
    return torch.Generator().manual_seed(100 + step)


def uneven(labels: torch.Tensor) -> torch.Tensor:
    """Labels with rows wholly and partly ignored: micro-batches and ranks count differently."""
    labels = labels.clone()
    labels[0, :9] = -100
    labels[3] = -100
    labels[-1, 2:] = -100
    return labels


def causal_batch(rows: int, step: int) -> dict[str, torch.Tensor]:
    ids = _ids(rows, step)
    return {"input_ids": ids, "labels": uneven(ids)}


def masked_batch(rows: int, step: int) -> dict[str, torch.Tensor]:
    ids = _ids(rows, step)
    present = torch.ones_like(ids)
    present[1, 10:] = 0
    return {"input_ids": ids, "attention_mask": present, "labels": uneven(ids)}


def plain_batch(rows: int, step: int) -> tuple[torch.Tensor, ...]:
    ids = _ids(rows, step)
    return ids, uneven(ids.roll(-1, 1))


def token_batch(rows: int, step: int) -> dict[str, torch.Tensor]:
    ids = _ids(rows, step)
    return {"ids": ids, "labels": uneven(ids)}


def pair_batch(rows: int, step: int) -> dict[str, torch.Tensor]:
    """Source and target sequences of different lengths."""
    ids = _ids(rows, step)
    return {"input_ids": ids[:, :12], "labels": uneven(ids.flip(1))}


def even_batch(rows: int, step: int) -> tuple[torch.Tensor, ...]:
    """Every label counts: for losses that are no mean over labels alone."""
    ids = _ids(rows, step)
    return ids, ids.roll(-1, 1)


def image_pair_batch(rows: int, step: int) -> tuple[torch.Tensor, ...]:
    noise = torch.randn(2, rows, 3, 8, 8, generator=_generator(step))
    return noise[0], noise[1]


def image_batch(rows: int, step: int) -> tuple[torch.Tensor, ...]:
    generator = _generator(step)
    return (
        torch.randn(rows, 3, 8, 8, generator=generator),
        torch.randint(0, 12, (rows,), generator=generator),
    )


def vector_batch(rows: int, step: int) -> tuple[torch.Tensor, ...]:
    generator = _generator(step)
    return torch.randn(rows, 32, generator=generator), torch.randn(rows, 32, generator=generator)


# --- the zoo --------------------------------------------------------------------------------------


def sgd(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


def adamw(parameters: Iterable[torch.Tensor]) -> torch.optim.Optimizer:
    """`eps` far above the rounding noise of gradients that are zero in exact arithmetic (key
    biases), which Adam would otherwise blow up to full steps."""
    return torch.optim.AdamW(parameters, lr=1e-3, eps=1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One model of the zoo. `batch` makes the global batch of (rows, step); `batch_statistics` says
    that the result depends on the cut into micro-batches."""

    build: Callable[[], nn.Module]
    batch: Callable[[int, int], Any]
    optimizer: Optimizer
    loss_fn: Callable[..., torch.Tensor] | None = None
    shardings: Mapping[str, str] = field(default_factory=dict)
    batch_statistics: bool = False

    def model(self, seed: int = 0) -> nn.Module:
        torch.manual_seed(seed)
        return self.build()

    def optimize(self, runtime: Runtime) -> torch.optim.Optimizer:
        """The optimizer of this rank; a stage that only computes the loss has no parameters, which
        torch's optimizers refuse."""
        return self.optimizer([*runtime.parameters()] or [nn.Parameter(torch.zeros(()))])

    def loss(self, model: nn.Module, batch: Any) -> torch.Tensor:
        """The loss as the user computes it, without Meshwright."""
        if isinstance(batch, Mapping):
            return model(**batch).loss
        assert self.loss_fn is not None
        return self.loss_fn(model(*batch[:-1]), batch[-1])


_GPT2_SHARDINGS = {
    "transformer.h.*.attn.c_attn": "colwise.1",
    "transformer.h.*.mlp.c_fc": "colwise",
    "lm_head": "colwise",
    "transformer.wte": "vocab",
}
_BERT_SHARDINGS = {
    "bert.encoder.layer.*.attention.self.query": "colwise",
    "bert.encoder.layer.*.attention.self.key": "colwise",
    "bert.encoder.layer.*.attention.self.value": "colwise",
    "bert.encoder.layer.*.intermediate.dense": "colwise",
    "cls.predictions.decoder": "colwise",
}
_LLAMA_SHARDINGS = {
    "model.layers.*.self_attn.q_proj": "colwise",
    "model.layers.*.self_attn.k_proj": "colwise",
    "model.layers.*.self_attn.v_proj": "colwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "lm_head": "colwise",
    "model.embed_tokens": "vocab",
}
_LORA_SHARDINGS = {
    **{f"model.layers.*.mlp.{name}": "colwise" for name in ("gate_proj", "up_proj")},
    **{f"model.layers.*.self_attn.q_proj.{name}": "colwise" for name in ("base", "b.default")},
    "model.embed_tokens": "vocab",
}

_T5_SHARDINGS = {
    f"{tower}.block.*.layer.*.{kind}": "colwise"
    for tower, kinds in {
        "encoder": ("SelfAttention.q", "SelfAttention.k", "SelfAttention.v"),
        "decoder": ("*Attention.q", "*Attention.k", "*Attention.v"),
    }.items()
    for kind in (*kinds, "DenseReluDense.wi_*")
}
_MOE_SHARDINGS = {
    "layers.*.experts.gate": "S(0)",
    "layers.*.experts.up": "S(0)",
    "layers.*.experts.down": "S(0)",
    "layers.*.q": "colwise",
    "layers.*.k": "colwise",
    "layers.*.v": "colwise",
    "out": "colwise",
}

CASES: Mapping[str, Case] = {
    "gpt2_tied": Case(
        build=lambda: gpt2(tied=True),
        batch=causal_batch,
        optimizer=adamw,
        shardings=_GPT2_SHARDINGS,
    ),
    "gpt2_untied": Case(
        build=lambda: gpt2(tied=False),
        batch=causal_batch,
        optimizer=sgd,
        shardings=_GPT2_SHARDINGS,
    ),
    "llama": Case(
        build=llama, batch=causal_batch, optimizer=adamw, shardings=_LLAMA_SHARDINGS
    ),
    "llama_lora": Case(
        build=llama_lora, batch=causal_batch, optimizer=adamw, shardings=_LORA_SHARDINGS
    ),
    "llama_tower": Case(
        build=llama_tower, batch=causal_batch, optimizer=adamw, shardings=_LLAMA_SHARDINGS
    ),
    "bert": Case(build=bert, batch=masked_batch, optimizer=sgd, shardings=_BERT_SHARDINGS),
    "resnet": Case(
        build=ResNet,
        batch=image_batch,
        optimizer=sgd,
        loss_fn=nn.CrossEntropyLoss(),
        shardings={"layer*.*.c1:conv2d": "o"},
        batch_statistics=True,
    ),
    "mlp": Case(
        build=MLP,
        batch=vector_batch,
        optimizer=adamw,
        loss_fn=F.mse_loss,
        shardings={"net.0": "colwise", "net.3": "colwise", "net.6": "colwise"},
    ),
    "recurrent": Case(
        build=Recurrent,
        batch=vector_batch,
        optimizer=adamw,
        loss_fn=F.mse_loss,
        shardings={"again": "colwise"},
    ),
    "plain_gpt": Case(
        build=PlainGPT,
        batch=plain_batch,
        optimizer=sgd,
        loss_fn=token_loss,
        shardings={"layers.*.up": "colwise", "out": "colwise", "tokens": "vocab"},
    ),
    "gpt2_deep": Case(
        build=lambda: gpt2(tied=True, layers=6),
        batch=causal_batch,
        optimizer=sgd,
        shardings=_GPT2_SHARDINGS,
    ),
    "t5": Case(
        build=lambda: t5(vocab=VOCAB), batch=pair_batch, optimizer=adamw, shardings=_T5_SHARDINGS
    ),
    "moe": Case(
        build=lambda: MoE(vocab=VOCAB),
        batch=even_batch,
        optimizer=sgd,
        loss_fn=moe_loss,
        shardings=_MOE_SHARDINGS,
        batch_statistics=True,
    ),
    "unet": Case(
        build=UNet,
        batch=image_pair_batch,
        optimizer=sgd,
        loss_fn=F.mse_loss,
        shardings={"down.*.c1": "o", "up.*.c1": "o"},
    ),
    "gpt2_dropout": Case(
        build=lambda: gpt2(tied=True, dropout=0.1),
        batch=causal_batch,
        optimizer=sgd,
        shardings=_GPT2_SHARDINGS,
    ),
    "mistral": Case(build=mistral, batch=causal_batch, optimizer=sgd, shardings=_LLAMA_SHARDINGS),
    "tokens": Case(
        build=Tokens,
        batch=token_batch,
        optimizer=sgd,
        shardings={"layers.*.up": "colwise", "layers.*.q": "colwise", "out": "colwise"},
    ),
}  # fmt: skip


# --- from a case to a run -------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class Traced:
    """A case's graph at one micro-batch size, cut into blocks, with its factors."""

    graph: Graph
    table: FactorTable


def traced(case: Case, rows: int, precision: str = "fp32") -> Traced:
    graph = trace(
        case.model(), case.batch(4, 0), batch_size=rows, loss_fn=case.loss_fn, precision=precision
    )
    table = analyse(graph)
    return Traced(graph=cut_blocks(graph, table), table=table)


def parallelize(
    model: nn.Module, plan: Plan, of: Traced, *, compile: bool | str = False
) -> Runtime:
    """The one place where tests turn a plan into something that trains."""
    checked = CheckedPlan.of(plan, of.graph, of.table)
    return Runtime(checked, model, options=RunOptions(compile=compile))
