"""Measures of the source tree: lines, imports between packages, sizes, and a few words of its prose.

An import of `zstore.engine` or `zstore.tools` counts as one of the folders `engine/` and `tools/`, which the links in `zstore/`
also name. Imports for type checking count too.
"""

import ast
import io
import re
import tokenize
from collections.abc import Callable, Iterable
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
_TOPS = ("engine", "zstore", "tools")
# Packages of the engine that move parameters, gradients and optimizer state in every step.
_CORE = (
    *(f"engine/{package}/" for package in ("params", "zero", "optim")),
    *(f"engine/{file}.py" for file in ("runtime/device", "training/training", "training/wiring")),
)
# They hand out names of the engine and do nothing else, so that they alone may import upwards.
SHORT_MODULES = frozenset({
    f"zstore/{name}.py"
    for name in (
        "__init__", "__main__", "as_deepspeed/__init__", "as_deepspeed/__main__",
        "attention", "checkpointing", "elasticity", "lightning", "optim", "zero",
    )
})  # fmt: skip


class Layout:
    """The Python files of the three packages, and what they import of each other."""

    def __init__(self, root: Path = ROOT) -> None:
        self.root = root
        paths = [path for top in _TOPS for path in sorted((root / top).rglob("*.py"))]
        # The links zstore/engine and zstore/tools are not followed.
        self.files = [
            name
            for path in paths
            if not (name := path.relative_to(root).as_posix()).startswith(("zstore/engine/", "zstore/tools/"))
        ]
        self.source = {name: (root / name).read_text() for name in self.files}
        self.trees = {name: ast.parse(text) for name, text in self.source.items()}

    def lines(self, *prefixes: str, without: tuple[str, ...] = ()) -> int:
        return sum(
            self.source[name].count("\n")
            for name in self.files
            if name.startswith(prefixes) and not name.startswith(without or ("\0",))
        )

    def asset_lines(self) -> int:
        assets = [p for s in ("*.js", "*.css") for p in (self.root / "zstore").rglob(s) if "vendor" not in p.parts]
        return sum(path.read_text().count("\n") for path in assets)

    @property
    def core(self) -> list[str]:
        return [name for name in self.files if name.startswith(_CORE)]

    @cached_property
    def imports(self) -> dict[str, set[str]]:
        modules = {_module(name): name for name in self.files}
        return {
            name: {file for module in _imported(name, tree) if (file := _resolve(module, modules)) not in (None, name)}
            for name, tree in self.trees.items()
        }

    def graph(self, room: Callable[[str], str | None]) -> dict[str, set[str]]:
        """Return for each room those that its files import from; files whose room is None do not count."""
        graph: dict[str, set[str]] = {place: set() for name in self.files if (place := room(name)) is not None}
        for name, imported in self.imports.items():
            here = room(name)
            if here is not None:
                graph[here].update(there for file in imported if (there := room(file)) not in (None, here))
        return graph

    def upward(self) -> list[tuple[str, str]]:
        """Return the imports of engine and tools by files of zstore that are not short modules."""
        return [
            (name, file)
            for name, imported in self.imports.items()
            if name.startswith("zstore/") and name not in SHORT_MODULES
            for file in imported
            if file.startswith(("engine/", "tools/"))
        ]

    @cached_property
    def classes(self) -> list[tuple[str, int]]:
        nodes = [node for tree in self.trees.values() for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        return [(node.name, (node.end_lineno or 0) - node.lineno + 1) for node in nodes]

    def undocumented(self) -> list[str]:
        """Return the public methods that no docstring describes: neither their own, nor one of a method here with that name, as
        a base or a protocol has it, nor perhaps a library's, which one of their bases is from."""
        nodes = [(name, node) for name, tree in self.trees.items() for node in ast.walk(tree)]
        classes = [(name, node) for name, node in nodes if isinstance(node, ast.ClassDef)]
        bases = {"object", "Generic", "Protocol", *(node.name for _, node in classes)}
        found: list[tuple[str, str]] = []
        documented: set[str] = set()
        for name, node in classes:
            foreign = not {ast.unparse(base).partition("[")[0].rpartition(".")[2] for base in node.bases} <= bases
            methods = [each for each in node.body if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef)]
            for method in (each for each in methods if not each.name.startswith(("_", "test_"))):
                if ast.get_docstring(method):
                    documented.add(method.name)
                elif not foreign and not node.name.startswith("_"):
                    found.append((method.name, f"{name}: {node.name}.{method.name}"))
        return [place for method, place in found if method not in documented]

    @cached_property
    def prose(self) -> str:
        parts = [text for name in self.files for text in _prose_of(self.source[name], self.trees[name])]
        pages = [self.root / "README.md", *(self.root / "docs").rglob("*.md")]
        parts += [re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL) for page in pages]
        return re.sub(r"`[^`]*`", "", "\n".join(parts))


def per_ten_thousand_words(prose: str, pattern: str) -> float:
    """Return how often `pattern` is found in 10,000 words of `prose`."""
    return 1e4 * len(re.findall(pattern, prose, re.IGNORECASE)) / len(re.findall(r"[A-Za-z']+", prose))


def inside(top: str) -> Callable[[str], str | None]:
    """Return the room of a file: the folder or file right below `top`; None for files elsewhere."""
    return lambda name: "/".join(name.split("/")[:2]) if name.startswith(top + "/") else None


def circles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Return the groups of rooms that import each other in a circle (Tarjan's strongly connected components)."""
    return [group for group in _components(graph) if len(group) > 1]


def floors(graph: dict[str, set[str]]) -> int:
    """Return the length of the longest way down the imports, counted in rooms; those of a circle are one."""
    groups = _components(graph)
    of = {room: index for index, group in enumerate(groups) for room in group}
    heights: list[int] = []
    for index, group in enumerate(groups):  # what a group imports comes before it
        below = {of[there] for room in group for there in graph[room]} - {index}
        heights.append(1 + max((heights[other] for other in below), default=0))
    return max(heights)


def _components(graph: dict[str, set[str]]) -> list[list[str]]:
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(room: str) -> None:
        index[room] = low[room] = len(index)
        stack.append(room)
        for there in sorted(graph[room]):
            if there not in index:
                visit(there)
                low[room] = min(low[room], low[there])
            elif there in stack:
                low[room] = min(low[room], index[there])
        if low[room] == index[room]:
            at = stack.index(room)
            groups.append(sorted(stack[at:]))
            del stack[at:]

    for room in sorted(graph):
        if room not in index:
            visit(room)
    return groups


def _module(name: str) -> str:
    parts = name.removesuffix(".py").split("/")
    parts = parts if parts[0] == "zstore" else ["zstore", *parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def _imported(name: str, tree: ast.Module) -> Iterable[str]:
    package = [*([] if name.startswith("zstore/") else ["zstore"]), *name.split("/")[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def _resolve(module: str, modules: dict[str, str]) -> str | None:
    while module and module not in modules:
        module = module.rpartition(".")[0]
    return modules.get(module)


def _prose_of(text: str, tree: ast.Module) -> Iterable[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    yield from (token.string for token in tokens if token.type == tokenize.COMMENT)
