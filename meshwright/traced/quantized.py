"""Weights that other libraries have packed into fewer bits: recognised, and refused by name."""

from __future__ import annotations

from torch import nn

from meshwright.profiles.inputs import MeshwrightError

PACKERS = ("bitsandbytes", "torchao", "hqq", "optimum", "quanto", "gptqmodel", "awq")
PACKED_CLASSES = ("Params4bit", "Int8Params")  # of bitsandbytes, and of what stands for it


def check_not_quantized(model: nn.Module) -> None:
    """Raise `MeshwrightError` for a model with packed weights (QLoRA), by the classes of parameters
    and what transformers notes on the model: no such library has to be there."""
    for name, p in model.named_parameters():
        kind = type(p)
        package = kind.__module__.partition(".")[0]
        if package in PACKERS or kind.__name__ in PACKED_CLASSES or hasattr(p, "quant_state"):
            raise _error(f"model: parameter {name!r}", f"{kind.__name__} of {package}")
    for name, module in model.named_modules():
        method = getattr(module, "quantization_method", None)
        if method is not None and getattr(module, "is_quantized", True):
            where = f"model: module {name!r}" if name else "model"
            raise _error(where, str(getattr(method, "value", method)))


def _error(place: str, how: str) -> MeshwrightError:
    return MeshwrightError(
        f" is quantized ({how}), as for QLoRA: the values are packed, so that no rank can take a "
        "part of them, and what they take and cost is not known",
        place=place,
        legal="weights in float32, bfloat16 or float16",
        way_out="load the base model in bfloat16 without quantization_config, and train LoRA on "
        "it: tp, pp and ZeRO-3 divide the frozen weights",
    )
