"""The modules that `import deepspeed` gives: made when they are imported, with the names that `names` lists."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch.distributed as torch_dist

from zstore.errors import UsageError
from zstore.ranks.world import World

from .names import ABSENT, ANSWERS_FOR, MODULES, VERSION, missing


def _groups() -> dict[str, Callable[[], Any]]:
    """Return functions about the ranks of a kind: of data parallelism, over which gradients are averaged, all; of
    others one. The group is None if torch.distributed is not started."""
    all_ranks: dict[str, Callable[[], Any]] = {
        "world_size": lambda: World.current().world_size,
        "rank": lambda: World.current().rank,
        "group": lambda: torch_dist.group.WORLD if torch_dist.is_initialized() else None,
    }
    one: dict[str, Callable[[], Any]] = {"world_size": lambda: 1, "rank": lambda: 0, "group": lambda: None}
    return {
        f"{start}get_{kind}_parallel_{what}": answer
        for kind in ("data", "sequence_data", "model", "tensor_model", "sequence")
        for what, answer in (all_ranks if kind.endswith("data") else one).items()
        for start in ("", "_")
    }


_PARTS = zip(("major", "minor", "patch"), map(int, ANSWERS_FOR.split(".")), strict=True)
VALUES: dict[str, dict[str, Any]] = {
    "deepspeed": {f"__version_{part}__": number for part, number in _PARTS}
    | {"__version__": VERSION, "version": VERSION},
    "deepspeed.git_version_info": {"version": VERSION},
    "deepspeed.utils.groups": _groups(),
}
"""Module -> what else it has."""
_LISTED = [dotted.split(".") for dotted in (*MODULES, *ABSENT, *VALUES)]
KNOWN = frozenset(".".join(parts[:depth]) for parts in _LISTED for depth in range(1, len(parts) + 1))
"""All answered modules, including packages that hold nothing but modules."""


class AnsweredModule(ModuleType):
    """A module of DeepSpeed's name with zstore's contents. A name that is not there is an error that names the
    replacement."""

    def __getattr__(self, name: str) -> Any:
        """Return the submodule of that name, which DeepSpeed imports with itself, if there is one."""
        dotted = f"{self.__name__}.{name}"
        if dotted in KNOWN:
            return importlib.import_module(dotted)
        if name.startswith("__") and name.endswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}", name=name, obj=self)
        raise AttributeError(missing(dotted), name=name, obj=self)

    def __dir__(self) -> list[str]:
        prefix = f"{self.__name__}."
        inner = (dotted.removeprefix(prefix) for dotted in KNOWN if dotted.startswith(prefix))
        return sorted({*self.__dict__, *(name for name in inner if "." not in name)})


def fill(module: ModuleType) -> None:
    """Give a module the names that are listed for it."""
    for home, names in MODULES.get(module.__name__, {}).items():
        source = importlib.import_module(home if "." in home else f"{__package__}.{home}")
        for name in names:
            setattr(module, name, getattr(source, name))
    for name in ABSENT.get(module.__name__, ()):
        setattr(module, name, absent(f"{module.__name__}.{name}"))
    vars(module).update(VALUES.get(module.__name__, {}))


def require(dotted: str) -> None:
    """Raise ModuleNotFoundError, which names the replacement, for a module that is not there.

    Its `name` stays empty: with it, `from deepspeed import NAME` would drop this message for Python's own.
    """
    if dotted not in KNOWN:
        raise ModuleNotFoundError(missing(dotted))


def absent(dotted: str) -> type:
    """Return a class of the name `dotted`, a call of which raises UsageError naming the replacement."""
    text = missing(dotted)

    def refuse(cls: type, *args: object, **kwargs: object) -> Any:
        raise UsageError(text)

    module, _, name = dotted.rpartition(".")
    return type(name, (), {"__new__": refuse, "__doc__": text, "__module__": module})
