"""What a client sends beside its checkpoints: the lines of its journal, and its model's config."""

from __future__ import annotations

import errno
import json
import os
import socket
from pathlib import Path
from typing import Any

import aiofiles
import numpy as np
import pytest
import urllib3

from tests.checkpoint.checkpoints import save_arrays
from tests.serve.conftest import Serve
from tests.serve.proxy import proxy_to
from tests.waiting import until
from zstore.errors import UsageError
from zstore.journal import journal_file
from zstore.remote.service import UploadPlace, open_folder
from zstore.remote.service_target import JournalTail

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
    refused = tail(tmp_path / "third.jsonl", f"{base}/one", {"token": "x"})
    for _ in range(2):
        refused.send()
    (problem,) = problems
    assert "does not accept the token" in problem


def test_config_and_tokenizer_lie_beside_the_checkpoints(tmp_path: Path, base: str) -> None:
    folder = open_folder(f"{base}/one", OPTIONS)
    folder.write_small("config.json", b"{}")
    folder.write_small("config.json", b"{ }")
    assert (tmp_path / "runs/one/config.json").read_bytes() == b"{ }"
    save_arrays(tmp_path / "runs/one", {"model/a": np.zeros(3)})
    folder.write_small("config.json", b"{ }")
    folder.write_small("tokenizer.json", b"{}")
    with pytest.raises(FileExistsError, match=r"has another config\.json"):
        folder.write_small("config.json", b"{}")
    for name in ("latest", "journal-abc.jsonl", "zstore.json", ".config.json"):
        with pytest.raises(UsageError):
            folder.write_small(name, b"{}")
    with pytest.raises(UsageError):
        folder.child("step-00000001").write_small("config.json", b"{}")


@pytest.mark.parametrize(("number", "status"), [(errno.ENOSPC, 507), (errno.EROFS, 500)])
def test_a_drive_that_is_full_or_read_only_is_told_and_nothing_stays(
    tmp_path: Path, base: str, http: urllib3.PoolManager, monkeypatch: pytest.MonkeyPatch, number: int, status: int
) -> None:
    url, real = f"{base}/api/runs/one/companions/config.json", aiofiles.open

    def failing(path: Path, mode: str) -> Any:
        if number == errno.EROFS:
            raise OSError(number, os.strerror(number), str(path))
        return real("/dev/full", mode)

    assert http.request("PUT", url, body=b"{}", headers=TOKEN).status == 204
    with monkeypatch.context() as patch:
        patch.setattr(aiofiles, "open", failing)
        answer = http.request("PUT", url, body=b"{ }", headers=TOKEN)
    assert answer.status == status, answer.data
    assert "the file cannot be written" in answer.json()["error"]
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "runs/one").iterdir()] == [("config.json", b"{}")]


def test_a_connection_that_ends_early_leaves_nothing(tmp_path: Path, base: str) -> None:
    place = urllib3.util.parse_url(base)
    head = f"PUT /api/runs/one/companions/tokenizer.json HTTP/1.1\r\nHost: x\r\nAuthorization: {TOKEN['Authorization']}\r\n"
    with socket.create_connection((place.host, place.port)) as client:
        client.sendall(f"{head}Content-Length: 4000000\r\n\r\n".encode() + b"x" * 3_000_000)
        until(lambda: any(path.stat().st_size >= 2**20 for path in tmp_path.glob("runs/one/.tokenizer.json.*.part")))
    until(lambda: not list((tmp_path / "runs/one").iterdir()))
