"""`deepspeed.utils.groups`: data parallel ranks are all ranks, and every other kind of parallelism has one."""

from __future__ import annotations

from typing import Any

import torch.distributed as torch_dist

from zstore.ranks.world import World


def _world_size() -> int:
    return World.current().world_size


def _rank() -> int:
    return World.current().rank


def _group() -> Any:
    """Return the group of all ranks; None where torch.distributed is not started."""
    return torch_dist.group.WORLD if torch_dist.is_initialized() else None


def _one() -> int:
    return 1


def _zero() -> int:
    return 0


def _none() -> None:
    return None


get_data_parallel_world_size = _get_data_parallel_world_size = _world_size
get_data_parallel_rank = _get_data_parallel_rank = _rank
get_data_parallel_group = _get_data_parallel_group = _group
# Sequence-data parallel ranks are those that gradients are averaged over.
get_sequence_data_parallel_world_size = _get_sequence_data_parallel_world_size = _world_size
get_sequence_data_parallel_rank = _get_sequence_data_parallel_rank = _rank
get_sequence_data_parallel_group = _get_sequence_data_parallel_group = _group
get_model_parallel_world_size = _get_model_parallel_world_size = _one
get_model_parallel_rank = _get_model_parallel_rank = _zero
get_model_parallel_group = _get_model_parallel_group = _none
get_tensor_model_parallel_world_size = _get_tensor_model_parallel_world_size = _one
get_tensor_model_parallel_rank = _get_tensor_model_parallel_rank = _zero
get_tensor_model_parallel_group = _get_tensor_model_parallel_group = _none
get_sequence_parallel_world_size = _get_sequence_parallel_world_size = _one
get_sequence_parallel_rank = _get_sequence_parallel_rank = _zero
get_sequence_parallel_group = _get_sequence_parallel_group = _none
get_expert_parallel_world_size = _get_expert_parallel_world_size = _one
get_expert_parallel_rank = _get_expert_parallel_rank = _zero
