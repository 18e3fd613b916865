"""Command lines by which MPI's launchers start ranks, which `zstore.ranks.mpi` then numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from zstore.errors import UsageError

_INTERFACE = "btl_tcp_if_include"


@dataclass(frozen=True, kw_only=True)
class Launcher:
    """One implementation of MPI. All but Open MPI start ranks by Hydra, whose options differ."""

    probe: str = "mpirun"
    """Program that is on PATH if it is installed."""
    exports: Mapping[str, str] = field(default_factory=dict)
    """Variables of its own that ranks get, as DeepSpeed sets them."""


MPI = {
    "openmpi": Launcher(probe="ompi_info", exports={"UCX_TLS": "tcp"}),
    "mpich": Launcher(),
    "impi": Launcher(exports={"I_MPI_PIN": "0"}),
    "mvapich": Launcher(
        probe="mpiname",
        exports={
            "MV2_SMP_USE_CMA": "0",
            "MV2_DEBUG_SHOW_BACKTRACE": "1",
            "MV2_SUPPORT_DL": "1",
            "MV2_ENABLE_AFFINITY": "0",
            "MV2_INTER_ALLGATHER_TUNING": "5",
            "MV2_CUDA_USE_NAIVE": "0",
        },
    ),
}
"""DeepSpeed's name of a launcher -> its properties."""


def mpi_command(
    kind: str, slots: Mapping[str, int], command: Sequence[str], exports: Mapping[str, str | None], more: Sequence[str]
) -> list[str]:
    """Return how `mpirun` starts `command` once for each slot of each host, with `more` of its options.

    Ranks get the variables `exports`; those that are None with the value that `mpirun` itself has. Raises UsageError if hosts
    of Hydra have different numbers of slots, which it cannot place.
    """
    count = sum(slots.values())
    if kind == "openmpi":
        hosts = ",".join(f"{host}:{number}" for host, number in slots.items())
        interface = [] if _INTERFACE in more else ["--mca", _INTERFACE, "eth0"]
        words = ["mpirun", "-n", str(count), "--host", hosts, "--mca", "btl", "^openib", *interface, *more]
        for name, value in exports.items():
            words += ["-x", name if value is None else f"{name}={value}"]
        return [*words, *command]
    if len(set(slots.values())) > 1:
        raise UsageError(f"{kind}: expected the same number of slots on each host, got {dict(slots)}; give --nproc")
    words = ["mpirun", "-n", str(count), "-ppn", str(count // len(slots)), "-hosts", ",".join(slots), *more]
    names = [name for name, value in exports.items() if value is None]
    words += ["-genvlist", ",".join(names)] if names else []
    for name, value in exports.items():
        words += [] if value is None else ["-genv", name, value]
    return [*words, *command]
