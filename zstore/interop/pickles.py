"""Reads pickles without calling anything that they name. No torch.

[Note: what a pickle may do]
A pickle is a program: it names functions of any module and has them called. The machine here knows the opcodes that
build numbers, text, lists, tuples, dicts and sets. Any other name must be in the caller's table, whose
entries are our own functions that build data. Everything else is refused by name before anything happens. There are no
recursive calls, and nothing is allocated for which the pickle does not have the bytes. The result may refer to
itself, or to one object many times over: code that walks it must count its steps (`Walk`).

Source of the opcodes: pickletools of the Python standard library, protocols 2 to 5.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, BinaryIO

from ..errors import CheckpointMismatchError, CorruptionError

Maker = Callable[..., Any]
"""Makes the result of a call of a global, from the pickle's arguments; must not trust them."""

Table = Mapping[str, Maker | None]
"""Full name of a global -> what makes its calls' results; None if it may be named, but not called."""

MAX_PICKLE_BYTES = 256 * 1024 * 1024
"""A longer pickle is not read: tensors' values are not part of it."""

_MOST_CONTAINERS, _BYTES_A_CONTAINER = 2**20, 8
"""Most lists, dicts, sets and marks in a pickle, plus one for each 8 bytes of it: an empty list is one byte
of a pickle, and 64 in memory."""
_COSTS: dict[type, int] = {tuple: 0, set: 4}
_MOST_LONG_BYTES = 255
_MOST_KEY_DEPTH = 4
_MOST_KEY_PARTS = 1000
_LAST_PROTOCOL = 5
_SIZED = (list, tuple, dict, set, frozenset, str, bytes)
_SMALL_COPIES = 64 * 1024


@dataclass(frozen=True)
class Global:
    """A class or function that a pickle names."""

    name: str
    make: Maker | None = None


@dataclass(eq=False)
class PickledObject:
    """An object of a class that is known by name alone: its content in the pickle, and nothing was called."""

    name: str
    args: tuple[Any, ...] = ()
    state: Any = None

    def get(self, key: str, default: Any = None) -> Any:
        """Return an entry of the state, if that is a dict."""
        return self.state.get(key, default) if isinstance(self.state, dict) else default


def brief(value: Any) -> str:
    """Return a short text of an object from a pickle, which may be deep or endless."""
    return repr(value)[:80] if isinstance(value, str | int | float) else f"a {type(value).__name__}"


class Walk:
    """Counts the steps of code that walks through the objects of a pickle: they may be endless."""

    def __init__(self, where: str, most: int = 1_000_000) -> None:
        self._where = where
        self._left = most

    def step(self) -> None:
        """Count a step. Raises CorruptionError if there were too many."""
        self._left -= 1
        if self._left < 0:
            raise CorruptionError(f"{self._where}: the pickle has too many parts for a checkpoint")


def inert(*names: str) -> dict[str, Maker | None]:
    """Return a table by which objects of the classes `names` become `PickledObject`s."""

    def maker(name: str) -> Maker:
        return lambda *args: PickledObject(name, args)

    return {name: maker(name) for name in names}


def load_pickle(
    stream: BinaryIO, where: str, table: Table, persistent: Callable[[Any], Any] | None = None, *, size: int
) -> Any:
    """Return the object of the pickle at the stream's position, of at most `size` bytes; the stream is behind it then.

    `where` names it in messages; `persistent` gives the objects that are kept outside it. Raises CheckpointMismatchError
    for a global that neither `table` nor `PLAIN` has, CorruptionError for data that is not a pickle.
    """
    machine = _Machine(stream, where, {**PLAIN, **table}, persistent, min(size, MAX_PICKLE_BYTES))
    try:
        return machine.run()
    except (CorruptionError, CheckpointMismatchError):
        raise
    except (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError, struct.error) as error:
        raise CorruptionError(
            f"{where} is not a pickle, or is damaged, at byte {machine.done} ({type(error).__name__}: {str(error)[:200]})"
        ) from error


def _mapping(*args: Any) -> dict[Any, Any]:
    """Make an OrderedDict or dict from nothing or from pairs."""
    if not args:
        return {}
    (pairs,) = args
    return {_key(key): value for key, value in (pairs.items() if isinstance(pairs, dict) else pairs)}


def _set(items: Any = ()) -> set[Any]:
    return {_key(item) for item in _sequence(items)}


def _sequence(items: Any) -> Any:
    if not isinstance(items, list | tuple | set | frozenset):
        raise ValueError("expected a list of items")
    return items


def _encode(text: Any = "", encoding: Any = "latin1") -> bytes:
    """Make bytes as protocol 2 has them: text, one character for each byte, or of no bytes nothing."""
    if not isinstance(text, str) or encoding not in ("latin1", "latin-1"):
        raise ValueError("expected bytes as latin1 text")
    return text.encode("latin1")


def _builtin(name: str, make: Maker | None) -> dict[str, Maker | None]:
    return {f"builtins.{name}": make, f"__builtin__.{name}": make}


