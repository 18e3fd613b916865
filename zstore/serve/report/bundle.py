"""The page as one file: its styles, its modules and its data inside, and a policy that allows these and nothing else.

[Note: modules in one script]
A page that is opened from a disk may not load modules, and a policy that allowed `data:` URLs would allow any script. So each
module becomes a function that is called at once and returns the exports of the module, after those that it imports from, and
all are in one script that the policy names by its hash. That holds for modules that import each other in no circle, export
declarations by name, never change their exports, and load nothing at run time; others are refused.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import posixpath
import re
from collections.abc import Mapping
from dataclasses import dataclass
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from urllib.parse import quote, quote_plus

_FOLDER = Path(__file__).parents[1] / "assets"
_LESS = "\\u003c"
"""`<` in the data, which cannot end an element in this form."""
ASSETS = "/assets/"
"""First part of the paths of the page's files in the service."""
DATA_ID = "report-data"
"""Id of the element that holds the data."""
NOTE_BEFORE = '<main id="main"'
"""The text before which the note is inserted."""

_IMPORT = re.compile(
    r"""^import\s+(?:(?P<what>[^"';]+?)\s+from\s+)?["'](?P<source>[^"']+)["'];?[ \t]*$""", re.MULTILINE
)
_EXPORT = re.compile(r"^export\s+(?=(?:async\s+function\*?|function\*?|class|const)\s*(?P<name>[\w$]+))", re.MULTILINE)
_EXPORT_LIST = re.compile(r"^export\s*\{(?P<names>[^}]*)\};?[ \t]*$", re.MULTILINE)
_NOT_SERVED = re.compile(r"^(?:import|export)\b.*$|\bimport\s*\(|\bimport\.meta\b|^await\b", re.MULTILINE)
_SCRIPT = re.compile(r'<script(?P<module> type="module")? src="/assets/(?P<name>[^"]+)"(?: defer)?></script>\s*')
_STYLES = re.compile(r'<link rel="stylesheet" href="/assets/(?P<name>[^"]+)"\s*/?>')
_PRELOAD = re.compile(r'<link rel="modulepreload"[^>]*>\s*')
_ICON = re.compile(r'(?P<before><link rel="icon"[^>]* href=")/assets/(?P<name>[^"]+)"')
_TYPES = {"svg": "image/svg+xml", "png": "image/png"}


@dataclass(frozen=True, kw_only=True)
class Inside:
    """The parts that are put into the page."""

    data: Mapping[str, str]
    """JSON by path of the API."""
    title: str
    note: str
    """A line of text above the view."""


def one_file(page: str, assets: Mapping[str, bytes], inside: Inside) -> str:
    """Return `page`, HTML that names its files below `/assets/`, with these and the data inside; `assets` are by name.

    Raises ValueError if the page uses its files in a way that one file cannot; see [Note: modules in one script].
    """
    scripts: list[str] = []
    styles: list[str] = []
    last: list[str] = []

    def style(match: re.Match[str]) -> str:
        styles.append(_text(assets, match["name"]))
        return f"<style>{styles[-1]}</style>"

    def script(match: re.Match[str]) -> str:
        if match["module"]:  # runs once the page was read: it goes to the end
            scripts.append(bundle(assets, match["name"]))
            last.append(f"<script>{scripts[-1]}</script>\n")
            return ""
        scripts.append(_text(assets, match["name"]))
        return f"<script>{scripts[-1]}</script>\n"

    def icon(match: re.Match[str]) -> str:
        kind = _TYPES[match["name"].rpartition(".")[2]]
        return f'{match["before"]}data:{kind};base64,{base64.b64encode(assets[match["name"]]).decode()}"'

    page = page.replace("</head>", '<link rel="stylesheet" href="/assets/report.css"></head>', 1)
    page = _ICON.sub(icon, _SCRIPT.sub(script, _STYLES.sub(style, _PRELOAD.sub("", page))))
    page = re.sub(r"<title>.*?</title>", lambda _: f"<title>{html.escape(inside.title)}</title>", page, count=1)
    for text in (*scripts, *styles):
        if re.search(r"</(?:script|style)|<!--", text, re.IGNORECASE) or ASSETS in text:
            raise ValueError(f"a script or style of the page ends its element, or names {ASSETS}: {text[:80]!r}")
    meta = f'<meta http-equiv="Content-Security-Policy" content="{_policy(scripts, styles)}">\n'
    data = f'<script type="application/json" id="{DATA_ID}">{_json(inside.data)}</script>\n'
    head, body = page.find("<head>"), page.rfind("</body>")
    if min(head, body) < 0 or f'"{ASSETS}' in page:
        raise ValueError(
            f"the page has no <head> and </body>, or names {ASSETS} elsewhere than in a script, style or icon"
        )
    head += len("<head>")
    page = f"{page[:head]}\n{meta}{page[head:body]}{data}{''.join(last)}{page[body:]}"
    return page.replace(NOTE_BEFORE, f'<p class="report-note">{html.escape(inside.note)}</p>\n    {NOTE_BEFORE}', 1)


