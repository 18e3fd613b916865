"""`import deepspeed` answered by zstore in one process, and those that it starts, from `import zstore.as_deepspeed` on.

The import comes before any of transformers, accelerate or others that look for DeepSpeed; after one of them it raises
UsageError. `python -m zstore.as_deepspeed script.py ...` runs a script so, unchanged. No module named deepspeed is ever put
anywhere. `docs/deepspeed.md` says which names are there.
"""

from zstore.tools.as_deepspeed.installing import install

install()
__all__: list[str] = []
