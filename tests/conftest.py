"""Settings that all tests share."""

from hypothesis import settings

# No deadline: a busy machine is no bug.
settings.register_profile("zstore", deadline=None)
settings.load_profile("zstore")
