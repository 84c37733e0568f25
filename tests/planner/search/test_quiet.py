"""Planning prints nothing: neither the solver's banner, nor transformers' warnings of our trace."""

import logging
import subprocess
import sys
from logging.handlers import BufferingHandler
from typing import Any

import numpy as np
import transformers

from meshwright.planner.tracing.trace import trace
from tests.helpers.planning import token_batch
from tests.helpers.tiers import second_tier

TRIANGLE = {pair: np.eye(2) for pair in (("a", "b"), ("b", "c"), ("a", "c"))}
CHILD = """
from meshwright import Cluster, Overrides, auto_parallelize
from meshwright.planner.intra_op import solvers
from tests.planner.search.test_quiet import TRIANGLE, gpt2, np, token_batch

model, batch = gpt2(), token_batch(2, 32)
auto_parallelize(
    model, Cluster.from_catalog("dgx-h100"), example_inputs=batch, global_batch_size=8,
    overrides=Overrides(tp=2), profile=False,
)
solved = solvers.solve_pairwise({name: np.zeros(2) for name in "abc"}, TRIANGLE, time_limit_s=60)
assert (solved.solver, solved.objective) == ("HiGHS", 1)
"""


def gpt2() -> transformers.PreTrainedModel:
    config = transformers.GPT2Config(
        n_layer=2, n_embd=64, n_head=4, vocab_size=128, n_positions=32, bos_token_id=0,
        eos_token_id=0,
    )  # fmt: skip
    return transformers.GPT2LMHeadModel(config)


@second_tier("a process of its own; warnings that a trace would give stay")
def test_a_process_that_plans_prints_nothing() -> None:
    """Not even at its first solve, when HiGHS would tell its version."""
    run = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=False)
    assert (run.returncode, run.stdout, run.stderr) == (0, "", "")


def test_warnings_of_transformers_wait_for_the_users_own_forward() -> None:
    once: Any = logging.Logger.warning_once
    logger = logging.getLogger("transformers")
    model, batch, kept = gpt2().to("meta"), token_batch(2, 32), BufferingHandler(99)
    before = logger.level
    once.cache_clear()
    logger.addHandler(kept)
    try:
        for level in (logging.INFO, logging.CRITICAL, logging.WARNING):
            logger.setLevel(level)
            trace(model, batch)
            assert (logger.level, logging.Logger.warning_once) == (level, once)
        assert not kept.buffer
        model(**batch)
        (said,) = kept.buffer
        assert "loss_type" in said.getMessage()
    finally:
        logger.setLevel(before)
        logger.removeHandler(kept)
