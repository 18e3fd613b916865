"""ZeRO++ and hybrid shard: exchanges in fewer bits, and copies of state or parameters within groups of ranks."""

from dataclasses import replace
from functools import partial

from zstore.ranks.groups import Groups
from zstore.ranks.world import World

from ...config.config import Config
from ...params.sharding import Sharding
from ...zero.exchanges import Exchanges, register
from .copies import CopiesReduction
from .quantized_gather import QuantizedGathers
from .quantized_gradients import quantized_reducer
from .secondary import SecondaryShards


def _exchanges(
    plain: Exchanges, config: Config, sharding: Sharding, world: World, groups: tuple[Groups, ...]
) -> Exchanges:
    found = plain
    if sharding.num_copies > 1:
        found = replace(found, reduce=partial(CopiesReduction, groups[-1]))
    elif groups and sharding.parameters:
        found = replace(found, second_copy=SecondaryShards(groups[0]))
    if config.zero.zero_quantized_weights:
        found = replace(found, gathers=QuantizedGathers())
    if config.zero.zero_quantized_gradients and sharding.gradients and world.world_size > 1 and not config.frozen:
        found = replace(found, reducer=quantized_reducer(config, world))
    return found


register(_exchanges)
