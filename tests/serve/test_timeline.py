"""The list of a run's checkpoints while its folder changes."""

from __future__ import annotations

import shutil
import threading
from pathlib import Path

import numpy as np

from tests.checkpoint.checkpoints import save_arrays
from zstore.checkpoint.folder import LocalFolder
from zstore.serve.views.timeline import Timeline

_NUM_LOOKS = 40


def test_folders_that_come_and_go_while_a_run_is_listed_do_not_hide_it(tmp_path: Path) -> None:
    whole = save_arrays(tmp_path, {"model/a": np.ones(4, np.float32)})
    timeline, ended = Timeline(LocalFolder(tmp_path)), threading.Event()

    def make_and_remove() -> None:
        names = [tmp_path / f"step-9.tmp-{number:032x}" for number in range(20)]
        while not ended.is_set():
            for name in names:
                name.mkdir()
            for name in names:
                name.rmdir()

    def copy_and_remove() -> None:
        while not ended.is_set():
            shutil.copytree(whole, tmp_path / "copy")
            shutil.rmtree(tmp_path / "copy")

    threads = [threading.Thread(target=work, daemon=True) for work in (make_and_remove, copy_and_remove)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(_NUM_LOOKS):
            timeline.forget()
            assert any(one.entry.checkpoint != "copy" for one in timeline.listed())
    finally:
        ended.set()
        for thread in threads:
            thread.join(200)