def answer_bytes(path: str, answer: str) -> int:
    """Return the bytes that an answer, JSON, takes inside the page."""
    return len(answer.encode()) + (len(_LESS) - 1) * answer.count("<") + len(json.dumps(path)) + len(":,\n")


def api_path(*segments: str, **query: str) -> str:
    """Return the path of an answer as the page writes it: `api` of `assets/data.js`, character by character."""
    path = "/".join(["/api", *(quote(segment, safe="/-_.!~*'()") for segment in segments)])
    text = "&".join(f"{name}={quote_plus(value, safe='*').replace('~', '%7E')}" for name, value in query.items())
    return f"{path}?{text}" if text else path


def read_assets() -> dict[str, bytes]:
    """Return the files of the page by their names."""
    found = sorted(path for path in _FOLDER.rglob("*") if path.is_file())
    return {path.relative_to(_FOLDER).as_posix(): path.read_bytes() for path in found}


def bundle(assets: Mapping[str, bytes], entry: str) -> str:
    """Return one script that does the work of the module `entry`, with those that it imports; see the note above."""
    graph: dict[str, set[str]] = {}
    open_names = [entry]
    while open_names:
        name = open_names.pop()
        if name not in graph:
            graph[name] = {_source(name, match["source"]) for match in _IMPORT.finditer(_text(assets, name))}
            open_names += sorted(graph[name])
    sorter = TopologicalSorter({name: sorted(graph[name]) for name in sorted(graph)})
    try:
        order = tuple(sorter.static_order())
    except CycleError as error:
        raise ValueError(f"modules of the page import each other in a circle: {' -> '.join(error.args[1])}") from error
    return '"use strict";\n(() => {\n' + "".join(_wrapped(name, _text(assets, name)) for name in order) + "})();\n"


def _wrapped(name: str, code: str) -> str:
    def imported(match: re.Match[str]) -> str:
        what, made = match["what"], _variable(_source(name, match["source"]))
        if what is None:
            return ""
        if what.startswith("* as "):
            return f"const {what[5:].strip()} = {made};"
        if not what.startswith("{"):
            raise ValueError(f"{name}: expected `import {{ names }}` or `import * as name`, got {match[0]!r}")
        names = re.sub(r"\s+as\s+", ": ", " ".join(what.split()))
        return f"const {names} = {made};"

    bare = _without_comments(code)
    exported = [match["name"] for match in _EXPORT.finditer(bare)]
    for match in _EXPORT_LIST.finditer(bare):
        for each in filter(None, (part.strip() for part in match["names"].split(","))):
            own, _, public = each.partition(" as ")
            exported.append(f"{public.strip()}: {own.strip()}" if public else own)
    code = _EXPORT_LIST.sub("", _EXPORT.sub("", _IMPORT.sub(imported, code)))
    if (other := _NOT_SERVED.search(_without_comments(code))) is not None:
        raise ValueError(f"{name}: {other[0].strip()!r} cannot be put into one script")
    return f"// {name}\nconst {_variable(name)} = (() => {{\n{code}\nreturn {{ {', '.join(exported)} }};\n}})();\n"


def _source(module: str, text: str) -> str:
    if not text.startswith(("./", "../")):
        raise ValueError(f"{module} imports {text!r}: expected a path that begins with './' or '../'")
    return posixpath.normpath(posixpath.join(posixpath.dirname(module), text))


def _variable(name: str) -> str:
    return "$" + re.sub(r"\W", "_", name)


def _without_comments(code: str) -> str:
    return re.sub(r"/\*(?s:.*?)\*/|^\s*//.*$", "", code, flags=re.MULTILINE)


def _text(assets: Mapping[str, bytes], name: str) -> str:
    try:
        return assets[name].decode().replace("\r\n", "\n")
    except KeyError:
        raise ValueError(f"the page names {name}, which is not among its files") from None


def _policy(scripts: list[str], styles: list[str]) -> str:
    return (
        f"default-src 'none'; script-src {_hashes(scripts)}; style-src {_hashes(styles)}; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


def _hashes(texts: list[str]) -> str:
    found = (base64.b64encode(hashlib.sha256(text.encode()).digest()).decode() for text in texts)
    return " ".join(f"'sha256-{digest}'" for digest in found) or "'none'"


def _json(data: Mapping[str, str]) -> str:
    """Return one JSON object of these, which ends no element and begins no comment, whatever names it holds."""
    text = "{" + ",\n".join(f"{json.dumps(path)}:{answer}" for path, answer in data.items()) + "}"
    return text.replace("<", _LESS).replace("\u2028", "\\u2028").replace("\u2029", "\\u2029")
