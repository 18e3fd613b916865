"""How `make docs` builds the site: Sphinx over the pages of the repository, whose links work on the site and in a checkout."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from zstore import __version__

project, version, copyright = "zstore", __version__, "zstore contributors"  # noqa: A001
extensions = ["myst_parser", "sphinx.ext.autodoc"]
# The source folder is the root of the repository, so that a link from page to page is the same everywhere.
root_doc = "docs/index"
include_patterns = ["CHANGELOG.md", "CONTRIBUTING.md", "docs/**.md", "bench/results/*.md"]

html_theme = "furo"
html_title = f"zstore {version}"
html_copy_source = html_show_sphinx = False

# The anchors that GitHub gives to headings.
myst_heading_anchors = 4

# Docstrings put code into single backticks, as Markdown does.
default_role = "code"
autodoc_member_order = "bysource"
autodoc_default_options = {"members": True}
autodoc_typehints = "description"


def as_restructured_text(_app: Any, what: str, _name: str, _object: Any, _options: Any, lines: list[str]) -> None:
    """Take a docstring's plurals of code, and drawings in a module's, for what they are."""
    lines[:] = [re.sub(r"`(?=s\b)", r"`\\ ", line) for line in lines]
    if what == "module" and any(line.startswith("    ") for line in lines):
        lines[:] = ["::", "", *(f"    {line}" for line in lines)]


def check_site(app: Any, exception: Exception | None) -> None:
    """Refuse a site that loads anything from the network, and lead from its top to the first page."""
    if exception is not None:
        return
    out = Path(app.outdir)
    for page in out.rglob("*.html"):
        for tag in re.findall(r"<(?:script|link|img|iframe|source)\b[^>]*>", page.read_text(encoding="utf-8")):
            if re.search(r"(?:src|href)=\"(?:https?:)?//", tag):
                raise RuntimeError(f"{page} loads from the network: {tag}")
    for sheet in out.rglob("*.css"):
        if re.search(r"(?:url\(|@import)\s*[\"']?(?:https?:)?//", sheet.read_text(encoding="utf-8")):
            raise RuntimeError(f"{sheet} loads from the network")
    (out / "index.html").write_text('<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">\n')


def setup(app: Any) -> None:
    """Connect the functions above."""
    app.connect("autodoc-process-docstring", as_restructured_text)
    app.connect("build-finished", check_site)
