"""The default of every key of the config beside that of the DeepSpeed which is installed, read from its own classes."""

import copy
import importlib
import inspect
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from zstore.engine.adapters.deepspeed import optimizers
from zstore.engine.config.config import load_config
from zstore.engine.config.keys import Section, Status, known_keys, section_of, status_of
from zstore.engine.config.optimizers import SCHEDULES, OptimizerSection
from zstore.engine.config.sections import BATCH_KEYS, ConfigSections

pytestmark = [pytest.mark.soak, pytest.mark.filterwarnings("ignore::DeprecationWarning")]

DOC = Path(__file__).parents[2] / "docs/deepspeed.md"

_MODELS = {
    "zero_optimization": "runtime.zero.config:DeepSpeedZeroConfig",
    "zero_optimization.offload_optimizer": "runtime.zero.offload_config:DeepSpeedZeroOffloadOptimizerConfig",
    "zero_optimization.offload_param": "runtime.zero.offload_config:DeepSpeedZeroOffloadParamConfig",
    "zero_optimization.leaf_module": "runtime.zero.leaf_module_config:DeepSpeedZeroLeafModuleConfig",
    "fp16": "runtime.precision_config:DeepSpeedFP16Config",
    "bf16": "runtime.precision_config:DeepSpeedBF16Config",
    "tensorboard": "monitor.config:TensorBoardConfig",
    "csv_monitor": "monitor.config:CSVConfig",
    "wandb": "monitor.config:WandbConfig",
    "timers.throughput": "utils.config:DeepSpeedThroughputTimerConfig",
}
_OBJECTS = {
    "activation_checkpointing": "runtime.activation_checkpointing.config:DeepSpeedActivationCheckpointingConfig"
}
"""Sections that DeepSpeed reads into attributes of an object, one for each key."""
_TOP = {
    "seq_parallel_comm_data_type": "seq_parallel_communication_data_type",
    "use_data_before_expert_parallelism": "use_data_before_expert_parallel_",
    "zero_force_ds_cpu_optimizer": "zero_force_ds_cpu_optimizer",
    "data_types.grad_accum_dtype": "grad_accum_dtype",
    "data_types.param_dtype": "param_dtype",
    "data_types.buffer_dtype": "buffer_dtype",
    "checkpoint.load_universal": "load_universal_checkpoint",
    "checkpoint.use_node_local_storage": "use_node_local_storage",
    "optimizer.legacy_fusion": "optimizer_legacy_fusion",
}
"""Keys whose attribute of `DeepSpeedConfig` has another name."""
_OPTIMIZERS = {
    "Adam": "ops.adam:FusedAdam",
    "AdamW": "ops.adam:FusedAdam",
    "Adagrad": "ops.adagrad:DeepSpeedCPUAdagrad",
    "Lion": "ops.lion:FusedLion",
    "Lamb": "ops.lamb:FusedLamb",
}
_STAND_INS = {
    name: f"ops.{package}:{name}"
    for package, name in (
        ("adam", "FusedAdam"),
        ("adam", "DeepSpeedCPUAdam"),
        ("adagrad", "DeepSpeedCPUAdagrad"),
        ("lion", "FusedLion"),
        ("lion", "DeepSpeedCPULion"),
        ("lamb", "FusedLamb"),
    )
} | {name: f"runtime.zero.muon.original_muon:{name}" for name in ("Muon", "MuonWithAuxAdam")}
_REMOVED = (
    "elasticity", "sparse_attention", "sparse_gradients", "graph_harvesting",
    "zero_optimization.mics_", "zero_optimization.zeropp_",
)  # fmt: skip
"""What DeepSpeed 0.19 took out of its schema, as the 1-bit optimizers."""
_ALONE = {
    "fp16.raise_error_at_min_scale",
    "seed",
    "sequence_parallel_size",
    "zero_optimization.offload_optimizer.buffer_size",
    "zero_optimization.offload_optimizer.convert_grad_on_cpu",
    "zero_optimization.stage3_partition_stream_chunk_size",
}
"""Keys that `DeepSpeedConfig` leaves without a default."""
_NO_DEFAULT = object()


def _named(path: str) -> Any:
    module, _, name = path.partition(":")
    return getattr(importlib.import_module(f"deepspeed.{module}"), name)


