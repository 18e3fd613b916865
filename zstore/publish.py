"""Weights of a run for whoever serves them: `zstore.publish.Receiver` keeps a module current, `pull` a folder."""

from .open.pull import Pulled, pull
from .open.receiver import Receiver

__all__ = ["Pulled", "Receiver", "pull"]
