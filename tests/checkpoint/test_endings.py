"""How a program may end while a save is under way, and what becomes of the save and of the exit code."""

import json
import multiprocessing
import signal
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from tests.checkpoint.checkpoints import leavings, open_world, save_arrays, values
from tests.checkpoint.s3_server import s3_server
from zstore.checkpoint.reader import open_checkpoint
from zstore.checkpoint.verify import verify_checkpoint
from zstore.remote.service import open_folder
from zstore.testing.faults import CallingFiles

pytestmark = pytest.mark.endings

_PROGRAM = """
import atexit, os, pathlib, signal, sys, threading
import numpy as np
from tests.checkpoint.checkpoints import open_world
from zstore.testing.faults import CallingFiles

ending, first = threading.main_thread(), threading.Lock()
at_exit, over = threading.Event(), threading.Event()

def interrupt(until=at_exit):
    while True:  # what comes just before the main thread waits is seen when it waits no more
        os.kill(os.getpid(), signal.SIGINT)
        if until.wait(1):
            return

def hold(kind, path):
    ending.join()  # the save goes on once the main thread has ended
    {held}

opened = open_world({{"model/w": np.ones(300000, np.float32)}}, files=[CallingFiles(hold)])
handle = opened.__enter__().begin_save(pathlib.Path(sys.argv[1]))[0]
atexit.register(at_exit.set)  # called first
{ending}
"""

_STORE = """
import multiprocessing, numpy as np, sys, zstore
def leave():
    global snapshot, store
    store = zstore.open_store()
    store.put("a", np.zeros(10)).wait()
    snapshot = store.snapshot()
    store.update("a", np.ones(10))
    store.checkpoint(sys.argv[1] + "/step-00000001")
child = multiprocessing.get_context("fork").Process(target=leave)
{ending}
"""


class Ending(NamedTuple):
    ending: str = ""
    """What the program does once the save is under way."""
    held: str = ""
    """What the save meets behind the end of the main thread."""
    code: int = 0
    complete: bool = True
    says: str = ""
    program: str = _PROGRAM


ENDINGS = {
    "last line": Ending(),
    "sys.exit": Ending("sys.exit(3)", code=3),
    "without threading._register_atexit": Ending(
        program="import concurrent.futures.thread, threading\ndel threading._register_atexit\n" + _PROGRAM
    ),
    "exception": Ending("raise ValueError('of the user')", code=1, says="of the user"),
    "ctrl-c": Ending("signal.raise_signal(signal.SIGINT)", code=-signal.SIGINT, says="KeyboardInterrupt"),
    "ctrl-c while it ends": Ending(
        held="first.acquire(blocking=False) and interrupt(); at_exit.wait()", says="KeyboardInterrupt"
    ),
    "ctrl-c twice while it ends": Ending(
        held="first.acquire(); interrupt(); interrupt(over); first.acquire()",
        code=120,
        complete=False,
        says="step-00000001 failed: InterruptedError: the program was interrupted again",
    ),
    "SIGTERM": Ending("signal.raise_signal(signal.SIGTERM)", code=-signal.SIGTERM, complete=False),
    "os._exit": Ending("os._exit(4)", code=4, complete=False),
    "the save fails": Ending(
        held="raise OSError(28, 'no room')",
        code=120,
        complete=False,
        says="step-00000001 failed: OSError: [Errno 28] no room",
    ),
    "the save fails, and sys.exit": Ending("sys.exit(3)", held="raise OSError(5, 'broken')", code=120, complete=False),
    **{
        f"a store's checkpoint waits for a snapshot{place}": Ending(
            ending, code=120, complete=False, says="closed while a change waited for a snapshot", program=_STORE
        )
        for place, ending in (("", "leave()"), (" of a child", "child.start()\nchild.join()\nsys.exit(child.exitcode)"))
    },
    "a forked child ends": Ending(
        "child = os.fork()\nif child == 0:\n    sys.exit(5)\nassert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5"
    ),
}


@pytest.fixture(scope="module")
def ended(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, int, str]]:
    """Run all programs at once; return folder, exit code and stderr of each."""
    started = {}
    for name, end in ENDINGS.items():
        folder = tmp_path_factory.mktemp("ended") / "ckpt"
        code = end.program.format(ending=end.ending, held=end.held or "pass")
        words = [sys.executable, "-W", "ignore", "-c", code, str(folder)]
        started[name] = folder, subprocess.Popen(words, stderr=subprocess.PIPE, text=True)
    done = {}
    for name, (folder, process) in started.items():
        try:
            says = process.communicate(timeout=200)[1]
        finally:
            process.kill()
        done[name] = folder, process.returncode, says
    return done


