"""Models whose vocabulary and inner width no degree divides, on the ranks of a launch.

131 and 67 are prime. On two ranks the parts are 66 and 65 (34 and 33), on four three of 33 and 32
(17 and 16). Rank 0 writes the results after each check, so that a crash says which one it was.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F

from meshwright.executor.checkpoint import checkpoint
from meshwright.executor.checkpoint.weights import init_weights, load_weights
from meshwright.executor.parameters.norms import clip_
from meshwright.executor.ranks import launch
from meshwright.executor.runtime.runtime import Runtime
from tests.helpers.plan_building import Knobs, build_plan
from tests.models.models import CASES, Case, Traced, adamw, parallelize, sgd, traced, uneven
from tests.parity.parity_launch import Run, on_ranks, run_all
from tests.parity.parity_reference import compare, plain_loop, runtime_loop

WORDS, INNER, SEQUENCE, ROWS = 131, 67, 16, 8
MICROBATCHES = 2


def gpt2() -> nn.Module:
    config = transformers.GPT2Config(
        n_layer=2,
        n_embd=32,
        n_head=4,
        n_inner=INNER,
        vocab_size=WORDS,
        n_positions=SEQUENCE,
        bos_token_id=0,
        eos_token_id=0,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    return transformers.GPT2LMHeadModel(config).train()


def bert() -> nn.Module:
    """Its decoder has a bias of the vocabulary's size."""
    config = transformers.BertConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        intermediate_size=INNER,
        vocab_size=WORDS,
        max_position_embeddings=SEQUENCE,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        pad_token_id=101,
    )
    return transformers.BertForMaskedLM(config).train()


def t5() -> nn.Module:
    config = transformers.T5Config(
        vocab_size=WORDS,
        d_model=32,
        d_kv=8,
        d_ff=INNER,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        relative_attention_num_buckets=8,
        relative_attention_max_distance=16,
        dropout_rate=0.0,
        feed_forward_proj="gated-silu",
        pad_token_id=0,
        decoder_start_token_id=0,
        use_cache=False,
    )
    return transformers.T5ForConditionalGeneration(config).train()


