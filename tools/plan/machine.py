"""The machine that `zstore plan` plans for: its memory, and the rates that were given or measured."""

from __future__ import annotations

import os
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from zstore.engine.config.config import Config, load_config
from zstore.engine.config.resolve import ResolveContext
from zstore.errors import ConfigError
from zstore.io import read_host_memory

from ..drive import RATE_BYTES, measure_drive, probe_folder

if TYPE_CHECKING:
    from zstore.engine.plan.rates import MatmulRates


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The rates that determine a step's time. None: not known, so that `ASSUMED` is used."""

    disk_read: float | None = None
    """Bytes a second, of the machine's drive."""
    disk_write: float | None = None
    flops: float | None = None
    """Floating-point operations a second that one device reaches in training."""
    link: float | None = None
    """Bytes a second between a device and the host's memory, each way at once."""
    host_update: float | None = None
    """Bytes a second that an optimizer's update on the CPU reads and writes."""
    device_update: float | None = None


@dataclass(frozen=True, kw_only=True)
class PlannedMachine:
    """One machine. Bytes are the total of each kind of memory."""

    gpus: int
    """Devices, one rank each; 0: the CPU computes."""
    gpu_bytes: int
    """Memory of one device; of the host if there is none."""
    memory_bytes: int
    disk_bytes: int | None
    """Room on the drive; None: not known, and taken to be enough."""
    rates: Rates
    cpu_ranks: int = 1
    """Ranks if the CPU computes."""
    machines: int = 1
    """Machines like this one that train together."""

    @property
    def world_size(self) -> int:
        """Ranks on all machines."""
        return self.machines * self.num_ranks

    @property
    def num_ranks(self) -> int:
        """Ranks on this machine."""
        return self.gpus or self.cpu_ranks

    @property
    def device_is_host(self) -> bool:
        """Whether the CPU computes."""
        return self.gpus == 0


def host_memory_bytes() -> int:
    """Return the bytes of this machine's memory, or of its control groups' limit if that is less."""
    return read_host_memory().usable_bytes or os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def own_gpus() -> tuple[int, int | None]:
    """Return how many CUDA devices there are, and the bytes of the smallest (None: there is none)."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return count, min((torch.cuda.get_device_properties(i).total_memory for i in range(count)), default=None)


@dataclass(frozen=True, kw_only=True)
class PrecisionChoice:
    """The type that parameters and gradients are planned in."""

    name: str
    """"fp32", "bf16" or "fp16"."""
    is_auto: bool
    """This machine's answer to "auto", so that the config may leave it open."""
    note: str | None
    """The reason, or why it is slow."""


def own_rates(gpus: int, *, is_this_machine: bool) -> MatmulRates | None:
    """Return the rates of the devices that are planned for; None if those are not in this machine."""
    if gpus and not is_this_machine:
        return None
    import torch

    from zstore.engine.plan.rates import measure_rates

    if gpus == 0:
        return measure_rates(torch.device("cpu"))
    return measure_rates(torch.device("cuda", 0)) if torch.cuda.is_available() else None


def find_precision(asked: str, rates: MatmulRates | None) -> PrecisionChoice:
    """Return the precision for the one asked for ("auto" or a name), on devices of these rates; None: not known, so that
    "auto" is bf16."""
    if asked != "auto":
        config = load_config({"train_batch_size": 1} | ({} if asked == "fp32" else {asked: {"enabled": True}}))
        return PrecisionChoice(name=asked, is_auto=False, note=slow_note(config, rates))
    if rates is None:
        return PrecisionChoice(
            name="bf16", is_auto=False, note="--precision auto is bf16 for GPUs that are not in this machine"
        )
    config = load_config({"train_batch_size": 1, "bf16": {"enabled": "auto"}, "fp16": {"enabled": "auto"}})
    name = config.resolve(ResolveContext(world_size=1, native=rates.native)).precision
    from zstore.engine.plan.rates import tell_choice

    return PrecisionChoice(name=name, is_auto=True, note=tell_choice(config, name, rates))


def slow_note(config: Config, rates: MatmulRates | None) -> str | None:
    """Return a warning of the precision that `config` demands if devices of these rates are slow in it."""
    if rates is None:
        return None
    from zstore.engine.plan.rates import warn_of_slow

    return warn_of_slow(config, rates)


def measured_rates(path: Path, given: Rates, *, rate_bytes: int = RATE_BYTES) -> tuple[Rates, int]:
    """Return `given` with the drive's missing rates measured as `zstore doctor` does, on a file of `rate_bytes`, and the
    bytes free in the folder `path`.

    Raises ConfigError if the folder does not exist or cannot be written.
    """
    folder = probe_folder(path)
    if None not in (given.disk_read, given.disk_write):
        return given, folder.free_bytes
    drive = measure_drive(path, rate_bytes) if folder.writable else None
    if drive is None:
        raise ConfigError(f"--measure {path}: expected a folder that can be written, with room for a few blocks")
    read, write = given.disk_read or drive.read_bytes_per_s, given.disk_write or drive.write_bytes_per_s
    return replace(given, disk_read=read, disk_write=write), folder.free_bytes
