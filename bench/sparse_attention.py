"""Sparse attention beside dense attention: forward and backward of one layer on the same inputs.

`python -m bench.sparse_attention --tokens 4096` prints for each mode the time beside causal dense attention and beside
dense attention under the same mask, which computes the same.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from zstore.attention import attend
from zstore.engine.extras.sparse_attention.patterns import pattern_of

MODES: dict[str, dict[str, object]] = {
    "fixed": {"num_local_blocks": 4},
    "variable": {"local_window_blocks": [4], "num_random_blocks": 1},
    "bigbird": {"num_sliding_window_blocks": 8},
    "bslongformer": {"num_sliding_window_blocks": 8},
}


def _seconds(run: Callable[[], torch.Tensor]) -> float:
    started = time.perf_counter()
    run().sum().backward()  # type: ignore[no-untyped-call]
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - started


def main(argv: list[str] | None = None) -> None:
    """Print a line for each mode and size of block."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--blocks", type=int, nargs="+", default=[16, 64])
    options = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    shape = (1, options.heads, options.tokens, options.head_dim)
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    print(
        f"{device}, {dtype}, {options.heads} heads of {options.head_dim}, {options.tokens} tokens, forward and backward"
    )
    for block in options.blocks:
        for mode, arguments in MODES.items():
            pattern = pattern_of(mode, block=block, attention="unidirectional", **arguments)
            runs: dict[str, Callable[[], torch.Tensor]] = {
                "sparse": partial(attend, query, key, value, pattern),
                "same mask": partial(attend, query, key, value, pattern, kernel="dense"),
                "causal": partial(F.scaled_dot_product_attention, query, key, value, is_causal=True),
            }
            taken: dict[str, list[float]] = {name: [] for name in runs}
            for repeat in range(options.repeats + 1):
                for name, run in runs.items():
                    seconds = _seconds(run)
                    if repeat:  # masks are made in the first
                        taken[name].append(seconds)
            mid = {name: statistics.median(each) for name, each in taken.items()}
            print(
                f"{mode}, blocks of {block}: {mid['sparse'] * 1e3:.0f} ms; dense under the same mask takes "
                f"{mid['same mask'] / mid['sparse']:.2f} times as long, dense causal {mid['causal'] / mid['sparse']:.2f}"
            )


if __name__ == "__main__":
    main()
