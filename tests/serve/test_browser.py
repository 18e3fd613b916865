"""The page in Chromium with Playwright, over a service of the sample runs: what it shows and does, and that names are text."""

import contextlib
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright
from safetensors.numpy import load_file

from tests.serve.conftest import serving_of
from tests.serve.sample import HOSTILE_ARRAY, HOSTILE_RUN, NUM_STEPS, RUN, RUN_ID, JournalWriter, arrays_of, make_sample

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="needs Chromium: apt-get install --yes --no-install-recommends chromium"
)

WIDE, PHONE = (1280, 800), (390, 844)
"""Width and height of a window on a desk, and of a phone."""
TIMEOUT_MS = 120_000
_ARGUMENTS = (
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
)  # fmt: skip


@dataclass(frozen=True)
class View:
    """A view of the page: where it is, and what is there once it is drawn."""

    name: str
    path: str
    ready: str


def views_of(run: str, checkpoint: str) -> list[View]:
    base = f"/#/run/{quote(run, safe='')}"
    return [
        View("run", base, "[data-test=chart-loss] canvas"),
        View("memory", f"{base}/memory", "[data-test=map]"),
        View("checkpoints", f"{base}/checkpoints", "[data-test=checkpoint-link]"),
        View("checkpoint", f"{base}/checkpoint/{checkpoint}", "[data-test=array]"),
    ]


VIEWS = [View("runs", "/#/", "[data-test=run]"), *views_of(RUN, "step-00000300")]
HOSTILE_VIEWS = views_of(HOSTILE_RUN, "checkpoint-40/step-00000040")


@dataclass
class Watched:
    """A page, and what it did that it should not have done."""

    page: Page
    origin: str
    errors: list[str] = field(default_factory=list)
    """Errors on the console and exceptions."""
    outside: list[str] = field(default_factory=list)
    """Requests to anywhere else than `origin`."""
    dialogs: list[str] = field(default_factory=list)

    def check(self) -> None:
        assert (self.errors, self.outside, self.dialogs) == ([], [], [])

    def open(self, view: View) -> Page:
        self.page.goto(self.origin + view.path)
        self.page.wait_for_selector(view.ready)
        return self.page

    def turn_to(self, view: View) -> Page:
        """Show a view as a link within the page does, without loading the page again, and wait until it is drawn."""
        self.page.evaluate("path => { location.hash = path.slice(1); }", view.path)
        self.page.wait_for_selector(view.ready)
        return self.page


@contextlib.contextmanager
def open_browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


def watch(context: BrowserContext, origin: str) -> Watched:
    page = context.new_page()
    page.set_default_timeout(TIMEOUT_MS)
    watched = Watched(page, origin)

    def on_console(message: Any) -> None:
        if message.type in ("error", "warning"):
            watched.errors.append(f"{message.text} ({message.location.get('url')})")

    def on_request(request: Any) -> None:
        parts = urlsplit(request.url)
        if parts.scheme not in ("data", "blob") and f"{parts.scheme}://{parts.netloc}" != origin:
            watched.outside.append(request.url)

    def on_dialog(dialog: Any) -> None:
        watched.dialogs.append(dialog.message)
        dialog.dismiss()

    page.on("console", on_console)
    page.on("pageerror", lambda error: watched.errors.append(str(error)))
    page.on("request", on_request)
    page.on("dialog", on_dialog)
    return watched


def overflow_px(page: Page) -> int:
    """Return by how much the page is wider than its window, once charts are drawn anew for that, or after a minute, a guard."""
    wider = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
    with contextlib.suppress(Exception):
        page.wait_for_function(f"{wider} <= 0", timeout=60_000)
    return int(page.evaluate(wider))


@dataclass
class Site:
    folder: Path
    base: str
    browser: Browser

    @contextlib.contextmanager
    def page(self, *, size: tuple[int, int] = WIDE, scheme: Literal["light", "dark"] = "light") -> Iterator[Watched]:
        viewport: Any = {"width": size[0], "height": size[1]}
        context = self.browser.new_context(viewport=viewport, color_scheme=scheme, reduced_motion="reduce")
        with contextlib.closing(context):
            watched = watch(context, self.base)
            yield watched
            watched.check()


pytestmark = needs_chromium


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = make_sample(tmp_path_factory.mktemp("site") / "runs")
    with serving_of(folder) as base, open_browser() as browser:
        yield Site(folder, base, browser)


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
