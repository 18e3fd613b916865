"""Adam and AdamW in host memory in one pass over their state, by adamw.c in place of torch's casts and fused kernel.

[Note: the host kernel]
It is optional, and bit-identical to torch. The library is built with the wheel if there was a compiler, otherwise at first use
by `cc`, into the user's cache. Compilers contract some products and sums of torch's kernel into FMAs; which ones depends on the
build, and is determined by comparison with torch's own kernel, once per process. Without a compiler, without AVX2 and FMA on
x86, or if no form matches, torch's kernel is used, and a debug message is logged.
"""

from __future__ import annotations

import atexit
import ctypes
import hashlib
import logging
import os
import platform
import signal
import stat
import subprocess
import tempfile
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch

from zstore.errors import ZstoreError
from zstore.io import num_cores

_log = logging.getLogger("zstore")

Tensors = Sequence[torch.Tensor]

_FLAGS = ("-O3", "-ffp-contract=off", "-fno-math-errno", "-fno-trapping-math", "-fPIC", "-shared", "-pthread")
_WHEEL = "_adamw*.so"
"""The library built with the wheel, in this folder."""
_COMPILE_LIMIT_S = 30.0
_DIGEST_BYTES = hashlib.sha256().digest_size
_MAX_THREADS = 16
_OTHER_THREADS = 2
"""Cores of a rank that the update leaves to computation and I/O."""

TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""Dtypes of gradients and weights -> their codes in adamw.c."""


class _Settings(ctypes.Structure):
    _fields_ = [
        *((name, ctypes.c_double) for name in ("lr", "beta1", "beta2", "weight_decay", "eps", "step", "factor")),
        *((name, ctypes.c_int32) for name in ("gradient", "weight", "decoupled", "body", "tail", "width")),
    ]


class Form(NamedTuple):
    """The operations that torch's build contracts, as bits of adamw.c, in vectors of `width` and in the `tail` after them."""

    body: int = 0
    tail: int = 0
    width: int = 8


class StepTensors(NamedTuple):
    """Tensors of parameters in one step: for each a master, slots, a gradient and, optionally, a 16-bit weight."""

    masters: Tensors
    slots: Sequence[Tensors]
    gradients: Tensors
    weights: Sequence[torch.Tensor | None]


class HostKernel:
    """The kernel of one library in one form."""

    name = "adamw.c"
    """Name in the record of a checkpoint."""

    def __init__(self, library: ctypes.CDLL, form: Form) -> None:
        self._call = library.zstore_adam_1
        self._call.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p, ctypes.c_int32]
        self.form = form

    def takes(self, tensors: Iterable[torch.Tensor], gradient: torch.dtype, weight: torch.dtype | None) -> bool:
        """Return whether `update` supports the tensors, with a gradient and a weight of these dtypes."""
        types = gradient in TYPES and (weight is None or TYPES.get(weight, 0) > 0)
        return types and all(t.is_cpu and t.is_contiguous() and not t.is_neg() for t in tensors)

    def update(self, settings: Mapping[str, float], tensors: StepTensors, num_threads: int = 1) -> None:
        """Step tensors in host memory, 1-D and contiguous. The settings are those of `_Settings` except dtypes and form;
        gradients are multiplied by the factor in fp32, and a negative factor maximizes."""
        # Addresses are read in each step, since other code may move a tensor's storage, as `share_memory_` does.
        jobs = array("q", bytes(8 * 7 * len(tensors.masters)))
        for index, column in enumerate((tensors.masters, *zip(*tensors.slots, strict=True))):
            jobs[index::7] = array("q", map(torch.Tensor.data_ptr, column))
        jobs[4::7] = array("q", map(torch.Tensor.data_ptr, tensors.gradients))
        jobs[5::7] = array("q", [0 if weight is None else weight.data_ptr() for weight in tensors.weights])
        jobs[6::7] = array("q", map(torch.Tensor.numel, tensors.masters))
        weights = {weight.dtype for weight in tensors.weights if weight is not None} or {torch.bfloat16}
        (gradient_type,), (weight_type,) = {gradient.dtype for gradient in tensors.gradients}, weights
        types = {"gradient": TYPES[gradient_type], "weight": TYPES[weight_type]}
        arguments = _Settings(**settings, **types, **self.form._asdict())
        self._call(jobs.buffer_info()[0], len(tensors.masters), ctypes.addressof(arguments), num_threads)