@pytest.fixture(autouse=True, scope="module")
def _installed() -> Iterator[None]:
    """DeepSpeed 0.19.8, whose defaults the page tells."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("DS_ACCELERATOR", "cpu")
        version = pytest.importorskip("deepspeed").__version__
        if not version.startswith("0.19.8"):
            pytest.skip(f"the page tells the defaults of DeepSpeed 0.19.8; {version} is installed")
        yield


def _signature(kind: Any) -> dict[str, Any]:
    found = inspect.signature(kind.__init__ if kind.__new__ is object.__new__ else kind.__new__).parameters.items()
    return {name: one.default for name, one in found if one.default is not inspect.Parameter.empty}


def _theirs(key: str, whole: Any) -> Any:
    """Return DeepSpeed's default of `key`, as its own class has it; `_NO_DEFAULT` if there is no such key."""
    section, _, name = key.rpartition(".")
    if section in _MODELS:
        for field, info in _named(_MODELS[section]).model_fields.items():
            if name in {field, info.alias}:
                return info.get_default(call_default_factory=True)
    if section in _OBJECTS:
        return vars(_named(_OBJECTS[section])({})).get(name, _NO_DEFAULT)
    if section == "aio":
        return whole.aio_config.get({"thread_count": "intra_op_parallelism"}.get(name, name), _NO_DEFAULT)
    if section == "checkpoint" and name in whole.checkpoint_config:
        return whole.checkpoint_config[name]
    return vars(whole).get(_TOP.get(key, key), _NO_DEFAULT)


def _alike(value: Any) -> Any:
    """Return a value in one spelling."""
    if isinstance(value, list | tuple):
        return tuple(_alike(one) for one in value)
    if isinstance(value, str):
        return value.lower()
    if value == sys.maxsize:
        return None
    return int(value) if isinstance(value, int) and not isinstance(value, bool) else value  # a class that prints commas


def _of_params(kinds: Mapping[str, type[Section]], prefix: str, make: Any) -> Iterator[tuple[str, Any, Any]]:
    for kind, section in kinds.items():
        theirs = make(kind)
        for name, field in section.model_fields.items():
            if name in theirs and status_of(field)[0] is Status.ACTIVE and not field.is_required():
                unset = field.default is None and name == "weight_decay"
                made = load_config({"optimizer": {"type": kind}}).settings.optimizer if unset else None
                ours = field.default if made is None else made.default_weight_decay
                yield f"{prefix} ({kind}) {name}", _alike(theirs[name]), _alike(ours)


def _compared() -> tuple[dict[str, tuple[Any, Any]], set[str]]:
    """Return {key: (DeepSpeed's default, ours)} and the keys that DeepSpeed does not have."""
    from deepspeed.runtime.config import DeepSpeedConfig

    whole, found, alone = DeepSpeedConfig({"train_batch_size": 1}), {}, set()
    for key, field in known_keys(ConfigSections):
        status, _ = status_of(field)
        one_value = section_of(field) is None and field.annotation is not Any and not field.is_required()
        if not one_value or ".params" in key or key.startswith("zstore.") or key in BATCH_KEYS:
            continue
        theirs = _theirs(key, whole)
        if status is not Status.ACTIVE and not theirs and not field.default:
            continue
        if theirs is _NO_DEFAULT:
            alone.add(key)
        else:
            found[key] = (_alike(theirs), _alike(field.default))

    def optimizer(kind: str) -> dict[str, Any]:
        return _signature(_named(_OPTIMIZERS[kind]) if kind in _OPTIMIZERS else getattr(torch.optim, kind))

    # Muon's are set by the groups that DeepSpeed's engine makes, and not by its class.
    params = OptimizerSection.variants["params"]
    kinds = {kind: one for kind, one in params.items() if kind != "Muon" and not one.replicates_state}  # type: ignore[attr-defined]
    for key, theirs, ours in (
        *_of_params(kinds, "optimizer", optimizer),
        *_of_params(SCHEDULES, "scheduler", lambda kind: _signature(_named(f"runtime.lr_schedules:{kind}"))),
    ):
        found[key] = (theirs, ours)
    return found, alone


def test_every_default_is_that_of_deepspeed_or_a_row_of_the_page() -> None:
    found, alone = _compared()
    differing = {key: (repr(theirs), repr(ours)) for key, (theirs, ours) in found.items() if theirs != ours}
    text = DOC.read_text().partition("### Defaults")[2].partition("\n### ")[0]
    rows = re.findall(r"^\| `(.*?)` \| `(.*?)` \| `(.*?)` \|", text, re.MULTILINE)
    assert {key: (theirs, ours) for key, theirs, ours in rows} == differing
    assert {key for key in alone if not key.startswith(_REMOVED)} == _ALONE
    assert len(found) > 200


@pytest.mark.parametrize("name", sorted(_STAND_INS))
def test_a_class_of_the_stand_in_has_the_defaults_of_deepspeeds(name: str) -> None:
    theirs, ours = _named(_STAND_INS[name]), getattr(optimizers, name)
    for extra in ({},) if name != "MuonWithAuxAdam" else ({"use_muon": True}, {"use_muon": False}):
        given = [{"params": [torch.nn.Parameter(torch.zeros(2, 2))], **extra}]
        expected = theirs(copy.deepcopy(given)).param_groups[0] if extra else _signature(theirs)
        group = ours(given).param_groups[0]
        common = (expected.keys() & group.keys()) - {"params"}
        assert {"lr", "weight_decay"} <= common
        assert {key: _alike(group[key]) for key in common} == {key: _alike(expected[key]) for key in common}
