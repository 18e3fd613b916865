"""A service over the sample runs, with and without a token, and a browser that looks at its pages."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import quote

from playwright.sync_api import Browser, Page

from tests.serve.browser import WIDE, Scheme, Watched, new_context, open_browser, watch
from tests.serve.sample import HOSTILE_RUN, RUN, make_sample
from zstore.serve.server import serving
from zstore.serve.settings import Root, Settings

TOKEN = "correct-horse-battery-staple"
LAST = "step-00000300"


@dataclass(frozen=True)
class View:
    """A view of the page: where it is, and what is there once it is drawn."""

    name: str
    path: str
    ready: str


def views_of(run: str, last: str) -> list[View]:
    """Return all views of a run."""
    base = f"/#/run/{quote(run, safe='')}"
    return [
        View("run", base, "[data-test=chart-loss] canvas"),
        View("memory", f"{base}/memory", "[data-test=map]"),
        View("checkpoints", f"{base}/checkpoints", "[data-test=checkpoint-link]"),
        View("checkpoint", f"{base}/checkpoint/{last}", "[data-test=array]"),
    ]


VIEWS = [
    View("runs", "/#/", "[data-test=run]"),
    *views_of(RUN, LAST),
]
HOSTILE_VIEWS = views_of(HOSTILE_RUN, "checkpoint-40/step-00000040")


@dataclass
class Site:
    """A service, and the pages that tests share."""

    folder: Path
    base: str
    browser: Browser
    _pages: dict[tuple[str, tuple[int, int], Scheme], Watched] = field(default_factory=dict)

    def page(self, origin: str | None = None, *, size: tuple[int, int] = WIDE, scheme: Scheme = "light") -> Watched:
        """Return the page of that origin, size and theme, blank, with nothing noted."""
        key = (origin or self.base, size, scheme)
        if key not in self._pages:
            self._pages[key] = watch(new_context(self.browser, size=size, scheme=scheme), key[0])
        watched = self._pages[key]
        watched.page.goto("about:blank")
        watched.errors.clear()
        return watched

    def open(self, view: View, watched: Watched) -> Page:
        """Show a view and wait until it is drawn."""
        watched.page.goto(watched.origin + view.path)
        watched.page.wait_for_selector(view.ready)
        return watched.page

    def turn_to(self, view: View, watched: Watched) -> Page:
        """Show a view as a link within the page does, without loading the page again, and wait until it is drawn."""
        watched.page.evaluate("path => { location.hash = path.slice(1); }", view.path)
        watched.page.wait_for_selector(view.ready)
        return watched.page


@contextlib.contextmanager
def open_site(folder: Path) -> Iterator[Site]:
    """Make the sample in `folder`, serve it, and start a browser."""
    make_sample(folder / "runs")
    settings = Settings(roots=(Root.parse(str(folder / "runs")),), port=0)
    with serving(settings) as base, open_browser() as browser:
        yield Site(folder / "runs", base, browser)
