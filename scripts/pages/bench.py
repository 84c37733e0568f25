"""How large the report's page is, how long it takes to write, and how a browser has it.

    python -m scripts.pages.bench [CASE ...] [--folder F] [--no-browser]

Cases are those of `bench_planner` (`scripts/planning/cases.py`). Of each: CPU seconds of what the
data waits for (alternatives, advice, details), and to write the page once the data is there (the
first one of a process also makes what draws the charts, which takes most of it); its bytes; in
chromium seconds to the first paint, until all charts are drawn, and until the timeline has followed
a key (the median of nine), what it logs and asks for, whether a click on a plan shows its
difference, what is wider than the window at four widths, what
has no label, whether the numbers are those of the data. Exits with 1 where a demand is not met. The
pages, and how they print, stay in `--folder` to be looked at.
"""

from __future__ import annotations

import argparse
import re
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import transformers
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.by import By

from meshwright import auto_parallelize
from meshwright.planner.report import Report
from scripts.pages import browser as seen
from scripts.planning.cases import CASES

USUAL = ("gpt2", "llama-8b", "gpt3-64", "mixtral", "gpt3-1024", "llama-405b")
MOST_BYTES, MANY_BYTES, FEW_DEVICES = 1_300_000, 3_000_000, 64
MOST_WRITING_S, MOST_PAINT_S, MOST_MOVE_S = 3.0, 1.0, 0.1
WIDTHS = (360, 768, 1280, 1920)


def written(report: Report, path: Path) -> Iterator[str]:
    """Write the page; what it took, and what is too much."""
    details = report.details
    assert details is not None
    parts = {
        "alternatives": lambda: report.alternatives,
        "advice, overrides": lambda: (report.advice, report.overrides),
        "details": details.to_dict,
        "the rest": report.to_dict,
    }
    spent = []
    for name, part in parts.items():
        started = time.process_time()
        part()
        spent.append(f"{name} {time.process_time() - started:.1f}")
    print(f"  the data, CPU-s: {', '.join(spent)}")
    started = time.process_time()
    report.html(path)
    writing_s = time.process_time() - started
    nbytes, devices = path.stat().st_size, details.problem.cluster.num_devices
    most = MOST_BYTES if devices <= FEW_DEVICES else MANY_BYTES
    print(f"  written in {writing_s:.2f} CPU-s, {nbytes:,} bytes")
    if nbytes > most:
        yield f"{nbytes:,} bytes of {most:,}"
    if writing_s > MOST_WRITING_S:
        yield f"{writing_s:.1f} CPU-s to write"


def looked_at(browser: WebDriver, path: Path, data: Mapping[str, Any]) -> Iterator[str]:
    """Open the page; what a reader sees, and what is wrong."""
    started = time.perf_counter()
    seen.opened(browser, path)
    drawn_s, paint_s = time.perf_counter() - started, seen.painted_s(browser)
    logged, asked = browser.get_log("browser"), seen.asked_for(browser) - {path.as_uri()}
    moved_s, boxes = seen.moved_s(browser)
    print(
        f"  first paint {paint_s:.2f} s, drawn {drawn_s:.2f} s, a key on {boxes:,} boxes of the "
        f"timeline {1e3 * moved_s:.1f} ms, {len(logged)} messages, {len(asked)} requests"
    )
    if paint_s > MOST_PAINT_S:
        yield f"first paint after {paint_s:.2f} s"
    if moved_s > MOST_MOVE_S:
        yield f"a key on the timeline takes {moved_s:.2f} s"
    yield from (f"logged {entry['message']}" for entry in logged)
    yield from (f"asked for {url}" for url in asked)
    yield from (f"{name} has no label" for name in seen.unlabelled(browser))
    buttons = browser.find_elements(By.CSS_SELECTOR, "[data-plan]")
    for button in buttons[:1]:
        row = browser.find_element(By.ID, button.get_attribute("aria-controls") or "")
        button.send_keys("\n")
        if not row.is_displayed():
            yield "a plan does not show its difference"
    yield from unequal(path, data)
    for width in WIDTHS:
        seen.opened(browser, path, width=width, scheme="dark")
        yield from (f"{name} is too wide at {width}" for name in seen.beyond(browser))
    seen.on_paper(browser, path.with_suffix(".pdf"))


def unequal(path: Path, data: Mapping[str, Any]) -> Iterator[str]:
    """Numbers of the page's tables and headline that are nowhere in the data. Shares of two of its
    numbers are none of them."""
    known = set(map(float, numbers(data)))
    known |= {  # of what is added up or divided for the page
        row["exposed_s"] / row["seconds"] for row in data["communication"] if row["seconds"]
    }
    parts = data["components_s"]
    known.add(parts["exposed communication"] + parts["gradient reduction"])
    shown = re.findall(r'<data value="([^"]*)">', path.read_text(encoding="utf-8"))
    wrong = [value for value in shown if float(value) not in known]
    print(f"  {len(shown):,} numbers, {len(wrong)} not in to_dict()")
    yield from (f"{value} is not in to_dict()" for value in wrong)


def numbers(data: Any) -> Iterator[float]:
    """Every number of plain data."""
    if isinstance(data, Mapping):
        for value in data.values():
            yield from numbers(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from numbers(value)
    elif isinstance(data, int | float):
        yield data


def bench(name: str, folder: Path, browser: WebDriver | None) -> list[str]:
    """One case; what is wrong with it."""
    case = CASES[name]
    model, cluster = case.model(), case.cluster()
    report = auto_parallelize(
        model.module,
        cluster,
        example_inputs=model.batch,
        global_batch_size=case.batch,
        precision=case.precision,
        profile=False,
    ).report
    print(f"{name}, {cluster.num_devices} devices: {report.summary['chosen']}")
    path = folder / f"{name}.html"
    wrong = list(written(report, path))
    if browser is not None:
        wrong += looked_at(browser, path, report.to_dict())
    for text in wrong:
        print(f"  NOT MET: {text}")
    return wrong


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("cases", nargs="*", metavar="CASE", help=", ".join(CASES))
    parser.add_argument("--folder", type=Path, help="where the pages are written, and stay")
    parser.add_argument("--no-browser", action="store_true", help="only write the pages")
    args = parser.parse_args()
    transformers.logging.set_verbosity_error()
    unknown = sorted({*args.cases} - {*CASES})
    if unknown:
        raise SystemExit(f"no case {unknown[0]!r}; legal: {', '.join(CASES)}")
    if not args.no_browser and not (seen.BROWSER and seen.DRIVER):
        raise SystemExit(
            "no chromium: scripts/setup_browser installs it, --no-browser does without"
        )
    folder = args.folder or Path(tempfile.mkdtemp(prefix="pages-"))
    folder.mkdir(parents=True, exist_ok=True)
    cases, wrong = args.cases or USUAL, []
    if args.no_browser:
        wrong = [text for name in cases for text in bench(name, folder, None)]
    else:
        with seen.started() as browser:
            wrong = [text for name in cases for text in bench(name, folder, browser)]
    print(f"pages in {folder}")
    raise SystemExit(bool(wrong))


if __name__ == "__main__":
    main()
