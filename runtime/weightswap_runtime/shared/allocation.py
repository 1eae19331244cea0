"""Memory of a memfd: the system kills somebody instead of refusing what it takes beyond what there is."""

from __future__ import annotations

import os

from weightswap_runtime.errors import OutOfMemory
from weightswap_runtime.memory.available import available
from weightswap_runtime.memory.host import FOR_TWO

_ADVICE = FOR_TWO.partition(",")[0] + ": all workers of the machine hold two sets together."


def allocate_shared(descriptor: int) -> None:
    """Take all memory of a memfd that it has not yet. Raises OutOfMemory."""
    status = os.fstat(descriptor)
    wanted = status.st_size - status.st_blocks * 512
    if wanted <= 0:
        return
    if (there := available()) is not None and wanted > there:
        raise OutOfMemory(f"{wanted} bytes of shared memory for a set of weights, and {there} are free. {_ADVICE}")
    try:
        os.posix_fallocate(descriptor, 0, status.st_size)
    except OSError as error:
        raise OutOfMemory(f"{wanted} bytes of shared memory cannot be had ({error}). {_ADVICE}") from error
