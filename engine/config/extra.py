"""Extras: features that plug into an engine by a section of the config, zstore's own and those of others.

[Note: an extra]
The engine knows of its extras what this class says. `initialize` takes those whose section is in the config and is on: each
may change the model before it is laid out, and is made when the engine is there. It may register optimizers
(`optim.rules`), watch the tiles of masters that an update changes (`optim.state.TileObserver`), and override what follows. An
extra whose key is no section, but a value, is always made, and says by `acts` whether it is on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from zstore.checkpoint import SaveHandle, SaveSummary
from zstore.errors import UsageError

from .keys import Section
from .schema import add_section, has_key, remove_section

if TYPE_CHECKING:
    from torch import nn

TellOfSave = Callable[[SaveHandle | SaveSummary | BaseException], None]
"""Is told of a save's handle when it has begun, of its summary, and of its error, from any thread."""
Rise = Callable[[int], int]
"""A number at a step; the first step is 1."""
SEQLEN = "seqlen"
"""Name of the difficulty that is the length of sequences."""
_CALL = "set_custom_curriculum_learning_schedule"


class Rising(Protocol):
    """A number that rises with the steps."""

    @property
    def is_custom(self) -> bool:
        """Whether a function is to say how."""

    def use(self, custom: Rise) -> None:
        """Let a function say how. Raises UsageError if the config does."""

    def at(self, step: int) -> int:
        """Return the number at a step, counted from 1."""


class Sampler(Protocol):
    """Draws the samples of one step after another, by difficulties that rise with the steps."""

    @property
    def state(self) -> dict[str, Any]:
        """The state for `restore`, with its "step", the batches drawn; a copy."""

    def restore(self, state: Mapping[str, Any]) -> None:
        """Go on from `state`. Raises CorruptionError for a malformed state."""

    def draw(self, count: int) -> list[int]:
        """Return the numbers of the next step's `count` samples."""

    def difficulties(self) -> Mapping[str, Rising]:
        """Return the difficulties by the names of their metrics."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """How the loader of training data draws samples."""

    sampler: Sampler | None = None
    """Draws them; None: in the order of a permutation."""
    num_epochs: int | None = None
    """Epochs after which the loader is at its end; None: it has none."""
    num_workers: int = 0
    """Processes that read ahead; 0: the training process reads."""
    pin_memory: bool = False
    """Whether tensors are put into pinned memory."""


IN_ORDER = Sampling()


class Extra:
    """A feature of one engine. Every rank has it, and calls each method in the same order. See [Note: an extra]."""

    acts_frozen: ClassVar[bool] = False
    """Whether engines that train nothing have it too."""
    acts = True
    """Whether it is on: if not, it is there, and nothing below is called but `close`."""

    @classmethod
    def prepare(cls, model: nn.Module, section: Any) -> None:
        """Change a model as the section says, before an engine takes it."""

    @classmethod
    def sampling(cls, section: Any, data: Any) -> Sampling | None:
        """Return how samples are drawn from `data`, the training data of `initialize`; None: it is not this extra's to say."""
        return None

    def __init__(self, engine: Any, section: Any) -> None:
        """Plug into an engine that was just made."""

    @property
    def difficulties(self) -> Mapping[str, Rising]:
        """The numbers that rise with the steps, by name."""
        return {}

    def inputs(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Return the arguments that the model gets in training in place of `args` and `kwargs`."""
        return args, kwargs

    def around(self, phase: str, timed: AbstractContextManager[None]) -> AbstractContextManager[None]:
        """Return a block around a phase, "forward_s", "backward_s" or "optimizer_s", which enters `timed` too."""
        return timed

    def step_ended(self) -> None:
        """Take the state after an optimizer step, taken or skipped: an update may still run behind it."""

    def saves_in(self, folder: str) -> None:
        """Note the folder or URL of the run's checkpoints, which a loop names before the first save."""

    def save_begins(self, tag: str, destination: Any) -> TellOfSave | None:
        """Note a save to a `Destination` of `checkpoint.destinations`; return a function that is told how it goes on, or
        None."""

    def loaded(self, path: str, load: Any, elapsed_s: float) -> None:
        """Note that the checkpoint at a path or URL was loaded, by a `Restore` of `checkpoint.load`."""

    def stops(self, error: BaseException) -> None:
        """Note that the engine is closed next because of an error; of SystemExit, because the run was asked to stop."""

    def close(self) -> None:
        """Release everything: the engine is closed."""


Load = Callable[[], type[Extra]]
EXTRAS: dict[str, Load] = {}
"""By the dotted key of their section."""


def register(key: str, load: Load, section: type[Section] | None = None) -> None:
    """Let engines have the extra that `load` imports if the config's section at the dotted `key` is on; see [Note: an extra]
    for another key. A `section` that the schema does not have is added to it, see `add_section`. Raises UsageError for a key
    that is taken, or that configs do not have, and for a class in place of the function."""
    if isinstance(load, type):
        raise UsageError(f"register({key!r}): expected a function that returns the class, as lambda: {load.__name__}")
    if key in EXTRAS:
        raise UsageError(f"register({key!r}): another extra has this key")
    if section is not None:
        add_section(key, section)
    elif not has_key(key):
        raise UsageError(f"register({key!r}): configs have no such key; pass the class of its section too")
    EXTRAS[key] = load


def overriding(extras: Iterable[Extra], name: str) -> list[Any]:
    """Return the method `name` of the extras that have one of their own."""
    return [getattr(one, name) for one in extras if getattr(type(one), name) is not getattr(Extra, name)]


def unregister(key: str) -> None:
    """Take an extra back that brought its own section."""
    del EXTRAS[key]
    remove_section(key)


def use_schedules(schedule: Rise | Mapping[str, Rise], difficulties: Iterable[tuple[str, Rising]]) -> None:
    """Let functions say how custom difficulties rise: one for the length of sequences, or some by name. Raises UsageError
    for an unknown name, or one whose schedule is not custom."""
    known: dict[str, list[Rising]] = {}
    for name, difficulty in difficulties:
        known.setdefault(name, []).append(difficulty)
    given = schedule if isinstance(schedule, Mapping) else {SEQLEN: schedule}
    for name, function in given.items():
        if name not in known:
            raise UsageError(
                f"{_CALL}: there is no curriculum {name!r}; the config has {', '.join(sorted(known)) or 'none'}"
            )
        if not callable(function):
            raise UsageError(f"{_CALL}: expected a function of the step for {name!r}, got {type(function).__name__}")
        for one in [one for one in known[name] if one.is_custom] or known[name]:
            one.use(function)
