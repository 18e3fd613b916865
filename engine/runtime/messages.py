"""The package's messages.

[Note: messages]
All messages go to the logger "zstore": progress at INFO, events that deserve a look at WARNING. Python shows nothing below
WARNING of a logger that was not configured, so a plain script would never see its progress. Therefore `show_messages` gives
that logger, if neither it nor the root has a handler, one that writes to stderr, and level INFO if none was set. Once
another handler would get the same messages, this one is silent, so configuring logging later doubles no line. To see less:
`logging.getLogger("zstore").setLevel(logging.WARNING)`, before or after.
"""

from __future__ import annotations

import logging
import sys

import torch.distributed as torch_dist

_FORMAT = "%(asctime)s %(name)s %(levelname)s: %(message)s"


class _WhereNobodyListens(logging.Handler):
    """Writes to the present `sys.stderr`, unless another handler gets the message."""

    def __init__(self, logger: logging.Logger) -> None:
        super().__init__()
        self._logger = logger
        self.setFormatter(logging.Formatter(_FORMAT, datefmt="%H:%M:%S"))

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line."""
        others = [handler for handler in self._logger.handlers if handler is not self]
        if others or (self._logger.propagate and logging.getLogger().handlers):
            return
        try:
            sys.stderr.write(f"{self.format(record)}\n")
            sys.stderr.flush()
        except Exception:
            self.handleError(record)


def warn_once(message: str, *arguments: object) -> None:
    """Warn on rank 0 of something that is the same on every rank."""
    started = torch_dist.is_available() and torch_dist.is_initialized()
    if not started or torch_dist.get_rank() == 0:
        logging.getLogger("zstore").warning(message, *arguments)


def show_messages() -> None:
    """Let the package's messages be seen if nobody configured logging. See [Note: messages]."""
    logger = logging.getLogger("zstore")
    if logger.hasHandlers():
        return
    logger.addHandler(_WhereNobodyListens(logger))
    if logger.level == logging.NOTSET:
        logger.setLevel(logging.INFO)
