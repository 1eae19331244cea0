"""Memory of programs at its peak: of a given work, and of a program that compares two files."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

MEMORY = """
import re, sys
from pathlib import Path
from weightswap_tools.diff import compare_weights

def status(field):
    return int(re.search(field + r":\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1]) << 10

before = status("VmRSS")
diff = compare_weights(*sys.argv[1:])
print(diff.level, status("VmHWM") - before)
"""


def status(field: str) -> int:
    """Return bytes of memory of this process."""
    found = re.search(field + r":\s+(\d+) kB", Path("/proc/self/status").read_text())
    assert found is not None
    return int(found[1]) << 10


def taken(work: Callable[[], object]) -> int:
    """Return by how much the memory of this process at the peak of the work exceeds that before it."""
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins again
    before = status("VmRSS")
    work()
    return status("VmHWM") - before
