"""Plug-ins of the engine: `initialize` alone imports these packages, which register their own parts."""

from . import one_bit as one_bit
from . import whole_tensors as whole_tensors
from . import zeropp as zeropp