def num_threads(local_ranks: int, *, overlaps_compute: bool) -> int:
    """Return the number of threads that update the state of one rank of this machine: one less if the CPU also computes the
    model."""
    cores = num_cores() // max(1, local_ranks)
    threads = max(1, min(_MAX_THREADS, cores - _OTHER_THREADS))
    return threads if overlaps_compute or cores < 2 else threads + 1


@cache
def host_kernel() -> HostKernel | None:
    """Return the kernel that is bit-identical to torch's, or None if there is none. See [Note: the host kernel]."""
    try:
        library = _load()
        kernel = HostKernel(library, _find_form(library))
    except Exception as error:  # of any kind: torch's kernel has the same results
        _log.debug("torch's kernel updates state in host memory, instead of adamw.c: %r", error)
        return None
    atexit.register(library.zstore_adam_end)
    return kernel


def _load() -> ctypes.CDLL:
    """Return the library from the wheel, or from the cache, where it is built if it is missing."""
    folder = Path(__file__).parent
    for path in folder.glob(_WHEEL):
        library = ctypes.CDLL(str(path))
        if hasattr(library, "zstore_adam_1"):  # otherwise built from other sources
            return library
    source = folder / "adamw.c"
    key = hashlib.sha256("\n".join((source.read_text(), platform.machine(), *_FLAGS)).encode())
    path = _cache_folder() / f"adamw-{key.hexdigest()[:32]}.so"
    if not _is_complete(path):
        _build(source, path)
    return ctypes.CDLL(str(path))


def _cache_folder() -> Path:
    """Return the folder in the user's cache. Raises ZstoreError if other users may write to it."""
    folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "zstore-kernel"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid() or status.st_mode & 0o022:
        raise ZstoreError(f"{folder} is not a folder that only this user can write to")
    return folder


def _is_complete(path: Path) -> bool:
    """Return whether the file ends with the digest of its content: loading a truncated one would kill the process."""
    if not path.is_file() or path.stat().st_uid != os.getuid():
        return False
    content = path.read_bytes()
    return hashlib.sha256(content[:-_DIGEST_BYTES]).digest() == content[-_DIGEST_BYTES:]


def _build(source: Path, path: Path) -> None:
    """Compile `source` to `path` atomically, even if other processes do the same."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="build-") as folder:
        library = Path(folder, path.name)
        command = ["cc", *_FLAGS, "-o", str(library), str(source), "-lm"]
        with Path(folder, "messages").open("w+b") as messages:
            compiler = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=messages, stderr=messages, process_group=0
            )
            try:
                code = compiler.wait(_COMPILE_LIMIT_S)
            finally:
                if compiler.poll() is None:
                    os.killpg(compiler.pid, signal.SIGKILL)  # with its children
                    compiler.wait()
            messages.seek(0)
            if code:
                raise ZstoreError(f"{' '.join(command)} failed: {messages.read(2000).decode(errors='replace')}")
        with library.open("r+b") as file:
            content = file.read()
            file.write(hashlib.sha256(content).digest())
        library.replace(path)


_LERP, _SQUARE_GRADIENT, _SQUARE_MOMENT, _DECAY, _RATE = 1, 2, 4, 8, 16
_BODIES = [sum(e) for e in product((_LERP, 0), (_SQUARE_GRADIENT, _SQUARE_MOMENT, 0), (_DECAY, 0), (_RATE, 0))]
_TAILS = [sum(e) for e in product((_LERP, 0), (_SQUARE_MOMENT, _SQUARE_GRADIENT, 0), (_DECAY, 0))]
_WIDTHS = (8, 16, 4)
"""Sizes of torch's usual vectors on x86, of AVX-512 vectors, and of NEON vectors."""
_HEAD, _SIZES = 4096, [1 + i % 15 for i in range(200)]
"""Elements of a tensor that has only a body, and of tensors that have tails."""
_PROBE = {"lr": 0.01, "beta2": 0.999, "weight_decay": 3.923270106315607, "eps": 1e-8}
"""`1 - lr * weight_decay` has a different value in fp32 if it is contracted."""
_CASES = (
    (True, 0.9, 0.37, torch.bfloat16, torch.bfloat16, False),
    (False, 0.4, -1.0, torch.float16, torch.float16, True),
    (False, 0.9, 1.0, torch.float32, torch.bfloat16, False),
)
"""The arguments of `_Case`."""


