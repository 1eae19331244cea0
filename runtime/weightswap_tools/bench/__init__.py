"""Benchmarks of an artifact's engines: latency and throughput of calls, cost of swaps."""

from .report import BenchReport, CallTimes, EngineBench, Memory, SwapTimes
from .running import bench

__all__ = ["BenchReport", "CallTimes", "EngineBench", "Memory", "SwapTimes", "bench"]
