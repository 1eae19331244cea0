"""Benchmarks of an artifact's engines: latency and throughput of calls, cost of swaps."""

from .running import BenchReport, CallTimes, EngineBench, Memory, SwapTimes, bench

__all__ = ["BenchReport", "CallTimes", "EngineBench", "Memory", "SwapTimes", "bench"]
