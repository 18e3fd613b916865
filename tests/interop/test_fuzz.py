"""Any JSON and shard files in place of a checkpoint's, whose checksums and digests fit: an error of ours or values, soon.

Bytes whose checksums do not fit are in test_untrusted_foreign.py.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.checkpoint.checkpoints import save_arrays
from tests.checkpoint.forging import Forge, data_start, index_of, mutate, record_digest
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.errors import ZstoreError
from zstore.io.shards import IoResources, open_resources

LIMIT_S = 10.0
"""No example may take longer; one takes some milliseconds."""
FUZZ = settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))


def make_arrays() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {
        "model/w": rng.standard_normal((40, 16)).astype(np.float32),
        "model/b": rng.standard_normal(5).astype(ml_dtypes.bfloat16),
        "optimizer/exp_avg/w": rng.standard_normal((40, 16)).astype(np.float32),
    }


SMALL = {"client/n": np.arange(6).reshape(2, 3)}


@pytest.fixture(scope="module")
def resources() -> Iterator[IoResources]:
    with open_resources(pool_bytes=2**20, num_threads=2) as opened:
        yield opened


@pytest.fixture(scope="module")
def forge(tmp_path_factory: pytest.TempPathFactory) -> Forge:
    path = save_arrays(tmp_path_factory.mktemp("fuzz"), make_arrays(), world_size=2, small=SMALL, record={"step": 1})
    for file in path.rglob("*"):
        if file.is_file():
            file.chmod(0o644)
    return Forge(path)


@contextlib.contextmanager
def changed(forge: Forge) -> Iterator[None]:
    """The block changes the checkpoint and reads it, within the limit; then it is as it was."""
    started = time.process_time()
    try:
        yield
        assert time.process_time() - started < LIMIT_S
    finally:
        forge.restore()


def read_all(forge: Forge, resources: IoResources) -> tuple[dict[str, bytes], int]:
    """Read and verify; return the arrays that could be read, and how many faults there are. Other errors fail."""
    found: dict[str, bytes] = {}
    try:
        with open_checkpoint(forge.path, resources=resources) as reader:
            for name in reader.arrays:
                with contextlib.suppress(ZstoreError):
                    found[name] = reader.read_array(name).tobytes()
            for rank in range(reader.record.world_size):
                with contextlib.suppress(ZstoreError):
                    reader.rank_state(rank)
            return found, len(verify_checkpoint(reader, num_threads=1))
    except ZstoreError:
        return found, 1


@FUZZ
@given(data=st.data())
def test_changed_json_with_digests_that_fit_gives_an_error_or_values(
    forge: Forge, resources: IoResources, data: st.DataObject
) -> None:
    file = data.draw(st.sampled_from([f for f in sorted(forge.originals) if f.endswith(".json")]))
    document = json.loads(forge.originals[file])
    for _ in range(data.draw(st.integers(1, 3))):
        if document:
            mutate(document, data)
    with changed(forge):
        if file == "zstore.json":
            document["digest"] = record_digest(document)
        forge.put(file, json.dumps(document).encode())
        if file != "zstore.json":
            forge.seal()
        read_all(forge, resources)


@FUZZ
@given(data=st.data())
def test_changed_shards_with_checksums_that_fit_give_an_error_or_what_is_in_them(
    forge: Forge, resources: IoResources, data: st.DataObject
) -> None:
    file = data.draw(st.sampled_from([f for f in sorted(forge.originals) if "/c." in f]))
    old = forge.originals[file]
    (offset, nbytes), *_ = index_of(old)
    start = data_start(old)
    places = st.integers(0, start - 1) | st.integers(offset, offset + nbytes - 5) | st.integers(0, len(old) - 1)
    edits = data.draw(st.lists(st.tuples(places, st.integers(0, 255)), min_size=1, max_size=8))

    def change(shard: bytearray) -> None:
        for at, value in edits:
            shard[at] = value

    with changed(forge):
        rank = 1 if "/c.1" in file else 0
        forge.forge_shard(file, change, rank)
        found, num_faults = read_all(forge, resources)
        written = forge.read(file)
        name = forge.name_of(file)
        if name in found:
            assert written[: start - 4] == old[: start - 4]  # an index that leads elsewhere is never followed
            assert num_faults == 0
            shard_bytes = nbytes - 4  # one chunk a shard
            here = found[name][rank * shard_bytes :][:shard_bytes]
            assert here == written[offset : offset + len(here)]


def test_the_forgers_do_what_they_say(forge: Forge, resources: IoResources) -> None:
    """A checkpoint that was sealed anew is one; else the two tests above would try nothing behind the digests."""
    with changed(forge):
        forge.edit("manifest/rank-00000.json", lambda manifest: manifest["rank_state"].update(rank=5))
        found, num_faults = read_all(forge, resources)
        assert (len(found), num_faults) == (4, 0)
        forge.forge_shard("model/w/c.0.0", lambda shard: shard.__setitem__(slice(4096, 4100), b"\0\0\x80\x3f"))
        found, num_faults = read_all(forge, resources)
        assert np.frombuffer(found["model/w"], np.float32)[0] == 1.0
        assert num_faults == 0
    found, num_faults = read_all(forge, resources)
    assert (len(found), num_faults) == (4, 0)
