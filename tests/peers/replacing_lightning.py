"""A plugin of pytest for Lightning's tests: with STANDS_IN=1 a Trainer whose strategy is named gets zstore's in its place.

`PYTHONPATH=tests/peers python -m pytest -p replacing_lightning FOLDER`, since theirs is a package of its own.
"""

import gc
import os
from typing import Any

import pytest

if os.environ.get("STANDS_IN"):
    import zstore.lightning  # noqa: F401  # "deepspeed" and its stages are zstore's from here on

from lightning.pytorch.trainer import trainer
from lightning.pytorch.trainer.connectors import accelerator_connector

NAMES = {"auto": "deepspeed_stage_2", "ddp": "deepspeed_stage_2", "fsdp": "deepspeed_stage_3"}
"""Lightning's name of a strategy -> the one in its place."""


class _Connector(accelerator_connector._AcceleratorConnector):
    def __init__(self, *, strategy: Any = "auto", accelerator: Any = "auto", **options: Any) -> None:
        if isinstance(strategy, str) and accelerator in ("auto", "cpu"):
            strategy = NAMES.get(strategy, strategy)
        super().__init__(strategy=strategy, accelerator=accelerator, **options)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """Collect what a test dropped: an engine's threads end with its Trainer, and theirs look for threads."""
    gc.collect()


if os.environ.get("STANDS_IN"):
    trainer._AcceleratorConnector = _Connector
