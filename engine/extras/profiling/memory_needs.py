"""Estimates of the memory that a model's parameters, gradients and optimizer state need, under DeepSpeed's names.

[Note: estimates]
They are the engine's own plan (`engine.plan`) for bf16 training with AdamW, one micro-batch a step: its bytes of rank 0 are
those that an engine with that config then holds. A GPU has the state that is kept there and, at stage 3, the parameters of
a unit in use and the next one. A machine has, for each of its GPUs, the state in host memory, and never less than the model
has in fp32 while each rank builds all of it (`zero_init=0`, and always at stage 2). Activations, and buckets and gradients
on their way, are left out: `zstore plan` estimates those too. Sizes are decimal: 1 GB is 10^9 bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import nn

from zstore.errors import UsageError
from zstore.sizes import format_bytes, format_count

from ...config.config import load_config
from ...config.resolve import ResolveContext
from ...plan.needs import ParameterShape, find_needs, placement_settings
from ...plan.placement import make_plan
from ...plan.plan import Plan
from ...plan.run import shapes_of_model, units_of_model

_SLOTS = ("exp_avg", "exp_avg_sq")
_FP32_BYTES = 4

Device = Literal["none", "cpu"]


@dataclass(frozen=True, kw_only=True)
class MemoryNeed:
    """The memory that one choice of options needs."""

    stage: int
    offload_optimizer: Device
    offload_param: Device
    zero_init: bool
    """The model is built in shards, by `zstore.Init` or `from_pretrained`."""
    host_bytes: int
    """On each machine, for all its GPUs."""
    device_bytes: int
    """On each GPU."""


@dataclass(frozen=True)
class _Sizes:
    shapes: Sequence[ParameterShape]
    units: Sequence[Sequence[str]]
    trained: frozenset[str]

    @property
    def numel(self) -> int:
        return sum(math.prod(one.shape) for one in self.shapes)

    @property
    def largest_numel(self) -> int:
        numel = {one.name: math.prod(one.shape) for one in self.shapes}
        return max((sum(numel[name] for name in unit) for unit in self.units), default=0)


def _live(model: nn.Module) -> _Sizes:
    if not isinstance(model, nn.Module):
        raise UsageError(f"expected a torch.nn.Module, got {type(model).__name__}")
    trained = frozenset(name for name, parameter in model.named_parameters() if parameter.requires_grad)
    return _Sizes(shapes_of_model(model, "bf16"), units_of_model(model), trained)


def _cold(total: int, largest: int) -> _Sizes:
    if type(total) is not int or type(largest) is not int or not 1 <= largest <= total:
        raise UsageError(
            f"expected whole numbers of parameters, of the largest layer at most those of all; got {total!r} and {largest!r}"
        )
    sizes = [largest] * (total // largest) + ([total % largest] if total % largest else [])
    shapes = [ParameterShape(name=f"layer.{n}", shape=(numel,), dtype="bfloat16") for n, numel in enumerate(sizes)]
    return _Sizes(shapes, [[one.name] for one in shapes], frozenset(one.name for one in shapes))


def _plan(model: _Sizes, stage: int, world_size: int, optimizer: Device, param: Device) -> Plan:
    zero = {"stage": stage, "offload_optimizer": {"device": optimizer}, "offload_param": {"device": param}}
    config = load_config(
        {
            "train_micro_batch_size_per_gpu": 1,
            "optimizer": {"type": "AdamW"},
            "bf16": {"enabled": True},
            "zero_optimization": zero,
        }
    ).resolve(ResolveContext(world_size=world_size, native=("bf16",)))
    slots = {one.name: _SLOTS for one in model.shapes if one.name in model.trained}
    needs = find_needs(model.shapes, slots, config, world_size=world_size, rank=0, units=model.units)
    return make_plan(needs, placement_settings(config, budget_bytes=None, device_is_host=False), model.units)


def _need(
    model: _Sizes, stage: int, gpus: tuple[int, int, float], optimizer: Device, param: Device, zero_init: bool
) -> MemoryNeed:
    """Return the memory on `gpus`: GPUs of a machine, machines, and a factor of a machine's bytes. Raises UsageError for
    impossible ones."""
    per_node, nodes, factor = gpus
    for name, value in (("num_gpus_per_node", per_node), ("num_nodes", nodes)):
        if type(value) is not int or value < 1:
            raise UsageError(f"{name}: expected a whole number of at least 1, got {value!r}")
    if not factor >= 1:
        raise UsageError(f"additional_buffer_factor: expected a number of at least 1, got {factor!r}")
    plan = _plan(model, stage, per_node * nodes, optimizer, param)
    least_bytes = 0 if zero_init else model.numel * _FP32_BYTES
    return MemoryNeed(
        stage=stage,
        offload_optimizer=optimizer,
        offload_param=param,
        zero_init=zero_init,
        host_bytes=int(max(plan.host_bytes, least_bytes) * per_node * factor),
        device_bytes=plan.held_total.device + plan.gathered_bytes,
    )


def _all(model: _Sizes, stage: int, *gpus: Any) -> list[MemoryNeed]:
    """Print the table of a stage, and return its rows. `gpus`: see `_need`."""
    pairs: list[tuple[Device, Device]] = [("cpu", "cpu"), ("cpu", "none"), ("none", "none")]
    pairs, inits = (pairs, (True, False)) if stage == 3 else (pairs[1:], (False,))
    rows = [_need(model, stage, gpus, *pair, zero_init) for pair in pairs for zero_init in inits]
    machines = f"{format_count(gpus[1], 'machine')} of {format_count(gpus[0], 'GPU')}"
    lines = [
        f"Parameters, gradients and AdamW state in bf16 at stage {stage}, on {machines}",
        f"{model.numel:,} parameters, {model.largest_numel:,} in the largest unit",
        f"{'per machine':>12}  {'per GPU':>12}  options",
    ]
    for row in rows:
        options = f"offload_optimizer={row.offload_optimizer}"
        if stage == 3:
            options += f", offload_param={row.offload_param}, zero_init={int(row.zero_init)}"
        lines.append(f"{format_bytes(row.host_bytes):>12}  {format_bytes(row.device_bytes):>12}  {options}")
    print("\n".join(lines))  # noqa: T201 - that is its purpose
    return rows


# -- DeepSpeed's names --------------------------------------------------------------------------------------------------


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> list[MemoryNeed]:
    """Print the memory that `model`, which may be on the meta device, needs at stage 2, and return it by options.

    `additional_buffer_factor` multiplies a machine's bytes; 1: the plan counts buffers itself. See [Note: estimates].
    """
    return _all(_live(model), 2, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> list[MemoryNeed]:
    """Do as `..._all_live` for a model of which only the number of parameters is known."""
    return _all(_cold(total_params, total_params), 2, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.0
) -> list[MemoryNeed]:
    """Print the memory that `model`, which may be on the meta device, needs at stage 3, and return it by options.

    `additional_buffer_factor` multiplies a machine's bytes; 1: the plan counts buffers itself. See [Note: estimates].
    """
    return _all(_live(model), 3, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.0,
) -> list[MemoryNeed]:
    """Do as `..._all_live` for a model of units of `largest_layer_params` each."""
    model = _cold(total_params, largest_layer_params)
    return _all(model, 3, num_gpus_per_node, num_nodes, additional_buffer_factor)


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.0,
) -> tuple[int, int]:
    """Return (bytes of each machine, bytes of each GPU) at stage 2, with the optimizer offloaded or not."""
    gpus = num_gpus_per_node, num_nodes, additional_buffer_factor
    found = _need(_cold(total_params, total_params), 2, gpus, "cpu" if cpu_offload else "none", "none", False)
    return found.host_bytes, found.device_bytes


def estimate_zero3_model_states_mem_needs(  # noqa: PLR0913, PLR0917 - DeepSpeed's arguments
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.0,
) -> tuple[int, int, int]:
    """Return (bytes of each machine, bytes of each GPU, bytes of the largest unit) at stage 3."""
    gpus = num_gpus_per_node, num_nodes, additional_buffer_factor
    devices: tuple[Device, Device] = ("cpu" if cpu_offload else "none", "cpu" if cpu_offload_params else "none")
    found = _need(_cold(total_params, largest_layer_params), 3, gpus, *devices, zero_init)
    return found.host_bytes, found.device_bytes, 2 * largest_layer_params
