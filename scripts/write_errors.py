"""The page of errors, docs/reference/errors.md: an entry for each code, with a message as it is.

    python -m scripts.write_errors

Fields are those of the classes; each message is of a call here that raises the error.
"""

from __future__ import annotations

import contextlib
import errno
import inspect
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import Any
from unittest import mock

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_flatten

from meshwright import (
    Cluster,
    Ema,
    Overrides,
    ParallelModel,
    auto_parallelize,
    data_loader,
    fit,
    leaf,
    register_schedule,
    rule,
)
from meshwright.cli import perform
from meshwright.costmodel.sharding import Placement
from meshwright.executor.ranks import joining
from meshwright.hf import Trainer
from meshwright.planner.frameworks import read_configuration
from meshwright.planner.frameworks.torch_script import torch_script
from meshwright.planner.intra_op import solvers
from meshwright.planner.operators import Operand, Program
from meshwright.planner.serving import attentions
from meshwright.profiles.inputs import MeshwrightError
from meshwright.profiles.inputs.errors import PAGE
from meshwright.profiles.measure.local_ranks import run_local

ROOT = Path(__file__).parents[1]
HEAD = """# Errors

An error says what is wrong and where, what is legal there, and the way out. Its last line has a
code, `(MW208: docs/reference/errors.md#mw208)`, which is explained here.

All are a `meshwright.MeshwrightError`, which is a `ValueError`. `place`, `legal` and `way_out` are
attributes; where a message says nothing of one of them, it is as in the entry of its `CODE`. Codes
from MW101 are of inputs, files and hardware, from MW201 of models and plans, from MW301 of runs,
from MW401 of what runs save. `python -m scripts.write_errors` writes this page from the code.
"""
ENTRY = """
## {code}

`{name}`{bases}. {meaning}

| | |
|---|---|
| where | {place} |
| legal | {legal} |
| way out | {way_out} |
"""
# modules that define errors; the others are imported by these
DEFINING = (
    "meshwright.planner.tracing.leaves.probe", "meshwright.executor.errors",
    "meshwright.planner.frameworks.torch_script", "meshwright.shell.commands.export",
)  # fmt: skip


class Net(nn.Module):
    """Two layers, the second given by the example."""

    def __init__(self, second: nn.Module | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), second or nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.first(x)))


class Drawing(nn.Module):
    """A module whose forward draws a number that torch does not know of."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * random.random()


class InPlace(nn.Module):
    """A module that writes to its argument."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mul_(2)


class Counting(nn.Module):
    """A module that writes to a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        return x * 2


ONE = Cluster.from_catalog("local-host", num_nodes=1, devices_per_node=1)
BATCH = (torch.randn(8, 4), torch.randn(8, 4))


def planned(model: nn.Module | None = None, **given: Any) -> ParallelModel:
    """A model planned for one process."""
    keywords: dict[str, Any] = {
        "example_inputs": BATCH,
        "global_batch_size": 8,
        "loss_fn": F.mse_loss,
        **given,
    }
    cluster = keywords.pop("cluster", None) or ONE
    return auto_parallelize(model or Net(), cluster, **keywords)


def lossy() -> None:
    """A plan that another software can't say, and no model to price it again."""
    planned(overrides=Overrides(recompute="pointwise")).plan.save("plan.json")
    perform(["export", "plan.json", "--to", "torchtitan"])


def summed(output: torch.Tensor, _: torch.Tensor) -> torch.Tensor:
    """A loss without targets."""
    return output.sum()


def file(name: str, text: str) -> str:
    """A file in the example's folder, by its name."""
    Path(name).write_text(text, encoding="utf-8")
    return name


def too_large() -> None:
    """The plan of a larger device on one of 4 GiB."""
    model = Net(nn.Linear(4, 2**26, device="meta"))
    large = Cluster.from_catalog("rtx-4090", devices_per_node=1)
    small = replace(large, device=replace(large.device, memory_bytes=4 * 2**30))
    plan = planned(model, cluster=large, loss_fn=summed).plan
    planned(model, cluster=small, loss_fn=summed, plan=plan)


def unscripted() -> None:
    """The script of a plan that splits the sequence."""
    result = planned()
    plan = replace(result.plan, stages=(replace(result.plan.stages[0], cp=2),))
    torch_script(plan, result._problem.graph, module="my_models:net")


