"""Traced models and operator calls that the tests of the cost model share, each made once."""

import dataclasses
import sys
from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from meshwright.costmodel.graph import Graph
from meshwright.costmodel.sharding.factors import FactorTable, analyse
from meshwright.planner.tracing.trace import trace
from tests.costmodel.rules import rule_cases
from tests.costmodel.rules.rule_cases import Case as Call
from tests.costmodel.rules.rule_cases import CaseModule, total
from tests.helpers import traced as helper
from tests.helpers.sharded_ops import OperatorCheck, Sample, sampled
from tests.helpers.stored import stored
from tests.helpers.traced import hugging_face
from tests.models import architectures, models
from tests.models.architectures import bert, gpt2, llama
from tests.models.models import CASES, Case, Traced, traced
from tests.parity.parity_cells import graph_of as zoo_graph


def like(name: str, build: Callable[[], nn.Module]) -> Case:
    return dataclasses.replace(CASES[name], build=build)


class ConvNet(nn.Module):
    """What ResNets begin with: ReLU and maximum pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.bn = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8)
        self.pool, self.fc = nn.MaxPool2d(2), nn.Linear(8, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.pool(F.relu(self.bn(self.conv(x)), inplace=True))
        return self.fc(x.mean((2, 3)))


_EAGER: Mapping[str, Any] = {"attn_implementation": "eager"}
MODELS: Mapping[str, Case] = {
    **CASES,
    "gpt2_untied_dropout": like("gpt2_tied", partial(gpt2, tied=False, dropout=0.1)),
    "gpt2_eager": like("gpt2_tied", partial(gpt2, tied=True, **_EAGER)),
    "gpt2_eager_dropout": like("gpt2_tied", partial(gpt2, tied=True, dropout=0.1, **_EAGER)),
    "llama_eager": like("llama", partial(llama, **_EAGER)),
    "bert_eager": like("bert", partial(bert, **_EAGER)),
    "bert_eager_dropout": like("bert", partial(bert, dropout=0.1, **_EAGER)),
    "convnet": like("resnet", ConvNet),
}


def graph_of(name: str, rows: int = 4, precision: str = "fp32") -> Traced:
    if name in CASES:
        return zoo_graph(name, rows, precision)
    return stored(
        name,
        rows,
        precision,
        make=lambda: traced(MODELS[name], rows, precision),
        models=(architectures, models, sys.modules[__name__]),
    )


@cache
def sample_of(name: str) -> Sample:
    case = CASES[name]
    return sampled(case.model(), case.batch(4, 0), case.loss_fn, graph=graph_of(name).graph)


def drawn(of: Call) -> tuple[CaseModule, Any]:
    torch.manual_seed(0)
    module = CaseModule(of)
    return module, module.batch()


def call_graph(of: Call) -> Graph:
    module, batch = drawn(of)
    return stored(
        "call",
        of.name,
        of.operands,
        make=lambda: trace(module, batch, loss_fn=total),
        models=(rule_cases,),
    )


def operator(of: Call) -> OperatorCheck:
    module, batch = drawn(of)
    graph = call_graph(of)
    sample = sampled(module, batch, total, differentiable_inputs=True, graph=graph)
    return OperatorCheck(sample, next(op for op in sample.ops if op.short == of.op))


def analysed(name: str) -> tuple[Graph, FactorTable]:
    """A model of `tests/helpers/traced.py` for 5 rows: a batch whose size no other dim has."""

    def make() -> tuple[Graph, FactorTable]:
        model, batch = hugging_face(name)
        graph = trace(model, batch, batch_size=5)
        return graph, analyse(graph)

    return stored("hugging face", name, make=make, models=(helper,))
