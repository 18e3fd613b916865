"""A save of a version is killed (SIGKILL) at any byte on its way to the bucket: of files, and of icechunk's own requests."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.checkpoint.buckets import VersionedBucket
from tests.checkpoint.checkpoints import open_world
from tests.checkpoint.s3_server import s3_server
from tests.serve.proxy import proxy_to
from zstore.checkpoint.reader import open_checkpoint, tags
from zstore.checkpoint.verify import verify_checkpoint
from zstore.testing.ranks import PRELOADED, loaded_context

pytest.importorskip("icechunk", reason="extra versions")
pytest.importorskip("s3fs", reason="extra s3")
pytest.importorskip("moto", reason="extra test")

FROZEN = np.arange(60_000, dtype=np.float32)


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, Any]]:
    with s3_server() as options:
        yield options


def arrays_of(number: int) -> dict[str, Any]:
    return {
        "model/frozen": FROZEN,
        "model/w": np.full(3000, number, np.float32),
        "optimizer/exp_avg/w": np.full(3000, -number, np.float32),
    }


def save(options: dict[str, Any], name: str, folder: str, number: int) -> None:
    """Save version `number` by two ranks; every third takes the tag of the one before."""
    bucket = VersionedBucket(options, Path(folder), name=name)
    with open_world(arrays_of(number), world_size=2) as world:
        bucket.save(world, step=number, tag=tag_of(number))


def tag_of(number: int) -> str:
    return f"tag-{number - (number % 3 == 0)}"


class KilledSaves:
    """Saves into `bucket`, each of which is killed once, and then saved again."""

    def __init__(self, bucket: VersionedBucket, folder: Path) -> None:
        self._bucket, self._folder, self._number = bucket, folder, 0
        self._context = loaded_context()
        self._context.set_forkserver_preload([*PRELOADED, "icechunk", "s3fs", "zarr", __name__])
        self._expected: dict[str, int] = {}
        """By tag, the number of the version."""
        self.sent_bytes = 0
        """In the last save of which no process was killed."""

    def save(self, kill_after: int | None = None) -> bool:
        """Save the next version, kill it once it sent so many bytes, and see what is there; return whether it was killed."""
        self._number += 1
        endpoint = self._bucket.options["client_kwargs"]["endpoint_url"]
        with proxy_to(int(endpoint.rpartition(":")[2])) as proxy:
            options = {**self._bucket.options, "client_kwargs": {"endpoint_url": f"http://127.0.0.1:{proxy.port}"}}
            arguments = options, self._bucket.name, str(self._folder / str(self._number)), self._number
            process = self._context.Process(target=save, args=arguments, daemon=True)
            if kill_after is not None:
                proxy.after(kill_after, process.kill)
            process.start()
            process.join(100)
            if kill_after is None:
                assert process.exitcode == 0
                self.sent_bytes = proxy.sent_bytes
        killed = process.exitcode == -signal.SIGKILL
        assert killed or process.exitcode == 0
        self._look(may=killed)
        return killed

    def _look(self, *, may: bool) -> None:
        """Read all versions: those that were committed, and if it `may`, the one under way is there or not."""
        after = {**self._expected, tag_of(self._number): self._number}
        found = {}
        for info in tags(self._bucket.folder):
            with open_checkpoint(info.folder) as reader:
                assert verify_checkpoint(reader) == []
                found[info.tag] = info.record.step
                for name, expected in arrays_of(info.record.step).items():
                    assert reader.read_array(name).tobytes() == expected.tobytes()
        assert found == after or (may and found == self._expected)
        self._expected = found

    def prune(self) -> None:
        """Remove all but the newest three."""
        for info in tags(self._bucket.folder)[:-3]:
            self._bucket.folder.remove_version(info)
            del self._expected[info.tag]


def kill_saves(bucket: VersionedBucket, folder: Path, kills: int) -> None:
    """Kill a save at each of so many places, and every third time save once more."""
    saves, killed = KilledSaves(bucket, folder), 0
    for _ in range(2):
        saves.save()
    sent_bytes = saves.sent_bytes
    for number in range(kills):
        killed += saves.save(sent_bytes * number // kills)
        if number % 3 == 2:
            saves.save()
            saves.prune()
    assert killed > 0.9 * kills
    bucket.folder.tidy(leftover_s=0)
    assert bucket.packs().keys() == {pack for version in bucket.folder.all().values() for pack in version.packs}


def test_a_save_that_is_killed_leaves_what_was_there(server: dict[str, Any], tmp_path: Path) -> None:
    kill_saves(VersionedBucket(server, tmp_path), tmp_path, 3)


@pytest.mark.soak
@pytest.mark.timeout(7200)
def test_saves_are_killed_at_two_hundred_places(server: dict[str, Any], tmp_path: Path) -> None:
    kill_saves(VersionedBucket(server, tmp_path), tmp_path, 225)
