"""`meshwright export`: a plan as a configuration of another software, and what is lost in it."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from meshwright.planner.frameworks import FORMATS, Exported, Lost
from meshwright.planner.plan import InfeasibleError, Plan, describe, seconds, slower
from meshwright.profiles.inputs import MeshwrightError, write_text
from meshwright.shell.commands import flags
from meshwright.shell.commands.parallelized import arguments_of
from meshwright.shell.named import CommandError, cluster_named
from meshwright.shell.progress import progress_shown
from meshwright.shell.terminal import Answer, listed

if TYPE_CHECKING:
    from meshwright.model import ParallelModel
    from meshwright.planner.pricing import Prediction

LIST = "export.txt"
TORCH, SCRIPT = "torch", "train.py"


class LossError(MeshwrightError):
    """A plan that another software can't say as it is, where that may change whether it fits."""

    CODE = "MW212"
    PLACE = "a plan for another software"
    LEGAL = "plans that it can say, or whose rounding fits"
    WAY_OUT = "plan for it (--target), or consent by --lossy"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", help="plan file")
    flags.add_model(parser, optional=True)
    flags.add_prices(parser)
    parser.add_argument(
        "--to",
        choices=(*FORMATS, TORCH),
        required=True,
        help="the software, or a script of plain PyTorch",
    )
    parser.add_argument("-o", "--folder", default=".", help="folder to write to (default .)")
    parser.add_argument(
        "--lossy", action="store_true", help="write it, whatever is lost and whether it fits or not"
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Written:
    """Files of an export; what is lost, and what the user's `script` has to say. Where a model was
    given: seconds of a step as planned and as written, by the software's prices, and whether it
    fits."""

    format: str
    version: str
    lost: tuple[Lost, ...]
    files: tuple[str, ...] = ()
    script: tuple[str, ...] = ()
    unpriced: bool = False
    step_time_s: float | None = None
    written_step_time_s: float | None = None
    written: str = ""
    fits: str = ""

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        lines = [f"{', '.join(self.files)}: for {self.format} {self.version}"]
        lines += [*listed("Left to you", self.script), *listed("It can't say", self.lost)]
        if self.written_step_time_s is not None:
            said = f"As written: {self.written}; {seconds(self.written_step_time_s)} a step"
            if self.step_time_s is not None:
                more = slower(self.written_step_time_s / self.step_time_s - 1)
                said += f" ({more}; as planned {seconds(self.step_time_s)})"
            lines.append(f"{said}, {self.fits}.")
        elif self.unpriced:
            lines.append(
                "Not priced again: name the model, its --cluster and its --batch for that."
            )
        return "\n".join(lines)


def run(args: argparse.Namespace) -> Answer:
    plan = Plan.load(args.plan)
    written = _script(args, plan) if args.to == TORCH else _configuration(args, plan)
    return Answer(data=written.as_dict, text=lambda: str(written))


def _script(args: argparse.Namespace, plan: Plan) -> Written:
    """A script of plain PyTorch."""
    import torch

    from meshwright.api import Arguments, asked, decided
    from meshwright.configurations import script_of

    if args.model is None:
        raise CommandError(
            "is missing", place="the model", legal="module:function, whose modules a script names"
        )
    model, arguments = arguments_of(args)
    given = {"global_batch_size": plan.global_batch_size, "precision": plan.precision}
    with progress_shown():
        question = asked(model, cluster_named(args.cluster), Arguments(**{**arguments, **given}))
        script = script_of(question, plan, args.model)
        check_lost(script.cannot_express, args.lossy)
        planned = _as_planned(lambda: decided(question, plan))
    left = []
    if any(each.is_meta for each in model.parameters()):
        left.append(f"weights: {args.model} gives a model on meta; the script trains what it gives")
    answer = Written(
        format=TORCH,
        version=torch.__version__,
        lost=script.cannot_express,
        script=tuple(left),
        **_prices(None, planned),
    )
    return _kept(args, SCRIPT, script.text, answer)


def _configuration(args: argparse.Namespace, plan: Plan) -> Written:
    """A configuration, priced again where there is a model."""
    from meshwright.configurations import as_configuration

    made = as_configuration(plan, args.to, optimizer=args.optimizer)
    if args.model is None:
        check_lost(made.lost, args.lossy)
        planned = written = None
    else:
        planned, written = _priced(args, plan, made)
    answer = Written(
        format=made.format,
        version=made.version,
        lost=made.lost,
        script=(*made.script, *made.configuration.habits),
        unpriced=args.model is None,
        **_prices(planned, written),
    )
    return _kept(args, made.file, made.text, answer)


def _kept(args: argparse.Namespace, name: str, text: str, written: Written) -> Written:
    """The answer, with the files that are written."""
    folder = Path(args.folder)
    folder.mkdir(parents=True, exist_ok=True)
    written = replace(written, files=(str(folder / name), str(folder / LIST)))
    write_text(folder / name, text, "--folder")
    write_text(folder / LIST, f"{written}\n", "--folder")
    return written


def check_lost(lost: Sequence[Lost], lossy: bool) -> None:
    """Raise where something is lost that memory depends on, which no model shows to fit."""
    of_memory = [each for each in lost if each.frees]
    if of_memory and not lossy:
        raise LossError(
            f"can't be said: {'; '.join(map(str, of_memory))}",
            legal="with the model, by whose prices it is seen whether it fits",
            way_out="name the model, its --cluster and --batch, or consent by --lossy",
        )


def _priced(
    args: argparse.Namespace, plan: Plan, made: Exported
) -> tuple[tuple[str, Prediction, str] | None, tuple[str, Prediction, str] | None]:
    """The plan as planned, where the software can run it, and as written. Raises `LossError` where
    the one fits and the other doesn't."""
    from meshwright.api import auto_parallelize
    from meshwright.configurations import configured

    args.global_batch_size = args.global_batch_size or plan.global_batch_size
    cluster = cluster_named(args.cluster)
    model, arguments = arguments_of(args)
    with progress_shown():
        given = {**arguments, "precision": plan.precision, "target": made.configuration.target}
        planned = _as_planned(lambda: auto_parallelize(model, cluster, plan=plan, **given))
        try:
            more = {k: v for k, v in arguments.items() if k not in ("target", "precision")}
            result = configured(made.configuration, model, cluster, **more).result
        except InfeasibleError as error:
            if not args.lossy:
                raise LossError(
                    f"does not fit as {made.format} can say it: {error}", place=args.plan
                ) from error
            return planned, None
    verdict = result.report.summary["memory_verdict"]
    return planned, (describe(result.plan), result.prediction, verdict)


def _as_planned(decide: Callable[[], ParallelModel]) -> tuple[str, Prediction, str] | None:
    """The plan, its price and whether it fits; None where the target can't run it. Raises
    `InfeasibleError`."""
    try:
        result = decide()
    except InfeasibleError:
        raise
    except MeshwrightError:
        return None
    return describe(result.plan), result.prediction, result.report.summary["memory_verdict"]


def _prices(
    planned: tuple[str, Prediction, str] | None, written: tuple[str, Prediction, str] | None
) -> dict[str, Any]:
    prices: dict[str, Any] = {}
    if planned is not None:
        prices["step_time_s"] = planned[1].step_time_s
    if written is not None:
        text, prediction, verdict = written
        prices |= {
            "written": text, "written_step_time_s": prediction.step_time_s, "fits": verdict,
        }  # fmt: skip
    return prices
