"""What plugs into the engine: nothing in it imports these packages, which register what they bring."""

from . import one_bit as one_bit
from . import zeropp as zeropp
