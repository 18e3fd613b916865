"""Names of DeepSpeed's that can be imported, asked for by `isinstance` and derived from, and that raise when they are used."""

from __future__ import annotations

from typing import Any

from zstore.errors import UsageError

from .names import missing


class _ByMark(type):
    """The type of classes whose instances are told by what `wrappers` of an object lists: see `wrapper_names`."""

    def __instancecheck__(cls, instance: object) -> bool:
        return cls.__name__ in getattr(instance, "wrappers", ())


def absent(dotted: str) -> type:
    """Return a class of the name `dotted`, a call of which raises UsageError saying what to use instead."""
    text = missing(dotted)

    def refuse(cls: type, *args: object, **kwargs: object) -> Any:
        raise UsageError(text)

    module, _, name = dotted.rpartition(".")
    return _ByMark(name, (), {"__new__": refuse, "__doc__": text, "__module__": module, "NAME": name})


def wrapper_names(stage: int, is_16_bit: bool) -> tuple[str, ...]:
    """Return the classes that DeepSpeed's optimizer is an instance of at a stage."""
    if stage:
        return "ZeROOptimizer", "DeepSpeedOptimizer", *_OF_STAGE[stage]
    return ("FP16_UnfusedOptimizer", "DeepSpeedOptimizer") if is_16_bit else ()


_OF_STAGE = {
    1: ("DeepSpeedZeroOptimizer",),
    2: ("DeepSpeedZeroOptimizer",),
    3: ("DeepSpeedZeroOptimizer_Stage3",),
}
