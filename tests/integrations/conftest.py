"""Other people's training loops: Trainer, Accelerate, Lightning, FSDP2, scripts for DeepSpeed."""

import os
from collections.abc import Iterator

import pytest

from zstore.testing import ranks

# What the ranks of these tests import: seconds in each of them.
ranks.PRELOADED += ["transformers.trainer", "trl.trainer.sft_trainer", "peft", "lightning.pytorch"]


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Take back what a loop sets in the process's variables, as Lightning does the port of its ranks."""
    before = dict(os.environ)
    yield
    for name in set(os.environ) - set(before):
        del os.environ[name]
    os.environ.update(before)
