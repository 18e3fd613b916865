"""Python processes for tests that start in a tenth of a second: forked from one that has torch and the engine loaded.

`Popen` and `run` stand in for those of `subprocess` where a command begins with this Python and goes on with `-c`, `-m` or a
script; others they leave to it. What they start is a process of its own, with its own arguments, environment, standard
streams and signals, and it ends as Python does; only its imports were done before. What it starts with this Python itself,
as a launcher does its ranks, are forks of it, and so are scripts on PATH whose first line names this Python. With
`anew=True`, and in `pytest --new-processes`, all are started as a user does it; with NEW_PROCESSES in a process's
variables, those that it starts. Not for tests of what is imported, or of how much memory an interpreter takes.
"""

import atexit
import contextlib
import faulthandler
import gc
import inspect
import io
import linecache
import multiprocessing
import multiprocessing.process
import os
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from multiprocessing import reduction
from subprocess import PIPE, CalledProcessError, CompletedProcess, TimeoutExpired
from typing import IO, Any, Self

from zstore.testing.ranks import loaded_context
from zstore.tools.as_deepspeed import CACHE_AVAILABILITY

NEW_PROCESSES = "ZSTORE_TEST_NEW_PROCESSES"
"""Variable that is set where processes are to be started anew."""


class Popen:
    def __new__(cls, args: Sequence[Any], *, anew: bool = False, **options: Any) -> Any:
        if anew or os.environ.get(NEW_PROCESSES) or args[0] != sys.executable:
            return subprocess.Popen(args, **options)
        return super().__new__(cls)

    def __init__(
        self,
        args: Sequence[Any],
        *,
        stdin: int | None = None,
        stdout: int | None = None,
        stderr: int | None = None,
        text: bool = False,
        errors: str | None = None,
        env: Mapping[str, str] | None = None,
        cwd: Any = None,
        start_new_session: bool = False,
        anew: bool = False,
    ) -> None:
        self.args = args
        _, *words = map(os.fspath, args)
        theirs: list[int] = []
        ours: list[IO[Any] | None] = []
        for number, wanted in enumerate((stdin, stdout, stderr)):
            assert wanted in (None, PIPE)
            if wanted is None:
                theirs.append(os.dup(number))
                ours.append(None)
                continue
            read, write = os.pipe()
            theirs.append(write if number else read)
            end: IO[Any] = os.fdopen(read, "rb") if number else os.fdopen(write, "wb", buffering=0)
            ours.append(io.TextIOWrapper(end, errors=errors, write_through=True) if text else end)
        self.stdin, self.stdout, self.stderr = ours
        self._streams = theirs
        start = _Start(words, env, cwd, start_new_session)
        self._process = loaded_context().Process(target=_begin, args=(start, _Streams(theirs)), daemon=True)
        self._process.start()
        for stream in theirs:
            os.close(stream)
        pid = self._process.pid
        assert pid is not None
        self.pid = pid

    @property
    def returncode(self) -> int | None:
        """The exit code once it is known to have ended; the negative number of the signal that ended it."""
        return self._process.exitcode

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self, timeout: float | None = None) -> int:
        self._process.join(timeout)
        code = self._process.exitcode
        if code is None:
            raise TimeoutExpired(self.args, timeout or 0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def communicate(self, input: Any = None, timeout: float | None = None) -> tuple[Any, Any]:  # noqa: A002
        """Return what it writes to its standard streams until its end; what was read of them before is left out."""
        deadline = None if timeout is None else time.monotonic() + timeout
        found: dict[str, Any] = {"stdout": None, "stderr": None}
        threads = []

        def read(stream: IO[Any], name: str) -> None:
            with stream:
                found[name] = stream.read()

        for name, stream in (("stdout", self.stdout), ("stderr", self.stderr)):
            if stream is not None and not stream.closed:
                threads.append(threading.Thread(target=read, args=(stream, name), daemon=True))
                threads[-1].start()
        if self.stdin is not None and not self.stdin.closed:
            try:
                if input:
                    self.stdin.write(input)
                self.stdin.close()
            except BrokenPipeError:
                pass
        for thread in threads:
            thread.join(None if deadline is None else max(0.0, deadline - time.monotonic()))
            if thread.is_alive():
                # A process that outlived it has the pipe, and to close a stream that is being read waits for the read.
                self.stdout = self.stderr = None
                raise TimeoutExpired(self.args, timeout or 0)
        self.wait(None if deadline is None else max(0.0, deadline - time.monotonic()))
        return found["stdout"], found["stderr"]

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if self.stdin is not None:
            self.stdin.close()
        if kind is not None:
            # Nobody will look at it any more, and it may wait for ever.
            self.kill()
        self.wait()
        for stream in (self.stdout, self.stderr):
            if stream is not None:
                stream.close()


def run(
    args: Sequence[Any],
    *,
    capture_output: bool = False,
    check: bool = False,
    timeout: float | None = None,
    input: Any = None,  # noqa: A002
    **options: Any,
) -> CompletedProcess[Any]:
    if capture_output:
        options |= {"stdout": PIPE, "stderr": PIPE}
    if input is not None:
        options["stdin"] = PIPE
    with Popen(args, **options) as process:
        try:
            out, err = process.communicate(input, timeout)
        except BaseException:
            if isinstance(process, subprocess.Popen):
                _kill_with_stacks(process)
            raise
    done = CompletedProcess(args, process.wait(), out, err)
    if check and done.returncode:
        sys.stderr.write(err if isinstance(err, str) else (err or b"").decode())
        raise CalledProcessError(done.returncode, list(args), out, err)
    return done


def _kill_with_stacks(process: subprocess.Popen[Any]) -> None:
    """End a process started anew, and let its last words, the stacks of its threads, be this test's."""
    process.send_signal(signal.SIGABRT)
    with contextlib.suppress(TimeoutExpired):
        _, err = process.communicate(timeout=10)
        sys.stderr.write(err if isinstance(err, str) else (err or b"").decode())
    process.kill()


def without_gloo(lines: Iterable[str]) -> Iterator[str]:
    """Leave out what gloo prints in torch 2.9."""
    return (line for line in lines if not line.startswith("[Gloo]"))


def ends_within(process: Any, seconds: float) -> bool:
    """Return whether a process ends in this time: for tests that look at what it left until something is there."""
    try:
        process.wait(seconds)
    except TimeoutExpired:
        return False
    return True


class _Start:
    def __init__(self, words: list[str], environment: Mapping[str, str] | None, cwd: Any, new_session: bool) -> None:
        self.words = words
        self.environment = dict(os.environ if environment is None else environment)
        self.cwd = os.getcwd() if cwd is None else os.fspath(cwd)
        self.new_session = new_session


class _Streams:
    def __init__(self, streams: Sequence[int]) -> None:
        self.streams = streams

    def __reduce__(self) -> Any:
        return _take_streams, tuple(reduction.DupFd(stream) for stream in self.streams)


def _take_streams(*passed: Any) -> list[int]:
    return [one.detach() for one in passed]


_execute_anew: Any = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _begin(start: _Start, streams: list[int]) -> None:
    """Become the process, and end as Python does."""
    # What multiprocessing left behind is not this process's.
    multiprocessing.process._parent_process = None
    multiprocessing.process.current_process()._config["daemon"] = False
    if sys.version_info >= (3, 13):  # where it also forgot what was to be called at exit
        atexit.register(weakref.finalize._exitfunc)  # type: ignore[attr-defined]
    subprocess.Popen._execute_child = _execute_child
    _become(start, streams)


def _execute_child(self: Any, *passed: Any) -> None:
    """Start what `subprocess` is to start: a fork of this process, where it is to run this Python, too.

    Ranks that a launcher starts are its children, as they must be.
    """
    given = inspect.signature(_execute_anew).bind(self, *passed).arguments
    interpreter, *words = [os.fspath(word) for word in given["args"]]
    script = shutil.which(interpreter)
    if script is not None and _is_ours(script):
        interpreter, words = sys.executable, [script, *words]
    anew = os.environ.get(NEW_PROCESSES) or interpreter != sys.executable
    if anew or (words[0].startswith("-") and words[0] not in {"-c", "-m", "-u"}):
        _execute_anew(self, *passed)
        return
    start = _Start(words, given["env"], given["cwd"], given["start_new_session"])
    sys.stdout.flush()
    sys.stderr.flush()
    self.pid = _fork_until_sound()
    if self.pid:
        self._child_created = True
        ends = ("p2cread", "p2cwrite", "c2pread", "c2pwrite", "errread", "errwrite")
        self._close_pipe_fds(*map(given.__getitem__, ends))
        return
    try:
        ends = [given[name] for name in ("p2cread", "c2pwrite", "errwrite")]
        streams = [os.dup(number if end == -1 else end) for number, end in enumerate(ends)]
        for number in os.listdir("/proc/self/fd"):
            if int(number) > 2 and int(number) not in streams:
                with contextlib.suppress(OSError):
                    os.close(int(number))
        _become(start, streams)
    finally:
        os._exit(1)  # what failed is not the launcher's


def _fork_until_sound() -> int:
    """Fork a process that may have threads; return what `os.fork` does.

    torch's store looks names up in a thread of the launcher. A fork made meanwhile has the C library's resolver locked for
    ever, and is ended and made anew.
    """
    while True:
        read, write = os.pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of threads
            pid = os.fork()
        if not pid:
            handler = signal.signal(signal.SIGALRM, signal.SIG_DFL)
            signal.setitimer(signal.ITIMER_REAL, 5)
            socket.getaddrinfo("localhost", None)
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, handler)
            os.close(read)
            os.write(write, b"\0")
            os.close(write)
            return 0
        os.close(write)
        with open(read, "rb") as told:
            if told.read(1):
                return pid
        os.waitpid(pid, 0)


