"""Compilation of an artifact's graphs for other engines."""
