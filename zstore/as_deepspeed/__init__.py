"""`import deepspeed` answered by zstore, for one process, where the user asks for it.

`python -m zstore.as_deepspeed script.py ...` runs a script so; `install()` does it for a process that runs already, as a
notebook. No module named deepspeed is ever put anywhere. `docs/deepspeed.md` says which names are there.
"""

from zstore.tools.as_deepspeed.installing import install

__all__ = ["install"]
