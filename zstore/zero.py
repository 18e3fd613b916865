"""The names that DeepSpeed has in `deepspeed.zero`, for scripts that `import zstore as deepspeed`."""

from zstore.engine.adapters.deepspeed.zero import GatheredParameters
from zstore.engine.build.init import Init

__all__ = ["GatheredParameters", "Init"]
