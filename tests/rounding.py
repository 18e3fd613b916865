"""A torch whose square roots err by one ulp, in one of five values: what torch promises of them on no machine.

With `pytest --sqrt-errs` every test runs on it, ranks and other processes of `tests.warm` too: importing this module with
VARIABLE set begins it. Which values err depends on the value alone, as two programs of one torch on one kind of machine
round alike. Fused and compiled kernels have roots of their own.
"""

import os
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch

VARIABLE = "ZSTORE_TEST_SQRT_ERRS"

_BITS = {torch.float32: torch.int32, torch.float64: torch.int64}


def _root(of: torch.Tensor) -> torch.Tensor:
    exact = of.pow(0.5)  # torch's own kernel of sqrt, without its dispatcher
    if exact.dtype not in _BITS:
        return exact
    errs = (exact.view(_BITS[exact.dtype]) % 5 == 0) & exact.isfinite() & (exact != 0)
    return torch.where(errs, exact.nextafter(torch.full_like(exact, torch.inf)), exact)


@contextmanager
def erring_sqrt() -> Iterator[None]:
    """Let torch's sqrt on the CPU err until the end of the block, wherever it is called from."""
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*registered kernel for the same operator", UserWarning)
        library.impl("sqrt", _root, "CPU", allow_override=True)
        library.impl("sqrt_", lambda of: of.copy_(_root(of)), "CPU", allow_override=True)
        library.impl("sqrt.out", lambda of, *, out: out.resize_(of.shape).copy_(_root(of)), "CPU", allow_override=True)
    try:
        yield
    finally:
        library._destroy()


if os.environ.get(VARIABLE):
    _in_this_process = erring_sqrt()
    _in_this_process.__enter__()