class _Case:
    """A step of torch's kernel to compare with."""

    def __init__(
        self, decoupled: bool, beta1: float, factor: float, gradient: torch.dtype, weight: torch.dtype, amsgrad: bool
    ) -> None:
        settings, step = _PROBE | {"beta1": beta1}, 3.0
        self._settings = settings | {"step": step, "decoupled": decoupled, "factor": factor}
        self._weight = weight
        generator, numel = torch.Generator().manual_seed(0), _HEAD + sum(_SIZES)
        drawn = torch.randn(5, numel, generator=generator, dtype=torch.float32, device="cpu")
        drawn[1:] *= 0.1
        drawn[2:4].square_()
        self._before, self._gradients = drawn[: 4 if amsgrad else 3], drawn[4].to(gradient)
        rows = torch.cat((self._before, self._gradients.float()[None] * abs(factor)))
        masters, averages, squares, *largest, gradients = (torch.split(row, [_HEAD, *_SIZES]) for row in rows)
        counts = [torch.tensor(step, dtype=torch.float32, device="cpu")] * len(masters)
        torch_step: Any = torch._fused_adamw_ if decoupled else torch._fused_adam_
        options = settings | {"amsgrad": amsgrad, "maximize": factor < 0}
        torch_step(masters, gradients, averages, squares, *(largest or [()]), counts, **options)
        self._after = rows[:-1]

    def is_equal(self, form: Form, library: ctypes.CDLL, of_body: bool) -> bool:
        """Return whether the library gives the same results for the body, or for the tails."""
        part, sizes = (slice(_HEAD), [_HEAD]) if of_body else (slice(_HEAD, None), _SIZES)
        state, weights = self._before[:, part].clone(), torch.empty_like(self._before[0, part], dtype=self._weight)
        masters, *slots, gradients, into = (torch.split(row, sizes) for row in (*state, self._gradients[part], weights))
        tensors = StepTensors(masters, list(zip(*slots, strict=True)), gradients, into)
        HostKernel(library, form).update(self._settings, tensors)
        expected = self._after[:, part]
        return torch.equal(state, expected) and torch.equal(weights, expected[0].to(self._weight))


def _find_form(library: ctypes.CDLL) -> Form:
    """Return the form in which the library is bit-identical to torch's kernel. Raises ZstoreError if there is none."""
    cases = [_Case(*case) for case in _CASES]

    def first_equal(forms: Iterable[Form], of_body: bool) -> Form:
        for form in forms:
            if all(case.is_equal(form, library, of_body) for case in cases):
                return form
        raise ZstoreError("it is not bit-identical to torch in any form; on x86 it needs AVX2 and FMA")

    body_form = first_equal((Form(body) for body in _BODIES), True)
    return first_equal((body_form._replace(tail=tail, width=width) for width in _WIDTHS for tail in _TAILS), False)
