"""Graphs of an artifact, read straight from their archives into Python functions."""
