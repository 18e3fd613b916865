"""Tensors that do not all fit in memory: python examples/tensor_store.py FOLDER"""

import asyncio
import sys

import torch

import zstore


async def main(folder: str) -> None:
    async with zstore.open_store(f"{folder}/run", host_budget_bytes=256e6) as store:
        for i in range(8):
            store.put(f"block.{i}/weight", torch.full((512, 1024), float(i)))  # written behind the caller
        async for _, value in store.stream(prefetch=2):  # read ahead; changed in place; written behind
            value.mul_(0.5)
        rows = await store.get("block.7/weight", rows=slice(0, 128))
        print(tuple(rows.shape), rows.mean().item())
        await store.checkpoint(f"{folder}/ckpt/step-10", extra={"loss": 1.0})  # links, one commit
    with zstore.open_store(f"{folder}/run") as store:  # the same methods without asyncio
        print(store.load(f"{folder}/ckpt").wait(), len(store), store.get("block.1/weight").wait().sum().item())


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1]))
