"""`generate` with sharded parameters: every rank runs as many forwards as the one that writes the most."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any


def in_step(generate: Callable[..., Any]) -> Callable[..., Any]:
    """Return `generate` with transformers' `synced_gpus` on, unless the call says otherwise.

    Gathering is a collective, so a rank whose texts are complete has to go on with forwards until all are, as `synced_gpus`
    does; the ranks call `generate` equally often. A `generate` without that parameter is returned as it is: it runs equally
    many forwards on every rank, or has its own way to keep step.
    """
    signature = inspect.signature(generate)
    if "synced_gpus" not in signature.parameters:
        return generate

    @functools.wraps(generate)
    def together(*args: Any, **kwargs: Any) -> Any:
        call = signature.bind_partial(*args, **kwargs)
        if call.arguments.get("synced_gpus") is None:
            call.arguments["synced_gpus"] = True
        return generate(*call.args, **call.kwargs)

    return together
