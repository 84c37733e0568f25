"""Forwards whose asks for values of the batch of the batch: a step takes that of its batch."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.nn import functional

from meshwright import Cluster, Overrides, auto_parallelize
from meshwright.executor.errors import BatchError
from tests.helpers.courses import FLAGS, KINDS, SIZES, Model, batch_of, selects, split
from tests.helpers.ranks import on_ranks
from tests.helpers.tiers import second_tier, tiered


@pytest.fixture(autouse=True)
def _seeded() -> Iterator[None]:
    torch.manual_seed(0)
    yield


def planned(model: nn.Module, batch: Any, ranks: int = 1, **overrides: Any) -> Any:
    return auto_parallelize(
        model,
        Cluster.local(ranks, measure=False),
        example_inputs=batch,
        global_batch_size=4,
        overrides=Overrides(**overrides),
    )


def check_step(result: Any, model: nn.Module, alone: nn.Module, batch: Any) -> None:
    """A step gives the loss and the gradients of the model alone."""
    model.zero_grad()
    alone.zero_grad()
    loss = alone(**batch)
    loss.backward()
    torch.testing.assert_close(result.train_step(batch), loss)
    for ours, theirs in zip(model.parameters(), alone.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, theirs.grad)


ASKED = ("selects", "counts", "writes", "by_numpy")


@pytest.mark.parametrize(
    "way",
    tiered(
        KINDS,
        lambda way: way.__name__ in ASKED,
        "other ways to ask; flags, counts, a write between and numpy stay",
        lambda way: way.__name__,
    ),
)
def test_a_step_takes_the_course_of_its_batch(way: Callable[..., torch.Tensor]) -> None:
    model, batch = Model(way), batch_of()
    alone = copy.deepcopy(model)
    result = planned(model, batch)
    check_step(result, model, alone, batch)
    check_step(result, model, alone, batch_of())  # of the same course
    assert not result.runtime.lowered.others


@second_tier("a step after one of another course is run on ranks, and by a loss function")
def test_a_batch_of_another_course_is_traced_for_itself_once() -> None:
    model, batch = Model(split), batch_of()
    alone = copy.deepcopy(model)
    result = planned(model, batch)
    assert any("asks for values of the batch" in note for note in result.report.notes)
    for sizes in (SIZES.flip(0), SIZES, SIZES.flip(0), torch.tensor([2, 2, 4])):
        check_step(result, model, alone, batch_of(sizes))
    assert len(result.runtime.lowered.others) == 2


@second_tier("the same refusal is of another shape in test_shapes_of_a_batch.py")
def test_a_course_of_other_operators_is_refused() -> None:
    result = planned(Model(split), batch_of())
    with pytest.raises(BatchError, match=r"runs other operators .*values"):
        result.train_step(batch_of(torch.tensor([4, 4])))


@second_tier(
    "such rows are found to meet in costmodel/sharding; a loss of them is refused elsewhere"
)
def test_values_of_rows_that_decide_the_course_stand_against_micro_batches() -> None:
    model, batch = Model(selects), batch_of()
    alone = copy.deepcopy(model)
    with pytest.raises(ValueError, match="rows of the batch meet in"):
        planned(model, batch, num_microbatches=2)
    free = planned(model, batch)
    assert free.plan.num_microbatches == 1
    check_step(free, model, alone, batch_of(flags=FLAGS.flip(0)))


@second_tier("which micro-batches take the course is found in executor/stages/test_courses.py")
def test_micro_batches_of_different_courses_are_refused() -> None:
    """With consent to rows that meet, as each is a batch by itself."""
    options = {
        "cluster": Cluster.local(1, measure=False),
        "global_batch_size": 4,
        "overrides": Overrides(num_microbatches=2),
        "rows_meet": "per_microbatch",
    }
    alike, other = FLAGS[[0, 2, 0, 2]], FLAGS[[0, 2, 2, 0]]
    result = auto_parallelize(Model(selects), example_inputs=batch_of(flags=alike), **options)
    result.train_step(batch_of(flags=alike))
    with pytest.raises(BatchError, match=r"(?s)micro-batches differ in values.*num_microbat"):
        result.train_step(batch_of(flags=other))


# --- on ranks -------------------------------------------------------------------------------------


LAYOUTS: Mapping[str, Mapping[str, Any]] = {
    "dp2": {"dp": 2},
    "zero3": {"dp": 2, "zero": 3},
    "tp2": {"tp": 2},
    "pp2": {"pp": 2, "schedule": "1f1b"},
    "pp2 zb": {"pp": 2, "schedule": "zb_h1"},
}


OTHERS = second_tier("a course is followed before anything is cut; rows and stages of one stay")


def steps_on_ranks(
    make: Callable[[], nn.Module], batches: Sequence[Any], overrides: Mapping[str, Any]
) -> list[Any]:
    """Loss and gradients of a step on each batch, on two ranks."""
    torch.manual_seed(0)
    model = make()
    result, found = planned(model, batches[0], 2, **overrides), []
    for batch in batches:
        model.zero_grad()
        found.append((float(result.train_step(batch)), result.runtime.full_gradients()))
    return found


def check_on_ranks(
    make: Callable[[], nn.Module], batches: Sequence[Any], overrides: Mapping[str, Any]
) -> None:
    torch.manual_seed(0)
    alone = make()
    found = on_ranks(2, steps_on_ranks, make, batches, overrides)
    for batch, (loss, gradients) in zip(batches, found, strict=True):
        alone.zero_grad()
        expected = alone(**batch)
        expected = getattr(expected, "loss", expected)
        expected.backward()
        assert loss == pytest.approx(float(expected), rel=1e-5)
        for name, p in alone.named_parameters():
            if p.grad is not None:
                torch.testing.assert_close(gradients[name], p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize(
    ("way", "layout"),
    [
        pytest.param(
            way, layout, id=f"{way.__name__}-{layout}", marks=() if layout == first else OTHERS
        )
        for way, first in ((split, "pp2"), (selects, "dp2"))
        for layout in LAYOUTS
    ],
)
def test_ranks_take_one_course(way: Callable[..., torch.Tensor], layout: str) -> None:
    other = batch_of(SIZES.flip(0), FLAGS.flip(0))
    check_on_ranks(partial(Model, way), [batch_of(), other, batch_of()], LAYOUTS[layout])


def local_batch() -> str:
    torch.manual_seed(0)
    batch = batch_of()
    result = planned(Model(split), batch, 2, dp=2)
    with pytest.raises(BatchError) as refused:
        result.train_step({"x": batch["x"][:2], "sizes": SIZES, "flags": FLAGS[:2]}, local=True)
    return str(refused.value)


def test_a_course_needs_the_global_batch() -> None:
    assert "give every rank the global batch" in on_ranks(2, local_batch)


# --- models that people have ----------------------------------------------------------------------


def smol_vlm() -> nn.Module:
    """Images that are padding are left out, by flags of their pixels."""
    text = {"model_type": "llama", "vocab_size": 128, **SMALL_TEXT, "pad_token_id": 0}
    vision = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2,
        "num_attention_heads": 2, "image_size": 16, "patch_size": 4,
    }  # fmt: skip
    config = transformers.SmolVLMConfig(
        text_config=text, vision_config=vision, image_token_id=120, scale_factor=2, pad_token_id=0
    )
    return transformers.SmolVLMForConditionalGeneration(config)


def qwen2_vl() -> nn.Module:
    """Patches of all images in one sequence, split by the sizes of the images."""
    sections = {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0}
    vision = {
        "depth": 2, "embed_dim": 32, "hidden_size": 64, "num_heads": 2, "patch_size": 4,
        "spatial_merge_size": 2, "temporal_patch_size": 2, "in_channels": 3,
    }  # fmt: skip
    config = transformers.Qwen2VLConfig(
        text_config={"vocab_size": 128, **SMALL_TEXT, "rope_parameters": sections},
        vision_config=vision,
        image_token_id=120, vision_start_token_id=121, vision_end_token_id=122,
        video_token_id=123,
    )  # fmt: skip
    return transformers.Qwen2VLForConditionalGeneration(config)


SMALL_TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2,
}  # fmt: skip


def with_images() -> dict[str, torch.Tensor]:
    ids = torch.randint(1, 100, (4, 16))
    ids[:, 3:7] = 120
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


def smol_batches() -> list[Any]:
    return [{**with_images(), "pixel_values": torch.randn(4, 1, 3, 16, 16)} for _ in range(2)]


def qwen_batches() -> list[Any]:
    """Of square images, then of one that is wide."""
    batches = []
    for grid in ([[1, 4, 4]] * 4, [[1, 2, 8], *[[1, 4, 4]] * 3]):
        texts = with_images()
        more = {
            "mm_token_type_ids": (texts["input_ids"] == 120).int(),
            "pixel_values": torch.randn(64, 3 * 2 * 4 * 4),
            "image_grid_thw": torch.tensor(grid),
        }
        batches.append(texts | more)
    return batches


MODELS = {"SmolVLM": (smol_vlm, smol_batches), "Qwen2-VL": (qwen2_vl, qwen_batches)}


@second_tier("courses of small models are followed in the first")
@pytest.mark.parametrize("layout", ["dp2", "tp2", "pp2"])
@pytest.mark.parametrize("name", MODELS)
def test_models_of_images_and_text(name: str, layout: str) -> None:
    make, batches = MODELS[name]
    check_on_ranks(make, batches(), LAYOUTS[layout])


def test_loss_functions_ask_too() -> None:
    def loss(output: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        keep = labels != -100
        return functional.cross_entropy(output[keep], labels[keep])

    net = nn.Linear(6, 5)
    alone, x = copy.deepcopy(net), torch.randn(4, 6)
    labels = torch.tensor([1, -100, 3, 0])
    result = auto_parallelize(
        net, Cluster.local(1, "cpu"), example_inputs=(x, labels), global_batch_size=4, loss_fn=loss
    )
    for of_batch in (labels, labels.flip(0), labels):
        torch.testing.assert_close(result.train_step((x, of_batch)), loss(alone(x), of_batch))
