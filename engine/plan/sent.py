"""Bytes that a rank sends to others in a step, by formula. Pure.

[Note: bytes sent]
Of P bytes, padding included, each of N ranks sends (N - 1) / N P in a reduce-scatter or an all-gather, and twice that in an
all-reduce. With groups of k ranks, (k - 1) of the N - 1 others are within the group. Second copies of the
parameters (`zero_hpz_partition_size`): a step's first gather is over all ranks, the others within the group.

Two ranks on gloo that sum whole gradients in place send no padding; see [Note: the mean of two].

Gradients are reduced once a micro-batch (stages 2 and 3) or once a step, in the type in which they travel; every trained
parameter is taken to have one. Quantized tensors count as [Note: blocks] says, in two hops over groups as in [Note:
quantized reductions]: with g ranks in each of n groups (g - 1) n rows within the group and n - 1 between groups. Parameters
that stay gathered are gathered once, after the update; others, at stage 3, as often as `Need.fetches` says in each
micro-batch. Agreement between ranks (counts, flags, norms) is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, replace

from zstore.format import numpy_dtype

from ..config.config import DTYPES, Config
from ..params.sharding import Sharding, sums_in_place
from .needs import gradient_types
from .plan import Need, Plan, Sent
from .quantized import WEIGHT_BITS, encoded_bytes, is_matrix


@dataclass(frozen=True, kw_only=True)
class _Ranks:
    """The number of ranks, and of those in a group."""

    world_size: int
    group: int
    """Ranks of a group; all if there are no groups."""

    def over_all(self, nbytes: int) -> Sent:
        """Return the bytes that a reduce-scatter or an all-gather of `nbytes` over all ranks sends."""
        shard = nbytes // self.world_size
        return Sent(within=shard * (self.group - 1), between=shard * (self.world_size - self.group))

    def in_group(self, nbytes: int) -> Sent:
        """Return the bytes that a reduce-scatter or an all-gather of `nbytes` within the group sends."""
        return Sent(within=nbytes // self.group * (self.group - 1))

    def in_two_hops(self, row_bytes: int) -> Sent:
        """Return the bytes that a quantized reduction of rows of so many bytes sends; all ranks are one hop."""
        num_groups = self.world_size // self.group
        return Sent(within=(self.group - 1) * num_groups * row_bytes, between=(num_groups - 1) * row_bytes)


def with_sent(
    plan: Plan,
    needs: Mapping[str, Need],
    config: Config,
    world_size: int,
    *,
    native: bool,
    local_world_size: int | None = None,
) -> Plan:
    """Return `plan` with the bytes that a rank sends in a step; see `planned_sent`."""
    sent = planned_sent(needs, config, world_size, native=native, local_world_size=local_world_size)
    group = config.secondary_size or config.quantized_group(world_size, local_world_size)
    quantizes = config.zero.zero_quantized_weights or config.zero.zero_quantized_gradients
    return replace(
        plan,
        sent=sent,
        group_size=group if group != world_size or config.secondary_size else None,
        tells_sent=bool(sent) and (group is not None or quantizes),
    )


def planned_sent(
    needs: Mapping[str, Need], config: Config, world_size: int, *, native: bool, local_world_size: int | None = None
) -> dict[str, Sent]:
    """Return the bytes that a rank sends in a step, by kind: "gradients", "parameters". See [Note: bytes sent].

    `native`: the backend has reductions of its own, as NCCL. `local_world_size` ranks share a machine; None: all. Nothing is
    sent by one rank.
    """
    if world_size == 1:
        return {}
    sharding = Sharding.of_stage(config.stage, world_size)
    group = config.secondary_size or config.quantized_group(world_size, local_world_size)
    # Without groups those of a machine count as one.
    near_size = local_world_size if local_world_size and world_size % local_world_size == 0 else world_size
    ranks = _Ranks(
        world_size=world_size,
        group=group or near_size,
    )
    everywhere = not (sharding.optimizer_state and (config.zero.reduce_scatter or sharding.parameters))
    types, sent = gradient_types(config, world_size, DTYPES), {"gradients": Sent(), "parameters": Sent()}
    micro_batches = 1 if config.frozen else config.batch.accumulation_steps
    for need, count in Counter(needs.values()).items():
        if need.slots is not None and not config.frozen:
            travelling = types.reduced(need.dtype)
            reduced = numpy_dtype(travelling).itemsize
            in_place = everywhere and need.whole_gradient and sums_in_place(travelling, world_size, native=native)
            if config.zero.zero_quantized_gradients and sharding.gradients and _is_quantized(need):
                row_bytes = encoded_bytes(need.reduced_numel // world_size, config.own.quantized_gradient_bits)
                one = ranks.in_two_hops(row_bytes)
                if everywhere:
                    one += ranks.over_all(need.reduced_numel * reduced)
            elif everywhere:
                one = ranks.over_all((need.numel if in_place else need.reduced_numel) * reduced).times(2)
            else:
                one = ranks.over_all(need.reduced_numel * reduced)
            sent["gradients"] += one.times(count * (micro_batches if sharding.gradients else 1))
        sent["parameters"] += _gathers(need, config, sharding, ranks, micro_batches).times(count)
    return sent


def _gathers(need: Need, config: Config, sharding: Sharding, ranks: _Ranks, micro_batches: int) -> Sent:
    """Return the bytes that all-gathers of a parameter send in a step."""
    itemsize = numpy_dtype(need.dtype).itemsize
    near_bytes, far_bytes = need.near_numel * itemsize, need.reduced_numel * itemsize
    if not sharding.parameters or need.stays_gathered:
        updated = sharding.optimizer_state and need.slots is not None and not config.frozen
        return ranks.over_all(far_bytes) if updated else Sent()
    count = need.fetches * micro_batches
    if config.zero.zero_quantized_weights and _is_quantized(need):
        far_bytes = encoded_bytes(need.grid.shard_numel, WEIGHT_BITS) * sharding.world_size
    if config.secondary_size is None:
        return ranks.over_all(far_bytes).times(count)
    first = need.slots is not None and not config.frozen
    return ranks.in_group(near_bytes).times(count - first) + (ranks.over_all(far_bytes) if first else Sent())


def _is_quantized(need: Need) -> bool:
    return "float" in need.dtype and is_matrix(need.grid)
