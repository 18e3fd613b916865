"""Files of journals: lines that are whole or cut off, repeated steps; without an engine."""

import json
import math
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.pages import blocks
from tests.waiting import until
from zstore.errors import CorruptionError, UsageError
from zstore.journal import JournalFile, JournalWriter, encode, journal_file, journals, read, steps
from zstore.remote.service import open_folder


def failed(text: str) -> None:
    raise AssertionError(text)


def row(number: int, **values: Any) -> dict[str, Any]:
    return {"kind": "step", "at": 100.0 + number, "step": number, **values}


def write(path: Path, *rows: dict[str, Any]) -> None:
    with JournalWriter(failed) as writer:
        writer.open(JournalFile(path))
        for each in rows:
            writer.append(each)


def test_a_second_process_goes_on_where_the_file_was_whole(tmp_path: Path) -> None:
    path = tmp_path / "ckpt" / journal_file("a1")
    write(path, row(1), row(2))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind":"step","at":103.0,"st')
    assert read(path.parent) == [row(1), row(2)]
    write(path, row(3))
    assert path.read_bytes() == whole + encode(row(3))
    for torn in (b"", b"{" * 200_000):  # no line at all, and none that is whole
        path.write_bytes(torn)
        write(path, row(1))
        assert path.read_bytes() == encode(row(1))


def test_numbers_that_are_not_finite_and_what_json_lacks_are_valid_json(tmp_path: Path) -> None:
    late = row(2, loss=lambda: math.inf)
    write(tmp_path / journal_file("a"), row(1, loss=math.nan, nested={"a": [-math.inf, 1.5]}, path=Path("/x")), late)

    def refuse(text: str) -> Any:
        raise ValueError(text)

    text = (tmp_path / journal_file("a")).read_text()
    lines = [json.loads(line, parse_constant=refuse) for line in text.splitlines()]
    assert lines == [
        row(1, loss=None, nested={"a": [None, 1.5]}, path="/x", not_finite={"loss": "nan", "a": "-inf"}),
        row(2, loss=None, not_finite={"loss": "inf"}),
    ]


@pytest.mark.parametrize("place", ["local", "memory://journal-test/run"])
def test_records_are_read_here_and_behind_urls(tmp_path: Path, place: str) -> None:
    name = journal_file("b-2")
    data = b"".join([encode(row(0)), b"not json\n", b"[1]\n", b'{"at":1}\n', b"\xff\n", b"\n", encode(row(1)), b'{"k'])
    if place == "local":
        (tmp_path / name).write_bytes(data)
    else:
        open_folder(place).write_small(name, data)  # type: ignore[union-attr]
    folder = tmp_path if place == "local" else open_folder(place)
    assert journals(folder) == [name]
    assert read(folder, "b-2") == read(folder) == [row(0), row(1)]


def test_the_newest_of_several_is_read_and_links_are_refused(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="has no journal"):
        read(tmp_path)
    write(tmp_path / journal_file("old"), row(1))
    write(tmp_path / journal_file("new"), row(5))
    (tmp_path / "journal-.jsonl").write_text("")
    assert read(tmp_path) == [row(5)]
    assert journals(tmp_path) == [journal_file("new"), journal_file("old")]
    (tmp_path / journal_file("link")).symlink_to(tmp_path / journal_file("old"))
    with pytest.raises(CorruptionError, match="symbolic link"):
        read(tmp_path, "link")
    with pytest.raises(OSError, match="symbolic links"):
        JournalFile(tmp_path / journal_file("link"))
    for unfit in ("../x", "", "a/b", "a\nb"):
        with pytest.raises(UsageError, match="run's id"):
            journal_file(unfit)


def test_columns_have_the_later_ones_of_repeated_steps_and_metrics_in_their_rows() -> None:
    rows = [row(n, loss=1.0) for n in (1, 2, 3, 4)] + [row(n, loss=2.0) for n in (3, 4)] + [row(2, loss=3.0)]
    columns = steps([{"kind": "start", "at": 0}, *rows])
    assert (columns["step"], columns["loss"], columns["lr"]) == ([1, 2], [1.0, 3.0], [None, None])
    metrics = [
        {"kind": "metrics", "at": 1.0, "step": n, f"metric/{name}": 0.5} for n, name in ((1, "a"), (1, "b"), (3, "a"))
    ]
    columns = steps([row(1, skipped=True, **{"rate/disk_read": 3.0}), *metrics])
    assert (columns["step"], columns["metric/a"], columns["metric/b"]) == ([1, 3], [0.5, 0.5], [0.5, None])
    assert columns["rate/disk_read"] == [3.0, None]
    assert "skipped" not in columns
    assert steps([])["loss"] == []


def test_records_wait_for_a_file_the_newest_of_them(tmp_path: Path) -> None:
    with JournalWriter(failed) as writer:
        for number in range(20_000):
            writer.append(row(number))
        writer.open(JournalFile(tmp_path / journal_file("w")), [{"kind": "start", "at": 1.0}])
    found = read(tmp_path)
    assert found[0]["kind"] == "start"
    assert [each["step"] for each in found[1:]] == list(range(20_000 - 4096, 20_000))


def test_no_line_is_lost_while_the_thread_that_writes_is_busy(tmp_path: Path) -> None:
    hangs, goes_on = threading.Event(), threading.Event()

    def hang() -> None:  # as a service that does not answer
        hangs.set()
        goes_on.wait()

    with JournalWriter(failed) as writer:
        writer.open(JournalFile(tmp_path / journal_file("a")), after=hang)
        hangs.wait()
        for number in range(5_000):
            writer.append(row(number))
        goes_on.set()
    assert [each["step"] for each in read(tmp_path)] == list(range(5_000))


def test_a_failed_write_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    path, real = tmp_path / journal_file("a"), os.write

    def short(fd: int, data: bytes) -> int:
        if len(data) < 5:
            raise OSError(28, "No space left on device")
        return real(fd, data[:4])

    with JournalWriter(told.append) as writer:
        writer.open(JournalFile(path))
        writer.append(row(1))
        writer.flush()
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", short)
            for _ in range(2):
                writer.append(row(2))
                writer.flush()
        writer.append(row(3))
    assert path.read_bytes() == encode(row(1)) + encode(row(3))
    assert told == ["OSError: [Errno 28] No space left on device"]


def test_lines_are_in_the_file_without_a_flush(tmp_path: Path) -> None:
    with JournalWriter(failed) as writer:
        writer.open(JournalFile(tmp_path / journal_file("a")))
        for number in (1, 2):
            writer.append(row(number))
            until(lambda: len(read(tmp_path)) >= number)  # noqa: B023


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (example,) = blocks("docs/metrics.md")
    write(tmp_path / "ckpt" / journal_file("a"), {"kind": "start", "at": 0.0}, row(1, loss=0.5), row(2, loss=0.25))
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert capsys.readouterr().out == "[1, 2] [0.5, 0.25]\n"
