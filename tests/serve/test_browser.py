"""The page in a browser: what it shows and does, that it stays within itself, and that names are text."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serve.browser import PHONE, WIDE, needs_chromium, overflow_px
from tests.serve.large import make_large
from tests.serve.pages import ARRAY, BEFORE, HOSTILE_VIEWS, LAST, TOKEN, VIEWS, Site, View, open_site, views_of
from tests.serve.sample import HOSTILE_ARRAY, HOSTILE_RUN, NUM_STEPS, RUN, RUN_ID, JournalWriter
from zstore.checkpoint.marks import read_marks
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


def test_a_histogram_opens_by_mouse_and_by_keyboard(site: Site) -> None:
    watched = site.page()
    page = site.open(view("checkpoint"), watched)
    page.fill("[data-test=arrays-filter]", "wte")
    page.locator("[data-test=tree-array]").first.click()
    page.wait_for_selector("[data-test=histogram]")
    assert ARRAY in page.locator("[data-test=array-name]").inner_text()
    page = site.open(view("checkpoint"), watched)
    page.fill("[data-test=arrays-filter]", "broken")
    page.keyboard.press("ArrowDown")
    page.keyboard.press("End")
    page.keyboard.press("Enter")
    page.wait_for_selector("[data-test=histogram]")
    assert page.locator("[data-test=array-nan]").inner_text().strip().endswith("3")
    assert page.locator("[data-test=array-inf]").inner_text().strip().endswith("1")
    watched.check()


def test_a_difference_shows(site: Site) -> None:
    watched = site.page()
    page = site.open(view("compare"), watched)
    assert page.locator("[data-test=compare-before]").input_value() == BEFORE
    assert page.locator("[data-test=compare-after]").input_value() == LAST
    page.fill("[data-test=compare-filter]", "wte")
    page.locator("[data-test=compare-tree] [data-test=tree-array]").first.click()
    page.wait_for_selector("[data-test=difference-values]")
    assert "0.001" in page.locator("[data-test=difference-values]").inner_text()
    page.goto(f"{site.base}{view('compare').path}&array=model/frozen.bias")
    page.wait_for_selector("[data-test=difference-detail]:has-text('is the same in both checkpoints')")
    watched.check()


def test_an_upload_has_links_once_it_is_committed(site: Site) -> None:
    job = {"id": "1", "kind": "upload", "run": RUN, "checkpoint": LAST, "state": "running", "started_at": time.time()}
    job |= {"ended_at": None, "done_bytes": 1, "total_bytes": 2, "lines": [], "problem": None}
    watched = site.page()
    page = watched.page
    page.route("**/api/jobs", lambda route: route.fulfill(json={"jobs": [job]}))
    page.goto(site.base + "/jobs")
    heading = page.locator("[data-test=job-heading]")
    assert heading.inner_text() == f"Upload of {LAST} in {RUN}"
    assert heading.locator("a").count() == 0
    box = page.locator("[data-test=jobs-list]").bounding_box()
    assert box is not None
    assert box["height"] < 200
    job["state"] = "done"
    heading.locator("a").nth(1).wait_for()
    page.unroute("**/api/jobs")
    watched.check()


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


def test_an_action_needs_the_token(site: Site) -> None:
    watched = site.page(site.guarded)
    page = watched.page
    page.goto(site.guarded)
    page.wait_for_selector("[data-test=token]")
    post = "async path => (await fetch(path, {method: 'POST'})).status"
    assert page.evaluate(post, f"/api/runs/{RUN}/checkpoints/{LAST}/verify") == 401
    assert page.evaluate(post, f"/api/runs/{RUN}/actions/stop") == 401
    page.fill("[data-test=token]", "a guess")
    page.click("[data-test=sign-in]")
    page.wait_for_selector("[data-test=token-problem]:not(:empty)")
    page.fill("[data-test=token]", TOKEN)
    page.click("[data-test=sign-in]")
    page.wait_for_selector("[data-test=run]")
    assert watched.errors
    assert all("401" in error or "403" in error for error in watched.errors), watched.errors
    watched.errors.clear()

    site.open(view("checkpoint"), watched)
    page.click("[data-test=verify]")
    page.wait_for_selector("[data-test=verify-job] [data-test=job-state]:has-text('done')")

    site.open(view("checkpoints"), watched)
    page.locator("[data-test=checkpoints-table] [data-test=grid-row]").nth(1).click()
    page.click("[data-test=mark-selected]")
    page.fill("[data-test=marks-tags]", "best, latest")
    page.fill("[data-test=marks-note]", "<b>good</b>")
    page.check("[data-test=marks-held]")
    page.click("[data-test=marks-save]")
    page.wait_for_selector("[data-test=marks-problem]:has-text('cannot be a tag that moves')")
    page.fill("[data-test=marks-tags]", "best")
    page.click("[data-test=marks-save]")
    page.wait_for_selector("[data-test=dialog]", state="detached")
    page.wait_for_selector("[data-test=mark]:has-text('@best')")
    assert page.locator("[data-test=mark]").all_inner_texts() == ["@best", "held", "<b>good</b>"]
    marked = read_marks(site.guarded_folder / RUN)
    assert (marked.tags, marked.held) == ({"best": "step-00000240"}, ["step-00000240"])
    folders = {path.name for path in (site.guarded_folder / RUN).iterdir()}
    page.click("[data-test=open-prune]")
    page.fill("[data-test=keep-last]", "2")
    page.click("[data-test=prune-dry-run]")
    page.wait_for_selector("[data-test=prune-summary]")
    assert "3 checkpoints would be removed, 2 kept" in page.locator("[data-test=prune-summary]").inner_text()
    fates = page.locator("[data-test=prune-fates] [data-test=grid-row]").all_inner_texts()
    assert [text.split("\n")[1] for text in fates][:3] == ["will be removed"] * 3
    assert {path.name for path in (site.guarded_folder / RUN).iterdir()} == folders
    page.click("[data-test=prune-remove]")
    page.click("[data-test=confirm]")
    page.wait_for_selector("[data-test=prune-job] [data-test=job-state]:has-text('done')")
    left = {path.name for path in (site.guarded_folder / RUN).iterdir()}
    assert folders - left == {"step-00000060", "step-00000120", "step-00000180"}
    page.click("[data-test=sign-out]")
    page.wait_for_selector("[data-test=token]")


@pytest.mark.soak
def test_ten_thousand_arrays_and_a_thousand_checkpoints(site: Site, tmp_path: Path) -> None:
    folder = make_large(tmp_path / "large")
    views = views_of("large", "step-00001000", "step-00000999", "model/h.7.part3.weight")[2:]
    with serving(Settings(roots=(Root.parse(str(folder)),), port=0)) as base:
        for size, scheme in ((WIDE, "light"), (PHONE, "dark")):
            watched = site.page(base, size=size, scheme=scheme)
            for each in views:
                site.open(each, watched)  # the service reads the checkpoint's metadata, and keeps it
                page = site.open(each, watched)
                assert overflow_px(page) <= 0, each
                assert page.locator("*").count() < 3000, each
            watched.check()
