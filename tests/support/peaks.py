"""Program that compares two files, and prints the level and the growth of its memory."""

from __future__ import annotations

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