class Odd(nn.Module):
    """Every width prime; a mean over a split dim, dropout, norms over whole and split dims, and
    a table that is read and multiplied."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, 29, padding_idx=100)
        self.conv = nn.Conv1d(29, 23, 3, padding=1)
        self.norm = nn.BatchNorm1d(23)
        self.up, self.down = nn.Linear(23, INNER), nn.Linear(INNER, 29, bias=False)
        self.scale = nn.Parameter(torch.rand(INNER))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        y = self.norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
        y = F.dropout(F.silu(self.up(y)) * self.scale, 0.0)
        x = x + self.down(y) * y.mean(-1, keepdim=True)
        return (F.linear(F.layer_norm(x, (29,)), self.table.weight)).flatten(0, 1)


def _ids(rows: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randint(1, WORDS, (rows, SEQUENCE), generator=generator)


def causal_batch(rows: int, step: int) -> dict[str, torch.Tensor]:
    ids = _ids(rows, step)
    return {"input_ids": ids, "labels": uneven(ids)}


def pair_batch(rows: int, step: int) -> dict[str, torch.Tensor]:
    ids = _ids(rows, step)
    return {"input_ids": ids[:, :12], "labels": uneven(ids.flip(1))}


def odd_batch(rows: int, step: int) -> tuple[torch.Tensor, ...]:
    ids = _ids(rows, step)
    return ids, ids.roll(-1, 1)


def odd_loss(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits, target.flatten())


ODD: Mapping[str, Case] = {
    "gpt2": Case(
        build=gpt2, batch=causal_batch, optimizer=adamw, shardings=CASES["gpt2_tied"].shardings
    ),
    "bert": Case(
        build=bert, batch=causal_batch, optimizer=sgd,
        shardings=CASES["bert"].shardings | {"bert.embeddings.word_embeddings": "vocab"},
    ),
    "t5": Case(
        build=t5, batch=pair_batch, optimizer=adamw,
        shardings=CASES["t5"].shardings | {"lm_head": "colwise", "*.embed_tokens": "vocab"},
    ),
    "odd": Case(
        build=Odd, batch=odd_batch, optimizer=sgd, loss_fn=odd_loss, batch_statistics=True,
        shardings={"table": "vocab", ":linear": "colwise", "up": "colwise", "conv": "o"},
    ),
}  # fmt: skip
# build_plan's arguments; a plan runs on as many ranks as its meshes have
PLANS: Mapping[str, Mapping[str, Any]] = {
    "alone": {"meshes": ((1, 1),)},
    "tp2": {"meshes": ((1, 2),)},
    "tp4": {"meshes": ((1, 4),)},
    "zero1": {"meshes": ((2, 2),), "zero": 1},
    "zero2": {"meshes": ((2, 2),), "zero": 2},
    "zero3": {"meshes": ((2, 2),), "zero": 3},
    "pp2xtp2": {"meshes": ((1, 2), (1, 2))},
    "tp2|dp2": {"meshes": ((1, 2), (2, 1))},
}
TRAINED = (
    *(("gpt2", plan) for plan in ("tp4", "zero1", "zero2", "zero3", "pp2xtp2", "tp2|dp2")),
    ("bert", "tp4"),
    ("bert", "zero1"),
    ("t5", "tp4"),
    ("t5", "zero3"),
    ("odd", "tp4"),
)
SAVED, RELOADED = "tp4", ("pp2xtp2", "zero1", "zero3")
SEED = 11


@cache
def of_case(case: str, rows: int = ROWS // MICROBATCHES) -> Traced:
    return traced(ODD[case], rows)


def built(case: str, plan: str, model: nn.Module | None = None) -> Runtime:
    of = of_case(case)
    made = build_plan(
        of.graph,
        Knobs(
            rows=ROWS, num_microbatches=MICROBATCHES, shardings=ODD[case].shardings, **PLANS[plan]
        ),
    )
    return parallelize(model or ODD[case].model(), made, of)


def train(case: str, plan: str) -> dict[str, Any]:
    """Three steps, against plain PyTorch; and the parts of the parameters that ranks hold."""
    of = of_case(case)
    made = build_plan(
        of.graph,
        Knobs(
            rows=ROWS, num_microbatches=MICROBATCHES, shardings=ODD[case].shardings, **PLANS[plan]
        ),
    )
    found = runtime_loop(ODD[case], made, of)
    if launch.rank():
        return {}
    parts = MICROBATCHES if ODD[case].batch_statistics else 1
    return compare(found, plain_loop(ODD[case], ROWS, parts=parts))


def clipped(case: str, plan: str) -> dict[str, Any]:
    """The norm of all gradients, and of the parameters' parts."""
    runtime = built(case, plan)
    runtime.train_step(ODD[case].batch(ROWS, 0))
    norm = float(clip_(runtime.stage_parameters, runtime.place, 0.1))
    gradients = runtime.full_gradients()
    after = float(torch.linalg.vector_norm(torch.cat([g.flatten() for g in gradients.values()])))
    model = ODD[case].model()
    ODD[case].loss(model, ODD[case].batch(ROWS, 0)).backward()
    wanted = float(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
    return {"norm": norm, "wanted": wanted, "after": after}


def held() -> dict[str, Any]:
    """Rows of the vocabulary that each rank holds, and what torch makes of them."""
    runtime = built("gpt2", "tp4")
    wte = dict(runtime.named_parameters())["transformer.wte.weight"]
    assert isinstance(wte, DTensor)
    mine = torch.tensor([wte.to_local().shape[0]])
    everywhere = [torch.zeros_like(mine) for _ in range(launch.world_size())]
    torch.distributed.all_gather(everywhere, mine)
    whole = torch.equal(wte.full_tensor(), ODD["gpt2"].model().transformer.wte.weight)
    return {"rows": [int(x) for x in everywhere], "shape": list(wte.shape), "whole": whole}


def stepped(runtime: Runtime, case: str, steps: int) -> torch.optim.Optimizer:
    optimizer = ODD[case].optimize(runtime)
    for step in range(steps):
        optimizer.zero_grad()
        runtime.train_step(ODD[case].batch(ROWS, step))
        optimizer.step()
    return optimizer


def save(folder: Path, case: str) -> dict[str, Any]:
    """A checkpoint after two steps, and what is known of the third."""
    runtime = built(case, SAVED)
    optimizer = stepped(runtime, case, 2)
    checkpoint.save(runtime, folder / f"{case}-saved", optimizer)
    state = runtime.full_state_dict()
    if launch.rank() == 0:
        torch.save(state, folder / f"{case}-state.pt")
    launch.agree_on(lambda: None)
    return {"loss": float(runtime.train_step(ODD[case].batch(ROWS, 2)))}


def resumed(folder: Path, case: str, plan: str, stored: str = "saved") -> dict[str, Any]:
    """A checkpoint of other ranks under a plan: the state, bit for bit, and the loss after one step
    of its optimizer."""
    runtime = built(case, plan, ODD[case].model(seed=5))
    optimizer = ODD[case].optimize(runtime)
    checkpoint.load(runtime, folder / f"{case}-{stored}", optimizer)
    wanted, found = torch.load(folder / f"{case}-state.pt"), runtime.full_state_dict()
    same = set(found) == set(wanted) and all(torch.equal(found[n], x) for n, x in wanted.items())
    if plan == "alone":
        checkpoint.save(runtime, folder / f"{case}-again", optimizer)
    loss = float(runtime.train_step(ODD[case].batch(ROWS, 2)))
    optimizer.step()
    optimizer.zero_grad()
    return {"same": same, "loss": loss, "next": float(runtime.train_step(ODD[case].batch(ROWS, 3)))}


def weights(folder: Path, case: str, plan: str) -> dict[str, Any]:
    """Initialised from a seed, and read from a file, against one device."""
    with torch.device("meta"):
        empty = ODD[case].build()
    runtime = built(case, plan, empty)
    init_weights(runtime, SEED)
    state = runtime.full_state_dict()
    wanted = torch.load(folder / f"{case}-initial.pt")
    seeded = all(torch.equal(state[n], x) for n, x in wanted.items())
    load_weights(runtime, folder / f"{case}-state.pt")
    state, wanted = runtime.full_state_dict(), torch.load(folder / f"{case}-state.pt")
    return {"seeded": seeded, "read": all(torch.equal(state[n], x) for n, x in wanted.items())}


def checks(folder: Path, world: int) -> dict[str, Run]:
    if world == 2:
        pairs = (("gpt2", "tp2", "again"), ("gpt2", "tp2", "saved"))
        return {f"{c} {p} {s}": partial(resumed, folder, c, p, s) for c, p, s in pairs}
    made: dict[str, Run] = {f"{case} {plan}": partial(train, case, plan) for case, plan in TRAINED}
    made |= {f"clip {plan}": partial(clipped, "gpt2", plan) for plan in ("tp4", "zero2", "zero3")}
    made |= {"held": held, "save": partial(save, folder, "gpt2")}
    made |= {f"resume {plan}": partial(resumed, folder, "gpt2", plan) for plan in RELOADED}
    made |= {f"weights {p}": partial(weights, folder, "gpt2", p) for p in ("tp4", "zero3")}
    return made


def main(folder: Path, only: str = "") -> None:
    world = launch.world_size()
    work = {name: run for name, run in checks(folder, world).items() if only in name}
    run_all(work, folder, f"{world}")


if __name__ == "__main__":
    on_ranks(main)
