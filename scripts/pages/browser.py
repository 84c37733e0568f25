"""The report's page in Debian's chromium, which `scripts/setup_browser` installs."""

from __future__ import annotations

import base64
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.support.wait import WebDriverWait

BROWSER, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
TIMEOUT_S = 60
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage")


@contextmanager
def started() -> Iterator[WebDriver]:
    """A browser without a window, which writes down what pages log and ask for."""
    options = Options()
    options.binary_location = BROWSER or ""
    for flag in FLAGS:
        options.add_argument(flag)
    logs = {"browser": "ALL", "performance": "ALL"}
    options.set_capability("goog:loggingPrefs", logs)
    # the browser leaves files; the path of a socket among them must be short
    with TemporaryDirectory(dir="/tmp", ignore_cleanup_errors=True) as folder:
        service = Service(DRIVER, env={**os.environ, "TMPDIR": folder})
        driver = webdriver.Chrome(options=options, service=service)
        driver.set_page_load_timeout(TIMEOUT_S)
        driver.set_script_timeout(TIMEOUT_S)
        try:
            yield driver
        finally:
            driver.quit()


def opened(browser: WebDriver, path: Path, *, width: int = 1280, scheme: str = "light") -> None:
    """The page with its charts drawn; what the browser logged before is forgotten."""
    size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get_log("browser")
    browser.get_log("performance")
    browser.get(path.as_uri())
    drawn = "return document.body.dataset.drawn === 'true'"
    WebDriverWait(browser, TIMEOUT_S).until(lambda b: b.execute_script(drawn))


def asked_for(browser: WebDriver) -> set[str]:
    """What the page that was opened last asked for; what is in it (`data:`) left out."""
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = (
        event["params"]["request"]["url"]
        for event in events
        if event["method"] == "Network.requestWillBeSent"
    )
    return {url for url in urls if not url.startswith("data:")}


def painted_s(browser: WebDriver) -> float:
    """Seconds until something of the page is seen."""
    paint = "return performance.getEntriesByName('first-contentful-paint')[0].startTime"
    return float(browser.execute_script(paint)) / 1e3


def moved_s(browser: WebDriver) -> tuple[float, int]:
    """Seconds of a key on the largest window of the timeline until it is drawn again, the median;
    and its boxes."""
    spent_ms, boxes = browser.execute_async_script("""
        const done = arguments[0];
        const {windows} = JSON.parse(document.getElementById('timeline-data').textContent);
        const sizes = windows.map(window => window.boxes.length);
        const largest = sizes.indexOf(Math.max(...sizes)), spent = [];
        const canvas = document.querySelector(`[data-timeline="${largest}"]`);
        const press = () => {
          const began = performance.now();
          const key = spent.length % 2 ? '-' : '+';
          canvas.dispatchEvent(new KeyboardEvent('keydown', {key}));
          requestAnimationFrame(() => setTimeout(() => {
            spent.push(performance.now() - began);
            if (spent.length < 9) press();
            else done([spent.sort((a, b) => a - b)[4], sizes[largest]]);
          }));
        };
        press();""")
    return spent_ms / 1e3, boxes


def beyond(browser: WebDriver) -> list[str]:
    """Charts with text that lies outside of them, and the page where it is wider than its
    window."""
    found: list[str] = browser.execute_script("""
        const wide = document.documentElement.scrollWidth > innerWidth ? ['page'] : [];
        return wide.concat([...document.querySelectorAll('[data-chart]')].filter(chart => {
          const own = chart.getBoundingClientRect();
          return [...chart.querySelectorAll('svg text')].some(text => {
            const box = text.getBoundingClientRect();
            return box.left < own.left - 1 || box.right > own.right + 1;
          });
        }).map(chart => chart.dataset.chart))""")
    return found


def unlabelled(browser: WebDriver) -> list[str]:
    """What a reader of the screen can't name: charts without a label, tables without a caption,
    heads without a scope, buttons and regions without a name, whatever takes the focus and does
    not show it."""
    found: list[str] = browser.execute_script("""
        const all = selector => [...document.querySelectorAll(selector)];
        const named = e => (e.getAttribute('aria-label') || e.textContent).trim() !== '';
        const unnamed = [
          ...all('[data-chart]').filter(e => !e.closest('details:not([open])') && !e.querySelector(
            '[role=graphics-document][aria-label], canvas[aria-label]')),
          ...all('main table').filter(e => e.caption === null),
          ...all('main th').filter(e => !['col', 'row'].includes(e.scope)),
          ...all('button, a, summary').filter(e => !named(e) && !e.title),
          ...all('[role=region], nav').filter(e => !e.getAttribute('aria-label')),
        ];
        for (const e of all('main button, main a, main summary, main [tabindex]')) {
          if (e.closest('[hidden], details:not([open]), .vega-embed')) continue;
          e.focus({focusVisible: true});
          if (getComputedStyle(e).outlineStyle === 'none') unnamed.push(e);
        }
        return unnamed.map(e => `${e.tagName} ${e.dataset.chart || e.className || e.textContent}`)
    """)
    return found


def on_paper(browser: WebDriver, path: Path) -> int:
    """Write the page as A4 (PDF); the bytes of it."""
    printed = browser.execute_cdp_cmd(
        "Page.printToPDF", {"preferCSSPageSize": True, "printBackground": True}
    )
    return path.write_bytes(base64.b64decode(printed["data"]))
