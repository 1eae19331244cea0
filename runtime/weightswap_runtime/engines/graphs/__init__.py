"""Graphs of an artifact, compiled straight from their archives into Python functions."""
