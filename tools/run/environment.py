"""Variables that ranks on other machines get from this one."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from zstore.errors import UsageError

_PASSED = re.compile(
    r"(NCCL|GLOO|UCX|MLFLOW|WANDB|HF|HUGGINGFACE|TOKENIZERS|TRANSFORMERS|TORCH|PYTORCH|PYTHON|OMP|MKL|ZSTORE|DEEPSPEED|AWS)_?.*"
    r"|CUDA_(HOME|LAUNCH_BLOCKING|DEVICE_ORDER|DEVICE_MAX_CONNECTIONS)|LD_LIBRARY_PATH|PATH|VIRTUAL_ENV|TMPDIR"
)
"""Names of variables that are passed on unasked: those that training libraries read, and search paths."""


def exported(given: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of `--export NAME` and `--export NAME=VALUE`.

    Raises UsageError for other texts and for a name that `environment` does not have.
    """
    found = {}
    for word in given:
        name, equals, value = word.partition("=")
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name):
            raise UsageError(f"--export: expected NAME or NAME=VALUE, got {name!r}")
        if not equals and name not in environment:
            raise UsageError(f"--export {name}: the variable is not set here; write --export {name}=VALUE")
        found[name] = value if equals else environment[name]
    return found


def passed_on(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that other machines get unasked."""
    return {name: value for name, value in environment.items() if _PASSED.fullmatch(name)}


def deepspeed_file(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables in DeepSpeed's files for them, NAME=VALUE a line: `.deepspeed_env`, or as DS_ENV_FILE names it, in
    the home folder and then in this one. Raises UsageError for another line."""
    name = environment.get("DS_ENV_FILE", ".deepspeed_env")
    found = {}
    for path in (Path.home() / name, Path(name)):
        if not path.is_file():
            continue
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if not line.strip():
                continue
            key, equals, value = line.partition("=")
            if not equals:
                raise UsageError(f"{path}, line {number}: expected NAME=VALUE, got {line!r}")
            found[key.strip()] = value
    return found
