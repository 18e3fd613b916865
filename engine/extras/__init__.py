"""Plug-ins of the engine: `initialize` alone imports these packages, which register their own parts."""

from . import one_bit as one_bit
from . import tensor_step as tensor_step
from . import zeropp as zeropp