@pytest.mark.parametrize("name", ENDINGS)
def test_what_becomes_of_a_save(name: str, ended: dict[str, tuple[Path, int, str]]) -> None:
    (folder, code, says), end = ended[name], ENDINGS[name]
    assert code == end.code, says
    assert end.says in says
    if end.complete:
        assert values(folder)["model/w"] == b"\0\0\x80\x3f" * 300000
    else:
        assert not (folder / "step-00000001").exists()
        # Whatever is left looks like no checkpoint, and the next save removes it.
        save_arrays(folder, {"model/w": np.ones(3, np.float32)}, step=2)
    assert leavings(folder) == []


def _begin_in_child(folder: str, fails: bool) -> None:
    def hold(kind: str, path: Path) -> None:
        if fails:
            raise OSError(28, "no room")

    opened = open_world({"model/w": np.ones(300000, np.float32)}, files=[CallingFiles(hold)])
    _kept.append(opened)
    opened.__enter__().begin_save(Path(folder))


_kept: list[object] = []


@pytest.mark.parametrize("fails", [False, True])
@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
def test_a_child_completes_a_save(method: str, fails: bool, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "ckpt"
    child = multiprocessing.get_context(method).Process(target=_begin_in_child, args=(str(folder), fails))  # type: ignore[attr-defined]
    child.start()
    child.join(200)
    assert child.exitcode == (120 if fails else 0)
    if fails and method != "forkserver":  # whose stderr is that of its server
        assert "step-00000001 failed: OSError: [Errno 28] no room" in capfd.readouterr().err
    elif not fails:
        assert values(folder)["model/w"] == b"\0\0\x80\x3f" * 300000


def test_an_error_that_somebody_caught_is_no_exit_code(tmp_path: Path) -> None:
    ending = "try:\n    handle.wait()\nexcept OSError as error:\n    print('caught', error)"
    code = _PROGRAM.replace("ending.join()", "").format(ending=ending, held="raise OSError(28, 'no room')")
    words = [sys.executable, "-c", code, str(tmp_path / "ckpt")]
    done = subprocess.run(words, check=False, capture_output=True, text=True, timeout=200)
    assert (done.returncode, done.stderr) == (0, "")
    assert "caught" in done.stdout


_UPLOADS = """
import json, sys, threading
from contextlib import ExitStack
from pathlib import Path
import numpy as np
from zstore.checkpoint.layout import new_save_id
from zstore.remote.upload import save_to_url
from zstore.remote.service import UploadPlace
from tests.checkpoint.checkpoints import open_world

del threading._register_atexit  # it is private to Python
url, options, folder = sys.argv[1], json.loads(sys.argv[2]), Path(sys.argv[3])
stack = ExitStack()
world = stack.enter_context(open_world({f"model/{i}": np.full(100, i, np.float32) for i in range(20)}))
save_to_url(world.request(folder, 0, new_save_id()), UploadPlace(url, options))
"""


def test_a_program_that_ends_completes_its_upload(tmp_path: Path) -> None:
    pytest.importorskip("s3fs", reason="extra s3")
    pytest.importorskip("moto", reason="extra test")
    with s3_server() as options:
        url, folder = "s3://bucket/run", open_folder("s3://bucket/run", options)
        folder.fs.mkdir("bucket")
        # By its name: looking it up takes a thread of an executor, which the end of the interpreter stops early.
        address = options["client_kwargs"]["endpoint_url"].replace("127.0.0.1", "localhost")
        named = {**options, "client_kwargs": {"endpoint_url": address}}
        command = [sys.executable, "-c", _UPLOADS, url, json.dumps(named), str(tmp_path)]
        subprocess.run(command, check=True, timeout=120)
        with open_checkpoint(folder) as reader:
            assert verify_checkpoint(reader) == []


_NOTEBOOK = """
import sys
from jupyter_client.manager import KernelManager

kernel = KernelManager(shutdown_wait_time=60)
kernel.start_kernel()
client = kernel.client()
client.start_channels()
client.wait_for_ready(timeout=200)
try:
    assert client.execute_interactive(sys.argv[1], timeout=200)["content"]["status"] == "ok"
    kernel.restart_kernel()
finally:
    kernel.shutdown_kernel(now=True)
"""


def test_the_restart_of_a_notebook_s_kernel_waits_for_the_save(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel", reason="extra test")
    folder = tmp_path / "ckpt"
    cell = _PROGRAM.replace("sys.argv[1]", repr(str(folder))).format(ending="", held="pass")
    subprocess.run([sys.executable, "-W", "ignore", "-c", _NOTEBOOK, cell], check=True, timeout=120)
    assert values(folder)["model/w"] == b"\0\0\x80\x3f" * 300000
    assert leavings(folder) == []
