"""Threads that each make, change, read and remove arrays of their own in one store."""

from __future__ import annotations

import sys
import threading
from pathlib import Path

import numpy as np
import pytest

from zstore.format import ArraySpec, make_grid
from zstore.store import StoreOptions, TensorStore


@pytest.mark.parametrize("packs", [False, True])
def test_threads_work_on_different_arrays_at_once(tmp_path: Path, packs: bool) -> None:
    interval = sys.getswitchinterval()
    errors: list[BaseException] = []
    with TensorStore(StoreOptions(run_path=tmp_path, most_pool_bytes=8 * 2**20)) as store:
        if packs:
            store.share_files()

        def work(number: int) -> None:
            try:
                for turn in range(12):
                    name, numel = f"model/{number}.{turn}", 32 * 1024 + 16 * number
                    spec = ArraySpec(name=name, shape=(numel,), dtype="float32")
                    tier = ("disk", "host")[turn % 2]
                    store.create(spec, grid=make_grid(spec.stored_shape, 1), shard=0, tier=tier)  # type: ignore[arg-type]
                    values = np.full(numel, 100 * number + turn, np.float32)
                    store.writing(name, values, 0)()
                    assert (store.reading(name, 0, None, None)() == values).all()
                    assert name in store
                    store.statistics()
                    if turn % 3:
                        store.remove(name)
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
        sys.setswitchinterval(1e-5)
        try:
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(200)
        finally:
            sys.setswitchinterval(interval)
        assert not errors
        held = {name: store.local(name).nbytes for name in store.names()}
        assert len(held) == 8 * 4
        statistics = store.statistics()
        assert statistics.disk_bytes + statistics.host_bytes == sum(held.values())
        for name in held:
            number, _, turn = name.removeprefix("model/").partition(".")
            assert (store.read(name).wait() == 100 * int(number) + int(turn)).all()
        assert store._disk is not None
        for name in held:
            store.remove(name)
        assert sum(store._disk._drives.given_bytes.values()) == 0
        assert store.budget.used_bytes == 8 * 2**20
