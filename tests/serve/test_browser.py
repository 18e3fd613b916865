"""The page in a browser: what it shows and does, that it stays within itself, and that names are text."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import zarr

from tests.serve.browser import PHONE, WIDE, needs_chromium, overflow_px, watch
from tests.serve.pages import ARRAY, HOSTILE_VIEWS, TOKEN, VIEWS, Site, View, open_site
from tests.serve.sample import HOSTILE_ARRAY, HOSTILE_RUN, NUM_STEPS, RUN, RUN_ID, JournalWriter
from zstore.serve.server import serving
from zstore.serve.settings import Root, Settings

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with open_site(tmp_path_factory.mktemp("site")) as site:
        yield site


def view(name: str) -> View:
    return next(view for view in VIEWS if view.name == name)


def test_every_view_has_a_url_that_shows_it_again_and_fits_a_phone(site: Site) -> None:
    watched = site.page()
    site.open(view("runs"), watched)
    for each in VIEWS:
        page = site.turn_to(each, watched)
        heading = page.locator("h1, h2").all_inner_texts()
        url = page.url
        assert url.startswith(site.base + each.path.split("?")[0])
        page.reload()
        page.wait_for_selector(each.ready)
        assert page.url == url
        assert page.locator("h1, h2").all_inner_texts() == heading, each
        assert overflow_px(page) <= 0, each
        page.set_viewport_size({"width": PHONE[0], "height": PHONE[1]})
        assert overflow_px(page) <= 0, each
        page.set_viewport_size({"width": WIDE[0], "height": WIDE[1]})
    watched.check()


def test_names_from_files_are_text(site: Site) -> None:
    watched = site.page(size=PHONE, scheme="dark")
    page = site.open(view("runs"), watched)
    assert HOSTILE_RUN in page.locator("[data-test=run] a").all_inner_texts()
    for each in HOSTILE_VIEWS:
        page = site.turn_to(each, watched)
        assert page.locator("[data-test=run-name]").inner_text() == HOSTILE_RUN
        assert page.locator("img, main script, iframe").count() == 0
        assert overflow_px(page) <= 0, each
        if each.name == "array":
            assert page.locator("[data-test=array-name]").inner_text() == HOSTILE_ARRAY
    page = site.turn_to(view("run"), watched)
    assert "<b>expected 2 GB/s</b>" in page.locator("[data-test=warnings]").inner_text()
    watched.check()


def test_steps_appear_while_the_page_is_open(site: Site) -> None:
    watched = site.page()
    page = site.open(view("run"), watched)
    assert f"{NUM_STEPS}" in page.locator("[data-test=fact-step]").inner_text()
    journal = JournalWriter(site.folder / RUN / f"journal-{RUN_ID}.jsonl", time.time(), NUM_STEPS)
    journal.steps(7, step_s=0.01)
    page.wait_for_function(
        "wanted => document.querySelector('[data-test=fact-step]').innerText.includes(wanted)", arg=f"{NUM_STEPS + 7}"
    )
    watched.check()


def test_curves_are_read_and_zoomed_together_by_mouse_and_by_keyboard(site: Site) -> None:
    watched = site.page()
    page = site.open(view("run"), watched)
    loss, rate = page.locator("[data-test=chart-loss] .plot"), page.locator("[data-test=chart-lr] .plot")
    assert (loss.get_attribute("aria-label") or "").startswith("Loss by step, from 1 to ")
    place = page.locator("[data-test=chart-loss] .u-over").bounding_box()
    assert place is not None
    middle, at = place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
    page.mouse.move(middle, at)
    step = rate.get_attribute("aria-valuenow")
    assert step is not None
    assert abs(int(step) - NUM_STEPS / 2) < 10
    assert rate.get_attribute("aria-valuetext") == f"step {step}: lr 0.0003"
    page.mouse.down()
    page.mouse.move(middle + 50, at)
    page.mouse.move(middle + 100, at)
    page.mouse.up()
    page.wait_for_function("location.hash.includes('from=')")
    zoomed = page.url
    page.reload()
    page.wait_for_selector(view("run").ready)
    assert page.locator("[data-test=zoom-all]").is_enabled()
    loss.focus()
    page.keyboard.press("Home")
    first = rate.get_attribute("aria-valuenow")
    assert f"from={first}" in zoomed or f"from={int(first or 0) - 1}" in zoomed
    page.keyboard.press("Shift+PageUp")
    page.keyboard.press("Shift+PageUp")
    page.keyboard.press("Enter")
    page.wait_for_function("before => location.href !== before", arg=zoomed)
    assert f"from={first}&" in page.url
    page.keyboard.press("Escape")
    page.wait_for_function("!location.hash.includes('?')")
    watched.check()


def test_an_array_opens_by_mouse_and_by_keyboard(site: Site) -> None:
    watched = site.page()
    page = site.open(view("checkpoint"), watched)
    page.fill("[data-test=arrays-filter]", "wte")
    page.locator("[data-test=tree-array]").first.click()
    assert ARRAY in page.locator("[data-test=array-name]").inner_text()
    url = page.locator("[data-test=zarr-url]").inner_text()
    stored = zarr.open_array(url, mode="r")
    assert str(stored.dtype) in page.locator("[data-test=array-detail]").inner_text()
    page.fill("[data-test=arrays-filter]", "broken")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-test=array-name]:has-text('broken')")
    watched.check()


def test_a_browser_signs_in_by_itself(site: Site) -> None:
    with serving(Settings(roots=(Root.parse(str(site.folder)),), port=0, read_token=TOKEN)) as base:
        context = site.browser.new_context(http_credentials={"username": "me", "password": TOKEN})
        watched = watch(context, base)
        watched.page.goto(f"{base}/{RUN}")
        watched.page.wait_for_selector(view("run").ready)
        watched.check()
        context.close()


def test_sizes_in_memory_are_whole_on_a_phone(site: Site) -> None:
    watched = site.page(size=PHONE)
    page = site.open(view("memory"), watched)
    ends = "[...document.querySelectorAll('.rowgrid, .rowgrid-row .numeric')].map(one => one.getBoundingClientRect().right)"
    grid, *cells = page.evaluate(ends)
    assert 0 < max(cells) <= grid
    coloured = "getComputedStyle(document.querySelector('[data-test=plan] .key:last-child .swatch')).backgroundColor"
    assert page.evaluate(coloured) != "rgba(0, 0, 0, 0)"
    watched.check()


def test_the_keyboard_reaches_everything(site: Site) -> None:
    watched = site.page()
    page = site.open(view("runs"), watched)
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the link that skips to the content
    page.wait_for_function("document.activeElement.id === 'main'")
    reached: set[str] = set()
    for _ in range(40):
        page.keyboard.press("Tab")
        focused = page.evaluate("document.activeElement.textContent")
        if focused == RUN:
            break
        reached.add(focused)
    page.keyboard.press("Enter")
    page.wait_for_selector(view("run").ready)
    assert page.url.endswith(f"#/run/{RUN}")
    watched.check()


def test_the_theme_that_was_chosen_stays(site: Site) -> None:
    watched = site.page(size=WIDE, scheme="dark")
    page = site.open(view("runs"), watched)
    dark = page.evaluate("getComputedStyle(document.body).backgroundColor")
    theme = page.locator("[data-test=theme]")
    seen = {dark}
    for _ in range(3):
        theme.click()
        now = page.evaluate("getComputedStyle(document.body).backgroundColor")
        seen.add(now)
        if now != dark:
            page.reload()
            page.wait_for_selector(view("runs").ready)
            assert page.evaluate("getComputedStyle(document.body).backgroundColor") == now
    assert len(seen) == 2
    page.evaluate("localStorage.clear()")
    watched.check()
