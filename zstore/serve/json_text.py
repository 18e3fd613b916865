"""Models as JSON, whatever texts and numbers a journal or the names of files put into them."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel
from pydantic_core import PydanticSerializationError


def json_of(model: BaseModel) -> str:
    """Return a model as JSON in UTF-8, numbers that are not finite as null and characters that are not Unicode as `?`."""
    try:
        return model.model_dump_json()
    except PydanticSerializationError:  # a lone surrogate, from a journal or the name of a file
        return json.dumps(_encodable(model.model_dump()), separators=(",", ":"), ensure_ascii=False)


def _encodable(value: Any) -> Any:
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {_encodable(key): _encodable(item) for key, item in value.items()}
    return [_encodable(item) for item in value] if isinstance(value, list | tuple) else value
