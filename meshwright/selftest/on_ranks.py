"""The ranks of a self-test: a model, training it under the plans of a folder, and timing them.

    torchrun --standalone --nproc-per-node N -m meshwright.selftest.on_ranks FOLDER parity|times

Each rank writes `FOLDER/<what>.<rank>.json`, by plan file: losses of `STEPS` steps, or the seconds
of `TURNS` steps and the most bytes that tensors took on its GPU (None on CPUs).
"""

from __future__ import annotations

import gc
import json
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

STEPS, TURNS, WARM_UP = 3, 5, 2
LEARNING_RATE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """A decoder's sizes, and rows of its global batch."""

    width: int
    layers: int
    heads: int
    tokens: int
    vocabulary: int
    rows: int


SMALL = Sizes(width=64, layers=4, heads=4, tokens=32, vocabulary=128, rows=8)
ON_CPU = Sizes(width=256, layers=4, heads=8, tokens=128, vocabulary=2048, rows=16)
ON_GPU = Sizes(width=2048, layers=8, heads=16, tokens=1024, vocabulary=32768, rows=16)


class Layer(nn.Module):
    """Causal attention and a feed-forward network, each behind a norm, added to what came in."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        width, self.heads = sizes.width, sizes.heads
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.q, self.k, self.v, self.out = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norms[0](x)
        q, k, v = (
            p(y).unflatten(-1, (self.heads, -1)).transpose(1, 2) for p in (self.q, self.k, self.v)
        )
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        made: torch.Tensor = self.down(F.gelu(self.up(self.norms[1](x))))
        return x + made


class Decoder(nn.Module):
    """An ordinary decoder: logits of every token's next one."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.embed = nn.Embedding(sizes.vocabulary, sizes.width)
        self.positions = nn.Embedding(sizes.tokens, sizes.width)
        self.layers = nn.ModuleList(Layer(sizes) for _ in range(sizes.layers))
        self.norm = nn.LayerNorm(sizes.width)
        self.head = nn.Linear(sizes.width, sizes.vocabulary, bias=False)
        self.tokens = sizes.tokens

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(self.tokens, device=ids.device)
        x = self.embed(ids) + self.positions(places)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(self.norm(x))
        return logits


def loss_of(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def model_of(sizes: Sizes) -> Decoder:
    """The same weights in every process."""
    torch.manual_seed(0)
    return Decoder(sizes)


def batch_of(sizes: Sizes, rows: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens (rows, tokens), and their labels, the same in every process."""
    draw = torch.Generator().manual_seed(1)
    shape = (rows or sizes.rows, sizes.tokens)
    ids = torch.randint(0, sizes.vocabulary, shape, generator=draw)
    return ids, ids.roll(-1, dims=1)


def alone(sizes: Sizes, device: torch.device) -> list[float]:
    """Losses of ordinary PyTorch in fp32 on one device, without any plan."""
    model, (ids, labels) = model_of(sizes).to(device), batch_of(sizes)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss = loss_of(model(ids.to(device)), labels.to(device))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


# --- on every rank --------------------------------------------------------------------------------


def _parity(path: Path, sizes: Sizes, device: torch.device) -> list[float]:
    """Losses under a plan."""
    result = _built(path, sizes)
    optimizer = torch.optim.SGD(result.parameters(), lr=LEARNING_RATE)
    losses = []
    for _ in range(STEPS):
        optimizer.zero_grad()
        losses.append(result.train_step(batch_of(sizes)).item())
        optimizer.step()
    return losses


def _times(path: Path, sizes: Sizes, device: torch.device) -> tuple[list[float], float | None]:
    """Seconds of steps under a plan, and bytes of tensors at their peak."""
    from meshwright.executor.ranks import launch

    on_gpu = device.type == "cuda"
    gc.collect()
    if on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    result = _built(path, sizes)
    batch, took = batch_of(sizes), list[float]()
    optimizer = torch.optim.AdamW(result.parameters(), lr=1e-4, fused=True)
    for _ in range(WARM_UP + TURNS):
        launch.agree_on(lambda: None)  # all ranks begin together
        started = time.perf_counter()
        optimizer.zero_grad()
        result.train_step(batch)
        optimizer.step()
        if on_gpu:
            torch.cuda.synchronize(device)
        took.append(time.perf_counter() - started)
    peak = float(torch.cuda.max_memory_allocated(device)) if on_gpu else None
    return took[WARM_UP:], peak


def _built(path: Path, sizes: Sizes) -> Any:
    from meshwright import Cluster, auto_parallelize

    return auto_parallelize(
        model_of(sizes),
        Cluster.detect(),
        example_inputs=batch_of(sizes, 2),
        global_batch_size=sizes.rows,
        loss_fn=loss_of,
        precision=json.loads(path.read_text(encoding="utf-8"))["precision"],
        plan=path,
        profile=False,
    )


WORK: Mapping[str, Callable[[Path, Sizes, torch.device], Any]] = {
    "parity": _parity,
    "times": _times,
}


def main() -> None:
    from meshwright import distributed
    from meshwright.executor.ranks import launch

    folder, what = Path(sys.argv[1]), sys.argv[2]
    settings = json.loads((folder / "settings.json").read_text(encoding="utf-8"))
    sizes = Sizes(**settings["sizes"])
    with distributed(settings["backend"]):
        device = launch.device_here()
        if device.type == "cpu":
            torch.set_num_threads(1)
        found = {p.name: WORK[what](p, sizes, device) for p in sorted(folder.glob("*.plan.json"))}
        output = folder / f"{what}.{launch.rank()}.json"
        output.write_text(json.dumps(found), encoding="utf-8")


def settings_of(sizes: Sizes, backend: str) -> str:
    """Settings that `main` reads."""
    return json.dumps({"sizes": asdict(sizes), "backend": backend})


if __name__ == "__main__":
    main()
