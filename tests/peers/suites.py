"""Other people's test suites, run twice in processes of their own: as they are, and with zstore in place of what they test."""

import os
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from xml.etree import ElementTree

HERE = Path(__file__).parent
SOURCES = HERE / "sources"
"""Where whoever runs a suite puts it, a folder a project; nothing of it is committed."""
NOT_PUBLIC = "not public: "
"""Begins the reason of tests of a project's inside, which do not count."""


@dataclass(frozen=True, kw_only=True)
class Suite:
    """A project's tests of which a list is run, `chosen/NAME.txt`, and those that need not pass, in `allowed.toml`."""

    name: str
    repository: str
    needs: tuple[str, ...] = ("deepspeed",)
    """The package that is tested, and those that its tests import besides."""
    fetched: tuple[str, ...]
    """Folders of the repository to fetch."""
    folder: str = ""
    """Where pytest runs, in the repository."""
    plugin: str = "standing_in"
    """Puts zstore in place when the variable STANDS_IN is set; takes marks off that ask for a GPU."""
    share: float = 0.95
    """Least share of tests that pass, of those that count; bench/results has the figures."""
    ini: str = "pytest.ini"
    """The project's settings for pytest, within `folder`; made empty if there is none."""
    variables: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return self.name

    @property
    def cwd(self) -> Path:
        return SOURCES / self.repository.rpartition("/")[2].lower() / self.folder

    @property
    def fetch(self) -> str:
        into = f"tests/peers/sources/{self.repository.rpartition('/')[2].lower()}"
        return (
            f"{self.name}: the tests are not there, or a package is missing: pip install {' '.join(self.needs)}\n"
            f"git clone --depth 1 --filter blob:none --sparse https://github.com/{self.repository} {into}\n"
            f"git -C {into} sparse-checkout set {' '.join(self.fetched)}"
        )

    @property
    def chosen(self) -> Sequence[str]:
        return (HERE / "chosen" / f"{self.name}.txt").read_text().splitlines()

    def passed(self, chosen: Sequence[str], report: Path, *, stands_in: bool) -> Sequence[str]:
        files = sorted({line.partition("::")[0] for line in chosen})
        words = ["-c", self.ini, *(file for file in files if (self.cwd / file).is_file())]
        (self.cwd / self.ini).touch()
        listed = report.with_suffix(".txt")
        listed.write_text("\n".join(chosen))
        variables = {**self.variables, "CHOSEN": os.fspath(listed)} | ({"STANDS_IN": "1"} if stands_in else {})
        found = passed(self.cwd, words, report, plugins=("choosing", self.plugin), variables=variables)
        return [line for line in chosen if reported(line) in found]


_OF_DEEPSPEED = {"DS_ACCELERATOR": "cpu", "OMP_NUM_THREADS": "1"}
_TIMEOUT = "--timeout=200 --timeout-method=signal --continue-on-collection-errors"
SUITES = (
    Suite(
        name="deepspeed",
        repository="deepspeedai/DeepSpeed",
        fetched=("tests/unit",),
        folder="tests",
        share=0.96,
        variables={
            **_OF_DEEPSPEED,
            "CUDA_VISIBLE_DEVICES": "0,1,2,3",  # not read on the CPU, but looked for
            "DS_DISABLE_REUSE_DIST_ENV": "1",
            "DS_UNITTEST_TIMEOUT": "60",
            "LOCAL_SIZE": "4",
            "PYTEST_ADDOPTS": "--timeout=120 --timeout-method=signal --continue-on-collection-errors",
        },
    ),
    Suite(
        name="accelerate",
        repository="huggingface/accelerate",
        fetched=("tests/deepspeed",),
        variables={**_OF_DEEPSPEED, "PYTEST_ADDOPTS": _TIMEOUT, "UNMARKED": "accelerate"},
    ),
    Suite(
        name="transformers_deepspeed",
        repository="huggingface/transformers",
        fetched=("tests/deepspeed", "tests/trainer", "tests/fixtures"),
        ini="pyproject.toml",
        variables={**_OF_DEEPSPEED, "PYTEST_ADDOPTS": _TIMEOUT, "UNMARKED": "transformers"},
    ),
    Suite(
        name="dcp",
        repository="pytorch/pytorch",
        needs=("torch", "expecttest"),
        fetched=("test/distributed/checkpoint",),
        folder="test",
        plugin="replacing_dcp",
        variables={"OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": _TIMEOUT},
    ),
    Suite(
        name="lightning",
        repository="Lightning-AI/pytorch-lightning",
        needs=("lightning", "jsonargparse"),
        fetched=("tests",),
        plugin="replacing_lightning",
        share=0.64,
        ini="pyproject.toml",
        variables={"OMP_NUM_THREADS": "1", "PYTEST_ADDOPTS": _TIMEOUT},
    ),
)


def passed(
    folder: Path, words: Sequence[str], report: Path, *, plugins: Sequence[str] = (), variables: Mapping[str, str]
) -> set[str]:
    command = [sys.executable, "-m", "pytest", *words, "-q", f"--junitxml={report}", "-p", "no:cacheprovider"]
    command += ["-o", "junit_family=xunit1", *(word for plugin in plugins for word in ("-p", plugin))]
    python_path = os.pathsep.join(filter(None, [os.fspath(HERE), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "PYTHONPATH": python_path, **variables}
    subprocess.run(command, cwd=folder, env=environment, check=False, stdout=subprocess.DEVNULL)
    cases = ElementTree.parse(report).iter("testcase")
    return {
        f"{case.get('classname')}.{case.get('name')}"
        for case in cases
        if not {child.tag for child in case} & {"failure", "error", "skipped"}
    }


def reported(node_id: str) -> str:
    path, bracket, parameters = node_id.partition("[")
    file, _, names = path.partition(".py::")
    return f"{file.replace('/', '.')}.{names.replace('::', '.')}{bracket}{parameters}"


def allowed_failures(suite: str) -> Mapping[str, str]:
    """Return the tests of a suite that need not pass on zstore, each with the reason."""
    found: dict[str, Mapping[str, str]] = tomllib.loads((HERE / "allowed.toml").read_text())
    return found.get(suite, {})
