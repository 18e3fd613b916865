"""The rule for which checkpoints stay: a number, or an object with several reasons."""

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Annotated

from pydantic import PlainValidator

from zstore.checkpoint.keep import Keep
from zstore.errors import UsageError

from .values import Rule, Whole, show


@dataclass(frozen=True, kw_only=True)
class Keeping(Rule):
    """How many of the newest stay, or an object with fields of `Keep`."""

    def _convert(self, value: object) -> Keep:
        if not isinstance(value, Mapping):
            return Keep(last=self._count(value))
        known = [field.name for field in fields(Keep)]
        for name in value:
            if name not in known:
                raise ValueError(f"expected keys {', '.join(known)}, got {show(name)}")
        found = {name: item for name, item in value.items() if item is not None}
        for name in {"last", "every"} & set(found):
            found[name] = self._count(found[name])
        if isinstance(found.get("tags"), list):
            found["tags"] = tuple(found["tags"])
        try:
            return Keep(**found)
        except UsageError as error:
            raise ValueError(str(error)) from error

    def _count(self, value: object) -> int:
        try:
            return int(str(Whole(minimum=1)(value)))
        except ValueError:
            raise self._refuse(value) from None

    def _expected(self) -> str:
        return "a whole number of at least 1, or an object with any of last, every, best, tags"


MaybeKeep = Annotated[Keep | None, PlainValidator(Keeping())]
