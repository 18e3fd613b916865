"""Where a process spends its cores, by cause: samples that `perf record` took of all its threads, sorted by where they fell.

A sample is taken for each millisecond that a thread runs, by the software clock, which needs no hardware counters. Of
samples in the kernel the call chain tells how it was entered: a system call by its name, a page fault, an interrupt. Waits for
the interpreter's lock are not samples: they are traced, as system calls `futex` that wait, with a timeout, for an address
within the interpreter's own state.
"""

from __future__ import annotations

import itertools
import re
import shutil
import subprocess
import tempfile
from bisect import bisect_right
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

CAUSES = {
    "checksum": "the crc32c package",
    "copy": "memcpy, memmove, memset; numpy's loops that copy",
    "cast": "loops of numpy and torch from one dtype to another, and numpy's on integers, which round",
    "update": "the optimizer's kernel, and other arithmetic on state (norm, clipping)",
    "model": "torch's and its libraries' other kernels: forward and backward",
    "dispatch": "from torch's binding down to a kernel: dispatcher, autograd, views, allocation of tensors",
    "python": "the interpreter and its extensions, numpy's calls among them",
    "spin": "threads of OpenMP or BLAS that wait without sleeping",
    "libc": "malloc, locks and the rest of libc outside of the kernel",
    "disk calls": "system calls that read and write, and wait for what was submitted",
    "file calls": "open, close, stat, rename, link, unlink, fallocate, fsync",
    "lock calls": "futex and sched_yield: threads that wait and wake each other",
    "memory calls": "mmap, munmap, madvise, brk, mprotect",
    "other calls": "other system calls",
    "page faults": "first touch of a page: found, zeroed and mapped",
    "sampling": "what perf itself takes in the kernel",
    "kernel": "interrupts and what else the kernel does in the process's time",
    "other": "none of these",
}
"""Causes, and what falls under each."""

PERIOD_S = 0.001
_LOCK_SPAN = 1 << 20
"""Bytes from the interpreter's state on in which its lock is looked for."""


@dataclass(frozen=True, kw_only=True)
class Sampler:
    """How a command is sampled here; `words` go before it and are followed by the file to write."""

    words: Sequence[str] = ()
    kernel: bool = False
    """Whether samples within the kernel are taken."""
    locks: bool = False
    """Whether waits are traced."""
    why: str = ""
    """Why there is less than all."""


def find_sampler(*, perf: bool = True) -> Sampler:
    """Return the most that this machine permits, `perf` False: none; it is tried on a command that does nothing."""
    if not perf or shutil.which("perf") is None:
        return Sampler(why="perf is not installed" if perf else "perf was not asked for")
    clock = f"cpu-clock/period={round(PERIOD_S * 1e9)}/"
    waits = ["-e", "syscalls:sys_enter_futex", "--filter", "utime != 0", "-e", "syscalls:sys_exit_futex"]
    base = ["perf", "record", "--quiet", "-k", "CLOCK_MONOTONIC", "-m", "256", "-c", "1"]
    tried = [
        Sampler(words=[*base, "-g", "-e", clock, *waits, "-o"], kernel=True, locks=True),
        Sampler(words=[*base, "-g", "-e", clock, "-o"], kernel=True, why="waits for locks may not be traced here"),
        Sampler(words=[*base, "-e", clock + "u", "-o"], why="the kernel may not be sampled here"),
    ]
    why = ""
    for sampler in tried:
        with tempfile.TemporaryDirectory(prefix="zstore-bench-") as folder:
            command = [*sampler.words, f"{folder}/data", "--", "true"]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return sampler
        why = done.stderr.strip().partition("\n")[0]
    return Sampler(why=f"perf may not sample here: {why}")


# -- reading ----------------------------------------------------------------------------------------------------------


Window = tuple[float, float]
"""Begin and end, in seconds of CLOCK_MONOTONIC."""


@dataclass(kw_only=True)
class Found:
    """What was sampled within the windows."""

    causes: Counter[str] = field(default_factory=Counter)
    """Samples by cause."""
    places: dict[str, Counter[str]] = field(default_factory=dict)
    """For each cause, samples by symbol and file, or by system call."""
    lock_wait_s: float = 0.0
    """Time that threads waited for the interpreter's lock, summed over threads."""
    lock_waits: int = 0

    @property
    def samples(self) -> int:
        return sum(self.causes.values())


