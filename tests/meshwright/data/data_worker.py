"""One rank of a launch: batches of which each rank feeds its own rows, under several plans."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch

from meshwright import data_loader
from meshwright.executor.ranks import all_gather_object, gloo_group, launch
from tests.meshwright.data.feeding import PLANS, ROWS, SAMPLES, Tokens, batch_of, planned
from tests.parity.parity_launch import on_ranks, run_all


def trained(plan: str) -> dict[str, Any]:
    """Losses of an epoch whose last batch is smaller; which ranks read."""
    result = planned(plan)
    optimizer = torch.optim.SGD(result.parameters(), lr=0.5)
    loader = data_loader(Tokens(), result, seed=3)
    losses = []
    for batch in loader:
        optimizer.zero_grad()
        losses.append(float(result.train_step(batch, local=True)))
        optimizer.step()
    reads = all_gather_object(gloo_group(), result.data_parallel.reads)
    left = float(result.eval_step(batch_of(range(ROWS))))
    own = batch_of(result.data_parallel.rows) if result.data_parallel.reads else None
    return {
        "losses": losses,
        "reads": reads,
        "eval": [left, float(result.eval_step(own, local=True))],
        "rows_per_step": result.metrics()["rows_per_s"] > 0,
    }


def errors() -> dict[str, Any]:
    """What wrong batches and datasets are told, on every rank."""
    result, rank = planned("dp2×tp2"), launch.rank()
    share = result.data_parallel
    right = batch_of(share.rows)
    wrong = {
        "of another share": batch_of(planned_rows(rank % 2, result)),
        "longer on a rank": tuple(torch.cat([x, x], 1) for x in right) if rank >= 2 else right,
        "more rows on a rank": tuple(torch.cat([x, x]) for x in right) if rank >= 2 else right,
        "none": None,
        "another key": {"ids": right[0]},
    }
    found = {
        name: _error(lambda b=batch: result.train_step(b, local=True))
        for name, batch in wrong.items()
    }  # type: ignore[misc]
    found["sharded dataset"] = _error(lambda: data_loader(Tokens(SAMPLES + rank), result))
    found["small dataset"] = _error(lambda: data_loader(Tokens(5), result, drop_last=True))
    found["no len"] = _error(lambda: data_loader(iter([]), result))
    return {name: all_gather_object(gloo_group(), said) for name, said in found.items()}


def planned_rows(share: int, result: Any) -> list[int]:
    """Rows of a share: ranks of one tensor group ask for different ones."""
    micro = result.plan.microbatch_rows
    rows = torch.arange(result.plan.global_batch_size).split(micro)
    return [int(n) for part in rows for n in part.tensor_split(2)[share]]


def _error(call: Any) -> str:
    try:
        call()
    except Exception as error:  # noqa: BLE001 - the test reads which
        return f"{type(error).__name__}: {error}"
    return "none"


def main(folder: Path) -> None:
    runs: dict[str, Any] = {plan: partial(trained, plan) for plan in PLANS}
    run_all({**runs, "errors": errors}, folder, "")


if __name__ == "__main__":
    on_ranks(main)
