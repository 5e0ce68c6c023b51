"""What MPI leaves in shared memory is found by what a process has mapped."""

import mmap
import os
from pathlib import Path

from penstock.cluster.supervision.supervisor import find_mpi_memory


def test_mapped_files_of_mpich_are_found_and_others_are_not() -> None:
    own, other = (Path(f"/dev/shm/{kind}_shm_penstock-{os.getpid()}") for kind in ("mpich", "other"))
    try:
        for path in (own, other):
            path.write_bytes(bytes(mmap.PAGESIZE))
        with own.open("r+b") as first, other.open("r+b") as second:
            mapped = mmap.mmap(first.fileno(), 0), mmap.mmap(second.fileno(), 0)
        assert find_mpi_memory(os.getpid()) == (own,)
        for memory in mapped:
            memory.close()
        assert find_mpi_memory(os.getpid()) == ()
    finally:
        own.unlink(missing_ok=True)
        other.unlink(missing_ok=True)


def test_a_process_that_is_gone_has_none() -> None:
    assert find_mpi_memory(2**22) == ()
