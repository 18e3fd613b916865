"""Boards over the store of torch.distributed."""

import gc
import time
from datetime import timedelta
from typing import Any

import pytest
import torch.distributed as torch_dist
from torch.distributed import distributed_c10d as c10d

from zstore.ranks import board


def test_messages_and_bytes_of_any_length_are_there_until_they_are_removed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board, "_VALUE_BYTES", 4)
    found = board.Board(torch_dist.HashStore())  # type: ignore[attr-defined]
    assert found.read("a") is None
    for data in (b"", b"1 2", b"four", b" 9 bytes."):
        found.post_bytes("a", data)
        assert found.read_bytes("a") == data
        found.remove("a")
        assert found.read_bytes("a") is None
    found.post("b", {"rank": 1})
    assert found.read("b") == {"rank": 1}
    assert [found.add("n", 1), found.add("n", 2), found.add("n", 0)] == [1, 3, 3]


def test_boards_share_posts_and_a_store_that_is_gone_is_not_asked_for_minutes(monkeypatch: pytest.MonkeyPatch) -> None:
    server: Any = torch_dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)  # type: ignore[attr-defined]
    client: Any = torch_dist.TCPStore("127.0.0.1", server.port, None, False, wait_for_workers=False)  # type: ignore[attr-defined]
    monkeypatch.setattr(c10d, "_get_default_store", lambda: client)
    monkeypatch.setattr(board, "_CONNECT", timedelta(seconds=0.5))
    usual, data = client.timeout, bytes(range(256)) * 40_000  # more than the store takes in one value
    board.Board.connect("a").post_bytes("large", data)
    other = board.Board.connect("a")
    assert (
        board.wait_until(lambda: other.read_bytes("large"), 60, str, check=lambda: None) == data
    )  # a post is not waited for
    other.remove("large")
    board.wait_until(lambda: other.read_bytes("large") is None, 60, str, check=lambda: None)
    del server
    gc.collect()
    began = time.monotonic()
    with pytest.raises(torch_dist.DistError):
        board.Board.connect("a")
    assert time.monotonic() - began < usual.total_seconds() / 5
    assert client.timeout == usual