PLAIN: Table = {
    "collections.OrderedDict": _mapping,
    "collections.defaultdict": lambda *_: {},
    "_codecs.encode": _encode,
    **_builtin("dict", _mapping),
    **_builtin("list", lambda items=(): list(_sequence(items))),
    **_builtin("set", _set),
    **_builtin("frozenset", _set),
    **_builtin("bytes", _encode),
    **{key: value for name in ("int", "float", "str", "bool") for key, value in _builtin(name, None).items()},
}
"""Globals of plain containers, known to every pickle."""


def _key(key: Any) -> Any:
    """Return `key`, which may be a key of a dict: hashing it calls nothing, and goes neither deep nor on forever."""
    left, done = [(key, 0)], 0
    while left:
        value, depth = left.pop()
        done += 1
        if isinstance(value, tuple) and depth < _MOST_KEY_DEPTH and done + len(value) + len(left) <= _MOST_KEY_PARTS:
            left += [(item, depth + 1) for item in value]
        elif not (value is None or isinstance(value, str | int | float | bytes | Global | PickledObject)):
            raise ValueError(f"a {type(value).__name__} cannot be a key")
    return key


_CONSTANTS: dict[int, Any] = {ord("N"): None, 0x88: True, 0x89: False}
_NUMBERS = {ord("J"): "<i", ord("K"): "<B", ord("M"): "<H", ord("G"): ">d"}
_TEXTS = {ord("X"): "<I", 0x8C: "<B", 0x8D: "<Q"}
_BYTES = {ord("B"): "<I", ord("C"): "<B", 0x8E: "<Q", 0x96: "<Q"}
_LONGS = {0x8A: "<B", 0x8B: "<i"}
_EMPTY: dict[int, type] = {ord("]"): list, ord("}"): dict, ord(")"): tuple, 0x8F: set}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_PUTS = {ord("q"): "<B", ord("r"): "<I"}
_GETS = {ord("h"): "<B", ord("j"): "<I"}
_STOP = ord(".")


