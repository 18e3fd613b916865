"""Messages about a config: keys that do not act, and keys that are wrong."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Notice:
    """A key that was set and does not act, or not as it could be read."""

    key: str
    """Dotted path, as written."""
    message: str
    """The substitute, or the reason why nothing is left to do."""

    def __str__(self) -> str:
        return f"{self.key}: {self.message}"


@dataclass(frozen=True)
class ConfigProblem:
    """An error, and the keys that it is about."""

    keys: tuple[str, ...]
    what: str

    @property
    def message(self) -> str:
        """The message, after the names of the keys."""
        named = " and ".join(filter(None, self.keys))
        return f"{named}: {self.what}" if named else self.what
