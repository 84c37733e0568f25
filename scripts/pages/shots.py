"""Pages of five models, and pictures of them in a browser, to be looked at.

    python -m scripts.pages.shots FOLDER [MODEL ...] [--picture FILE]

Writes `MODEL.json`, the report's data (taken again where it is there, as planning takes minutes),
`MODEL.html`, and of the page at 360 and 1,280 pixels, light and dark, pictures from top to bottom.
Says what the browser logged, what the page asked for and what is too wide, and exits with 1 where
that is anything. `--picture` writes the top of the first model's page, as the README shows it.
"""

from __future__ import annotations

import argparse
import base64
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
import transformers as hf
from selenium.webdriver.chrome.webdriver import WebDriver

from meshwright import Cluster, Overrides, auto_parallelize
from meshwright.planner.page import render_page
from scripts.pages import browser as seen
from scripts.planning.cases import Model, gpt, images, llama_70b, mixtral

WIDTHS, SCHEMES = (360, 1280), ("light", "dark")
PIECE = 1500  # pixels from top to bottom of a picture
PICTURE = 1280, 1000
MOST_BYTES = 300_000  # of the README's picture
TIME_LIMIT_S = 60.0  # of a search, and of its answers together


@dataclass(frozen=True, slots=True, kw_only=True)
class Shown:
    """A model by its name for people, on nodes of 8 devices."""

    name: str
    model: Callable[[], Model]
    node: str
    nodes: int
    batch: int
    overrides: Mapping[str, Any] = field(default_factory=dict)


def t5() -> Model:  # T5-3B
    config = hf.T5Config(
        vocab_size=32128, d_model=1024, d_kv=128, d_ff=16384, num_heads=32, num_layers=24,
        decoder_start_token_id=0,
    )  # fmt: skip
    ids = torch.empty(2, 512, dtype=torch.long, device="meta")
    with torch.device("meta"):
        module = hf.T5ForConditionalGeneration(config)
    return Model(module=module, batch={"input_ids": ids, "labels": ids})


MODELS: Mapping[str, Shown] = {
    "llama-70b": Shown(
        name="Llama-3-70B", model=lambda: llama_70b(4096), node="dgx-h100", nodes=8, batch=256,
        overrides={"pp": 4, "tp": 4, "schedule": "1f1b"},
    ),
    "gpt2": Shown(
        name="GPT-2", model=lambda: gpt(12, 768, 12, 50257, 1024), node="dgx-h100", nodes=1,
        batch=64,
    ),
    "mixtral": Shown(name="Mixtral-8x7B", model=mixtral, node="dgx-h100", nodes=8, batch=256),
    "t5": Shown(name="T5-3B", model=t5, node="dgx-a100", nodes=2, batch=256),
    "resnet": Shown(
        name="ResNet-50", model=lambda: images("ResNet", 224), node="dgx-a100", nodes=1, batch=1024
    ),
}  # fmt: skip


def data_of(key: str, folder: Path) -> dict[str, Any]:
    """The report's data, of the file if it is there."""
    file, shown = folder / f"{key}.json", MODELS[key]
    if not file.exists():
        model = shown.model()
        model.module.config.name_or_path = shown.name
        report = auto_parallelize(
            model.module,
            Cluster.from_catalog(shown.node, num_nodes=shown.nodes),
            example_inputs=model.batch,
            global_batch_size=shown.batch,
            overrides=Overrides(**shown.overrides),
            profile=False,
            time_limit_s=TIME_LIMIT_S,
        ).report
        made = {**report.made, "module": f"my_models:{key.replace('-', '_')}"}
        file.write_text(json.dumps(replace(report, made=made).to_dict()), encoding="utf-8")
    found: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    return found


def pictures(browser: WebDriver, page: Path) -> Iterator[str]:
    """Pictures of a page at each width, light and dark; what is wrong with it."""
    for width in WIDTHS:
        for scheme in SCHEMES:
            seen.opened(browser, page, width=width, scheme=scheme)
            at = f"{page.stem} at {width}, {scheme}"
            yield from (f"{at}: logged {entry['message']}" for entry in browser.get_log("browser"))
            asked = seen.asked_for(browser) - {page.as_uri()}
            yield from (f"{at}: asked for {url}" for url in asked)
            yield from (f"{at}: {name} is too wide" for name in seen.beyond(browser))
            height = browser.execute_script("return document.documentElement.scrollHeight")
            for top in range(0, height, PIECE):
                name = f"{page.stem}-{width}-{scheme}-{top // PIECE}.png"
                size = width, min(PIECE, height - top)
                shot(browser, page.with_name(name), top, *size)
            yield from (f"{at}: {name} has no label" for name in seen.unlabelled(browser))


def shot(browser: WebDriver, file: Path, top: int, width: int, height: int) -> None:
    """Write a part of the page as PNG."""
    clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
    options = {"captureBeyondViewport": True, "clip": clip}
    taken = browser.execute_cdp_cmd("Page.captureScreenshot", options)
    file.write_bytes(base64.b64decode(taken["data"]))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path)
    parser.add_argument("models", nargs="*", metavar="MODEL", help=", ".join(MODELS))
    parser.add_argument("--picture", type=Path, metavar="FILE", help="the README's picture")
    args = parser.parse_args()
    if unknown := sorted({*args.models} - {*MODELS}):
        raise SystemExit(f"no model {unknown[0]!r}; legal: {', '.join(MODELS)}")
    if not (seen.BROWSER and seen.DRIVER):
        raise SystemExit("no chromium: scripts/setup_browser installs it")
    hf.logging.set_verbosity_error()
    args.folder.mkdir(parents=True, exist_ok=True)
    wrong, pages = [], []
    for key in args.models or MODELS:
        pages.append(args.folder / f"{key}.html")
        pages[-1].write_text(render_page(data_of(key, args.folder)), encoding="utf-8")
    with seen.started() as browser:
        for page in pages:
            wrong += list(pictures(browser, page))
        if args.picture:
            seen.opened(browser, pages[0], width=PICTURE[0])
            shot(browser, args.picture, 0, *PICTURE)
            if (nbytes := args.picture.stat().st_size) > MOST_BYTES:
                wrong.append(f"{args.picture}: {nbytes:,} bytes of {MOST_BYTES:,}")
    print("\n".join(wrong) or f"{len(pages)} pages in {args.folder}: nothing logged, nothing asked")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
