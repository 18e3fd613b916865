"""Chromium of the system with Playwright, over a service of the sample runs: pages watched for errors, dialogs and requests."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote, urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

from tests.serve.sample import HOSTILE_RUN, RUN, make_sample
from zstore.serve.server import serving
from zstore.serve.settings import Root, Settings

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
    """Return all views of a run."""
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
        """Raise where anything was noted."""
        assert (self.errors, self.outside, self.dialogs) == ([], [], [])

    def open(self, view: View) -> Page:
        """Show a view and wait until it is drawn."""
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
    """Start Chromium with a profile of its own for the length of a `with` block."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(_ARGUMENTS))
        try:
            yield browser
        finally:
            browser.close()


def watch(context: BrowserContext, origin: str) -> Watched:
    """Return a new page of `context` that may reach `origin` alone."""
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
    """A service over the sample, and a browser."""

    folder: Path
    base: str
    browser: Browser

    @contextlib.contextmanager
    def page(self, *, size: tuple[int, int] = WIDE, scheme: Literal["light", "dark"] = "light") -> Iterator[Watched]:
        """Yield a page in a window of `size`, for people who like `scheme`; it is checked at the end."""
        viewport: Any = {"width": size[0], "height": size[1]}
        context = self.browser.new_context(viewport=viewport, color_scheme=scheme, reduced_motion="reduce")
        with contextlib.closing(context):
            watched = watch(context, self.base)
            yield watched
            watched.check()


@contextlib.contextmanager
def open_site(folder: Path) -> Iterator[Site]:
    """Make the sample in `folder`, serve it, and start a browser."""
    make_sample(folder / "runs")
    settings = Settings(roots=(Root.parse(str(folder / "runs")),), port=0)
    with serving(settings) as base, open_browser() as browser:
        yield Site(folder / "runs", base, browser)
