"""The public names, and how little it takes to import them."""

import re
import subprocess
import sys
from importlib import import_module
from inspect import isclass, isfunction
from pathlib import Path

import pytest

import zstore

PAGE = Path(__file__).parents[2] / "docs" / "store.md"
BUILT_ON = ("zstore.checkpoint", "zstore.format", "zstore.io", "zstore.store")
"""What everything above the store is built on."""


def imported_after(code: str) -> set[str]:
    report = "\nfinally:\n import sys; print('modules', *{name.partition('.')[0] for name in sys.modules})"
    command = [
        sys.executable,
        "-c",
        f"try:\n {code}\nexcept SystemExit as end:\n assert not end.code, end.code{report}",
    ]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    return set(done.stdout.splitlines()[-1].split()[1:])


def test_all_is_sorted_and_without_repeats() -> None:
    assert list(zstore.__all__) == sorted(set(zstore.__all__))


def test_all_is_complete() -> None:
    """What can be reached without an underscore is either listed or a module of the package."""
    modules = {name.removeprefix("zstore.") for name in sys.modules if name.startswith("zstore.")}
    machinery = {"annotations", "Any", "TYPE_CHECKING", "import_module"}
    public = {name for name in vars(zstore) if not name.startswith("_")} - modules - machinery
    assert public <= set(zstore.__all__)
    assert set(zstore._HOMES) == set(zstore.__all__) - {"__version__"}


@pytest.mark.parametrize("name", zstore.__all__)
def test_every_name_is_handed_out(name: str) -> None:
    value = getattr(zstore, name)
    assert name in dir(zstore)
    if name != "__version__":
        assert value.__doc__


def test_other_names_are_not() -> None:
    with pytest.raises(AttributeError, match="no attribute 'initialise'"):
        _ = zstore.initialise


def test_importing_the_package_imports_little() -> None:
    assert not {"torch", "numpy", "zarr", "pydantic", "typer", "rich"} & imported_after("import zstore")


def test_reading_needs_no_torch() -> None:
    code = "import zstore.store, zstore.checkpoint, zstore.open.checkpoint, zstore.format.zarr_dtypes"
    assert "torch" not in imported_after(code)


def test_the_page_names_what_may_be_built_on_and_nothing_else() -> None:
    section = PAGE.read_text(encoding="utf-8").partition("## API for extensions")[2]
    named = set(re.findall(r"`(\w+)`", section.partition("| package |")[2]))
    assert named == {name for package in BUILT_ON for name in import_module(package).__all__}


@pytest.mark.parametrize("package", BUILT_ON)
def test_what_is_built_on_is_public_and_documented(package: str) -> None:
    module = import_module(package)
    assert len(set(module.__all__)) == len(module.__all__)
    for name in module.__all__:
        value = getattr(module, name)
        assert not name.startswith("_")
        assert value.__doc__ or not (isclass(value) or isfunction(value))
    with pytest.raises(AttributeError, match="no attribute"):
        _ = module.nothing_of_the_kind
