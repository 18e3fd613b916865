"""Ranks that an MPI launcher started: its variables, under the names that torchrun gives them. No torch."""

from __future__ import annotations

from collections.abc import MutableMapping

from zstore.errors import UsageError

_NAMES = {
    "RANK": ("OMPI_COMM_WORLD_RANK", "MV2_COMM_WORLD_RANK", "PMI_RANK"),
    "WORLD_SIZE": ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE"),
    "LOCAL_RANK": ("OMPI_COMM_WORLD_LOCAL_RANK", "MV2_COMM_WORLD_LOCAL_RANK", "MPI_LOCALRANKID"),
    "LOCAL_WORLD_SIZE": ("OMPI_COMM_WORLD_LOCAL_SIZE", "MV2_COMM_WORLD_LOCAL_SIZE", "MPI_LOCALNRANKS"),
}
"""torchrun's name -> those of Open MPI, of MVAPICH2, and of MPICH and Intel MPI."""


def take_mpi_ranks(environment: MutableMapping[str, str]) -> None:
    """Set torchrun's variables if mpirun started this process and nothing has set them.

    Raises UsageError if the ranks are on several machines and MASTER_ADDR does not say where they meet.
    """
    if "RANK" in environment:
        return
    found = {
        name: environment[theirs] for name, others in _NAMES.items() for theirs in others[::-1] if theirs in environment
    }
    if len(found) < len(_NAMES):
        return
    if found["WORLD_SIZE"] != found["LOCAL_WORLD_SIZE"] and "MASTER_ADDR" not in environment:
        raise UsageError(
            f"mpirun started {found['LOCAL_WORLD_SIZE']} of {found['WORLD_SIZE']} ranks here, and MASTER_ADDR is not "
            "set: pass the address of rank 0's machine on, as `mpirun -x MASTER_ADDR=HOST ...`, or let `zstore run --launcher "
            "openmpi --hostfile FILE` write the command"
        )
    environment.update(found)
