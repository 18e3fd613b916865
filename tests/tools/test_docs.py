"""Links of all pages lead somewhere, every page is on the site, and all that pages name and print is there."""

import ast
import pkgutil
import re
import shlex
import sys
import textwrap
from collections import Counter
from pathlib import Path

import pytest
import typer

from bench import figures
from tests import warm
from tests.layout import per_ten_thousand_words
from zstore.engine.config.parse import load_jsonc
from zstore.tools import cli

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
AT_THE_TOP = ("README", "README.ko", "SECURITY", "CONTRIBUTING", "CHANGELOG")
PAGES = [*(ROOT / f"{name}.md" for name in AT_THE_TOP), *DOCS.rglob("*.md"), *ROOT.glob("bench/results/*.md")]
PAGES.sort()


FENCE = re.MULTILINE | re.DOTALL


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """What GitHub calls the headings of a page."""
    found: Counter[str] = Counter()
    names = set()
    for heading in re.findall(r"^#{1,6} (.*)$", prose(page), re.MULTILINE):
        text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading)
        name = re.sub(r"[^\w\- ]", "", text.strip().lower()).replace(" ", "-")
        names.add(f"{name}-{found[name]}" if found[name] else name)
        found[name] += 1
    return names


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = page if not path else (page.parent / path).resolve()
        if not target.exists() or (anchor and anchor not in anchors(target)):
            dead.append(link)
    assert dead == []


def test_every_page_is_on_the_site() -> None:
    listed = [DOCS / f"{name}.md" for name in re.findall(r"^[\w\-./]+$", (DOCS / "index.md").read_text(), re.MULTILINE)]
    notes = set(re.findall(r"\((0\d+-[\w-]+\.md)\)", (DOCS / "design/index.md").read_text()))
    assert {page.resolve() for page in listed} >= set(DOCS.glob("*.md")) - {DOCS / "index.md"}
    assert notes == {page.name for page in DOCS.glob("design/0*.md")}
    assert [name[:4] for name in sorted(notes)] == [f"{number:04}" for number in range(1, len(notes) + 1)]


def test_the_tree_of_the_page_is_there() -> None:
    page = (DOCS / "how-it-works.md").read_text(encoding="utf-8")
    tree = page.partition("## Source tree")[2].partition("```\n")[2].partition("```")[0]
    top, found = ROOT, set()
    for line in tree.splitlines():
        names = re.match(r"\s*((?:[\w.]+(?:/|\.py) )*[\w.]+(?:/|\.py))", line)
        assert names, line
        if not line.startswith(" "):
            top = ROOT / names[1].split()[0]
        for name in names[1].split():
            path = top / name if line.startswith(" ") else ROOT / name
            assert path.exists(), f"{path.relative_to(ROOT)} is not there"
            found.add(path)
    packages = {path.parent for top in ("zstore", "engine", "tools") for path in ROOT.glob(f"{top}/*/__init__.py")}
    links = {ROOT / "zstore/engine", ROOT / "zstore/tools"}
    assert {path for path in packages - links if path not in found} == set()


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    code = text.partition("```python\n")[2].partition("```")[0]
    assert len([line for line in code.splitlines() if line]) <= 12
    assert {"make demo", "make test"} <= set(re.findall(r"^make \w+", text, re.MULTILINE))
    for picture in DOCS.glob("pictures/*"):
        assert picture.stat().st_size < 200_000, picture


def test_the_korean_readme_has_the_same_code_commands_links_and_figures() -> None:
    def facts(name: str) -> tuple[list[str], list[str]]:
        text = (ROOT / name).read_text(encoding="utf-8")
        code = "".join(re.findall(r"^```\w+\n(.*?)^```", text, FENCE)).splitlines()
        links_and_figures = re.findall(r"(?<=\]\()(?!README)[^)\s]+|\d+\.\d+", text)
        return [line.partition("  #")[0].rstrip() for line in code], sorted(links_and_figures)

    assert facts("README.ko.md") == facts("README.md")


def test_charts_and_tables_are_those_of_the_results() -> None:
    assert [file for file, text in figures.written().items() if file.read_text(encoding="utf-8") != text] == []


@pytest.mark.parametrize("page", [page for page in PAGES if "results" not in page.parts], ids=lambda page: page.name)
def test_files_that_a_page_names_are_there(page: Path) -> None:
    named = re.findall(r"`((?:zstore|engine|tools|tests|bench|examples|docs)/[\w./*-]+)`", prose(page))
    assert [name for name in named if not any(ROOT.glob(name.rstrip("/")))] == []


