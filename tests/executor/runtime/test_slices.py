"""Token slices through the API, on two ranks: other batches, evaluation and generation beside one
device."""

from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from meshwright import Overrides, auto_parallelize
from meshwright.executor.stages.stage import StageProgram
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier
from tests.user_code.user_runs import free_links

LENGTH, WORDS = 12, 48


def llama() -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "max_position_embeddings": 64}
    heads = {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    return LlamaForCausalLM(LlamaConfig(vocab_size=WORDS, **sizes, **heads))


def batch(rows: int, length: int, seed: int) -> dict[str, torch.Tensor]:
    """Ids and labels, of which each row's first do not count."""
    of = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, WORDS, (rows, length), generator=of)
    ignored = torch.arange(length) < torch.arange(rows)[:, None]
    return {"input_ids": ids, "labels": ids.masked_fill(ignored, -100)}


def goes_on(given: dict[str, Any]) -> list[int]:
    """Losses, outputs and tokens are those of one device; returns the tokens of each forward."""
    asked = {"pp": 2, "num_microbatches": 2, **given}
    result = auto_parallelize(
        llama(), free_links(2), example_inputs=batch(4, LENGTH, 0), global_batch_size=4,
        precision="fp32", overrides=Overrides(**asked),
    )  # fmt: skip
    plain, seen = llama(), list[int]()
    optimizers = [torch.optim.AdamW(x.parameters(), lr=1e-2) for x in (result, plain)]
    forward = StageProgram.forward

    def noted(program: StageProgram, inputs: Any, received: Any, *more: Any) -> Any:
        made = forward(program, inputs, received, *more)
        seen.extend(x.shape[1] for x in [*received.values(), *made.values()] if x.dim() == 3)
        return made

    StageProgram.forward = noted
    try:
        for step, (rows, length) in enumerate([(4, LENGTH), (4, 7), (2, LENGTH), (4, LENGTH)]):
            for optimizer in optimizers:
                optimizer.zero_grad()
            part = {"optimizer": optimizers[0]} if result.plan.post_validation else {}
            loss = result.train_step(batch(rows, length, step), **part)
            expected = plain(**batch(rows, length, step)).loss
            expected.backward()
            for optimizer in optimizers[bool(part) :]:
                optimizer.step()
            assert float(loss) == pytest.approx(float(expected), rel=1e-5)
        trained = [*seen]
    finally:
        StageProgram.forward = forward
    held = batch(4, LENGTH, 9)
    with torch.no_grad():
        wanted = plain(**held)
    assert float(result.eval_step(held)) == pytest.approx(float(wanted.loss), rel=1e-5)
    logits = result.forward(held, gather=True).logits
    torch.testing.assert_close(logits, wanted.logits, atol=1e-4, rtol=1e-4)
    ids = held["input_ids"][:, :5]
    tokens = plain.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0)
    assert torch.equal(result.generate(ids, max_new_tokens=4), tokens)
    return trained


@pytest.mark.parametrize(
    "given",
    [
        {"slices": (6, 4, 2), "schedule": "1f1b"},
        pytest.param(
            {"slices": 3, "schedule": "zb_h2", "post_validation": True, "recompute": "pointwise"},
            marks=second_tier("post-validation without slices, and slices without it, stay"),
        ),
    ],
    ids=["sizes", "validated afterwards"],
)
def test_training_evaluation_and_generation_are_those_of_one_device(given: dict[str, Any]) -> None:
    trained = on_ranks(2, goes_on, given)
    sizes = given["slices"] if isinstance(given["slices"], tuple) else None
    # of each step's two micro-batches three slices; 7 tokens in the same proportion
    assert len(trained) == 4 * 2 * 3 and LENGTH not in trained
    if sizes:
        assert trained[:6] == [*sizes] * 2 and trained[6:12] == [4, 2, 1] * 2
