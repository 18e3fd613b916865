"""Whether the ranks of a run can be put into the groups that a config asks for. Pure."""

from collections.abc import Iterator

from .zero import ZeroSection


def group_problems(zero: ZeroSection, world_size: int) -> list[str]:
    """Return the errors of `mics_shard_size` and `zero_hpz_partition_size` at this world size."""
    return list(_problems(zero, world_size))


def _problems(zero: ZeroSection, world_size: int) -> Iterator[str]:
    mics, hpz = zero.mics_shard_size, zero.zero_hpz_partition_size
    if mics > 0 and hpz > 1:
        yield (
            f"zero_optimization.mics_shard_size {mics} and zero_hpz_partition_size {hpz}: with groups that each hold all "
            "parameters there is nothing for a second copy to save; leave out zero_hpz_partition_size, or with less memory "
            "mics_shard_size"
        )
    if mics > 0 and zero.zero_quantized_gradients:
        yield (
            f"zero_optimization.mics_shard_size {mics} and zero_quantized_gradients: the gradients of copies are reduced in "
            "their own type; leave one of them out, or use zero_hpz_partition_size, which goes with both quantizations"
        )
    for key, size in (("mics_shard_size", mics), ("zero_hpz_partition_size", hpz)):
        if size > 1 and world_size % size:
            fits = [str(number) for number in range(2, world_size + 1) if world_size % number == 0]
            advice = f"take {' or '.join(fits)}, or leave it out" if fits else "leave it out"
            yield f"zero_optimization.{key} {size} does not divide the world size {world_size}; {advice}"
    if mics == 1 and zero.stage > 0 and world_size > 1:
        yield (
            "zero_optimization.mics_shard_size 1: a group of one rank shards nothing; take stage 0, which does the same, or a "
            "number of at least 2"
        )
