"""Extras: the core names none of them, and the rule of an optimizer comes without a change of the engine."""

import re

from tests.layout import Layout

_NAMES = r"one_?bit|1-bit|sends signs|sparse_attention|elastic"
_OF_THE_CONFIG = rf"{_NAMES}|muon|adafactor"
_OF_THE_CORE = (
    rf"{_NAMES}|zero\+\+|zeropp|hpz|mics|hybrid|second(ary)?_size|quantized|\bint8|\.moments|flops"
    r"|whole_tensors"
)


def test_the_core_and_the_config_name_no_extra() -> None:
    layout = Layout()
    others = {"engine/api/initialize.py"} | {name for name in layout.files if name.startswith("engine/config/")}
    keys = "engine/config/keys.py"
    # Not the table of keys that do not act.
    texts = layout.source | {keys: layout.source[keys].partition("\nINACTIVE:")[0]}
    found = {
        name: sorted({word.group() for word in re.finditer(names, texts[name], re.IGNORECASE)})
        for files, names in ((layout.core, _OF_THE_CORE), (others, _OF_THE_CONFIG))
        for name in files
    }
    assert {name: words for name, words in found.items() if words} == {}
