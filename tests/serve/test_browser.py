"""The page in a browser: what it shows and does, that it stays within itself, and that names are text."""

import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.numpy import load_file

from tests.serve.browser import (
    HOSTILE_VIEWS,
    PHONE,
    VIEWS,
    WIDE,
    Site,
    View,
    Watched,
    needs_chromium,
    open_site,
    overflow_px,
)
from tests.serve.sample import HOSTILE_ARRAY, HOSTILE_RUN, NUM_STEPS, RUN, RUN_ID, JournalWriter, arrays_of

pytestmark = needs_chromium


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    with open_site(tmp_path_factory.mktemp("site")) as site:
        yield site


@pytest.fixture
def watched(site: Site) -> Iterator[Watched]:
    with site.page() as watched:
        yield watched


def view(name: str) -> View:
    return next(view for view in VIEWS if view.name == name)


def test_every_view_has_a_url_that_shows_it_again_and_fits_a_phone(site: Site, watched: Watched) -> None:
    watched.open(view("runs"))
    for each in VIEWS:
        page = watched.turn_to(each)
        heading = page.locator("h1, h2").all_inner_texts()
        assert page.url == site.base + each.path
        page.reload()
        page.wait_for_selector(each.ready)
        assert page.locator("h1, h2").all_inner_texts() == heading, each
        for width, height in (WIDE, PHONE, WIDE):
            page.set_viewport_size({"width": width, "height": height})
            assert overflow_px(page) <= 0, (each, width)


def test_names_from_files_are_text(site: Site) -> None:
    with site.page(size=PHONE, scheme="dark") as watched:
        page = watched.open(view("runs"))
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(14, 18, 22)"
        assert HOSTILE_RUN in page.locator("[data-test=run] a").all_inner_texts()
        for each in HOSTILE_VIEWS:
            watched.turn_to(each)
            assert page.locator("[data-test=run-name]").inner_text() == HOSTILE_RUN
            assert page.locator("img, main script, iframe").count() == 0
            assert overflow_px(page) <= 0, each
        assert HOSTILE_ARRAY in page.locator("[data-test=array] a").all_inner_texts()
        watched.turn_to(view("run"))
        assert "<b>no space left</b>" in page.locator("[data-test=saves]").inner_text()


def test_steps_appear_while_the_page_is_open(site: Site, watched: Watched) -> None:
    page = watched.open(view("run"))
    assert f"{NUM_STEPS}" in page.locator("[data-test=fact-step]").inner_text()
    journal = JournalWriter(site.folder / RUN / f"journal-{RUN_ID}.jsonl", time.time(), NUM_STEPS)
    journal.steps(7, step_s=0.01)
    shown = "wanted => document.querySelector('[data-test=fact-step]').innerText.includes(wanted)"
    page.wait_for_function(shown, arg=f"{NUM_STEPS + 7}")
    label = page.locator("[data-test=chart-loss] .plot").get_attribute("aria-label") or ""
    assert label.startswith(f"Loss, steps 1 to {NUM_STEPS + 7}: loss from ")


def test_curves_are_read_and_zoomed_together_by_mouse_and_by_keyboard(watched: Watched) -> None:
    page = watched.open(view("run"))
    loss, rate = page.locator("[data-test=chart-loss] .plot"), page.locator("[data-test=chart-lr] .plot")

    def read() -> int:
        return int(rate.get_attribute("aria-valuenow") or 0)

    place = page.locator("[data-test=chart-loss] .u-over").bounding_box()
    assert place is not None
    middle, at = place["x"] + place["width"] / 2, place["y"] + place["height"] / 2
    page.mouse.move(middle, at)
    step = read()
    assert abs(step - NUM_STEPS / 2) < 10
    assert rate.get_attribute("aria-valuetext") == f"step {step}: lr 0.0003"
    page.mouse.down()
    page.mouse.move(middle + 50, at)
    page.mouse.move(middle + 100, at)
    page.mouse.up()
    page.wait_for_selector("[data-test=zoom-all]:enabled")
    loss.focus()
    page.keyboard.press("Home")
    assert abs(read() - step) <= 1, "the first step that is shown"
    page.keyboard.press("Escape")
    assert page.locator("[data-test=zoom-all]").is_disabled()
    page.keyboard.press("Home")
    assert read() == 1
    page.keyboard.press("+")
    assert page.locator("[data-test=zoom-all]").is_enabled()
    page.emulate_media(color_scheme="dark")
    page.keyboard.press("End")
    assert read() < NUM_STEPS


def test_arrays_are_filtered_and_sorted_and_the_map_leads_to_them(watched: Watched) -> None:
    page = watched.open(view("checkpoint"))
    arrays = arrays_of()
    assert page.locator("[data-test=array]").count() == len(arrays)
    page.locator("[data-test=sort-nbytes]").click()
    assert page.locator("[data-test=array] a").first.inner_text() == "model/wte.weight"
    page.fill("[data-test=filter]", "exp_avg ln")
    assert page.locator("[data-test=found]").inner_text().startswith(f"12 of {len(arrays)} arrays, ")
    assert page.locator("[data-test=array]").count() == 12
    watched.turn_to(view("memory"))
    boxes = "[...document.querySelectorAll('.map-box')].map(({title, style}) => [title, style.width, style.height])"
    found = page.evaluate(boxes)
    areas = {name.partition(":")[0]: float(wide.rstrip("%")) * float(high.rstrip("%")) for name, wide, high in found}
    assert areas.keys() == arrays.keys()
    host = {name: array.nbytes for name, array in arrays.items() if name.startswith("model/")}
    for name, nbytes in host.items():
        assert areas[name] == pytest.approx(1e4 * nbytes / sum(host.values()), rel=1e-3)
    page.locator("[data-test=map] [title^='model/wte.weight']").click()
    assert page.locator("[data-test=placed-array] th").all_inner_texts() == ["model/wte.weight"]


def test_weights_are_downloaded_in_the_type_that_is_chosen(watched: Watched, tmp_path: Path) -> None:
    page = watched.open(view("checkpoint"))
    link = page.locator("[data-test=weights-download]")
    for dtype in ("bf16", "fp32"):
        page.select_option("[data-test=weights-dtype]", dtype)
        assert (link.get_attribute("href") or "").endswith(f"/model.safetensors?dtype={dtype}")
    with page.expect_download() as download:
        link.click()
    download.value.save_as(tmp_path / "model.safetensors")
    assert load_file(tmp_path / "model.safetensors")["frozen.bias"].shape == arrays_of()["model/frozen.bias"].shape


def test_the_keyboard_reaches_everything(watched: Watched) -> None:
    page = watched.open(view("runs"))
    page.keyboard.press("Tab")
    page.keyboard.press("Enter")  # the link that skips to the content
    page.wait_for_function("document.activeElement.id === 'main'")
    for _ in range(40):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.textContent") == RUN:
            break
    page.keyboard.press("Enter")
    page.wait_for_selector(view("run").ready)
    assert page.url.endswith(f"#/run/{RUN}")
