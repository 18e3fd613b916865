"""What becomes of each key of `zero_optimization` at each stage, as `zstore config` tells it and a run reports it."""

from __future__ import annotations

from typing import Any

import pytest

from zstore.engine.config.config import load_config
from zstore.engine.config.keys import Status, about, known_keys, section_of
from zstore.engine.config.parse import explain
from zstore.engine.config.sections import ConfigSections
from zstore.errors import ConfigError

# By DeepSpeed's documentation of ZeRO: stage 1 shards optimizer state, 2 gradients, 3 parameters. Of all other keys the stages
# are 0 to 3.
STAGES: dict[str, tuple[int, ...]] = {
    "allgather_bucket_size": (1, 2, 3),
    "leaf_module.classes": (3,),
    "leaf_module.name_suffixes": (3,),
    "leaf_module.names": (3,),
    "offload_optimizer": (1, 2, 3),
    "offload_param": (3,),
    "reduce_scatter": (1, 2),
    "stage3_max_live_parameters": (3,),
    "stage3_max_reuse_distance": (3,),
    "stage3_model_persistence_threshold": (3,),
    "stage3_param_persistence_threshold": (3,),
    "stage3_prefetch_bucket_size": (3,),
    "zero_hpz_partition_size": (3,),
    "zero_quantized_gradients": (2, 3),
    "zero_quantized_weights": (3,),
}
VALUES: dict[str, Any] = {
    "leaf_module.classes": ["Moe"],
    "leaf_module.name_suffixes": ["moe"],
    "leaf_module.names": ["moe"],
    "offload_optimizer.device": "cpu",
    "offload_optimizer.ratio": 0.5,
    "offload_param.device": "cpu",
}
"""Values of keys that are neither true or false nor numbers."""
SECTIONS: dict[str, dict[str, Any]] = {
    "offload_optimizer": {"device": "nvme", "nvme_path": "/drive"},
    "offload_param": {"device": "nvme", "nvme_path": "/drive"},
}
KEYS = [
    key.partition(".")[2]
    for key, field in known_keys(ConfigSections)
    if key.startswith("zero_optimization.") and section_of(field) is None and about(field)[0] is Status.BUILT
]
ACTING = [key for key in KEYS if key != "stage"]


def _section(key: str) -> dict[str, Any]:
    fields = {name.partition(".")[2]: field for name, field in known_keys(ConfigSections)}
    default = fields[key].default
    value = VALUES.get(key, not default if isinstance(default, bool) else 3)
    if key.endswith("nvme_path"):
        value = "/drive"
    section, _, name = key.rpartition(".")
    return {section: SECTIONS.get(section, {}) | {name: value}} if section else {key: value}


@pytest.mark.parametrize("key", ACTING)
@pytest.mark.parametrize("stage", range(4))
def test_a_key_acts_at_its_stages_alone_and_is_told_of_at_others(key: str, stage: int) -> None:
    config = {"train_batch_size": 1, "zero_optimization": _section(key) | {"stage": stage}}
    acts = stage in STAGES.get(key, STAGES.get(key.partition(".")[0], range(4)))
    facts, problems = explain(config)
    (status,) = {fact.status for fact in facts if fact.key == f"zero_optimization.{key}"}
    if problems:  # of the config, which no run takes
        with pytest.raises(ConfigError) as raised:
            load_config(config)
        told = str(raised.value)
    else:
        assert (status == "acts") is acts, status
        told = " ".join(load_config(config).report())
    if acts:
        assert not problems
        return
    assert key.partition(".")[0] in told
    assert f"stage is {stage}" in told or f"stage {stage}" in told


def test_a_key_in_an_older_spelling_has_the_status_of_todays() -> None:
    config = {"zero_optimization": {"stage": 1, "prefetch_bucket_size": 5}}
    (fact,) = (fact for fact in explain(config)[0] if fact.key.endswith("prefetch_bucket_size"))
    assert (fact.status, fact.key) == ("no effect", "zero_optimization.prefetch_bucket_size")