def _is_ours(script: str) -> bool:
    """Return whether a program is a script that names this Python in its first line."""
    with open(script, "rb") as file:
        return file.readline().strip() == f"#!{sys.executable}".encode()


def _become(start: _Start, streams: list[int]) -> None:
    gc.freeze()
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number, stream in enumerate(streams):
        os.dup2(stream, number)
        os.close(stream)
    if start.new_session:
        os.setsid()
    os.chdir(start.cwd)
    os.environ.clear()
    os.environ.update(start.environment)
    unbuffered = start.words[0] == "-u"
    if unbuffered:
        start.words.pop(0)
    _open_streams(unbuffered=unbuffered or bool(start.environment.get("PYTHONUNBUFFERED")))
    if start.environment.get("PYTHONFAULTHANDLER"):
        faulthandler.enable()
    code = _main(start)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):
            code = code or 120
    if code == -signal.SIGINT:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code)


def _open_streams(*, unbuffered: bool) -> None:
    sys.stdin = sys.__stdin__ = os.fdopen(0, closefd=False)
    # As Python has them: what is no terminal is written in blocks to stdout, and in lines to stderr.
    out = os.fdopen(1, "wb", buffering=0 if unbuffered else -1, closefd=False)
    sys.stdout = sys.__stdout__ = io.TextIOWrapper(out, write_through=unbuffered)
    sys.stderr = sys.__stderr__ = os.fdopen(2, "w", buffering=1, closefd=False, errors="backslashreplace")


