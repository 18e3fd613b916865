"""Lightning's Trainer on the engine: `from zstore.lightning import ZstoreStrategy` (extra `lightning`).

From then on `import deepspeed` gives zstore in this process, as after `import zstore.as_deepspeed`: Lightning's strategy
imports it.
"""

from zstore.tools.as_deepspeed import install_finder

install_finder(set_rank_variables=False)  # Lightning starts the ranks, and sets their variables

from zstore.engine.adapters.lightning import ZstoreStrategy  # noqa: E402

__all__ = ["ZstoreStrategy"]
