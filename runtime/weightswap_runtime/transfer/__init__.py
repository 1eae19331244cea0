"""Weights from one process's memory to another's."""
