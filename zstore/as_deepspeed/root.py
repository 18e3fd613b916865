"""What `deepspeed` itself says of its version, and its launcher of its file of variables."""

import os

from .finder import VERSION

__version__ = version = VERSION
__git_hash__ = __git_branch__ = None
DEEPSPEED_ENVIRONMENT_NAME = os.environ.get("DS_ENV_FILE", ".deepspeed_env")
