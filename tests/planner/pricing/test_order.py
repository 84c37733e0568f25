"""A price after any other one equals the price alone: what is remembered depends on nothing else
than on what it is remembered by."""

from typing import Any

import pytest
import torch
from torch import nn

from meshwright.costmodel.mesh import Batch, Mesh
from meshwright.costmodel.operators import Setting
from meshwright.costmodel.stages import of_one, stage_costs
from meshwright.planner.pricing import StageCoster
from meshwright.planner.stages import BlockPrograms
from meshwright.profiles.cluster import Cluster
from tests.helpers.planning import Traced, case, changed, cut, problem_of
from tests.helpers.tiers import tiered
from tests.models.experts_models import Library, batch, token_loss

ROWS = 4


class Variance(nn.Module):
    """Rows meet: every rank of the data axis needs all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.second(torch.relu(self.first(x)))
        return (z.var(0) - 1).square().mean()


def experts() -> Traced:
    return cut(Library(), batch(ROWS, 0), token_loss, "fp32")


MODELS = {
    "dense": lambda: case("llama", ROWS),
    "statistics": lambda: case("resnet", ROWS),
    "rows meet": lambda: cut(Variance(), (torch.zeros(ROWS, 16),), None, "fp32"),
    "experts": experts,
}
CHANGES: dict[str, list[dict[str, Any]]] = {
    "dense": [
        {"tp": 2}, {"cp": 2, "cp_kind": "ring"}, {"cp": 2, "cp_kind": "ulysses"},
        {"cp": 2, "cp_kind": "all_gather"}, {"cp": 4, "cp_kind": "ring"}, {"spread": 2},
        {"tp": 2, "spread": 2}, {"hpz": 2, "zero": 3}, {"quantized": "both", "zero": 3},
        {"hpz": 2, "quantized": "both", "zero": 3}, {"compressed": "topk-1"}, {"zero": 3},
        {"dp_shard": 2, "zero": 1}, {"zero": 2}, {"states": 0.5}, {"activations": 0.5},
        {"weights": 0.5, "states": 1.0}, {"files": 0.5, "states": 1.0}, {"stepping": "validated"},
        {"stepping": "in_backward"},
    ],
    "experts": [
        {"dp": 4, "ep": 2}, {"dp": 4, "ep": 4}, {"dp": 8, "ep": 4}, {"dp": 2, "ep": 2, "tp": 2},
        {"dp": 2, "ep": 4, "cp": 2, "cp_kind": "ring"}, {"dp": 4, "ep": 4, "dp_shard": 2},
        {"dp": 4, "ep": 2, "microbatches": 2}, {"dp": 4, "ep": 2, "zero": 3},
    ],
}  # fmt: skip
ALWAYS: list[dict[str, Any]] = [
    {}, {"dp": 2}, {"dp": 4}, {"dp": 8}, {"rows": 1.0}, {"rows": 2.0}, {"microbatches": 2},
    {"microbatches": 4}, {"dp": 2, "microbatches": 2}, {"tp": 2, "microbatches": 2},
]  # fmt: skip


def priced(programs: BlockPrograms, setting: Setting) -> list[Any]:
    """Everything that a setting has prices of: its chain's, those of each block and of the whole
    as a stage."""
    chain, coster = programs.chain(setting), programs.coster
    pricer = coster.pricer(setting)
    found: list[Any] = [chain.send_s.tolist(), [own.tolist() for own in chain.costs]]
    states: dict[str, Any] = {}
    assignments = chain.assignments(0, len(chain.blocks))
    for block in chain.blocks:
        inputs = {value: states[value] for value in block.inputs if value in states}
        assignment = assignments[block.name]
        states |= {value: assignment.states[value] for value in block.outputs}
        passes, sums = coster.block(pricer, block, assignment, inputs)
        found += [passes.cost, passes.saved_bytes, passes.course, sums.array.tolist()]
    whole = of_one(stage_costs(chain.whole(), setting, "full"))
    return [*found, whole, coster.setting(Mesh(dp=1, tp=1, cp=2), Batch(rows=2.0)).mesh]


@pytest.mark.parametrize(
    "name",
    tiered(MODELS, ("dense", "rows meet").__contains__, "what is dense, and rows that meet, stay"),
)
def test_a_price_does_not_depend_on_the_ones_before(name: str) -> None:
    problem = problem_of(MODELS[name](), Cluster.from_catalog("dgx-h100", num_nodes=2), "fp32")
    plain = Setting(problem=problem, mesh=Mesh(dp=1, tp=1), batch=Batch(rows=4.0))
    settings = [changed(plain, **given) for given in (*ALWAYS, *CHANGES.get(name, []))]
    alone = [priced(BlockPrograms(StageCoster(problem), {}), own) for own in settings]
    for order in (1, -1):
        programs = BlockPrograms(StageCoster(problem), {})
        together = [priced(programs, own) for own in settings[::order]][::order]
        for own, other, setting in zip(together, alone, settings, strict=True):
            assert own == other, (setting.mesh, setting.batch, setting.sharing)
