"""ZeRO++ and hybrid shard: exchanges in fewer bits, and copies of state or parameters within groups of ranks."""

from dataclasses import replace
from functools import partial

from zstore.ranks.groups import make_groups
from zstore.ranks.world import World

from ...config.config import Config
from ...params.sharding import Sharding
from ...zero.exchanges import Exchanges, register
from .copies import CopiesReduction
from .quantized_gather import QuantizedGathers
from .quantized_gradients import quantized_reducer
from .secondary import SecondaryShards


def _exchanges(found: Exchanges, config: Config, sharding: Sharding, world: World) -> Exchanges:
    if sharding.num_copies > 1:
        # Within a group gathers come in another order than reductions, which gloo has none of.
        number = 1 if world.backend == "gloo" else 2
        groups = tuple(make_groups(world, sharding.copy_size) for _ in range(number))
        reduce = partial(CopiesReduction, groups[-1])
        found = replace(found, world=groups[0].within, groups=groups, reduce=reduce)
    elif config.secondary_size is not None:
        second = make_groups(world, config.secondary_size)
        found = replace(found, groups=(second,), second_copy=SecondaryShards(second))
    if config.zero.zero_quantized_weights:
        found = replace(found, gathers=QuantizedGathers())
    if config.zero.zero_quantized_gradients and sharding.gradients and world.world_size > 1 and not config.frozen:
        found = replace(found, reducer=quantized_reducer(config, world))
    return found


register(_exchanges)
