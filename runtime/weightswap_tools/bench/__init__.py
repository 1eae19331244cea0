"""How fast an artifact's engines answer, and what swaps cost."""

from .report import BenchReport, CallTimes, EngineBench, Memory, SwapTimes
from .running import bench

__all__ = ["BenchReport", "CallTimes", "EngineBench", "Memory", "SwapTimes", "bench"]
