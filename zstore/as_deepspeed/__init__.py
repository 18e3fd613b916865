"""After `import zstore.as_deepspeed`, `import deepspeed` gives zstore in this process and its children.

Import it before transformers, accelerate and others that look for DeepSpeed; after one of them it raises UsageError.
`python -m zstore.as_deepspeed script.py ...` runs an unchanged script so. Nothing is installed on disk. `docs/deepspeed.md`
lists the names.
"""

from zstore.tools.as_deepspeed import install

install()
__all__: list[str] = []
