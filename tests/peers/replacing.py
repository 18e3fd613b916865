"""A plugin of pytest that lets transformers' tests of its Trainer train on zstore, through its own DeepSpeed integration.

`PYTHONPATH=tests/peers python -m pytest -p replacing FOLDER`, since theirs is a package `tests` too; the variable
ZSTORE_CONFIG is the config that TrainingArguments have if a test names none.
"""

from __future__ import annotations

import json
import os
from typing import Any

from transformers import TrainingArguments

import zstore.as_deepspeed  # noqa: F401 - before transformers

_own = TrainingArguments.__post_init__


def _with_config(self: Any) -> None:
    if self.deepspeed is None:
        self.deepspeed = json.loads(os.environ["ZSTORE_CONFIG"])
    _own(self)


TrainingArguments.__post_init__ = _with_config
