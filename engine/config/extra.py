"""Extras: features that plug into an engine by a section of the config, zstore's own and those of others.

[Note: an extra]
The engine knows of its extras what this class says. `initialize` takes those whose section is in the config and is on: each
may change the model before it is laid out, and is made when the engine is there. It may register optimizers
(`optim.rules`), and override what follows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, ClassVar

from zstore.errors import UsageError

from .keys import Section
from .schema import add_section, remove_section

if TYPE_CHECKING:
    from torch import nn


class Extra:
    """A feature of one engine. Every rank has it, and calls each method in the same order. See [Note: an extra]."""

    acts_frozen: ClassVar[bool] = False
    """Whether engines that train nothing have it too."""

    @classmethod
    def prepare(cls, model: nn.Module, section: Any) -> None:
        """Change a model as the section says, before an engine takes it."""

    def __init__(self, engine: Any, section: Any) -> None:
        """Plug into an engine that was just made."""

    def step_ended(self) -> None:
        """Take the state after an optimizer step, taken or skipped: an update may still run behind it."""

    def close(self) -> None:
        """Release everything: the engine is closed."""


Load = Callable[[], type[Extra]]
EXTRAS: dict[str, Load] = {}
"""By the dotted key of their section."""


def register(key: str, load: Load, section: type[Section] | None = None) -> None:
    """Let engines have the extra that `load` imports if the config's section at the dotted `key` is on; see [Note: an extra]
    for another key. A `section` that the schema does not have is added to it, see `add_section`. Raises UsageError for a key
    that is taken."""
    if key in EXTRAS:
        raise UsageError(f"register({key!r}): another extra has this key")
    if section is not None:
        add_section(key, section)
    EXTRAS[key] = load


def unregister(key: str) -> None:
    """Take an extra back that brought its own section."""
    del EXTRAS[key]
    remove_section(key)
