"""Parameters that are read where the module that holds them is not called, as in `F.linear(x, self.embed.weight)`.

No hook of a unit fires there. So modules with sharded parameters look theirs up in a dictionary that tells of each
reading; the engine's hooks then gather the unit, if it is released and a forward is under way.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

OnRead = Callable[[nn.Parameter], None]


class WatchedParameters(dict[str, nn.Parameter | None]):
    """A module's own parameters by name; calls `on_read` before one is handed out as an attribute."""

    def __init__(self, parameters: dict[str, nn.Parameter | None], on_read: OnRead) -> None:
        super().__init__(parameters)
        self._on_read = on_read

    def __getitem__(self, name: str) -> nn.Parameter | None:
        """Return the parameter, gathered where that can be."""
        parameter = super().__getitem__(name)
        if parameter is not None:
            self._on_read(parameter)
        return parameter

    def __reduce__(self) -> tuple[Any, ...]:
        """Copies and pickles are plain dictionaries."""
        return dict, (dict(self.items()),)


def watch(modules: Iterable[nn.Module], on_read: OnRead) -> None:
    """Let the modules tell of each reading of a parameter of their own."""
    for module in modules:
        if not isinstance(module._parameters, WatchedParameters):
            module._parameters = WatchedParameters(module._parameters, on_read)


def unwatch(modules: Iterable[nn.Module]) -> None:
    """Give the modules plain dictionaries again."""
    for module in modules:
        if isinstance(module._parameters, WatchedParameters):
            module._parameters = dict(module._parameters.items())
