"""What a client sends beside its checkpoints: the lines of its journal."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import urllib3

from tests.checkpoint.checkpoints import save_arrays
from tests.serve.conftest import Serve
from tests.serve.proxy import proxy_to
from zstore.journal import journal_file
from zstore.remote.service import JournalTail, UploadPlace

TOKEN = {"Authorization": "Bearer secret-of-the-tests"}
OPTIONS = {"token": "secret-of-the-tests"}


def _lines(*numbers: int) -> bytes:
    return b"".join(
        json.dumps({"kind": "step", "step": number}, separators=(",", ":")).encode() + b"\n" for number in numbers
    )


@pytest.fixture
def base(tmp_path: Path, serve: Serve) -> str:
    (tmp_path / "runs").mkdir()
    return serve(tmp_path / "runs", token="secret-of-the-tests")


def test_lines_are_appended_once_at_their_place(tmp_path: Path, base: str, http: urllib3.PoolManager) -> None:
    stored = tmp_path / "runs/one" / journal_file("abc")

    def post(lines: bytes, offset: Any, run: str = "one", run_id: str = "abc") -> tuple[int, Any]:
        url = f"{base}/api/runs/{run}/journals/{run_id}?offset={offset}"
        answer = http.request("POST", url, body=lines, headers=TOKEN)
        return answer.status, answer.json()

    first, second = _lines(1, 2), _lines(3)
    assert post(first, 0) == (200, {"bytes": len(first)})
    assert post(second, len(first)) == (200, {"bytes": len(first) + len(second)})
    assert post(second, len(first))[0] == 200  # the answer was lost
    assert post(first + second + _lines(4), 0)[0] == 200
    assert stored.read_bytes() == _lines(1, 2, 3, 4)
    for lines, offset, expected in [
        (_lines(9), 0, 409),
        (_lines(9), 10**6, 409),
        (b"{}", 0, 400),
        (b"", 0, 400),
        (b"text\n", 0, 400),
        (_lines(5), "x", 400),
        (_lines(5), -1, 400),
        (b"{" + b" " * 2**20 + b"}\n", 0, 413),
    ]:
        assert post(lines, offset)[0] == expected, (lines[:20], offset)
    assert post(first, 0, run_id="..%2fx")[0] in (400, 404)
    assert post(first, 0, run=".hidden")[0] == 400
    # A line that the end of the service cut off.
    with stored.open("ab") as file:
        file.write(b'{"kind": "st')
    assert post(_lines(5), len(_lines(1, 2, 3, 4)))[0] == 200
    assert stored.read_bytes() == _lines(1, 2, 3, 4, 5)
    save_arrays(tmp_path / "runs/other", {"model/a": np.zeros(3)}, run_id="other")
    assert post(first, 0, run="other")[0] == 409
    assert http.request("POST", f"{base}/api/runs/one/journals/abc?offset=0", body=first).status == 401


def test_lines_of_deep_json_are_passed_over(tmp_path: Path, base: str, http: urllib3.PoolManager) -> None:
    deep = b'{"kind":"start","config":' + b"[" * 100_000 + b"]" * 100_000 + b"}\n"
    url = f"{base}/api/runs/one/journals/abc?offset=0"
    assert http.request("POST", url, body=deep + _lines(7), headers=TOKEN).status == 200
    runs = http.request("GET", f"{base}/api/runs", headers=TOKEN)
    assert (runs.status, runs.json()["runs"][0]["step"]) == (200, 7)


def test_a_journal_is_sent_as_it_grows_and_goes_on_elsewhere(tmp_path: Path, base: str) -> None:
    stored = tmp_path / "runs/one" / journal_file("abc")
    problems: list[str] = []

    def tail(path: Path, url: str, options: dict[str, str] = OPTIONS) -> JournalTail:
        start = path.stat().st_size if path.exists() else 0
        return JournalTail(path, UploadPlace(url, options), "abc", start, failed=problems.append)

    with proxy_to(int(base.rpartition(":")[2])) as proxy:
        first = tail(tmp_path / "first.jsonl", f"http://127.0.0.1:{proxy.port}/one")
        proxy.after(1500, proxy.cut)
        for number in range(1, 40):
            with (tmp_path / "first.jsonl").open("ab") as file:
                file.write(_lines(number))
            first.send()
    assert problems == []
    again = tail(tmp_path / "second.jsonl", f"{base}/one")  # on another machine, whose folder has nothing of it
    (tmp_path / "second.jsonl").write_bytes(_lines(40) + b'{"kind": "st')
    again.send(is_end=True)
    assert stored.read_bytes() == _lines(*range(1, 41))
    # As many whole lines at a time as the service takes; one that is longer than that is refused for good.
    long = tmp_path / "long.jsonl"
    at_most = tail(long, f"{base}/two")
    long.write_bytes(b"".join(b'{"a":"%s"}\n' % (b"x" * size) for size in (400_000, 900_000, 1_100_000)))
    for _ in range(2):
        at_most.send()
    assert (tmp_path / "runs/two" / journal_file("abc")).stat().st_size == 1_300_000 + 2 * 9
    assert "may have" in problems.pop()
    refused = tail(tmp_path / "third.jsonl", f"{base}/one", {"token": "x"})
    for _ in range(2):
        refused.send()
    (problem,) = problems
    assert "does not accept the token" in problem
