"""Slabs that are registered with CUDA, on a double of its runtime: what was registered is given back, once."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from tests.engine.runs import make_config, start
from zstore.engine.runtime.device import Streams
from zstore.format.arrays import Bytes
from zstore.io.pinning import PinnedSlabs
from zstore.store import StoreOptions, TensorStore
from zstore.testing.ranks import run_ranks

MIB = 1 << 20


class Runtime:
    """Counts registrations; refuses them beyond `limit_bytes`."""

    def __init__(self, limit_bytes: int = 1 << 40, raises: bool = False) -> None:
        self.limit_bytes = limit_bytes
        self.raises = raises
        self.registered: dict[int, int] = {}
        self.calls = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.calls += 1
        if self.raises:
            raise RuntimeError("no driver")
        if sum(self.registered.values()) + nbytes > self.limit_bytes:
            return 2
        self.registered[address] = nbytes
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        del self.registered[address]
        return 0


def test_slabs_are_registered_until_the_end() -> None:
    runtime = Runtime()
    slabs = PinnedSlabs(runtime)
    first, second = slabs.make(MIB), slabs.make(3 * MIB)
    assert runtime.registered == {first.ctypes.data: MIB, second.ctypes.data: 3 * MIB}
    assert slabs.pinned_bytes == 4 * MIB
    assert slabs.make(0).size == 0
    slabs.close()
    assert runtime.registered == {}
    assert slabs.pinned_bytes == 0
    slabs.close()
    assert slabs.messages == []


@pytest.mark.filterwarnings("ignore:.*is multi-threaded:DeprecationWarning")  # from Python 3.12 on
def test_processes_that_are_forked_have_no_copy_of_registered_memory() -> None:
    """Of pinned pages the kernel makes a copy at once, for each worker of a DataLoader."""

    def child_has(slab: Bytes) -> bool:
        pid = os.fork()
        if pid == 0:
            lines = Path("/proc/self/maps").read_text().splitlines()
            places = [[int(end, 16) for end in line.split()[0].split("-")] for line in lines]
            os._exit(any(first <= slab.ctypes.data < stop for first, stop in places))
        return bool(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

    slabs = PinnedSlabs(Runtime())
    large, small = slabs.make(3 * MIB), slabs.make(MIB)
    large[:], small[:] = 1, 2
    assert (child_has(large), child_has(small)) == (False, True)
    slabs.close()
    assert child_has(large)
    assert large.sum() == large.size


def test_a_slab_is_registered_as_long_as_a_view_of_it_lives() -> None:
    runtime = Runtime()
    slabs = PinnedSlabs(runtime)
    kept = slabs.make(MIB)
    view = slabs.make(2 * MIB)[MIB:].view("float32")[:5]
    assert slabs.pinned_bytes == 3 * MIB
    del view
    assert runtime.registered == {kept.ctypes.data: MIB}
    assert slabs.pinned_bytes == MIB
    slabs.close()
    assert runtime.registered == {}


@pytest.mark.parametrize("runtime", [Runtime(2 * MIB), Runtime(raises=True)])
def test_what_cannot_be_registered_is_ordinary_memory(runtime: Runtime) -> None:
    slabs = PinnedSlabs(runtime)
    for _ in range(4):
        slab = slabs.make(MIB + 4096)
        slab[:] = 1
    assert len(slabs.messages) == 1
    assert "host memory is not pinned" in slabs.messages[0]
    assert runtime.calls < 4  # it is not tried again
    slabs.close()
    assert runtime.registered == {}


def test_a_store_pins_what_it_is_told(tmp_path: Path) -> None:
    for pin_buffers, pin_state in [(True, False), (False, True), (True, True)]:
        runtime = Runtime()
        options = StoreOptions(run_path=tmp_path, pin_buffers=pin_buffers, pin_state=pin_state)
        with TensorStore(options, cuda=runtime) as store:
            store.make_pool(MIB)
            assert (store.statistics().pinned_bytes > 0) == pin_buffers
            assert store.fallbacks == ()
        assert runtime.registered == {}


class HostStreams(Streams):
    """Those of the host, with a runtime to register memory with."""

    def __init__(self, runtime: Runtime) -> None:
        self.cuda_runtime = runtime


@pytest.mark.parametrize("pinned", [True, False])
def test_state_of_a_run_is_pinned(pinned: bool, caplog: pytest.LogCaptureFixture) -> None:
    runtime = Runtime() if pinned else Runtime(raises=True)
    config = make_config(3, "cpu")
    config["zero_optimization"]["offload_param"] = {"device": "cpu", "pin_memory": True}
    with caplog.at_level(logging.WARNING), start(config, _streams=HostStreams(runtime)) as engine:
        found = engine.statistics().store
        assert (found.host_bytes > found.pinned_bytes > 0) == pinned  # masters and moments stay on the host
    assert runtime.registered == {}
    assert sum("host memory is not pinned" in record.message for record in caplog.records) == int(not pinned)


def _warned(rank: int) -> list[str]:
    found: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: found.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("zstore").addHandler(handler)
    config = make_config(1, "cpu")
    config["zero_optimization"]["offload_optimizer"]["pin_memory"] = True
    start(config, _streams=_Away()).close()
    return [message for message in found if "not pinned" in message]


class _Away(Streams):
    """Says that the device is not the host, so that memory is to be pinned."""

    device_is_host = False


def test_ranks_that_cannot_pin_say_so_once() -> None:
    (said, *others) = run_ranks(_warned, 2)
    assert others == [[]]
    assert len(said) == 1
    assert said[0].startswith("every rank: host memory is not pinned")
