"""Measures the figures of README and of `docs/figures.md`, each beside its peer in one run, and writes tables and charts.

    python -m bench.figures [--peer-python PYTHON] [--path FOLDER] [--only training,update,checkpoints,steps]

Each part is another benchmark with the arguments below, whose JSON goes to `bench/results`, with the commit; all of them take
under an hour on two cores. DeepSpeed's rows need `--peer-python`, the Python of an environment with it. `--only none` writes
tables and charts from the results that are there, with which a test compares them.
"""

import argparse
import json
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from bench.machine import write_figures

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "bench/results"
PICTURE = ROOT / "docs/pictures/figures.svg"
_GIB = 2**30
_BARS_WIDTH, _BAR, _NAMES, _TEXTS = 560, 22, 200, 120


@dataclass(frozen=True, kw_only=True)
class Bar:
    """A horizontal bar: its name, its length, the text at its end, and whether it is one of ours."""

    name: str
    value: float
    text: str
    ours: bool = False


@dataclass(frozen=True, kw_only=True)
class Bars:
    """A chart of horizontal bars from zero."""

    title: str
    subtitle: str
    bars: Sequence[Bar]


def results(name: str) -> Any:
    """Return the figures of a benchmark as it wrote them."""
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def training(found: Any) -> Bars:
    """Iterations of a model whose state is on disk, beside the peer, each with the peak memory of its process."""
    (model,) = (model for model in found["models"] if model["model"] == "1.2b")
    names = {"compute": "computation alone, in memory", "deepspeed": "DeepSpeed, NVMe"}
    bars = [
        Bar(
            name=f"zstore, {_budget(row['host_budget_bytes'])}" if ours else names[row["contender"]],
            value=row["iteration_s"],
            text=f"{row['iteration_s']:.1f} s, {row['peak_bytes'] / _GIB:.1f} GiB",
            ours=ours,
        )
        for row in _distinct(model["rows"])
        for ours in [row["contender"] == "zstore"]
    ]
    return Bars(
        title="Training 1.2 B parameters from disk",
        subtitle=f"seconds per iteration, peak memory ({_machine(found['machine'])})",
        bars=sorted(bars, key=lambda bar: -bar.value),
    )


def checkpoints(found: Any, what: str) -> Bars:
    """How long a save or a load of a model's state takes with each library."""
    rows = [
        row
        for row in found["medians"]
        if row["model"] == "110m" and row["what"] == what and row["who"] in _LIBRARIES and row["error"] is None
    ]
    bars = [
        Bar(
            name=_LIBRARIES[row["who"]],
            value=row["seconds"],
            text=f"{row['seconds']:.2f} s",
            ours="zstore" in row["who"],
        )
        for row in rows
    ]
    size = rows[0]["bytes"] / 1e9
    titles = {"save": f"Saving {size:.1f} GB from memory", "load": f"Loading {size:.1f} GB"}
    ends = {"save": "it is durable", "load": "every value is loaded"}
    return Bars(
        title=titles[what],
        subtitle=f"seconds until {ends[what]} ({_machine(found['machine'])})",
        bars=sorted(bars, key=lambda bar: -bar.value),
    )


def steps(found: Any) -> Bars:
    """Whole steps of two processes without offload, beside DDP and FSDP2."""
    bars: list[Bar] = []
    for row in found["rows"]:
        bars += [
            Bar(name=f"{row['other']}, {row['precision']}", value=row["other_s"], text=f"{row['other_s']:.2f} s"),
            Bar(
                name=f"zstore, {row['precision']}, stage {row['stage']}",
                value=row["engine_s"],
                text=f"{row['engine_s']:.2f} s",
                ours=True,
            ),
        ]
    return Bars(
        title="Whole steps of two processes, all in memory",
        subtitle=f"seconds, medians of pairs ({_machine(found['machine'])})",
        bars=bars,
    )


def figures() -> str:
    """Return the SVG of all charts."""
    saves = results("checkpoint")
    charts = [
        training(results("offload")),
        steps(results("overhead")),
        checkpoints(saves, "save"),
        checkpoints(saves, "load"),
    ]
    return draw_bars(charts)


