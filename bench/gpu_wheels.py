"""Gathers the wheels that `make gpu` needs on a machine that reaches no package index, and has a Python with torch of its own.

They go to a folder that git ignores; copy it there along with the project, and run `make gpu GPU_PYTHON=python3`.

    python -m bench.gpu_wheels [--python 3.12] [--have FILE] [--deepspeed] [--fio] [--into build/gpu-wheels]

`--have` is a file with the names of the packages that are there, a line each, as `pip freeze` or `pip list` print them. Without
it that is torch, with what it requires, and numpy. Versions are those that this project is tested with (constraints.txt).
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

_ROOT = Path(__file__).resolve().parent.parent
_TOOLS = ("hypothesis", "pytest", "pytest-timeout", "transformers")
"""What the parts need beside the project's own requirements."""
_PLATFORMS = ("manylinux1", "manylinux2014", *(f"manylinux_2_{minor}" for minor in (12, 17, 24, 27, 28, 31, 34, 35)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--python", default="3.12", help="version of the Python there")
    parser.add_argument("--machine", default="x86_64", help="processor there, as `uname -m` prints it")
    parser.add_argument("--have", type=Path, help="file with the names of the packages that are there")
    parser.add_argument("--deepspeed", action="store_true", help="also DeepSpeed, built here without operators")
    parser.add_argument("--fio", action="store_true", help="also the fio that is installed here, with its libraries")
    parser.add_argument("--into", type=Path, default=_ROOT / "build" / "gpu-wheels", help="folder, made anew")
    options = parser.parse_args()
    roots = [*_required(), *_TOOLS, *(["deepspeed"] if options.deepspeed else [])]
    have = closure(["torch", "numpy"], options.python) if options.have is None else read_names(options.have)
    missing = sorted(closure(roots, options.python, without=have))
    shutil.rmtree(options.into, ignore_errors=True)
    options.into.mkdir(parents=True)
    for name in missing:
        _fetch(name, options)
    if options.fio:
        if (fio := shutil.which("fio")) is None:
            raise SystemExit("--fio: fio is not installed here; its ./configure --build-static builds one")
        bring_program(Path(fio), options.into / "fio")
    nbytes = sum(path.stat().st_size for path in options.into.rglob("*") if path.is_file())
    others = ", and fio" if options.fio else ""
    print(f"{options.into}: {len(missing)} wheels, {nbytes / 1e6:.1f} MB: {', '.join(missing)}{others}")


def _required() -> list[str]:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    return [Requirement(text).name for text in project["dependencies"]]


def read_names(path: Path) -> set[str]:
    """Return the normalized names of packages in a list of pip's."""
    words = (re.match(r"[A-Za-z0-9][\w.-]*", line) for line in path.read_text(encoding="utf-8").splitlines())
    return {canonicalize_name(word[0]) for word in words if word is not None}


def closure(roots: Iterable[str], python: str, without: Iterable[str] = ()) -> set[str]:
    """Return the normalized names of packages and of all that they require, except those in `without` and what these alone
    require, as installed here."""
    found: set[str] = set()
    left = [canonicalize_name(name) for name in roots]
    known = set(without)
    while left:
        name = left.pop()
        if name in found or name in known:
            continue
        found.add(name)
        for text in metadata.requires(name) or () if _version(name) else ():
            needed = Requirement(text)
            if needed.marker is None or needed.marker.evaluate({"python_version": python, "extra": ""}):
                left.append(canonicalize_name(needed.name))
    return found


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _fetch(name: str, options: argparse.Namespace) -> None:
    version = _version(name)
    wanted = name if version is None else f"{name}=={version}"
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    environment = os.environ | {"DS_BUILD_OPS": "0"}
    if name == "deepspeed":
        call = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(options.into), wanted]
    else:
        platforms = [f"--platform={platform}_{options.machine}" for platform in _PLATFORMS]
        call = [*pip, "download", "--no-deps", "--only-binary=:all:", f"--python-version={options.python}"]
        call += ["--implementation=cp", *platforms, f"--dest={options.into}", wanted]
    done = subprocess.run(call, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(
            f"{wanted} for Python {options.python} on {options.machine} was not found:\n{done.stderr[-1000:]}"
        )


def bring_program(program: Path, folder: Path) -> None:
    """Copy a program to `folder` with the libraries that it is linked with, but the C library's, and a script of its name
    that runs it with these."""
    (folder / "lib").mkdir(parents=True)
    shutil.copy(program, folder / "lib")
    linked = subprocess.run(["ldd", program], capture_output=True, text=True, check=False)  # a static one has none
    for name, path in re.findall(r"(\S+) => (.+?)(?: \(|$)", linked.stdout, re.MULTILINE):
        if path == "not found":
            raise SystemExit(f"{program} does not run here: its library {name} is missing")
        if not re.match(r"lib(anl|c|dl|m|nsl|pthread|resolv|rt|util)\.so", name):
            shutil.copy(path, folder / "lib" / name)
    script = folder / program.name
    script.write_text(f'#!/bin/sh\nlib=$(dirname "$0")/lib\nLD_LIBRARY_PATH="$lib" exec "$lib/{program.name}" "$@"\n')
    script.chmod(0o755)


if __name__ == "__main__":
    main()
