"""Files of journals: lines that are whole or cut off, tails, repeated steps; without an engine."""

from __future__ import annotations

import json
import math
import os
import re
import time
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import until
from zstore.checkpoint.request import SaveSummary
from zstore.engine.extras.journal.beside import SaveNotes
from zstore.errors import CorruptionError, UsageError
from zstore.journal import journals, read, read_file, read_from, steps
from zstore.journal.columns import last_steps
from zstore.journal.lines import encode
from zstore.journal.names import journal_file
from zstore.journal.writer import FileSink, JournalWriter
from zstore.remote.service import open_folder

PAGE = Path(__file__).parents[2] / "docs" / "journal.md"
SIZES = ("linked_bytes", "written_bytes", "stall_s")


def failed(text: str) -> None:
    raise AssertionError(text)


def row(number: int, **values: Any) -> dict[str, Any]:
    return {"kind": "step", "at": 100.0 + number, "step": number, **values}


def write(path: Path, *rows: dict[str, Any]) -> None:
    with JournalWriter(failed) as writer:
        writer.open(FileSink(path))
        for each in rows:
            writer.append(each)


def test_a_second_process_goes_on_where_the_file_was_whole(tmp_path: Path) -> None:
    path = tmp_path / "ckpt" / journal_file("a1")
    write(path, row(1), row(2))
    whole = path.read_bytes()
    path.write_bytes(whole + b'{"kind":"step","at":103.0,"st')
    assert read_file(path.parent, path.name) == [row(1), row(2)]
    write(path, row(3))
    assert path.read_bytes() == whole + encode(row(3))
    # No line at all, and none that is whole.
    for torn in (b"", b"{" * 200_000):
        path.write_bytes(torn)
        write(path, row(1))
        assert path.read_bytes() == encode(row(1))


def test_a_save_that_is_committed_while_its_call_still_runs_has_a_stall(tmp_path: Path) -> None:
    summary = SaveSummary(
        path=tmp_path,
        num_files=1,
        num_linked=0,
        linked_bytes=0,
        written_bytes=5,
        all_linked_bytes=0,
        all_written_bytes=7,
        elapsed_s=0.5,
        known={},
        messages=(),
    )
    with JournalWriter(failed) as writer:
        writer.open(FileSink(tmp_path / journal_file("a")))
        notes = SaveNotes(writer, {"kind": "save", "step": 1, "tag": "t", "location": "x"}, print, print)
        notes(summary)
    begun, found = read_file(tmp_path, journal_file("a"))
    assert (begun["state"], found["state"]) == ("begun", "committed")
    assert found["stall_s"] > 0


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
def test_a_tail_goes_on_from_its_offset(tmp_path: Path, place: str) -> None:
    folder = tmp_path if place == "local" else open_folder(place)
    name, local = journal_file("b-2"), tmp_path / journal_file("b-2")

    def have(data: bytes) -> None:
        if folder is tmp_path:
            local.write_bytes(data)
        else:
            folder.write_small(name, data)  # type: ignore[union-attr]

    lines = [encode(row(number)) for number in range(4)]
    foreign = [b"not json\n", b"[1]\n", b'{"kind":"dance","at":1}\n', b'{"at":1}\n', b"\xff\n", b"\n"]
    have(b"".join(lines[:2]) + lines[2][:9])
    found, offset = read_from(folder, name)
    assert (found, offset) == ([row(0), row(1)], len(lines[0] + lines[1]))
    assert read_from(folder, name, offset) == ([], offset)
    have(b"".join([*lines[:3], *foreign, lines[3]]))
    assert read_from(folder, name, offset)[0] == [row(2), row(3)]
    assert read(folder, "b-2") == read(folder) == [row(number) for number in range(4)]
    have(lines[3])  # another file by that name
    assert read_from(folder, name, offset) == ([row(3)], len(lines[3]))
    assert journals(folder) == [name]


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
        read_file(tmp_path, journal_file("link"))
    with pytest.raises(OSError, match="symbolic links"):
        FileSink(tmp_path / journal_file("link"))
    for unfit in ("../x", "", "a/b", "a\nb"):
        with pytest.raises(UsageError, match="run's id"):
            journal_file(unfit)


def test_later_ones_of_repeated_steps_count() -> None:
    rows = [row(n, loss=1.0) for n in (1, 2, 3, 4)] + [row(n, loss=2.0) for n in (3, 4)] + [row(2, loss=3.0)]
    assert [(r["step"], r["loss"]) for r in last_steps(rows)] == [(1, 1.0), (2, 3.0)]
    columns = steps([{"kind": "start", "at": 0}, *rows])
    assert columns["step"] == [1, 2]
    assert columns["loss"] == [1.0, 3.0]


