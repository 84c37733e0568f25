"""The page in a browser, where one is installed (`scripts/setup_browser`)."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from selenium.webdriver.chrome.webdriver import WebDriver
from selenium.webdriver.common.action_chains import ActionChains
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.wait import WebDriverWait

from meshwright.planner.page.front import COLOURS
from scripts.pages.browser import (
    BROWSER,
    DRIVER,
    TIMEOUT_S,
    asked_for,
    beyond,
    on_paper,
    opened,
    painted_s,
    started,
    unlabelled,
)
from tests.helpers.reports import rehearsed_report, report_of_axes
from tests.helpers.tiers import second_tier

pytestmark = [
    second_tier("a browser; the page's data, charts and sizes stay (test_page.py)"),
    pytest.mark.skipif(
        not (BROWSER and DRIVER), reason="no chromium: scripts/setup_browser installs it"
    ),
]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page") / "plan.html"
    assert report_of_axes().html(path, sensitivity=True)
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[WebDriver]:
    with started() as driver:
        yield driver


def elements(browser: WebDriver, selector: str) -> list[WebElement]:
    return browser.find_elements(By.CSS_SELECTOR, selector)


def test_nothing_is_asked_for_and_nothing_fails(browser: WebDriver, path: Path) -> None:
    opened(browser, path)
    assert browser.get_log("browser") == []
    assert asked_for(browser) == {path.as_uri()}
    assert 0 < painted_s(browser) < TIMEOUT_S


def test_each_chart_has_marks_and_a_label(browser: WebDriver, path: Path) -> None:
    opened(browser, path)
    browser.execute_script(
        "for (const each of document.querySelectorAll('details.diagram')) each.open = true"
    )
    undrawn = "return document.querySelector('[data-chart]:not([data-drawn])') === null"
    WebDriverWait(browser, TIMEOUT_S).until(lambda b: b.execute_script(undrawn))
    charts = elements(browser, "[data-chart]")
    assert len(charts) >= 8 and elements(browser, "#chart-block-0")
    for chart in charts:
        name = chart.get_attribute("data-chart")
        (labelled,) = chart.find_elements(By.CSS_SELECTOR, "[role='graphics-document']")
        assert len(labelled.get_attribute("aria-label") or "") > 20, name
        marks = chart.find_elements(By.CSS_SELECTOR, "svg .role-mark path")
        assert marks and chart.size["height"] > 30, name


def test_everything_has_a_name_and_shows_its_focus(browser: WebDriver, path: Path) -> None:
    opened(browser, path)
    assert unlabelled(browser) == []
    browser.execute_script("""
        document.querySelector('[role=graphics-document]').removeAttribute('aria-label');
        document.querySelector('main caption').remove();
        document.head.insertAdjacentHTML(
          'beforeend', '<style>.difference {outline: none !important}</style>')""")
    assert {text.split()[0] for text in unlabelled(browser)} == {"DIV", "TABLE", "BUTTON"}


def test_a_rehearsal_is_seen(browser: WebDriver, tmp_path: Path) -> None:
    page = rehearsed_report().html(tmp_path / "plan.html")
    assert page
    opened(browser, page, width=360)
    assert beyond(browser) == [] and browser.get_log("browser") == []
    (table,) = elements(browser, "[data-table='rehearsal'] table")
    assert "priced" in table.text
    marks = elements(browser, "#chart-memory .mark-symbol.role-mark path")
    assert len(marks) == len(rehearsed_report().to_dict()["memory"])


@pytest.mark.parametrize("width", [360, 768, 1920])
def test_nothing_is_wider_than_the_window(browser: WebDriver, path: Path, width: int) -> None:
    opened(browser, path, width=width)
    assert beyond(browser) == []


def test_light_and_dark(browser: WebDriver, path: Path) -> None:
    light_of = """
        const rgb = value => value.match(/[0-9.]+/g).slice(0, 3).map(Number);
        const light = value => rgb(value).reduce((a, b) => a + b) / 765;
        const text = document.querySelector('#chart-memory svg text');
        return [light(getComputedStyle(document.body).backgroundColor),
                light(getComputedStyle(text).fill)]"""
    opened(browser, path, scheme="light")
    paper, ink = browser.execute_script(light_of)
    assert paper > 0.9 and ink < 0.2
    opened(browser, path, scheme="dark")
    paper, ink = browser.execute_script(light_of)
    assert paper < 0.2 and ink > 0.8


def test_a_click_on_a_plan_shows_its_difference(browser: WebDriver, path: Path) -> None:
    opened(browser, path)
    button = elements(browser, "[data-plan]")[0]
    row = elements(browser, f"#{button.get_attribute('aria-controls')}")[0]
    assert not row.is_displayed()
    button.send_keys("\n")  # by the keyboard
    assert row.is_displayed() and button.get_attribute("aria-expanded") == "true"
    assert "compute" in row.text
    button.click()
    assert not row.is_displayed()


def test_a_click_on_a_point_shows_its_difference(browser: WebDriver, path: Path) -> None:
    opened(browser, path)
    rows = elements(browser, ".shown")
    assert not [row for row in rows if row.is_displayed()]
    points = elements(browser, "#chart-alternatives .mark-symbol.role-mark path")
    assert len(points) == len(rows) + 1
    chain = ActionChains(browser)
    for point in points[-3:]:
        chain.move_to_element(point).click()
    chain.perform()
    assert [row for row in rows if row.is_displayed()]


def test_the_timeline_moves_by_keys_and_says_what_is_there(browser: WebDriver, path: Path) -> None:
    opened(browser, path)
    (canvas,) = elements(browser, "[data-timeline]")

    def view() -> tuple[float, float]:
        start, end = (canvas.get_attribute("data-view") or "").split()
        return float(start), float(end)

    def after(key: str) -> tuple[float, float]:
        before = view()
        canvas.send_keys(key)
        WebDriverWait(browser, TIMEOUT_S).until(lambda _: view() != before)
        return view()

    whole, near, later = view(), after("+"), after(Keys.ARROW_RIGHT)
    assert whole[0] < near[0] < later[0] and near[1] < later[1] <= whole[1]
    assert later[1] - later[0] == pytest.approx(near[1] - near[0], rel=1e-3)
    assert after(Keys.ARROW_LEFT) == pytest.approx(near, rel=1e-3)
    assert after("0") == whole
    up = -canvas.size["height"] // 4
    ActionChains(browser).move_to_element_with_offset(canvas, 0, up).perform()
    told = elements(browser, ".timeline output")[0].text
    assert re.fullmatch(r"stage 0: .*, micro-batch \d+, .* from .*", told), told


def test_the_timeline_is_in_the_colours_of_the_stages(browser: WebDriver, path: Path) -> None:
    opened(browser, path)
    colours = browser.execute_script("""
        const canvas = document.querySelector('[data-timeline]');
        const {data} = canvas.getContext('2d').getImageData(0, 0, canvas.width, canvas.height);
        const found = new Set();
        for (let k = 0; k < data.length; k += 4) found.add(data.slice(k, k + 3).join());
        return [...found]""")
    for colour in COLOURS[:2]:
        assert ",".join(str(int(colour[k : k + 2], 16)) for k in (1, 3, 5)) in colours
    assert ",".join(map(str, (228, 87, 86))) in colours  # the tensor axis is waited for


@pytest.mark.parametrize("width", [360, 1280])
def test_links_stay_in_sight_and_wide_tables_say_so(
    browser: WebDriver, path: Path, width: int
) -> None:
    opened(browser, path, width=width)
    browser.execute_script("document.querySelector('#communication').scrollIntoView()")
    top, bottom = browser.execute_script("""
        const box = document.querySelector('nav').getBoundingClientRect();
        return [box.top, box.bottom]""")
    assert 0 <= top < bottom <= 900
    marked = "return document.querySelector('nav [aria-current]')?.hash"
    WebDriverWait(browser, TIMEOUT_S).until(lambda b: b.execute_script(marked) == "#communication")
    wide, said = browser.execute_script("""
        const places = [...document.querySelectorAll('.scroll')];
        const open = places.filter(e => !e.closest('[hidden], details:not([open])'));
        return [open.filter(e => e.scrollWidth > e.clientWidth + 2).length,
                open.filter(e => e.classList.contains('more')).length]""")
    assert wide == said and bool(wide) >= (width == 360)


def test_what_is_copied_is_the_plan(browser: WebDriver, path: Path) -> None:
    opened(browser, path)
    browser.execute_script("document.querySelector('#plan-json').closest('details').open = true")
    shown = elements(browser, "#plan-json")[0].get_attribute("textContent")
    assert json.loads(shown or "") == report_of_axes().to_dict()["plan"]
    button = elements(browser, "[data-copy='plan-json']")[0]
    button.click()
    WebDriverWait(browser, TIMEOUT_S).until(lambda _: button.text != "Copy")
    assert button.text in ("Copied", "Selected: copy it now")


def test_paper_is_light_and_has_pages(browser: WebDriver, path: Path, tmp_path: Path) -> None:
    opened(browser, path, scheme="dark")
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": "print"})
    style = "return [document.body, document.querySelector('nav')].map(e => getComputedStyle(e))"
    paper = f"{style}.map((s, k) => k ? s.display : s.backgroundColor)"
    assert browser.execute_script(paper) == ["rgb(255, 255, 255)", "none"]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": ""})
    closed = "return document.querySelectorAll('main details[data-table]:not([open])').length"
    before = browser.execute_script(closed)
    opened_by = "dispatchEvent(new Event('beforeprint'));" + closed
    assert browser.execute_script(opened_by) == 0 < before  # nobody clicks on paper
    browser.execute_script("dispatchEvent(new Event('afterprint'))")
    assert browser.execute_script(closed) == before
    assert on_paper(browser, tmp_path / "page.pdf") > 10_000
