"""A plugin of pytest that lets transformers' tests of its Trainer train on zstore, through its own DeepSpeed integration.

`PYTHONPATH=tests/peers python -m pytest -p replacing FOLDER`, since theirs is a package `tests` too; the variable
ZSTORE_CONFIG is the config that TrainingArguments have if a test names none.
"""

import json
import os
from importlib import import_module
from typing import Any

from zstore.tools.as_deepspeed import install_finder

install_finder()  # before transformers, which looks for DeepSpeed as it is imported
TrainingArguments = import_module("transformers").TrainingArguments
_own = TrainingArguments.__post_init__


def _with_config(self: Any) -> None:
    if self.deepspeed is None:
        self.deepspeed = json.loads(os.environ["ZSTORE_CONFIG"])
    _own(self)


TrainingArguments.__post_init__ = _with_config
