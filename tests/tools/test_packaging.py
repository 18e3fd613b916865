"""What a wheel contains: one top-level package, each file once. See docs/design/0001-packages.md."""

import configparser
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
LIBRARY = "zstore/engine/runtime/_adamw.abi3.so"
SOURCES = {"zstore": ROOT / "zstore", "zstore/engine": ROOT / "engine", "zstore/tools": ROOT / "tools"}


def python_files() -> set[str]:
    found = set()
    for prefix, folder in SOURCES.items():
        for file in folder.rglob("*.py"):
            inside = file.relative_to(folder)
            if prefix != "zstore" or inside.parts[0] not in {"engine", "tools"}:
                found.add(f"{prefix}/{inside.as_posix()}")
    return found


@pytest.fixture(scope="module", params=["cc", "no-compiler"])
def compiler(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def wheel(compiler: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel of a copy of the tree, links and all: setuptools writes into the tree that it builds."""
    tree = tmp_path_factory.mktemp("tree")
    out = tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tree)
    for name in ("zstore", "engine", "tools"):
        shutil.copytree(ROOT / name, tree / name, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", str(tree), "--no-deps"]
    command += ["--no-build-isolation", "--quiet", "--wheel-dir", str(out)]
    environment = os.environ | {"CC": compiler}
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    (built,) = out.iterdir()
    return built


def test_each_file_is_packed_once_under_its_installed_name(wheel: Path, compiler: str) -> None:
    names = [name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name]
    assert len(names) == len(set(names))
    page = {f"zstore/{path.relative_to(ROOT / 'zstore')}" for path in (ROOT / "zstore/serve/assets").rglob("*.*")}
    assert len(page) > 10
    assert set(names) - {LIBRARY} == python_files() | page | {"zstore/py.typed", "zstore/engine/runtime/adamw.c"}
    assert (LIBRARY in names) == (shutil.which(compiler) is not None)


def test_a_wheel_is_enough_to_run(wheel: Path, tmp_path: Path) -> None:
    """Unpacked somewhere else, the command starts, the engine is found without the links, and there is a host kernel if there
    was a compiler."""
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import zstore.tools.cli, zstore.engine\n"
        "assert zstore.engine.__file__.startswith(sys.argv[1]), zstore.engine.__file__\n"
        "from zstore.engine.runtime.native import host_kernel; print(host_kernel() is not None)\n"
        "sys.argv = ['zstore', '--version']; zstore.tools.cli.main()\n"
    )
    command = [sys.executable, "-c", code, str(tmp_path)]
    environment = ENVIRONMENT | {"PATH": "", "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split()[0] == str((tmp_path / LIBRARY).exists())


def test_entry_points_and_licence(wheel: Path) -> None:
    archive = zipfile.ZipFile(wheel)
    (info,) = {name.partition("/")[0] for name in archive.namelist() if ".dist-info/" in name}
    points = configparser.ConfigParser()
    points.read_string(archive.read(f"{info}/entry_points.txt").decode())
    assert points["console_scripts"]["zstore"] == "zstore.tools.cli:main"
    assert points["zarr.data_type"]["bfloat16"] == "zstore.format.zarr_dtypes:BFloat16"
    metadata = archive.read(f"{info}/METADATA").decode()
    assert "License-Expression: Apache-2.0" in metadata
    assert f"{info}/licenses/LICENSE" in archive.namelist()


def test_the_listed_packages_are_those_of_the_tree() -> None:
    listed = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    assert listed == sorted(listed)
    assert set(listed) == {str(Path(name).parent).replace("/", ".") for name in python_files()}


def test_the_links_are_links_to_the_folders_beside() -> None:
    for name in ("engine", "tools"):
        assert (ROOT / "zstore" / name).is_symlink()
        assert (ROOT / "zstore" / name).readlink() == Path("..", name)


def test_no_top_level_engine_or_tools_can_be_imported() -> None:
    code = "import importlib.util as u; print([n for n in ('engine', 'tools') if u.find_spec(n)])"
    command, place = [sys.executable, "-c", code], ROOT / "docs"
    done = subprocess.run(command, capture_output=True, text=True, check=True, cwd=place, env=ENVIRONMENT)
    assert done.stdout.strip() == "[]"


def test_the_oldest_torch_that_is_allowed_is_the_one_that_the_tests_run_on() -> None:
    needs = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    (floor,) = (need.removeprefix("torch>=") for need in needs if need.startswith("torch>="))
    (pin,) = re.findall(r"^torch==([0-9.]+)$", (ROOT / "constraints-oldest.txt").read_text(), re.MULTILINE)
    assert pin.rpartition(".")[0] == floor
