"""The hand-over between host and device, on a device of our own: the bits of the plain loop, and no missing wait."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

import pytest

from tests import test_engine_bits
from tests.test_engine_bits import Case, compare
from zstore import pinning
from zstore.engine import wiring
from zstore.errors import NonFiniteError
from zstore.testing.fake_device import FakeDevice, HandOverError
from zstore.testing.ranks import run_ranks

# (stage, optimizer's tier, precision, accumulation, clip, parameters' tier, step mode)
CASES = [
    (3, "nvme", "bf16", 1, 0.25, "nvme", "none"),
    (3, "nvme", "fp16", 3, 0.0, "nvme", "forward"),
    (3, "nvme", "fp32", 1, 0.0, "cpu", "backward"),
    (2, "cpu", "bf16", 1, 0.0, "none", "backward"),
    (1, "cpu", "fp16", 3, 0.25, "none", "none"),
]


def case(stage: int, optimizer: str, *rest: Any) -> Case:
    precision, accumulation, clip, parameters, overlap = rest
    keys = {"offload_optimizer": {"pin_memory": True}}
    if parameters != "none":
        keys["offload_param"] = {"pin_memory": True}
    return Case(stage, optimizer, precision, accumulation, clip, parameters=parameters, overlap=overlap, keys=keys)


@contextmanager
def fake_device(forgets: Sequence[str] = ()) -> Iterator[FakeDevice]:
    """Let engines made in the block compute on a fake device."""
    device = FakeDevice(forgets)
    with pytest.MonkeyPatch.context() as patch, device:
        patch.setattr(wiring, "lane_for", lambda _: device)
        patch.setattr(pinning, "_cuda_runtime", lambda: device)
        patch.setattr(test_engine_bits, "STEPS", 2)
        yield device


@pytest.mark.parametrize("chosen", CASES, ids=lambda chosen: "-".join(map(str, chosen)))
def test_bits_equal_the_plain_loop(chosen: tuple[Any, ...]) -> None:
    with fake_device() as device:
        assert compare(case(*chosen), 0, 1) == []
        assert device.copies > 0
        assert device.num_under_way == 0
        assert device.pinned_peak_bytes > 0


def _compare_on_fakes(rank: int, world_size: int) -> list[list[str]]:
    found: list[list[str]] = []
    for chosen in (CASES[1], (2, "nvme", "bf16", 3, 0.25, "none", "forward"), CASES[4]):
        with fake_device():
            found.append(compare(case(*chosen), rank, world_size))
    return found


def test_bits_equal_the_plain_loop_on_two_ranks() -> None:
    assert run_ranks(_compare_on_fakes, 2, 2, timeout_s=120) == [[[], [], []]] * 2


# What is left out, and a case in which it matters: gradients as they come, parameters before use, gradients of the
# update, new rows.
FORGOTTEN = [("down", CASES[0]), ("up", CASES[0]), ("mark", CASES[0]), ("down", CASES[3]), ("up", CASES[4])]


@pytest.mark.parametrize(("forgotten", "chosen"), FORGOTTEN)
def test_a_missing_step_of_the_hand_over_is_noticed(forgotten: str, chosen: tuple[Any, ...]) -> None:
    with fake_device([forgotten]), suppress(HandOverError, NonFiniteError):
        assert compare(case(*chosen), 0, 1) != []
