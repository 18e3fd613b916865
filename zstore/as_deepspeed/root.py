"""What `deepspeed` itself says of its version."""

from .finder import VERSION

__version__ = version = VERSION
__git_hash__ = __git_branch__ = None