@dataclass(frozen=True)
class Frame:
    """A place in a call chain."""

    address: int
    symbol: str
    file: str

    @property
    def in_kernel(self) -> bool:
        return self.address >= 1 << 63


def read_samples(data: Path, windows: Sequence[Window], interpreter_at: int) -> Found:
    """Return what `perf record` wrote to `data`, as far as it falls into `windows`; see `sort_samples`."""
    command = ["perf", "script", "-i", str(data), "-F", "tid,time,event,ip,sym,dso,trace"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, errors="replace"
    ) as process:
        return sort_samples(process.stdout or (), windows, interpreter_at)


def sort_samples(lines: Iterable[str], windows: Sequence[Window], interpreter_at: int) -> Found:
    """Return what lines of `perf script` say of `windows`, which are in order and apart; `interpreter_at` is the address of
    the interpreter's state. Of a wait that reaches over the end of a window nothing counts."""
    found = Found()
    waiting: dict[int, tuple[float, int]] = {}
    begins = [begin for begin, _ in windows]
    for event in _events(lines):
        number = bisect_right(begins, event.when) - 1
        if number < 0 or event.when > windows[number][1]:
            continue
        if event.name.startswith("cpu-clock"):
            cause, place = cause_of(event.chain)
            found.causes[cause] += 1
            found.places.setdefault(cause, Counter())[place] += 1
        elif (asked := _UADDR.search(event.text)) is not None:
            if 0 <= int(asked[1], 16) - interpreter_at < _LOCK_SPAN:
                waiting[event.thread] = event.when, number
        elif (begun := waiting.pop(event.thread, None)) is not None and begun[1] == number:
            found.lock_wait_s += event.when - begun[0]
            found.lock_waits += 1
    return found


@dataclass(frozen=True, kw_only=True)
class _Event:
    thread: int
    when: float
    name: str
    text: str
    chain: Sequence[Frame]
    """From the place where it was taken outwards."""


_UADDR = re.compile(r"uaddr: (0x[0-9a-f]+)")
_HEAD = re.compile(r"\s*(\d+)\s+([\d.]+):\s+(\S+?):\s+(.*)$")
_FRAME = re.compile(r"\s+([0-9a-f]+) (.*) \((.*)\)$")


def _events(lines: Iterable[str]) -> Iterator[_Event]:
    head: re.Match[str] | None = None
    chain: list[Frame] = []
    for line in itertools.chain(lines, ["0 0.0: end: \n"]):
        if (frame := _FRAME.match(line)) is not None:
            chain.append(Frame(int(frame[1], 16), frame[2], frame[3]))
        elif (begun := _HEAD.match(line)) is not None:
            if head is not None:
                yield _Event(thread=int(head[1]), when=float(head[2]), name=head[3], text=head[4], chain=chain)
            head, chain = begun, []


# -- sorting ----------------------------------------------------------------------------------------------------------


def cause_of(chain: Sequence[Frame]) -> tuple[str, str]:
    """Return the cause of a sample, and the place to show for it."""
    if not chain:
        return "other", "unknown"
    if not chain[0].in_kernel:
        return _cause_in_program(chain[0].symbol, chain[0].file)
    within = [frame.symbol for frame in chain if frame.in_kernel]
    if any(symbol in _FAULTS for symbol in within):
        return "page faults", within[0]
    if any(symbol.startswith("perf_") for symbol in within):
        return "sampling", within[0]
    call = _call_of(within)
    if call is None:
        return "kernel", within[0]
    cause = next((cause for cause, names in _CALLS.items() if names.fullmatch(call)), "other calls")
    return cause, f"{call}: {within[0]}"


def _call_of(within: Sequence[str]) -> str | None:
    """Return the system call by which the kernel was entered; None where it was none."""
    named = next((found[1] for symbol in within if (found := _SYSTEM_CALL.match(symbol))), None)
    entry = next((number for number, symbol in enumerate(within) if symbol in _ENTRIES), None)
    if named is not None or entry is None:
        return named
    # Its function ended by going on to the next.
    return _INNER.sub("", within[entry - 1]) if entry else "enter and leave"


