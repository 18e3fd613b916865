"""The section `zstore.publish`."""

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator

from zstore.remote.url import is_url

from ...config.keys import Section, built
from ...config.values import Name, Positive, Words, show


def _version_folder(to: str) -> str:
    if not is_url(to) and not Path(to).is_absolute():
        raise ValueError(f"expected an absolute path, or a URL like http://HOST:8700/RUN/weights; got {show(to)}")
    return to


class PublishSection(Section):
    """Weights in bf16 for whoever serves them: after steps the changed elements, and now and then all. See docs/publish.md."""

    switch = "to"

    to: Annotated[Name, AfterValidator(_version_folder), Words("an absolute path or a URL")] | None = built(None)
    """Folder that the versions go to, which all ranks and all readers see; or `http://HOST:PORT/RUN/weights`, a run of a
    `zstore serve` that takes uploads. Unset: nothing is published."""
    every: Positive = built(1)
    """Optimizer steps from one version to the next. A step that publishes waits for its update."""
    full_every: Positive = built(100)
    """Versions from one with all weights to the next, for readers that begin or have fallen behind. One whose changes would
    be larger than all weights is full too. Versions before the last full one but one are removed."""
