"""`make gpu` as on a rented machine: no route to anywhere, and a Python that has only torch and numpy.

The project's files are copied, a bare environment is made beside them, and all parts run small on the CPU in a network
namespace of their own, with the wheels that `bench.gpu_wheels` gathered for this Python.

    python -m bench.gpu_rehearsal [--wheels build/gpu-wheels] [--out FOLDER] [--path FOLDER]

Ends as `make` does. It needs unshare, and a kernel that gives users namespaces of their own.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

_ROOT = Path(__file__).resolve().parent.parent
_ISOLATED = """\
import fcntl, os, socket, struct, sys
with socket.socket() as one:  # the loopback goes up, which every machine has: ranks meet there
    fcntl.ioctl(one, 0x8914, struct.pack("16sH14x", b"lo", 1))
    try:
        one.connect(("192.0.2.1", 80))
    except OSError as error:
        print(f"rehearsal: no way out ({error.strerror})", flush=True)
    else:
        sys.exit("rehearsal: there is a network, so that this would show nothing")
os.execvp(sys.argv[1], sys.argv[1:])
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheels", type=Path, default=_ROOT / "build" / "gpu-wheels", help="folder of wheels")
    parser.add_argument("--out", type=Path, help="folder for gpu.json and gpu.md (default: they are not kept)")
    parser.add_argument(
        "--path", type=Path, help="folder for all that is made, 2 GB (default: that of temporary files)"
    )
    options = parser.parse_args()
    if not any(options.wheels.glob("*.whl")):
        raise SystemExit(
            f"{options.wheels}: expected wheels: run `python -m bench.gpu_wheels --python 3.{sys.version_info[1]}`"
        )
    with tempfile.TemporaryDirectory(dir=options.path, prefix="zstore-rehearsal-") as name:
        sys.exit(rehearse(Path(name), options.wheels.resolve(), options.out and options.out.resolve()))


def rehearse(folder: Path, wheels: Path, out: Path | None) -> int:
    """Return the exit status of `make gpu` in a copy of the project in `folder`."""
    tree, python = folder / "project", folder / "python" / "bin" / "python"
    files = subprocess.run(["git", "ls-files", "-z"], cwd=_ROOT, capture_output=True, text=True, check=True).stdout
    for file in filter(None, files.split("\0")):
        (tree / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(_ROOT / file, tree / file, follow_symlinks=False)
    (folder / "drive").mkdir()
    subprocess.run([sys.executable, "-m", "venv", folder / "python"], check=True)
    pins = (_ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    torch = os.environ.get("TORCH") or next(pin for pin in pins if pin.startswith("torch=="))
    pip = [str(python), "-m", "pip", "install", "--quiet", "--only-binary", ":all:"]
    subprocess.run([*pip, *torch.split()], check=True)
    subprocess.run([*pip, "--constraint", str(_ROOT / "constraints.txt"), "numpy"], check=True)
    arguments = f"--tiny --path {folder / 'drive'} --out {out or folder / 'out'}"
    make = ["make", "gpu", f"GPU_PYTHON={python}", f"GPU_WHEELS={wheels}", f"GPU_ARGS={arguments}"]
    # Nothing of this environment but where programs are: the rented machine has none of it.
    environment = {"PATH": os.defpath, "HOME": str(folder)}
    isolated = ["unshare", "--map-root-user", "--net", str(python), "-c", _ISOLATED, *make]
    return subprocess.run(isolated, cwd=tree, env=environment, check=False).returncode


if __name__ == "__main__":
    main()
