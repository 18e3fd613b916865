"""What `deepspeed` itself says of its version."""

from .finder import ANSWERS_FOR, VERSION

__version__ = version = VERSION
__git_hash__ = __git_branch__ = None
__version_major__, __version_minor__, __version_patch__ = map(int, ANSWERS_FOR.split("."))
