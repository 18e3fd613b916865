"""Service and clients of uploads are killed at every stage: former checkpoints stay whole, and the upload goes on."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.serve.upload_kills import KilledUploads


def test_uploads_survive_kills_of_service_and_client(tmp_path: Path) -> None:
    uploads = KilledUploads(tmp_path)
    uploads.plain()
    operations, sent = uploads.operations, uploads.sent_bytes
    killed = [uploads.kill_service(operations * number // 6) for number in range(6)]
    killed += [uploads.kill_client(sent * number // 7) for number in range(4)]
    assert sum(killed) == 10


@pytest.mark.soak
def test_uploads_survive_kills_at_every_operation_and_byte(tmp_path: Path) -> None:
    uploads = KilledUploads(tmp_path)
    uploads.plain()
    operations, sent = uploads.operations, uploads.sent_bytes
    killed = {"service": 0, "client": 0}
    for fail_at in range(operations + 6):
        for _ in range(3):  # every third one replaces a checkpoint
            killed["service"] += uploads.kill_service(fail_at)
    for number in range(150):
        killed["client"] += uploads.kill_client(sent * number // 200)
    assert killed["service"] >= 3 * operations
    assert killed["client"] >= 140
