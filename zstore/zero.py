"""The names that DeepSpeed has in `deepspeed.zero`, for scripts that `import zstore as deepspeed`."""

from zstore.engine import Init
from zstore.engine.adapters.deepspeed.zero import GatheredParameters

__all__ = ["GatheredParameters", "Init"]
