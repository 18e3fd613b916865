"""Settings that all tests share."""

import pytest
from hypothesis import settings

pytest.register_assert_rewrite("zstore.testing.contract")

# No deadline: a busy machine is no bug.
settings.register_profile("zstore", deadline=None)
settings.load_profile("zstore")
