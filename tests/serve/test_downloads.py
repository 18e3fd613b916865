"""Blocks on their way to clients: their order, their memory, and who waits for whom."""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.waiting import GUARD_S
from zstore.checkpoint.folder import LocalFolder
from zstore.serve.files.downloads import BLOCK_BYTES, BusyError, Downloads
from zstore.serve.files.opened import Opened
from zstore.serve.files.ranges import Part


def numbers(_: int) -> Iterator[Any]:
    return iter([lambda number=number: bytes([number]) for number in range(20)])


async def all_of(shared: Downloads, cut: Any) -> list[int]:
    async with shared.cast(cut) as blocks:
        return [block[0] async for block in blocks]


def test_casts_wait_for_each_other_and_their_blocks_come_in_order() -> None:
    async def play() -> None:
        found = await asyncio.gather(*(all_of(shared, numbers) for _ in range(9)))
        assert found == [list(range(20))] * 9
        assert not shared.taken_bytes

    with Downloads(4 * BLOCK_BYTES, wait_s=GUARD_S) as shared:  # room for one
        asyncio.run(play())


def test_memory_of_downloads_is_bounded_and_given_back() -> None:
    """Clients that take nothing, some that go away, and more than there is room for."""
    begun, gate = threading.Event(), threading.Event()

    def work() -> bytes:
        begun.set()
        gate.wait(GUARD_S)
        return b""

    async def play() -> None:
        async def stall(begun: asyncio.Event) -> None:
            async with shared.cast(numbers) as blocks:
                await anext(blocks)
                begun.set()
                await asyncio.Event().wait()

        stalled = []
        for _ in range(6):  # one with large blocks, then small ones
            has_begun = asyncio.Event()
            task = asyncio.create_task(stall(has_begun))
            stalled.append(task)
            done, _pending = await asyncio.wait(
                {task, asyncio.create_task(has_begun.wait())}, return_when="FIRST_COMPLETED"
            )
            if task in done:
                with pytest.raises(BusyError):
                    task.result()
        assert 8 * BLOCK_BYTES < shared.taken_bytes <= 16 * BLOCK_BYTES
        for task in stalled:
            task.cancel()
        await asyncio.gather(*stalled, return_exceptions=True)
        assert not shared.taken_bytes
        # One whose thread is at work when it ends keeps its memory until that is done.
        task = asyncio.create_task(all_of(shared, lambda _: iter([work, *numbers(0)])))
        await asyncio.to_thread(begun.wait, GUARD_S)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert shared.taken_bytes == 4 * BLOCK_BYTES
        gate.set()
        while shared.taken_bytes:  # noqa: ASYNC110 - nothing tells when a thread is done
            await asyncio.sleep(0.001)

    with Downloads(32 * BLOCK_BYTES, wait_s=0.05) as shared, contextlib.ExitStack() as end:
        end.callback(gate.set)
        asyncio.run(asyncio.wait_for(play(), 30))


def test_files_are_read_while_casts_have_all_their_memory_and_threads(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(data := os.urandom(3 * BLOCK_BYTES + 1))
    part = Part(status=206, start=5, stop=len(data), size=len(data))
    gate = threading.Event()

    async def play() -> None:
        async with contextlib.AsyncExitStack() as casts:
            casts.callback(gate.set)
            for _ in range(2):
                blocks = await casts.enter_async_context(shared.cast(lambda _: iter([lambda: gate.wait(GUARD_S)] * 9)))
                casts.callback(asyncio.create_task(anext(blocks)).cancel)
                await asyncio.sleep(0)
            assert shared.taken_bytes == 7 * BLOCK_BYTES
            with pytest.raises(BusyError):
                await casts.enter_async_context(shared.cast(numbers))
            with (tmp_path / "file").open("rb", buffering=0) as file, contextlib.ExitStack() as others:
                opened = Opened(folder=LocalFolder(tmp_path), path="file", size=len(data), etag=None, file=file)
                for most in (BLOCK_BYTES, BLOCK_BYTES // 4):
                    with shared.read(opened, part) as read:
                        found = [block async for block in read]
                    assert b"".join(found) == data[5:]
                    assert max(map(len, found)) == most
                    for _ in range(13):
                        others.enter_context(shared.read(opened, part))

    with Downloads(14 * BLOCK_BYTES, wait_s=0.05) as shared:
        asyncio.run(asyncio.wait_for(play(), 30))
