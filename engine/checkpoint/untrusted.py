"""State out of a checkpoint that may come from elsewhere: if it cannot be restored, the error is one of ours."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zstore.errors import CorruptionError, ZstoreError


@contextmanager
def understood(what: str) -> Iterator[None]:
    """Raise CorruptionError if the block, or function, meets JSON that no engine saves; `what` names it."""
    try:
        yield
    except ZstoreError:
        raise
    except (ArithmeticError, AttributeError, LookupError, RuntimeError, TypeError, ValueError) as error:
        raise CorruptionError(
            f"the checkpoint's {what} is not what an engine saves ({type(error).__name__}: {error!s:.200}): the record was "
            "changed; load another checkpoint, or pass load_module_only=True"
        ) from error
