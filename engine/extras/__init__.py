"""Plug-ins of the engine: nothing in it imports these packages, which register their own parts."""

from . import one_bit as one_bit
from . import zeropp as zeropp
