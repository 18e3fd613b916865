"""The table of `docs/store.md`, made of signatures and docstrings: python -m tests.open.api writes it anew."""

import inspect
import re
from pathlib import Path
from typing import Any

import numpy as np

import zstore
from zstore.store import Store

PAGE = Path(__file__).parents[2] / "docs" / "store.md"
LARGE = (300, 100, 2)
"""240 kB in fp32: rests on disk."""
_TABLE = re.compile(r"(?<=<!-- api -->\n).*?(?=\n\n)", re.DOTALL)


def values(shape: tuple[int, ...], dtype: Any = np.float32, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return np.asarray(rng.integers(0, 100, shape)).astype(dtype)


def table() -> str:
    opening = {name: getattr(zstore, name) for name in ("open_store", "open_checkpoint_async")}
    methods = {name: call for name, call in vars(Store).items() if not name.startswith("_")}
    calls = opening | methods | {"statistics": Store.statistics}
    rows = ["| call | effect |", "|---|---|"]
    for name, call in calls.items():
        signature = inspect.signature(call)
        given = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
        text = str(inspect.Signature([each for each in given if each.name != "self"]))
        first = " ".join((inspect.getdoc(call) or "").split("\n\n")[0].split())
        rows.append(f"| `{name}{text}` | {first} |")
    return "\n".join(rows)


def shown() -> str:
    (found,) = _TABLE.findall(PAGE.read_text())
    return str(found)


if __name__ == "__main__":
    PAGE.write_text(_TABLE.sub(lambda _: table(), PAGE.read_text(), count=1))