def draw_bars(charts: Sequence[Bars], columns: int = 2) -> str:
    """Return an SVG of charts of bars side by side; the charts of a row are as high as the highest of them."""
    parts, top = [], 0
    for first in range(0, len(charts), columns):
        row = charts[first : first + columns]
        for number, chart in enumerate(row):
            parts += [f'<g transform="translate({number * _BARS_WIDTH},{top})">', *_bars(chart), "</g>"]
        top += 60 + _BAR * max(len(chart.bars) for chart in row)
    return _svg(min(columns, len(charts)) * _BARS_WIDTH, top, parts)


def _svg(width: int, height: int, parts: Iterable[str]) -> str:
    size = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


def _bars(chart: Bars) -> Iterable[str]:
    longest = max(bar.value for bar in chart.bars)
    yield f'<text x="16" y="24" font-size="14" font-weight="bold">{escape(chart.title)}</text>'
    yield f'<text x="16" y="41" fill="#555">{escape(chart.subtitle)}</text>'
    for number, bar in enumerate(chart.bars):
        y = 52 + _BAR * number
        length = (_BARS_WIDTH - _NAMES - _TEXTS) * bar.value / longest
        colour, weight = ("#3366cc", "bold") if bar.ours else ("#a0a8b4", "normal")
        yield f'<text x="{_NAMES - 8}" y="{y + 12}" text-anchor="end" font-weight="{weight}">{escape(bar.name)}</text>'
        yield f'<rect x="{_NAMES}" y="{y}" width="{length:.1f}" height="{_BAR - 6}" fill="{colour}"/>'
        yield f'<text x="{_NAMES + length + 6:.1f}" y="{y + 12}" font-weight="{weight}">{escape(bar.text)}</text>'


_LIBRARIES = {
    "zstore, from memory": "zstore",
    "torch.save": "torch.save",
    "safetensors": "safetensors",
    "DCP 4 threads": "torch DCP, 4 threads",
    "tensorstore": "tensorstore",
    "DeepSpeed, from memory": "DeepSpeed",
}
"""Who saves and loads in `checkpoint.json` -> its name in the chart."""


def _distinct(rows: Sequence[Any]) -> list[Any]:
    """Return a row for each contender and budget, the last that was measured, of those without clipping or an error."""
    rows = [row for row in rows if not row.get("clip") and not row.get("error")]
    return list({(row["contender"], row.get("host_budget_bytes")): row for row in rows}.values())


def _budget(budget_bytes: int | None) -> str:
    return "buffers alone" if budget_bytes is None else f"budget {budget_bytes / 1e9:.1f} GB"


def _machine(machine: Any, words: str = "{} cores, {}") -> str:
    return words.format(machine["cores"], machine["cpu"].replace("(R)", "").replace(" Processor", ""))


PARTS = {
    "training": ("offload", "--models 1.2b --overlap forward --clip off --budget none --steps 3 --out"),
    "update": ("optimizer", "--steps 6 --json"),
    "checkpoints": ("checkpoint", "--models 110m --rounds 3 --out"),
    "steps": ("overhead", "--processes 2 --precisions fp32 bf16 --stages 2 --pairs 20 --json"),
}
"""Name of a part -> the benchmark that measures it, which names its results, and its arguments."""
_WITH_DEEPSPEED = ("training", "update", "checkpoints")


def measure(part: str, folder: Path, peer_python: str | None, commit: str) -> None:
    """Run a part's benchmark, and write its results with the `commit` that it measured."""
    name, arguments = PARTS[part]
    words = [*arguments.split(), str(RESULTS / f"{name}.json")]
    if part != "steps":
        words += ["--path", str(folder)]
    if peer_python and part in _WITH_DEEPSPEED:
        words += ["--peer-python", peer_python]
    subprocess.run([sys.executable, "-m", f"bench.{name}", *words], cwd=ROOT, check=True)
    write_figures(RESULTS / f"{name}.json", results(name) | {"commit": commit})


_WORDS = {
    "README.md": (
        "| what | zstore | compared with | measured on |",
        "training 1.2 B parameters from disk",
        "{} s per iteration, {} GiB of memory",
        "update of {} M parameters in host memory",
        "save of {} GB from memory: training stops for / durable after",
        "load of {} GB, every chunk verified",
        "full step of two processes in memory, stage 2, fp32",
        "{} cores, {}",
        "an earlier commit",
    ),
    "README.ko.md": (
        "| 항목 | zstore | 비교 대상 | 측정 환경 |",
        "1.2 B(12억) 파라미터를 디스크에서 학습",
        "반복당 {} s, 메모리 {} GiB",
        "호스트 메모리에 있는 파라미터 {} M개의 업데이트",
        "메모리에 있는 {} GB 저장: 학습이 멈추는 시간 / 안전하게 기록되는 시간",
        "{} GB 불러오기, 모든 청크 검증",
        "메모리에서 두 프로세스의 전체 스텝, stage 2, fp32",
        "코어 {}개, {}",
        "이전 커밋",
    ),
}
"""Page -> its words for the head and the rows of the table, for the machine, and for an unknown commit."""
_BEGIN, _END = "<!-- figures: python -m bench.figures -->\n", "<!-- end of figures -->\n"


