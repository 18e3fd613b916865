"""Service and clients of uploads are killed at every stage: former checkpoints stay whole, and the upload goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.upload_kills import KilledUploads


def test_uploads_survive_kills_of_service_and_client(tmp_path: Path) -> None:
    uploads = KilledUploads(tmp_path)
    uploads.plain()
    operations, sent = uploads.operations, uploads.sent_bytes
    killed = [uploads.kill_service(operations * number // 4) for number in (1, 3)]
    killed.append(uploads.kill_client(sent // 4))
    assert sum(killed) == 3


@pytest.mark.soak
def test_uploads_survive_kills_of_the_service_at_every_operation(tmp_path: Path) -> None:
    uploads = KilledUploads(tmp_path)
    uploads.plain()
    # Every third upload replaces a checkpoint; those that link more have fewer operations than the first.
    killed = sum(uploads.kill_service(fail_at) for fail_at in range(uploads.operations) for _ in range(3))
    assert killed >= 250


@pytest.mark.soak
def test_uploads_survive_kills_of_the_client_at_every_byte(tmp_path: Path) -> None:
    uploads = KilledUploads(tmp_path)
    uploads.plain()
    sent = uploads.sent_bytes
    assert sum(uploads.kill_client(sent * number // 200) for number in range(150)) >= 120
