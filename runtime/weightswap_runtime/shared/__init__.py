"""Weights in shared memory, one copy for all processes of a machine: a keeper changes it, workers map it."""