def measurement() -> None:
    """A measurement whose ranks can't be started."""
    launcher = Path("python")
    launcher.write_text("#!/bin/sh\necho 'RuntimeError: no route to host'\nexit 1\n")
    launcher.chmod(0o755)
    with mock.patch.object(sys, "executable", str(launcher.absolute())):
        run_local(
            "meshwright.profiles.measure.collectives",
            ranks=4,
            budget_s=1.0,
            output=Path("times.json"),
            what="timing collectives on 4 ranks",
            way_out="see that the host can reach itself",
        )


def missing(package: str, command: str) -> None:
    """A command without a package that it needs."""
    with mock.patch.dict(sys.modules, {package: None}):
        perform(command.split())


def no_solver() -> None:
    """A solve without HiGHS and CBC."""
    with mock.patch.multiple("pulp", HiGHS=None, PULP_CBC_CMD=None, COIN_CMD=None):
        solvers._solver(None)


def rank(number: str) -> None:
    """A start of one of four ranks by hand."""
    with mock.patch.dict(os.environ, {"RANK": number, "WORLD_SIZE": "4"}):
        joining.place()


def code_that_raises() -> None:
    """A command whose model can't be made."""
    file("my_models.py", "def gpt():\n    return {}['layers']\n")
    with mock.patch.object(sys, "path", [*sys.path]):
        try:
            perform(["plan", "my_models:gpt", "--batch", "8", "--cluster", "dgx-h100"])
        finally:
            sys.modules.pop("my_models", None)


def saved() -> ParallelModel:
    """A model, saved in "saved"."""
    result = planned()
    result.save_checkpoint("saved")
    return result


def damaged() -> None:
    """A load of a checkpoint whose file of tensors is gone."""
    result = saved()
    next(Path("saved").glob("*.safetensors")).unlink()
    result.load_checkpoint("saved")


def unwritten() -> None:
    """A save into a full file system."""
    full = OSError(errno.ENOSPC, "No space left on device")
    with mock.patch("meshwright.executor.files.tensors._written", side_effect=full):
        saved()


def called(function: Callable[..., Any], *state: torch.Tensor) -> None:
    """A leaf's call, that of a plan, whose result had a gradient when it was traced."""
    leaves, spec = tree_flatten(((Operand(0),), {}))
    names = tuple(name for name, _ in zip(("seen",), state, strict=False))
    program = Program(
        name="second",
        function=function,
        module=function if isinstance(function, nn.Module) else None,
        leaves=tuple(leaves),
        spec=spec,
        state=names,
        dense=(False,) * (1 + len(state)),
        autocast=None,
        gradients=(True,),
    )
    program([torch.ones(2, requires_grad=True), *state])