_FAULTS = {"handle_mm_fault", "exc_page_fault", "asm_exc_page_fault", "do_page_fault", "do_translation_fault"}
_SYSTEM_CALL = re.compile(r"__(?:x64|arm64|se|do)_sys_(\w+)$")
_ENTRIES = {"do_syscall_64", "x64_sys_call", "do_el0_svc", "invoke_syscall"}
_INNER = re.compile(r"^(__|do_|ksys_|vfs_)+")
_CALLS = {
    "disk calls": re.compile(r"(p?(read|write)(64|v|v2)?|io_\w+|sendfile\w*|copy_file_range|splice)"),
    "file calls": re.compile(
        r"(open\w*|close\w*|\w*stat\w*|getdents\w*|rename\w*|link\w*|unlink\w*|fallocate|f(data)?sync|sync\w*|mkdir\w*"
        r"|rmdir|f?truncate\w*|fcntl|flock|fadvise\w*|f?ch(mod|own)\w*|readlink\w*|f?access\w*|lseek|ioctl|utime\w*)"
    ),
    "lock calls": re.compile(r"(futex\w*|sched_yield|clock_nanosleep|nanosleep|poll|ppoll|select|pselect6|epoll_\w+)"),
    "memory calls": re.compile(r"(mmap\w*|munmap|mremap|madvise|brk|mprotect|mlock\w*|munlock\w*|mbind)"),
}


def _cause_in_program(symbol: str, file: str) -> tuple[str, str]:
    name = file.rpartition("/")[2]
    place = f"{symbol.replace(_ANONYMOUS, '').partition('(')[0]} ({name})"
    for cause, files, symbols in _PLACES:
        if files.search(file) and symbols.search(symbol):
            return cause, place
    return "other", place


_ANONYMOUS = "(anonymous namespace)::"
_ANY = re.compile("")
_TORCH = re.compile(r"/lib(torch|c10|mkl|dnnl|onednn|openblas|scipy_openblas|cblas|sleef)[\w.+-]*$|torch/lib/")
_NUMPY = re.compile(r"/numpy/|ml_dtypes")
_DISPATCH = re.compile(
    r"^(c10::(?!function_ref)|torch::|std::|at::(?!native::|internal::)"
    r"|at::native::(?!.*(kernel|vectorized|loop|gemm|gemv|blas|dot|conv|softmax|layer_norm|embedding|attention|sum|mean)))"
)
_PLACES = (
    ("checksum", re.compile(r"crc32|awscrt|xxhash"), _ANY),
    ("copy", re.compile(r"/(libc|ld)[-.]|vdso|\[unknown\]"), re.compile(r"mem(move|cpy|set|pcpy|cmp|chr|rchr)")),
    ("spin", re.compile(r"/lib[gi]?omp"), _ANY),
    ("spin", _TORCH, re.compile(r"blas_thread_server|kmp|gomp|omp_|barrier")),
    ("cast", _NUMPY, re.compile(r"cast|half|HALF|bfloat|float16|_to_(FLOAT|DOUBLE|HALF)", re.IGNORECASE)),
    ("copy", _NUMPY, re.compile(r"strided|raw_array_assign|memcpy|memset|copy|fill", re.IGNORECASE)),
    ("cast", _NUMPY, re.compile(r"^U?(BYTE|SHORT|INT|LONG)_")),
    ("update", _NUMPY, re.compile(r"^(FLOAT|DOUBLE|HALF|BOOL)_|simd|npyv")),
    ("python", _NUMPY, _ANY),
    ("update", _TORCH, re.compile(r"adam|adagrad|foreach|_fused|lion|sgd|norm_kernel|vector_norm", re.IGNORECASE)),
    ("cast", _TORCH, re.compile(r"copy_kernel|convert|_to_copy|cast", re.IGNORECASE)),
    ("dispatch", re.compile(r"libtorch_python|libc10|libshm"), _ANY),
    ("dispatch", _TORCH, _DISPATCH),
    ("model", _TORCH, _ANY),
    ("model", re.compile(r"\[unknown\]|anon|\[JIT\]|jit|perf-\d+\.map|memfd"), _ANY),
    ("python", re.compile(r"python|lib-dynload|site-packages|libffi|vdso|_ctypes"), _ANY),
    ("libc", re.compile(r"/(libc|libpthread|libm|ld|libstdc|libgcc)[-_.+\w]*"), _ANY),
)
"""Causes of samples outside of the kernel, first match wins: by the file that was loaded, and by the symbol there."""