class _Machine:
    """Runs one pickle. See [Note: what a pickle may do]."""

    def __init__(
        self, stream: BinaryIO, where: str, table: Table, persistent: Callable[[Any], Any] | None, size: int
    ) -> None:
        self._stream = stream
        self._where = where
        self._table = table
        self._persistent = persistent
        self._size = size
        self.done = 0
        """Bytes that were read."""
        self._copied = 0
        """Items and characters that were arguments of calls."""
        self._stack: list[Any] = []
        self._marked: list[list[Any]] = []
        self._memo: list[Any] = []
        self._containers_left = _MOST_CONTAINERS + size // _BYTES_A_CONTAINER

    def run(self) -> Any:
        """Return the object that the pickle leaves at its end."""
        while True:
            opcode = self._read(1)[0]
            if opcode == _STOP:
                (value,) = self._stack
                return value
            if opcode in _STEPS:
                _STEPS[opcode](self)
            elif not self._simple(opcode):
                raise CorruptionError(
                    f"{self._where}: opcode {opcode:#04x} at byte {self.done - 1} is not used by checkpoints: the "
                    "pickle is damaged, or its protocol is below 2"
                )

    def _read(self, count: int) -> bytes:
        if not 0 <= count <= self._size - self.done:
            raise CorruptionError(
                f"{self._where}: the pickle does not end within {self._size} bytes (at byte {self.done}, {count} more are "
                "expected): it is truncated, damaged, or too large"
            )
        data = self._stream.read(count)
        self.done += len(data)
        if len(data) != count:
            raise CorruptionError(f"{self._where}: the pickle is truncated at byte {self.done}")
        return data

    def _number(self, form: str) -> Any:
        return struct.unpack(form, self._read(struct.calcsize(form)))[0]

    def _simple(self, opcode: int) -> bool:
        """Carry out an opcode of one value; return whether it is one of those."""
        push = self._stack.append
        if opcode in _PUTS:
            self._put(self._number(_PUTS[opcode]))
        elif opcode in _GETS:
            push(self._memo[self._number(_GETS[opcode])])
        elif opcode in _TEXTS:
            push(self._read(self._number(_TEXTS[opcode])).decode("utf-8", "surrogatepass"))
        elif opcode in _NUMBERS:
            push(self._number(_NUMBERS[opcode]))
        elif opcode in _CONSTANTS:
            push(_CONSTANTS[opcode])
        elif opcode in _EMPTY:
            make = _EMPTY[opcode]
            self._count(_COSTS.get(make, 1))
            push(make())
        elif opcode in _TUPLES:
            count = _TUPLES[opcode]
            items = tuple(self._stack.pop() for _ in range(count))
            push(items[::-1])
        elif opcode in _BYTES:
            push(self._read(self._number(_BYTES[opcode])))
        elif opcode in _LONGS:
            length = self._number(_LONGS[opcode])
            if length > _MOST_LONG_BYTES:
                raise CorruptionError(f"{self._where}: an integer of {length} bytes is too large for a checkpoint")
            push(int.from_bytes(self._read(length), "little", signed=True))
        else:
            return False
        return True

    # -- the stack --------------------------------------------------------------------------------------------------

    def _protocol(self) -> None:
        version = self._number("<B")
        if version > _LAST_PROTOCOL:
            raise CheckpointMismatchError(
                f"{self._where} is a pickle of protocol {version}; {_LAST_PROTOCOL} is the last known"
            )

    def _count(self, containers: int) -> None:
        self._containers_left -= containers
        if self._containers_left < 0:
            raise CorruptionError(f"{self._where}: the pickle has too many lists and dicts for a checkpoint")

    def _mark(self) -> None:
        self._count(1)
        self._marked.append(self._stack)
        self._stack = []

    def _unmark(self) -> list[Any]:
        items, self._stack = self._stack, self._marked.pop()
        return items

    def _push(self, value: Any) -> None:
        self._stack.append(value)

    def _pop(self) -> None:
        if self._stack:
            self._stack.pop()
        else:
            self._unmark()

    def _put(self, place: int) -> None:
        if place > len(self._memo):
            raise ValueError("memo entries are out of order")
        self._memo[place : place + 1] = [self._stack[-1]]

    # -- containers -------------------------------------------------------------------------------------------------

    def _top(self, kind: type) -> Any:
        target = self._stack[-1]
        if type(target) is not kind:
            raise ValueError(f"items are put into a {type(target).__name__}, expected a {kind.__name__}")
        return target

    def _append(self) -> None:
        item = self._stack.pop()
        self._top(list).append(item)

    def _appends(self) -> None:
        items = self._unmark()
        self._top(list).extend(items)

    def _set_item(self) -> None:
        value, key = self._stack.pop(), self._stack.pop()
        self._top(dict)[_key(key)] = value

    def _set_items(self) -> None:
        items = self._unmark()
        target = self._top(dict)
        for key, value in zip(items[::2], items[1::2], strict=True):
            target[_key(key)] = value

    def _add_items(self) -> None:
        items = self._unmark()
        self._top(set).update(_set(items))

    # -- globals ----------------------------------------------------------------------------------------------------

    def _line(self) -> str:
        data = bytearray()
        while (byte := self._read(1)) != b"\n":
            data += byte
        return data.decode("utf-8")

    def _stack_global(self) -> None:
        name, module = self._stack.pop(), self._stack.pop()
        if not (isinstance(name, str) and isinstance(module, str)):
            raise ValueError("a global has no name")
        self._find(f"{module}.{name}")

    def _find(self, name: str) -> None:
        if name not in self._table:
            raise CheckpointMismatchError(
                f"{self._where} names {name[:200]!r}, which is neither a tensor nor a plain container: nothing was called, and "
                "the file is not read. If you trust the file, load it with the software that wrote it, take that object out, "
                "and save it again"
            )
        self._stack.append(Global(name, self._table[name]))

    def _call_with_keywords(self) -> None:
        if self._stack.pop():
            raise ValueError("an object is made with keywords")
        self._call()

    def _call(self) -> None:
        args, target = self._stack.pop(), self._stack.pop()
        if not isinstance(target, Global) or type(args) is not tuple:
            raise ValueError(f"a {type(target).__name__} is called")
        if target.make is None:
            raise CheckpointMismatchError(f"{self._where} calls {target.name!r}, which is not read")
        # The results copy their arguments, which the memo hands out again and again.
        self._copied += sum(len(arg) for arg in args if isinstance(arg, _SIZED))
        if self._copied > 2 * self.done + _SMALL_COPIES:
            raise CorruptionError(f"{self._where}: the pickle copies its parts to more than its own size")
        self._stack.append(target.make(*args))

    def _build(self) -> None:
        state, target = self._stack.pop(), self._stack[-1]
        if isinstance(target, PickledObject):
            target.state = state
        elif not isinstance(target, dict):  # attributes of an OrderedDict are left out
            raise ValueError(f"a {type(target).__name__} is given a state")

    def _persistent_id(self) -> None:
        if self._persistent is None:
            raise ValueError("it refers to objects outside")
        self._stack.append(self._persistent(self._stack.pop()))


_STEPS: dict[int, Callable[[_Machine], Any]] = {
    0x80: _Machine._protocol,
    0x95: lambda machine: machine._number("<Q"),  # a frame: how much to read ahead, which is not needed
    ord("("): _Machine._mark,
    ord("0"): _Machine._pop,
    ord("1"): _Machine._unmark,
    ord("2"): lambda machine: machine._push(machine._stack[-1]),
    ord("a"): _Machine._append,
    ord("e"): _Machine._appends,
    ord("t"): lambda machine: machine._push(tuple(machine._unmark())),
    ord("s"): _Machine._set_item,
    ord("u"): _Machine._set_items,
    0x90: _Machine._add_items,
    0x91: lambda machine: machine._push(_set(machine._unmark())),
    0x94: lambda machine: machine._put(len(machine._memo)),
    ord("c"): lambda machine: machine._find(f"{machine._line()}.{machine._line()}"),
    0x93: _Machine._stack_global,
    ord("R"): _Machine._call,
    0x81: _Machine._call,
    0x92: _Machine._call_with_keywords,
    ord("b"): _Machine._build,
    ord("Q"): _Machine._persistent_id,
}
"""Not kept by a machine: bound to it they would keep its objects until garbage is collected."""