EXAMPLES: Mapping[str, Callable[[], Any]] = MappingProxyType(
    {
        "MW101": lambda: planned(precision="fp23"),
        "MW102": lambda: perform(["plna"]),
        "MW103": lambda: perform(["cluster", "convert", "mine.toml"]),
        "MW104": lambda: perform(["plan", "mine:model", "--batch", "8", "-o", "no/plan.json"]),
        "MW105": lambda: missing("shtab", "completion bash"),
        "MW111": lambda: Cluster.load(
            file("mine.toml", 'base = "dgx-h100"\n[inter_link]\nbandwidth = "25 gb"\n')
        ),
        "MW112": lambda: Cluster.load(
            file("mine.toml", 'base = "dgx-h100"\n[inter_link]\nbandwidth = 25\n')
        ),
        "MW113": lambda: read_configuration(
            file("ds_config.json", '{"train_batch_size": 8, "zero_optimization": {"stge": 3}}'), 8
        ),
        "MW114": unscripted,
        "MW121": lambda: perform(
            ["profile", "--cluster", "dgx-h100", "--import", file("mine.csv", "collective,ranks\n")]
        ),
        "MW122": measurement,
        "MW201": lambda: planned(Net(nn.LazyLinear(4))),
        "MW202": lambda: planned(example_inputs=("eight", "rows")),
        "MW203": lambda: planned(Net(Drawing())),
        "MW204": lambda: planned(Net(leaf(InPlace(), rule="b o -> b o"))),
        "MW205": lambda: rule("aten::no_such", "b o -> b o"),
        "MW206": lambda: register_schedule("1f1b", object()),  # type: ignore[arg-type]
        "MW207": lambda: Placement.parse("S(rows)"),
        "MW208": lambda: planned(
            cluster=Cluster.from_catalog("dgx-h100"), overrides=Overrides(tp=3)
        ),
        "MW209": lambda: planned(plan=file("plan.json", '{"format": 99}')),
        "MW210": too_large,
        "MW212": lossy,
        "MW213": lambda: attentions(planned()._traced.graph),
        "MW211": no_solver,
        "MW301": lambda: planned(Net().to("meta")).train_step(BATCH),
        "MW302": lambda: rank("4"),
        "MW303": lambda: planned().train_step(tuple(torch.cat([x, x]) for x in BATCH)),
        "MW304": lambda: planned().train_step(BATCH, optimizer="adamw"),
        "MW305": lambda: data_loader(iter([]), planned()),  # type: ignore[arg-type]
        "MW306": lambda: fit(planned(), [BATCH], optimizer=torch.optim.SGD, steps=0),
        "MW307": lambda: Trainer(tokenizer=None),
        "MW308": lambda: called(Counting(), torch.zeros(())),
        "MW309": lambda: called(torch.Tensor.detach),
        "MW310": lambda: planned().rehearse(optimizer="adamw"),
        "MW311": code_that_raises,
        "MW401": lambda: planned().load_weights("weights.txt"),
        "MW402": lambda: planned().load_checkpoint("saved"),
        "MW403": lambda: planned().load_checkpoint("."),
        "MW404": damaged,
        "MW405": unwritten,
        "MW406": lambda: Ema(planned(), decay=0.9).load_state_dict({"other.weight": BATCH[0]}),
    }
)


def classes() -> Mapping[str, type[MeshwrightError]]:
    """The class that has each code, by code."""
    for module in DEFINING:
        import_module(module)
    found: dict[str, type[MeshwrightError]] = {}
    rest = [MeshwrightError]
    while rest:
        error = rest.pop()
        rest += error.__subclasses__()
        if "CODE" in vars(error) and error.CODE:
            assert error.CODE not in found, f"{error.CODE} is of {found[error.CODE]} and {error}"
            found[error.CODE] = error
    return MappingProxyType(dict(sorted(found.items())))


@contextlib.contextmanager
def in_a_folder() -> Iterator[str]:
    """A folder of its own for what an example reads and writes, the cache included."""
    with (
        tempfile.TemporaryDirectory() as folder,
        contextlib.chdir(folder),
        mock.patch.dict(os.environ, {"MESHWRIGHT_CACHE": folder}),
    ):
        yield folder


def raised(code: str) -> tuple[type[MeshwrightError], str]:
    """The class and the text of the error that an example raises, without the folders of here."""
    with in_a_folder() as folder:
        try:
            EXAMPLES[code]()
        except MeshwrightError as error:
            text = str(error).replace(f"{folder}/", "").replace(f"{ROOT}/", "")
            return type(error), text
    raise AssertionError(f"the example of {code} raises nothing")


def entry(code: str, error: type[MeshwrightError]) -> str:
    """The entry of a code, without its example."""
    others = [base.__name__ for base in error.__bases__ if base is not MeshwrightError]
    return ENTRY.format(
        code=code,
        name=error.__name__,
        bases=f" (also {', '.join(f'`{name}`' for name in others)})" if others else "",
        meaning=" ".join((inspect.getdoc(error) or "").split()),
        place=error.PLACE,
        legal=error.LEGAL,
        way_out=error.WAY_OUT,
    )


def page() -> str:
    """The page's text."""
    entries = []
    for code, error in classes().items():
        kind, text = raised(code)
        assert kind is error, f"the example of {code} raises {kind.__name__}"
        entries.append(f"{entry(code, error)}\n```\n{text}\n```\n")
    return HEAD + "".join(entries)


def main() -> None:
    (ROOT / PAGE).parent.mkdir(exist_ok=True)
    (ROOT / PAGE).write_text(page(), encoding="utf-8")


if __name__ == "__main__":
    main()
