"""Takes a picture of every view, in both themes and as wide as a phone: `python -m tests.serve.screenshots OUT`."""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from tests.serve.browser import PHONE, WIDE, Scheme
from tests.serve.pages import HOSTILE_VIEWS, VIEWS, open_site

_LOOKS: tuple[tuple[str, tuple[int, int], Scheme], ...] = (
    ("light", WIDE, "light"), ("dark", WIDE, "dark"), ("phone", PHONE, "light"),
)  # fmt: skip


def main() -> None:
    """See the head of the file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("out", type=Path)
    parser.add_argument("--views", nargs="*", help="names of views; all without it")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder, open_site(Path(folder)) as site:
        for look, size, scheme in _LOOKS:
            watched = site.page(size=size, scheme=scheme)
            for kind, views in (("", VIEWS), ("hostile-", HOSTILE_VIEWS)):
                for view in views:
                    if options.views and kind + view.name not in options.views:
                        continue
                    page = site.open(view, watched)
                    page.wait_for_timeout(300)
                    page.screenshot(path=options.out / f"{kind}{view.name}-{look}.png", full_page=True)
        watched.check()


if __name__ == "__main__":
    main()
