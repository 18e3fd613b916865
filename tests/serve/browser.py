"""Chromium of the system with Playwright: pages that are watched for errors, dialogs and requests."""

from __future__ import annotations

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, BrowserContext, Page, sync_playwright

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

Scheme = Literal["light", "dark"]


@dataclass
class Watched:
    """A page, and what it did that it should not have done."""

    page: Page
    origin: str
    errors: list[str] = field(default_factory=list)
    """Errors on the console and exceptions; those of answers that a test asks for are taken out by it."""
    outside: list[str] = field(default_factory=list)
    """Requests to anywhere else than `origin`."""
    dialogs: list[str] = field(default_factory=list)

    def check(self) -> None:
        """Raise where anything was noted."""
        assert (self.errors, self.outside, self.dialogs) == ([], [], [])


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
    """Return a new page of `context` that may reach `origin` alone (`file://` for files)."""
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


def new_context(
    browser: Browser, *, size: tuple[int, int] = WIDE, scheme: Scheme = "light", **options: Any
) -> BrowserContext:
    """Return a context without cookies, in a window of `size`, for people who like `scheme`."""
    return browser.new_context(
        viewport={"width": size[0], "height": size[1]}, color_scheme=scheme, reduced_motion="reduce", **options
    )


_OVERFLOW = """
() => new Promise((done) => {
  const until = performance.now() + 60000;
  const look = () => {
    const { scrollWidth, clientWidth } = document.documentElement;
    if (scrollWidth <= clientWidth || performance.now() > until) done(scrollWidth - clientWidth);
    else requestAnimationFrame(look);
  };
  look();
})
"""


def overflow_px(page: Page) -> int:
    """Return by how much the page is wider than its window, once charts are drawn anew for that, or after a minute, a guard."""
    return int(page.evaluate(_OVERFLOW))
