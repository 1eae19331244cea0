"""Graphs of an artifact: read straight from their archives into Python functions, which needs torch, or as outlines."""
