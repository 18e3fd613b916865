"""Text as bytes: order of files, and what is refused."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from zstore.errors import ConfigError
from zstore.tools.sample.corpus import Corpus, open_corpus


def make_folder(root: Path, sizes: list[int]) -> tuple[Corpus, bytes]:
    """Files of random bytes below `root`, and what they are laid end to end."""
    random = np.random.default_rng(7)
    contents = [random.bytes(size) for size in sizes]
    for i, content in enumerate(contents):
        file = root / f"part{i % 2}" / f"{i:03}.txt"
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(content)
    return open_corpus(root), b"".join(contents[0::2] + contents[1::2])


@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_any_range_is_read_across_files(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    sizes = data.draw(st.lists(st.integers(0, 9), min_size=1, max_size=8).filter(any))
    corpus, whole = make_folder(tmp_path_factory.mktemp("corpus"), sizes)
    start = data.draw(st.integers(0, len(whole) - 1))
    count = data.draw(st.integers(0, len(whole) - start))
    assert corpus.read(start, count) == whole[start : start + count]


def test_what_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        open_corpus(tmp_path / "missing")
    (tmp_path / ".hidden").write_text("no")
    with pytest.raises(ConfigError, match=r"no text \(0 files"):
        open_corpus(tmp_path)
    (tmp_path / "empty").touch()
    with pytest.raises(ConfigError, match=r"no text \(1 files, 0 bytes\)"):
        open_corpus(tmp_path / "empty")
    (tmp_path / "rows.parquet").write_bytes(b"PAR1")
    with pytest.raises(ConfigError, match="expected plain text, got a file of rows"):
        open_corpus(tmp_path / "rows.parquet")
    (tmp_path / "short").write_bytes(b"abc")
    with pytest.raises(ConfigError, match="holds 3 bytes, but one sample takes 4"):
        open_corpus(tmp_path / "short").sample(0, 4, seed=0)
