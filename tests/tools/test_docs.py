"""Links of all pages lead somewhere, every page is on the site, and all that pages name and print exists or runs."""

import ast
import builtins
import pkgutil
import re
import shlex
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch.distributed.run
import typer

from bench import figures
from tests import warm
from tests.layout import per_ten_thousand_words
from tests.pages import ROOT, blocks, code_of, text_of
from zstore import errors
from zstore.engine.config.config import load_config
from zstore.engine.config.parse import load_jsonc
from zstore.tools import cli
from zstore.tools.run.command import RunOptions, make_jobs

DOCS = ROOT / "docs"
AT_THE_TOP = ("README", "README.ko", "SECURITY", "CONTRIBUTING", "CHANGELOG")
PAGES = [*(ROOT / f"{name}.md" for name in AT_THE_TOP), *DOCS.rglob("*.md"), *ROOT.glob("bench/results/*.md")]
PAGES.sort()
PROGRAMS = [
    str(page.relative_to(ROOT)) for page in PAGES if page.parent.name != "results" and page.name != "README.ko.md"
]
"""Pages whose code runs. README.ko.md prints that of README.md."""
DIRECTIVES = {"{toctree}", "{eval-rst}"}


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
    (tree,) = blocks("docs/how-it-works.md", "text")
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
        code = "".join(code for _, code in code_of(name)).splitlines()
        links_and_figures = re.findall(r"(?<=\]\()(?!README)[^)\s]+|\d+\.\d+", text_of(name))
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


def printed(language: str) -> list[str]:
    return [code for page in PROGRAMS for code in blocks(page, language)]


def test_a_test_runs_the_programs_of_each_page() -> None:
    assert {found for page in PROGRAMS for found, _ in code_of(page)} <= {"python", "sh", "json", "text"} | DIRECTIVES
    tests = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/*/test_*.py"))
    run = set(re.findall(r'(?:blocks|code_of)\("([^"]+)"\)', tests))
    assert {page for page in PROGRAMS if blocks(page)} - run == set()


def test_the_reference_names_what_is_there() -> None:
    """Sphinx, which reads the docstrings too, runs in `make docs`."""
    texts = [page.read_text(encoding="utf-8") for page in DOCS.glob("reference.md")]
    named = [name for text in texts for name in re.findall(r"^\.\. auto\w+:: ([\w.]+)", text, re.MULTILINE)]
    assert len(named) > 15
    for name in named:
        pkgutil.resolve_name(name)


@pytest.mark.parametrize("code", printed("json"))
def test_printed_json_is_a_config_or_a_part_of_it(code: str) -> None:
    load_config(load_jsonc(code if code.startswith("{") else f"{{{code}}}", "page"))


def parsed(words: list[str]) -> typer.Context:
    """Return what the command's own parser makes of `words`, which begin with the command."""
    group = typer.main.get_command(cli.app)
    assert isinstance(group, cli.Commands)
    context = group.make_context("zstore", words[:1])
    name, command, _ = group.resolve_command(context, words[:1])
    return command.make_context(name, words[1:], parent=context)


def commands() -> list[list[str]]:
    lines = "\n".join(printed("sh")).replace("\\\n", " ").splitlines()
    lines = (re.sub(r"^[A-Z_]+=(\$\([^)]*\)|\S*) ", "", line) for line in lines)
    return [words for line in lines if (words := shlex.split(line, comments=True))]


@pytest.mark.parametrize("words", commands(), ids=" ".join)
def test_a_printed_command_is_accepted(words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of pages about checkpoints run, too, by the tests of these pages."""
    program, *rest = words
    monkeypatch.chdir(tmp_path)
    Path("examples").symlink_to(ROOT / "examples")
    Path("ds.json").symlink_to("examples/zero3_disk.json")
    Path("hosts").write_text(blocks("docs/launch.md", "text")[0])
    if program == "zstore":
        context = parsed(rest)
        assert rest[0] != "run" or make_jobs(RunOptions(**context.params), {}, lambda: 8)
    elif program == "torchrun":
        options = torch.distributed.run.get_args_parser().parse_args(rest)
        assert options.module
        assert options.training_script == "zstore.as_deepspeed" or parsed(options.training_script_args)
    elif program == "make":
        makefile = text_of("Makefile")
        assert all(re.search(rf"^{word.partition('=')[0]}(:| \?=)", makefile, re.MULTILINE) for word in rest)
    elif program == "python":
        assert rest[:2] == ["-m", "zstore.as_deepspeed"]
        assert not rest[2].startswith("-")
    else:
        assert program in ("pip", "curl", "export")


def test_the_page_of_errors_quotes_the_messages_and_classes_of_the_source() -> None:
    classes, _, messages = text_of("docs/errors.md").partition("## By message")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \|", classes, re.MULTILINE)
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.ZstoreError)}
    assert {name for name, _ in rows} == {kind.__name__ for kind in kinds} - {"ZstoreError", "CheckpointError"}
    assert all(issubclass(getattr(errors, name), getattr(builtins, base)) for name, base in rows)
    files = (path for top in ("zstore", "engine", "tools") for path in ROOT.glob(f"{top}/**/*.py"))
    source = re.sub(r'"\n +f?"', "", "".join(path.read_text(encoding="utf-8") for path in files))
    quoted = re.findall(r"^\| `([^`]+)` \|", messages, re.MULTILINE)
    assert len(quoted) >= 5
    assert [message for message in quoted if message not in source] == []


def hops() -> list[tuple[str, str]]:
    """(file, name) of each hop, and of each answer; a file's names follow it until the next file."""
    found: list[tuple[str, str]] = []
    for row in re.findall(r"^\| (?:\d+ \| .*|[A-Z].*\?) \| ([^|]*) \|$", text_of("docs/how-it-works.md"), re.MULTILINE):
        path = ""
        for text in re.findall(r"`([^`]+)`", row):
            if text.endswith(".py"):
                path = text
            elif path and re.fullmatch(r"[A-Z]\w*(\.\w+)?", text):
                found.append((path, text))
    return found


@pytest.mark.parametrize(("path", "name"), hops())
def test_a_hop_is_there(path: str, name: str) -> None:
    body: list[ast.stmt] = ast.parse((ROOT / path).read_text(encoding="utf-8")).body
    for part in name.split("."):
        found = [node for node in body if isinstance(node, ast.ClassDef | ast.FunctionDef) and node.name == part]
        assert found, f"{path} has no {name}"
        body = found[0].body


def test_the_tier_keeps_the_contract(tmp_path: Path) -> None:
    key, example = blocks("CONTRIBUTING.md")
    assert key in re.sub(r"^ +", "", text_of("engine/config/sections.py"), flags=re.MULTILINE)
    file = tmp_path / "test_mapped.py"
    file.write_text(example)
    command = [sys.executable, "-m", "pytest", "-q", "-c", "/dev/null", "-p", "no:cacheprovider", str(file)]
    done = warm.run(command, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stdout
    assert int(re.findall(r"(\d+) passed", done.stdout)[0]) > 30
