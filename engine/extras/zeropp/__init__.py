"""ZeRO++: exchanges in fewer bits, and second copies of parameters within groups of ranks."""

from dataclasses import replace

from zstore.ranks.world import World

from ...config.config import Config
from ...params.sharding import Sharding
from ...zero.exchanges import Exchanges, register
from .quantized import QuantizedGathers, QuantizedReducer
from .secondary import SecondaryShards


def _exchanges(found: Exchanges, config: Config, sharding: Sharding, world: World) -> Exchanges:
    if config.secondary_size is not None and sharding.parameters:
        found = replace(found, second_copy=SecondaryShards(world, config.secondary_size))
    if config.zero.zero_quantized_weights:
        found = replace(found, gathers=QuantizedGathers())
    if config.zero.zero_quantized_gradients and sharding.gradients and world.world_size > 1 and not config.frozen:
        # Reduced in two hops: in groups first.
        near = config.secondary_size or world.local_world_size or world.world_size
        group_size = near if 1 < near < world.world_size and world.world_size % near == 0 else world.world_size
        reducer = QuantizedReducer(world, config.own.quantized_gradient_bits, group_size=group_size)
        found = replace(found, reducer=reducer)
    return found


register(_exchanges)
