"""Lightning's Trainer on the engine: `import zstore.lightning`, then `Trainer(strategy="zstore")` or
`Trainer(strategy=ZstoreStrategy("ds.json"))`.

`ZstoreStrategy` is for `import lightning`, or, if `pytorch_lightning` alone is imported or installed, for that. A program
that uses both takes it from this package's `unified` and `classic`.
"""

from __future__ import annotations

import sys
from importlib.util import find_spec

from .files import load_checkpoint

_classic = ("pytorch_lightning" in sys.modules and "lightning.pytorch" not in sys.modules) or find_spec(
    "lightning"
) is None
if _classic and find_spec("pytorch_lightning") is None:
    raise ImportError("zstore.lightning needs Lightning: pip install 'zstore[lightning]'")

if _classic:
    from .classic import ZstoreStrategy
else:
    from .unified import ZstoreStrategy

__all__ = ["ZstoreStrategy", "load_checkpoint"]
