"""`zstore verify`: checks every checksum of a checkpoint, in parallel. No torch."""

from __future__ import annotations

import contextlib
import os
from dataclasses import asdict
from typing import Any

from zstore.checkpoint import CheckpointReader, VerifyFault, refused, verify_checkpoint
from zstore.errors import CheckpointNotFoundError, CorruptionError, UsageError
from zstore.open.sources import folder_of, split_location

from .options import DEFAULTS, Common, Location, Tag, open_location
from .printing import ProgressBar, print_json, printable


def verify_command(ckpt: Location, common: Common = DEFAULTS, *, tag: Tag = None) -> int:
    """Check `ckpt` and print each fault to stdout; return the exit code, 1 if there are any.

    In a folder of checkpoints, `tag` is checked, or the newest; then checkpoints with an invalid record are faults too. With
    `json`, one object: `path`, `faults`, `read_bytes` and `ProgressBar.summary`.
    """
    faults: list[VerifyFault] = []
    place, tag_name = split_location(ckpt, tag)
    with contextlib.suppress(CheckpointNotFoundError):
        refusals = refused(folder_of(place, common.storage_options)) if tag_name is None else []
        faults += [VerifyFault(file=refusal.location, problem=refusal.reason) for refusal in refusals]
    document: dict[str, Any] = {}
    try:
        with open_location(place, common, tag_name) as reader:
            if not isinstance(reader, CheckpointReader):
                raise UsageError(
                    f"zstore verify checks zstore's own checkpoints: {reader.location} is {reader.kind}, which has no "
                    "checksums; `zstore convert` writes a checkpoint that does"
                )
            total = sum(array.file_bytes for array in reader.arrays.values())
            with ProgressBar(f"verify {reader.location}", total) as progress:
                faults += verify_checkpoint(reader, progress.advance)
                if not faults:
                    progress.print_line(f"no faults: every chunk of {len(reader.arrays)} arrays matches its checksum")
            # In a local folder the check reads the files directly, not through the reader.
            read_bytes = progress.done_bytes if reader.folder.is_local else reader.reading().read_bytes
            document = {"read_bytes": read_bytes, **progress.summary()}
    except CorruptionError as error:
        faults.append(VerifyFault(file=os.fspath(ckpt), problem=str(error)))
    if common.json:
        print_json({"path": os.fspath(ckpt), "faults": [asdict(fault) for fault in faults], **document})
    else:
        for fault in faults:
            print(printable(fault))
    return 1 if faults else 0