def test_columns_are_of_one_length_and_rates_of_their_time() -> None:
    link = {"bytes": 600, "operations": 3, "busy_s": 0.1, "stall_s": {"not read yet": 0.3}}
    rows = [
        row(1, tokens=64, step_s=0.5, grad_norm=None),
        row(2, tokens=64, step_s=0.0, links={"disk_read": link}, links_s=2.0, links_steps=3, memory={"host": 7}),
    ]
    columns = steps(rows)
    assert {len(column) for column in columns.values()} == {2}
    assert columns["tokens_per_s"] == [128.0, None]
    assert columns["rate/disk_read"] == [None, 300.0]
    assert columns["stall/not read yet"] == columns["stall_s"] == [None, pytest.approx(0.1)]
    assert columns["memory/host"] == [None, 7]
    assert steps([])["loss"] == []


def test_records_wait_for_a_place_and_are_thinned(tmp_path: Path) -> None:
    with JournalWriter(failed) as writer:
        for number in range(20_000):
            writer.append(row(number))
        writer.open(FileSink(tmp_path / journal_file("w")), [{"kind": "start", "at": 1.0}])
    found = read(tmp_path)
    assert found[0]["kind"] == "start"
    numbers = [each["step"] for each in found[1:]]
    assert 2000 < len(numbers) <= 4096
    assert numbers == sorted(numbers)
    assert numbers[-2000:] == list(range(18_000, 20_000))
    assert numbers[0] < 15_000


class FullDisk:
    """A sink that fails for a while."""

    def __init__(self) -> None:
        self.lines = b""
        self.is_full = True

    def append(self, lines: bytes) -> None:
        if self.is_full:
            raise OSError(28, "No space left on device")
        self.lines += lines

    def close(self) -> None:
        pass


def test_a_full_disk_is_told_once_and_nothing_is_lost(tmp_path: Path) -> None:
    told: list[str] = []
    sink = FullDisk()
    with JournalWriter(told.append) as writer:
        writer.open(sink)
        for number in range(3):
            writer.append(row(number))
            writer.flush()
        sink.is_full = False
    assert told == ["OSError: [Errno 28] No space left on device"]
    assert sink.lines == b"".join(encode(row(number)) for number in range(3))


def test_lines_that_a_full_disk_did_not_take_follow_the_first_ones_of_the_next_file() -> None:
    sink = FullDisk()
    with JournalWriter([].append) as writer:
        writer.open(sink)
        writer.append(row(1))
        writer.close()
        writer.append(row(2))
        sink.is_full = False
        writer.open(sink, [row(0)])
    assert sink.lines == b"".join(encode(row(number)) for number in range(3))


def test_a_write_that_fails_half_way_leaves_whole_lines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sink = FileSink(tmp_path / "file")
    sink.append(b"first\n")
    real = os.write

    def short(fd: int, data: bytes) -> int:
        if len(data) < 5:
            raise OSError(28, "No space left on device")
        return real(fd, data[:4])

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", short)
        with pytest.raises(OSError, match="No space"):
            sink.append(b"second\n")
    assert (tmp_path / "file").read_bytes() == b"first\n"
    sink.append(b"second\n")
    sink.close()
    assert (tmp_path / "file").read_bytes() == b"first\nsecond\n"


def test_lines_are_in_the_file_without_a_flush(tmp_path: Path) -> None:
    path = tmp_path / journal_file("a")
    with JournalWriter(failed) as writer:
        writer.open(FileSink(path))
        for number in (1, 2):
            writer.append(row(number))
            until(lambda: len(read(tmp_path)) >= number)  # noqa: B023


def test_100_000_lines_are_read_in_about_a_second(tmp_path: Path) -> None:
    values = {f"value_{n}": 0.123456789 + n for n in range(9)}
    line = encode(row(0, **values)).replace(b'"step":0', b'"step":%d')
    path = tmp_path / journal_file("long")
    path.write_bytes(b"".join(line % n for n in range(100_000)))
    started = time.process_time()
    plain = [json.loads(each) for each in path.read_bytes().splitlines()]
    decoded = time.process_time()
    columns = steps(read(tmp_path))
    # To decode the lines takes about half a second where nobody else is at work.
    assert time.process_time() - decoded < 4 * (decoded - started)
    assert len(plain) == 100_000
    assert len(columns["step"]) == 100_000


def test_the_example_of_the_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    (example,) = re.findall(r"<!-- example -->\n```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    saved = {"kind": "save", "at": 1.0, "step": 2, "tag": "t", "state": "committed"}
    write(tmp_path / "ckpt" / journal_file("a"), row(1, loss=0.5), saved | dict.fromkeys(SIZES, 7), row(2, loss=0.25))
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert capsys.readouterr().out == "1 0.5\n2 0.25\nt 7 7 7\n"