MOST_IN_10_000_WORDS = {
    r"\bwhere\b": 15,
    r"\bwhat (is|are|was|were|has|it|they|the)\b": 10,
    r"\b(lie|lies|rest|rests|stand|stands)\b": 3,
}
"""Words that may name a place or begin a question. The page of keys is not counted: the schema's docstrings make it."""


@pytest.mark.parametrize("words", MOST_IN_10_000_WORDS)
def test_pages_are_plain(words: str) -> None:
    texts = {page.name: prose(page) for page in PAGES if page.name not in ("CHANGELOG.md", "config.md")}
    found = Counter({name: len(re.findall(words, text, re.IGNORECASE)) for name, text in texts.items()})
    assert per_ten_thousand_words(" ".join(texts.values()), words) <= MOST_IN_10_000_WORDS[words], found.most_common(10)


def blocks(language: str) -> list[str]:
    texts = (page.read_text(encoding="utf-8") for page in PAGES)
    return [
        textwrap.dedent(code) for text in texts for code in re.findall(rf"^ *```{language}\n(.*?)^ *```", text, FENCE)
    ]


@pytest.mark.parametrize("code", blocks("python"), ids=lambda code: code.partition("\n")[0])
def test_printed_python_can_be_read_and_imports_names_that_are_there(code: str) -> None:
    """Most of it is run by the tests of the page's subject; so is `zstore.lightning`, whose import stands in for DeepSpeed."""
    for node in ast.walk(compile(code, "page", "exec", ast.PyCF_ONLY_AST | ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)):
        if isinstance(node, ast.ImportFrom) and re.match(r"zstore\b(?!\.lightning)", node.module or ""):
            for alias in node.names:
                pkgutil.resolve_name(f"{node.module}:{alias.name}")


def test_the_reference_names_what_is_there() -> None:
    """Sphinx, which reads the docstrings too, runs in `make docs`."""
    texts = [page.read_text(encoding="utf-8") for page in DOCS.glob("reference.md")]
    named = [name for text in texts for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)", text, re.MULTILINE)]
    assert len(named) > 15
    for name in named:
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("code", blocks("json"))
def test_printed_json_can_be_read(code: str) -> None:
    load_jsonc(code if code.startswith("{") else f"{{{code}}}", "page")


def commands() -> list[list[str]]:
    lines = "\n".join([*blocks("bash"), *blocks("sh")]).replace("\\\n", " ").splitlines()
    return [shlex.split(line, comments=True) for line in lines if line.startswith("zstore ")]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_printed_command_is_one(words: list[str]) -> None:
    group = typer.main.get_command(cli.app)
    assert isinstance(group, cli.Commands)
    _, command, _ = group.resolve_command(group.make_context("zstore", words[1:2]), words[1:2])
    script = next(
        (at for at, word in enumerate(words) if word in ("--", "--module") or word.endswith(".py")), len(words)
    )
    known = {option for parameter in command.params for option in parameter.opts}
    assert {word for word in words[2:script] if word.startswith("--")} <= known


PAGE = (ROOT / "docs/how-it-works.md").read_text(encoding="utf-8")


def hops() -> list[tuple[str, str]]:
    """(file, name) of each hop; a file's names follow it until the next file."""
    found: list[tuple[str, str]] = []
    for row in re.findall(r"^\| \d+ \| .* \| ([^|]*) \|$", PAGE, re.MULTILINE):
        path = ""
        for text in re.findall(r"`([^`]+)`", row):
            if text.endswith(".py"):
                path = text
            else:
                found.append((path, text))
    return found


@pytest.mark.parametrize(("path", "name"), hops())
def test_a_hop_is_there(path: str, name: str) -> None:
    body: list[ast.stmt] = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part]
        assert found, f"{path} has no {name}"
        body = found[0].body


def _example(word: str) -> str:
    page = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    (example,) = (e for e in re.findall(r"<!-- example -->\n```python\n(.*?)```", page, re.DOTALL) if word in e)
    return str(example)


def test_the_tier_keeps_the_contract(tmp_path: Path) -> None:
    example = _example("TierContract")
    file = tmp_path / "test_mapped.py"
    file.write_text(example)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider", str(file)]
    done = warm.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 30
