"""S3 whose process is killed at a request; s3:// is it once this is imported. For processes of their own."""

from __future__ import annotations

import os
import signal
from typing import Any

import fsspec
from s3fs import S3FileSystem


class MortalFileSystem(S3FileSystem):  # type: ignore[misc]
    """S3 whose process is killed at a request that writes."""

    kill_at: int | None = None

    async def _call_s3(self, method: str, *arguments: Any, **options: Any) -> Any:
        if method == "put_object" and MortalFileSystem.kill_at is not None:
            MortalFileSystem.kill_at -= 1
            if MortalFileSystem.kill_at < 0:
                os.kill(os.getpid(), signal.SIGKILL)
        return await super()._call_s3(method, *arguments, **options)


fsspec.register_implementation("s3", MortalFileSystem, clobber=True)
