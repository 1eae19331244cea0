"""Weights in shared memory, one copy for all processes of a machine: an owner changes it, workers map it."""
