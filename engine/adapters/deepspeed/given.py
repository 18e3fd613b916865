"""Configs in the forms that scripts and libraries give DeepSpeed, converted for zstore."""

from __future__ import annotations

import base64
import binascii
import copy
import json
import math
import os
from collections.abc import Mapping
from typing import Any

from zstore.engine.config.config import read_config


def cleaned(source: Any) -> Any:
    """Return a config without the keys that DeepSpeed ignores: a copy, if it is a dict.

    Those are `steps_per_print` of infinity and `zero_allow_untested_optimizer`, which accelerate writes by itself, and keys
    with a dot at the top, which trl writes. A path, or a dict as base64-encoded JSON, is read first; anything else is
    returned as it is.
    """
    raw = raw_config(source)
    if not isinstance(raw, Mapping):
        return raw
    config = {key: value for key, value in raw.items() if "." not in key}
    config.pop("zero_allow_untested_optimizer", None)
    steps = config.get("steps_per_print")
    if isinstance(steps, float) and math.isinf(steps):
        config["steps_per_print"] = 0
    return config


def raw_config(source: Any) -> Any:
    """Return the dict in `source`, a copy: of a dict, of a file, or of base64-encoded JSON; anything else as it is."""
    if isinstance(source, Mapping):
        return copy.deepcopy(dict(source))
    if isinstance(source, str) and not os.path.exists(source):
        decoded = _decoded(source)
        if decoded is not None:
            return decoded
    if isinstance(source, str | os.PathLike):
        return read_config(source)
    return source


def _decoded(text: str) -> dict[str, Any] | None:
    try:
        found = json.loads(base64.urlsafe_b64decode(text))
    except (binascii.Error, ValueError):
        return None
    return found if isinstance(found, dict) else None