def _rows(words: Sequence[str]) -> Iterator[tuple[str, str, str, Any]]:
    """Yield what was measured, ours, the peers', and the results with their machine and commit."""
    training_, iteration, update, save, load, step = words
    found = results("offload")
    rows = _distinct(next(one for one in found["models"] if one["model"] == "1.2b")["rows"])
    ours = next(row for row in rows if row["contender"] == "zstore" and row["host_budget_bytes"] is None)
    peers = [row for row in rows if row["contender"] == "deepspeed"]  # none without --peer-python
    mine, *theirs = (
        iteration.format(f"{row['iteration_s']:.1f}", f"{row['peak_bytes'] / _GIB:.1f}") for row in (ours, *peers)
    )
    yield training_, mine, ", ".join(f"DeepSpeed: {text}" for text in theirs), found
    if (RESULTS / "optimizer.json").exists() and "deepspeed_s" in (found := results("optimizer"))["update"]:
        both = found["update"]
        size = f"{both['parameters'] / 1e6:.0f}"
        other = f"DeepSpeed CPUAdam: {1e3 * both['deepspeed_s']:.0f} ms"
        yield update.format(size), f"{1e3 * both['zstore_s']:.0f} ms", other, found
    found = results("checkpoint")
    of = {(row["what"], row["who"]): row for row in found["medians"] if row["model"] == "110m" and not row["error"]}
    size = f"{of['save', 'zstore, from memory']['bytes'] / 1e9:.1f}"
    saved = of["save", "zstore, from memory"]
    savers = {"torch DCP": "DCP 4 threads", "DeepSpeed": "DeepSpeed, from memory"}
    others = ", ".join(
        f"{name}: {of['save', who]['seconds']:.1f} s" for name, who in savers.items() if ("save", who) in of
    )
    yield save.format(size), f"{1e3 * saved['stall_s']:.0f} ms / {saved['seconds']:.2f} s", others, found
    ours_s, theirs_s = (of["load", who]["seconds"] for who in ("zstore, from memory", "DCP 4 threads"))
    yield load.format(size), f"{ours_s:.2f} s", f"torch DCP: {theirs_s:.2f} s", found
    found = results("overhead")
    row = next(row for row in found["rows"] if (row["processes"], row["precision"], row["stage"]) == (2, "fp32", 2))
    yield step, f"{row['engine_s']:.2f} s", f"FSDP2: {row['other_s']:.2f} s", found


def updated(name: str, page: str) -> str:
    """Return the page called `name` with the table of the results that are there."""
    head, *rows, machine, earlier = _WORDS.get(name, _WORDS["README.md"])
    lines = [head, "|---|---|---|---|"]
    for *cells, found in _rows(rows):
        lines.append(f"| {' | '.join(cells)} | {_machine(found['machine'], machine)}, {found.get('commit', earlier)} |")
    before, _, rest = page.partition(_BEGIN)
    return before + _BEGIN + "\n".join(lines) + "\n" + _END + rest.partition(_END)[2]


PAGES = (ROOT / "README.md", ROOT / "README.ko.md", ROOT / "docs/figures.md")


def written() -> dict[Path, str]:
    """Return the pages and the chart of the results that are there."""
    return {PICTURE: figures()} | {page: updated(page.name, page.read_text(encoding="utf-8")) for page in PAGES}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(PARTS), help="parts to measure, with commas between; or none")
    parser.add_argument("--peer-python", help="python of an environment with deepspeed")
    parser.add_argument("--path", type=Path, default=Path.cwd(), help="folder on the drive to measure")
    options = parser.parse_args()
    command = ["git", "describe", "--always", "--dirty"]  # before the first part's results change the tree
    commit = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    for part in options.only.split(","):
        if part != "none":
            measure(part, options.path, options.peer_python, commit)
    for file, text in written().items():
        file.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