def _main(start: _Start) -> int:
    sys.path[:0] = [path for path in start.environment.get("PYTHONPATH", "").split(os.pathsep) if path]
    option, *words = start.words
    try:
        if option == "-c":
            code, *arguments = words
            sys.argv = ["-c", *arguments]
            sys.path.insert(0, "")
            module = types.ModuleType("__main__")
            sys.modules["__main__"] = module
            if sys.version_info >= (3, 13):  # whose tracebacks show lines of -c
                linecache.cache["<string>"] = len(code), None, code.splitlines(keepends=True), "<string>"
            exec(compile(code, "<string>", "exec"), module.__dict__)
        elif option == "-m":
            sys.argv = list(words)
            sys.path.insert(0, start.cwd)
            if words[0] == "zstore.as_deepspeed":
                for name in CACHE_AVAILABILITY:  # a process of its own has not imported them yet
                    sys.modules.pop(name, None)
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
        else:
            sys.argv = list(start.words)
            sys.path.insert(0, os.path.dirname(os.path.abspath(option)))
            runpy.run_path(option, run_name="__main__")
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        sys.stderr.write(f"{end.code}\n")
        return 1
    except BaseException as error:
        # Without the frame of this function.
        shown = error.__traceback__.tb_next if error.__traceback__ is not None else None
        sys.last_type, sys.last_value, sys.last_traceback = type(error), error, shown
        sys.excepthook(type(error), error.with_traceback(shown), shown)
        return -signal.SIGINT if isinstance(error, KeyboardInterrupt) else 1
    return 0
