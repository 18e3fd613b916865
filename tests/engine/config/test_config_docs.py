import argparse
import re
import sys
from pathlib import Path

import zstore
from tests import warm
from zstore.engine.config.config import add_config_arguments
from zstore.engine.config.keys import Status, about, known_keys, section_of
from zstore.engine.config.sections import ConfigSections
from zstore.tools.config_docs import END, all_keys, mark, missing_keys, updated

DOCUMENT = Path(__file__).parents[3] / "docs" / "config.md"
SOURCES = Path(zstore.__file__).parent
GIVEN_WHOLE = ("optimizer.params.", "scheduler.params.", "sparse_attention.")
"""Arguments that are looked up by name; their own tests say what they do."""


def test_the_document_is_up_to_date() -> None:
    page = DOCUMENT.read_text(encoding="utf-8")
    assert all_keys() in page
    assert page == updated(page), "run: python -m zstore.tools.config_docs"


def test_every_key_is_in_a_table_of_those_that_act_or_of_those_that_do_not() -> None:
    rows = [line for line in all_keys().splitlines() if line.startswith("| `")]
    assert {line.replace("\\|", "").count("|") for line in rows} == {5}
    acting, others = {line.split("`")[1] for line in rows}, missing_keys()
    for path, _ in known_keys(ConfigSections):
        assert path.rpartition(".")[2] in acting or f"`{path}`" in others, path


def test_the_command_writes_it(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    for name in ("config.md", "deepspeed.md"):
        (tmp_path / "docs" / name).write_text(f"before\n{mark('keys')}old\n{END}after\n")
    warm.run([sys.executable, "-m", "zstore.tools.config_docs"], check=True, cwd=tmp_path)
    assert (tmp_path / "docs/config.md").read_text() == f"before\n{mark('keys')}{all_keys()}{END}after\n"


def test_arguments_of_deepspeed_scripts() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--local_rank", type=int, default=-1)
    assert add_config_arguments(parser) is parser
    none = parser.parse_args([])
    assert (none.deepspeed, none.deepspeed_config, none.deepscale, none.deepscale_config) == (False, None, False, None)
    given = parser.parse_args(["--deepspeed", "--deepspeed_config", "ds.json", "--local_rank", "1"])
    assert (given.deepspeed, given.deepspeed_config) == (True, "ds.json")
    assert "--deepspeed_config PATH" in parser.format_help()
    assert "deepscale" not in parser.format_help()


def test_every_key_that_acts_is_read() -> None:
    """No key acts in its documentation alone: each that is said to act is read somewhere in the product."""
    paths = [*SOURCES.rglob("*.py"), *(SOURCES / "engine").rglob("*.py"), *(SOURCES / "tools").rglob("*.py")]
    read = set(re.findall(r"\.([a-z]\w+)\b", "\n".join(path.read_text(encoding="utf-8") for path in paths)))
    acting = [
        path
        for path, field in known_keys(ConfigSections)
        if section_of(field) is None and about(field)[0] is Status.BUILT and not path.startswith(GIVEN_WHOLE)
    ]
    assert len(acting) > 50
    assert {path for path in acting if path.rpartition(".")[2] not in read} == set()
